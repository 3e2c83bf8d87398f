//! Exports as ublk block devices of this machine.
