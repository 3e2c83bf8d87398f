//! The `gaur` command: from arguments to output, one file per verb.
//!
//! Options, JSON schemas and exit codes are qemu-img's and qemu-nbd's where those tools have them,
//! so that scripts can switch. Under a name that ends in `qemu-img` the verbs work the same.

#![forbid(unsafe_code)]

mod amend;
mod background;
mod bench;
mod bitmap;
mod bitmaps;
mod check;
mod check_report;
mod command;
mod commit;
mod compare;
mod completions;
mod control;
mod convert;
mod copied_bitmaps;
mod copy;
mod create;
mod dd;
mod drive;
mod export;
mod file_holes;
mod front_args;
mod gc;
mod info;
mod info_report;
mod interrupt;
mod json;
mod luks;
mod man;
mod map;
mod measure;
mod new_image;
mod notice;
mod open;
mod option_help;
mod pin_args;
mod progress;
mod publish;
mod pull;
mod qemu_io;
mod qemu_nbd;
mod rate;
mod rebase;
mod reclaimable;
mod resize;
mod serve;
mod snapshot;
mod snapshot_choice;
mod snapshot_report;
mod snapshot_table;
mod socket_path;
mod stream;
mod table;
mod ublk;
mod usage;
mod workers;

use std::process::ExitCode;

use gaur_server::{
    cache_cleaner, cached_device, exporter, failure, fronts, guest, host_kind, image_file,
    image_spec, new_luks, options, pin, shared_image, size, state_pipe, vm_state,
};

fn main() -> ExitCode {
    gaur_reactor::ignore_file_size_signal();
    gaur_remote::install();
    gaur_server::notice::listen(|line| notice::say(line));
    ExitCode::from(command::run(std::env::args_os().collect()))
}
