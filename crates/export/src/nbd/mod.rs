//! Exports over the network block device protocol.

pub mod proto;
