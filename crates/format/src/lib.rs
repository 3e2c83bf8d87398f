//! The qcow2 on-disk format: bytes to types and back, without input or output.
