//! The `gaur` command beside QEMU's tools: the same arguments, the same answers. Every test works
//! in a directory of its own and fails when a tool it compares with is missing.

#![forbid(unsafe_code)]

mod allocation;
mod bench;
mod check;
mod compare;
mod control;
mod convert;
mod create;
mod image_opts;
mod info;
mod machine_state;
mod map;
mod newcomer;
mod paths;
mod resize;
mod serve;
mod server;
mod sizes;
mod snapshot;
mod usage;
mod workdir;
