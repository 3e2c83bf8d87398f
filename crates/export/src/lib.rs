//! Front ends that serve a [`gaur_block::Device`] to clients, one module and one feature each.

pub mod device;
#[cfg(feature = "nbd")]
pub mod nbd;
