//! Exports over vhost-user-blk, for virtual machines.
