//! Exports as VDUSE block devices of this machine.
