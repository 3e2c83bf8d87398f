//! Front ends that export a device: NBD.
