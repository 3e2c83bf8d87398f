//! The `gaur` command: from arguments to output, one file per verb.
//!
//! Options, JSON schemas and exit codes are qemu-img's and qemu-nbd's where those tools have them,
//! so that scripts can switch. Under a name that ends in `qemu-img` the verbs work the same.

#![forbid(unsafe_code)]

mod background;
mod bench;
mod cache_cleaner;
mod cached_device;
mod check;
mod check_report;
mod command;
mod compare;
mod completions;
mod control;
mod convert;
mod copy;
mod create;
mod export;
mod exporter;
mod failure;
mod file_holes;
mod fronts;
mod guest;
mod handover;
mod health;
mod host_kind;
mod image_file;
mod image_spec;
mod info;
mod info_report;
mod interrupt;
mod json;
mod kept;
mod key_values;
mod luks;
mod man;
mod map;
mod new_image;
mod notice;
mod open;
mod options;
mod pin;
mod progress;
mod reclaimable;
mod resize;
mod serve;
mod shared_image;
mod size;
mod snapshot;
mod snapshot_choice;
mod snapshot_report;
mod snapshot_table;
mod socket_path;
mod state_pipe;
mod table;
mod temporary;
mod trimmer;
mod ublk;
mod usage;
mod vm_state;

use std::process::ExitCode;

fn main() -> ExitCode {
    gaur_reactor::ignore_file_size_signal();
    ExitCode::from(command::run(std::env::args_os().collect()))
}
