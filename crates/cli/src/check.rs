//! `gaur check`: check the consistency of an image, and repair it.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use gaur_engine::{Format, Job, OpenOptions, repair_on};
use gaur_format::AllocationPolicy;
use gaur_format::check::{
    Check, Finding, Miscount, RepairMode, Repaired, Report, Severity, Step, TablePart,
};
use gaur_reactor::block_on;
use gaur_server::check_facts::CheckFacts;

use crate::check_report::{Fixed, ImageCheck};
use crate::control::client::Client;
use crate::control::protocol::Command;
use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::interrupt;
use crate::json;
use crate::notice::{is_qemu, say, say_bare};
use crate::open::{self, CacheMode, Output, SourceOptions};
use crate::progress::{Progress, ProgressOptions};
use crate::reclaimable;
use crate::snapshot::Server;

/// Check the consistency of an image
///
/// Exits with 0 when it is clean, 2 when it is corrupt, 3 when it has leaked clusters only, 1 when
/// the check itself failed and 63 when the format has no checks. After a repair it is checked again, and the
/// code is about what is left.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// Use of the host's cache
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    #[command(flatten)]
    show: ProgressOptions,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// What to repair
    #[arg(
        short,
        long,
        value_name = "WHAT",
        value_enum,
        conflicts_with = "force_share"
    )]
    repair: Option<What>,
    /// Say what -r would do, and change nothing
    #[arg(long, requires = "repair")]
    dry_run: bool,
    /// Check the image that 'gaur serve --control SOCKET' has open, while it is served; no FILE is given then
    #[arg(long, value_name = "SOCKET",
          conflicts_with_all = ["format", "image_opts", "allow", "allow_any", "untrusted", "cache", "force_share", "repair"])]
    control: Option<PathBuf>,
    /// Name of the export, if the server has several
    #[arg(short = 'x', long, value_name = "NAME", requires = "control")]
    export_name: Option<String>,
    /// Seconds the server may be silent before it counts as hung (30)
    #[arg(long, value_name = "SECONDS", requires = "control",
          value_parser = clap::value_parser!(u32).range(1..))]
    timeout: Option<u32>,
    /// The image
    #[arg(required_unless_present = "control", conflicts_with = "control")]
    file: Option<OsString>,
}

/// What a repair is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum What {
    /// Refcounts that are too high: lost space
    Leaks,
    /// Leaks, and all damage that can be repaired without losing data
    All,
}

/// The format has no checks.
const EXIT_NO_CHECKS: u8 = 63;

/// Checks and prints.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let Some(file) = &args.file else {
        return check_served(args, out);
    };
    let spec = args.source.spec(file)?;
    let base = OpenOptions {
        direct: args.cache.direct(),
        read_only: args.repair.is_none() || args.dry_run,
        keys: args.source.keys()?,
        ..open::reading(None, args.force_share, args.source.references())
    };
    let file = spec.open_file(&base)?;
    let format = spec.format_of(&file)?;
    let message = match format {
        Format::Qcow2 => None,
        // Scripts look for these words.
        _ if is_qemu() => {
            let failure = Failure::new("This image format does not support checks");
            return Err(failure.code(EXIT_NO_CHECKS));
        }
        Format::Raw | Format::Luks => Some(format!(
            "{} images have nothing that could be checked",
            format.name()
        )),
        Format::Foreign(other) => Some(format!("{} images cannot be checked", other.shown())),
    };
    if let Some(message) = message {
        return Err(Failure::about(spec.path(), message).code(EXIT_NO_CHECKS));
    }
    let job = interrupt::job()?;
    let repaired = match args.repair {
        Some(what) => Some(repair(&file, what, args, &job)?),
        None => None,
    };
    let report = match &repaired {
        Some(repaired) => repaired.after.clone(),
        None => check(&file, args, &job)?,
    };
    if !args.show.quiet {
        print_findings(spec.path(), &report);
    }
    let check = ImageCheck {
        reclaimable_bytes: reclaimable(&file, &report)?,
        filename: spec.given().to_string_lossy().into_owned(),
        fixed: repaired.map(|repaired| Fixed::new(&repaired, args.dry_run)),
        report,
        unsettled_clusters: 0,
    };
    conclude(&check, args, out)
}

fn conclude(check: &ImageCheck, args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    match args.output {
        Output::Json => json::write(out, &check.json())?,
        Output::Human if args.show.quiet => {}
        Output::Human => check.print(out)?,
    }
    Ok(check.exit_code())
}

/// Has a server check the image that it serves.
fn check_served(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let socket = args.control.clone().unwrap_or_default();
    let server = Server::new(socket, args.export_name.clone(), args.timeout);
    let mut progress = args.progress();
    let facts: CheckFacts = Client::connect(&server)?.call(Command::Check {}, &mut progress)?;
    if !args.show.quiet {
        for finding in &facts.findings {
            say(format!("{}: {finding}", facts.filename));
        }
        say_dropped(&facts.filename, facts.findings_dropped);
    }
    let check = ImageCheck {
        report: facts.report(),
        unsettled_clusters: facts.unsettled_clusters,
        filename: facts.filename,
        ..ImageCheck::default()
    };
    conclude(&check, args, out)
}

/// Most threads that look at L2 tables: more wait for the host's memory.
const THREADS_MAX: usize = 16;

fn threads() -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    processors.min(THREADS_MAX)
}

impl Args {
    /// Progress, where it does not mix with what programs read.
    fn progress(&self) -> Progress {
        match self.output {
            Output::Human => self.show.start(None),
            Output::Json => Progress::Quiet,
        }
    }
}

/// Runs the checker over the file, with a thread for each processor where most of the work is.
fn check(file: &ImageFile, args: &Args, job: &Job) -> Result<Report, Failure> {
    let broken = |error| file.broken(&error);
    let mut progress = args.progress();
    let threads = threads();
    let mut check = Check::new(&file.header_cluster()?, file.len_bytes()).map_err(broken)?;
    let report = loop {
        interrupt::check(job)?;
        let step = check.next();
        let mut parts = check.split(threads);
        if !parts.is_empty() {
            look_at_tables(file, &mut parts, job, &mut progress);
            check.join(parts);
            continue;
        }
        match step {
            Step::Need { offset, len } => match file.try_read(offset, len) {
                Ok(bytes) => check.feed(&bytes),
                Err(_) => check.fail(),
            },
            Step::Done(report) => break report,
        }
    };
    progress.finish();
    Ok(report)
}

/// Looks at the L2 tables, this thread at those of the first part. A job that is cancelled ends it early.
fn look_at_tables(file: &ImageFile, parts: &mut [TablePart], job: &Job, progress: &mut Progress) {
    let total: usize = parts.iter().map(TablePart::left).sum();
    let (total, done) = (total as u64, AtomicU64::new(0));
    let look = |part: &mut TablePart, show: &mut dyn FnMut(u64)| {
        while !job.is_cancelled()
            && let Some((offset, len)) = part.next()
        {
            match file.try_read(offset, len) {
                Ok(bytes) => part.feed(&bytes),
                Err(_) => part.fail(),
            }
            show(done.fetch_add(1, Ordering::Relaxed));
        }
    };
    let Some((first, others)) = parts.split_first_mut() else {
        return;
    };
    thread::scope(|scope| {
        for part in others {
            scope.spawn(|| look(part, &mut |_| {}));
        }
        look(first, &mut |done| progress.update(done, total));
    });
}

/// Repairs the image in the file, and tells what was done.
fn repair(file: &ImageFile, what: What, args: &Args, job: &Job) -> Result<Repaired, Failure> {
    let mode = match what {
        What::Leaks => RepairMode::Leaks,
        What::All => RepairMode::All,
    };
    let mut progress = args.progress();
    let look = |parts: &mut [TablePart]| look_at_tables(file, parts, job, &mut progress);
    let (qcow2, dry_run) = (file.file(), args.dry_run);
    let repaired = block_on(repair_on(qcow2, mode, dry_run, job, threads(), look));
    let repaired = repaired.map_err(|error| match job.is_cancelled() {
        true => Failure::interrupted(),
        false => Failure::image(file.name(), &error),
    });
    progress.end(&repaired);
    let repaired = repaired?;
    if !args.show.quiet {
        if is_qemu() {
            say_as_qemu(&repaired.before);
        }
        print_actions(file.name(), &repaired, args.dry_run);
    }
    Ok(repaired)
}

fn print_actions(name: &str, repaired: &Repaired, dry_run: bool) {
    let will = if dry_run { "would repair" } else { "repaired" };
    for action in &repaired.actions {
        match (is_qemu(), action.miscount) {
            (true, Some(wrong)) => say_bare(format!("Repairing {}", qemu_counts(wrong))),
            (true, None) => say_bare(format!("Repairing {action}")),
            (false, _) => say(format!("{name}: {will}: {action}")),
        }
    }
    say_dropped(name, repaired.actions_dropped);
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
    if is_qemu() {
        return say_as_qemu(report);
    }
    for finding in &report.messages {
        say(format!("{name}: {finding}"));
    }
    say_dropped(name, report.messages_dropped);
}

/// Says findings in the words that scripts know from qemu-img, and in its order: counts, then the rest.
fn say_as_qemu(report: &Report) {
    let line = |finding: &Finding| match (finding.miscount, finding.severity) {
        (Some(wrong), Severity::Leak) => format!("Leaked {}", qemu_counts(wrong)),
        (Some(wrong), _) => format!("ERROR {}", qemu_counts(wrong)),
        (None, _) => format!("ERROR: {}", finding.message),
    };
    let (counts, others): (Vec<_>, Vec<_>) = report
        .messages
        .iter()
        .partition(|finding| finding.miscount.is_some());
    for finding in counts.into_iter().chain(others) {
        say_bare(line(finding));
    }
}

fn qemu_counts(wrong: Miscount) -> String {
    let Miscount {
        cluster,
        refcount,
        references,
    } = wrong;
    format!("cluster {cluster} refcount={refcount} reference={references}")
}

fn say_dropped(name: &str, dropped: u64) {
    // Under the name of QEMU's program a line is a finding, and their number is told at the end.
    if dropped > 0 && !is_qemu() {
        say(format!("{name}: and {dropped} more"));
    }
}
