//! `gaur check`: check the consistency of an image.

use std::io::Write;

use gaur_engine::{Format, Job};
use gaur_format::AllocationPolicy;
use gaur_format::check::{Check, Report, Step};

use crate::check_report::ImageCheck;
use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::interrupt;
use crate::json;
use crate::notice::say;
use crate::open::{self, CacheMode, Output, SourceArgs};
use crate::reclaimable;

/// Check the consistency of an image
///
/// Exits with 0 when it is clean, 2 when it is corrupt, 3 when it has leaked clusters only, 1 when
/// the check itself failed and 63 when the format has no checks.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Use of the host's cache
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback")]
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
}

/// The format has no checks.
const EXIT_NO_CHECKS: u8 = 63;

/// Checks and prints.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if args.repair.is_some() {
        let name = args.source.name();
        let failure = Failure::about(name, "repairing (-r) is not supported yet");
        return Err(failure.hint("without -r the image is checked and left as it is"));
    }
    let spec = args.source.spec()?;
    let mut base = open::reading(None, args.force_share, args.source.references());
    base.direct = args.cache.direct();
    let file = spec.open_file(&base)?;
    if spec.format_of(&file)? == Format::Raw {
        let failure = Failure::about(spec.path(), "raw images have nothing that could be checked");
        return Err(failure.code(EXIT_NO_CHECKS));
    }
    let report = check(&file, &*interrupt::job()?)?;
    if !args.quiet {
        print_findings(spec.path(), &report);
    }
    let check = ImageCheck {
        reclaimable_bytes: reclaimable(&file, &report)?,
        filename: spec.given().to_string_lossy().into_owned(),
        report,
    };
    match args.output {
        Output::Json => json::write(out, &check.json())?,
        Output::Human if args.quiet => {}
        Output::Human => check.print(out)?,
    }
    Ok(check.exit_code())
}

/// Runs the checker over the file.
fn check(file: &ImageFile, job: &Job) -> Result<Report, Failure> {
    let broken = |error| file.broken(&error);
    let mut check = Check::new(&file.header_cluster()?, file.len_bytes()).map_err(broken)?;
    loop {
        interrupt::check(job)?;
        match check.next() {
            Step::Need { offset, len } => match file.try_read(offset, len) {
                Ok(bytes) => check.feed(&bytes),
                Err(_) => check.fail(),
            },
            Step::Done(report) => return Ok(report),
        }
    }
}

/// What the policy *compact* would have given back, of an image that asks for it and is sound.
fn reclaimable(file: &ImageFile, report: &Report) -> Result<u64, Failure> {
    if report.corruptions + report.check_errors > 0 {
        return Ok(0);
    }
    let header = file.header()?;
    if header.allocation() != Some(AllocationPolicy::Compact) {
        return Ok(0);
    }
    reclaimable::bytes(file, &header)
        .map_err(|errno| Failure::system(file.name(), "cannot look for holes", errno))
}

/// What is wrong in detail, where it does not mix with what programs read.
fn print_findings(name: &str, report: &Report) {
    for finding in &report.messages {
        say(format!("{name}: {finding}"));
    }
    if report.messages_dropped > 0 {
        let dropped = report.messages_dropped;
        say(format!("{name}: and {dropped} more"));
    }
}
