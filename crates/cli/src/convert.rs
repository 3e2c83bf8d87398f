//! `gaur convert`: copy images to another image, of the other format or with other options.

use std::ffi::{OsStr, OsString};
use std::io::Write;

use gaur_block::{File, FileId};
use gaur_engine::{AllocationPolicy, Format, ImageFormat, Job, OpenOptions};
use gaur_reactor::block_on;

use crate::copied_bitmaps::CopiedBitmaps;
use crate::copy::{Compression, Copy};
use crate::failure::Failure;
use crate::guest::Guest;
use crate::image_spec::ImageSpec;
use crate::interrupt;
use crate::new_image::{self, NewImage};
use crate::notice::{is_qemu, say};
use crate::open::{
    self, CacheMode, KeyOptions, ReferenceOptions, allocation_parser, format_parser,
    target_format_parser,
};
use crate::option_help;
use crate::options::OptionList;
use crate::progress::ProgressOptions;
use crate::rate::{Rate, parse_rate};
use crate::shared_image::SharedImage;
use crate::size::{parse_size, parse_whole_number};
use crate::snapshot_choice::SnapshotChoice;

/// Copy images to a new image, or to one that is there
///
/// Holes and zeros stay holes. Several sources follow each other in the target.
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur convert [OPTIONS] SOURCE.. TARGET")]
pub struct Args {
    /// Format of the sources (probed by default)
    #[arg(short = 'f', long, value_name = "FMT", value_parser = format_parser())]
    source_format: Option<Format>,
    /// The sources are lists of options, driver=qcow2,file.filename=PATH,..
    #[arg(
        long,
        visible_alias = "source-image-opts",
        conflicts_with = "source_format"
    )]
    image_opts: bool,
    /// The same for the target, which is there
    #[arg(long, conflicts_with_all = ["target_format", "target_options"], requires = "no_create")]
    target_image_opts: bool,
    #[command(flatten)]
    references: ReferenceOptions,
    #[command(flatten)]
    keys: KeyOptions,
    /// Format of the target (qcow2 if its name ends in .qcow2, otherwise raw)
    #[arg(short = 'O', long, value_name = "FMT", value_parser = target_format_parser())]
    target_format: Option<Format>,
    /// Options of the target's format; '-o help' lists them
    #[arg(short = 'o', long, value_name = "KEY=VALUE,..")]
    target_options: Vec<String>,
    /// Backing file of the target; what the sources' top layers do not have is not copied
    #[arg(short = 'B', long, value_name = "BACKING")]
    backing: Option<OsString>,
    /// Format of the backing file
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,
    /// Compress the target's clusters (with '-o compression_type=zstd' by zstd)
    #[arg(short = 'c', long)]
    compress: bool,
    /// How hard to try: 1 to 9 for zlib (7 by default), 1 to 22 for zstd (3)
    #[arg(long, value_name = "N", requires = "compress")]
    compression_level: Option<u32>,
    /// Write to an image that is there
    #[arg(short = 'n', long)]
    no_create: bool,
    /// The existing target reads as zeros throughout
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Remove the persistent bitmaps of the existing target, which writing would make useless
    #[arg(long, requires = "no_create")]
    drop_bitmaps: bool,
    #[command(flatten)]
    show: ProgressOptions,
    /// Shortest run of zeros that is not written as data; 0 writes everything
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = parse_size, default_value = "4k")]
    sparse_size: u64,
    /// Use of the host's cache for the target [default: writeback; as qemu-img unsafe]
    #[arg(short = 't', long, value_name = "MODE")]
    target_cache: Option<CacheMode>,
    /// Use of the host's cache for the sources
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback")]
    source_cache: CacheMode,
    /// What to do with the target's space on the host, whatever the target says
    #[arg(long, value_name = "POLICY", value_parser = allocation_parser())]
    allocation: Option<AllocationPolicy>,
    /// Allow writes out of order: faster on some disks, the target may be less tidy
    #[arg(short = 'W', long)]
    oob_writes: bool,
    /// Requests in flight, 1 to 16 (4 to 8 by default; with -c one a processor)
    #[arg(short = 'm', long, value_name = "N", value_parser = parse_parallel)]
    parallel: Option<u8>,
    /// Copy this internal snapshot of the source: an id, a name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long = "source-snapshot", value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Copy the persistent bitmaps of the source
    #[arg(long, conflicts_with = "snapshot")]
    bitmaps: bool,
    /// Leave inconsistent bitmaps out
    #[arg(long, requires = "bitmaps")]
    skip_broken_bitmaps: bool,
    /// Open the sources even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Take zeros for what the sources fail to read, and tell where that was
    #[arg(long)]
    salvage: bool,
    /// Move at most so many bytes of data a second
    #[arg(short, long, value_name = "RATE", value_parser = parse_rate)]
    rate: Option<u64>,
    /// Without effect: the host may copy as it likes
    #[arg(short = 'C', long, conflicts_with_all = ["compress", "sparse_size", "salvage"])]
    copy_range_offloading: bool,
    /// The sources, and the target as the last
    #[arg(
        required_unless_present = "target_options",
        value_name = "SOURCE.. TARGET"
    )]
    files: Vec<OsString>,
}

/// Most workers that are started without being asked for.
const WORKERS_MAX: usize = 8;

/// Fewest of them: some wait for a disk, a server, or their turn.
const WORKERS_MIN: usize = 4;

/// Converts.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if OptionList::asks_for_help(&args.target_options)? {
        let last = args.files.last();
        let last = last.and_then(|name| new_image::format_by_name(name, "-O").ok());
        let format = args.target_format.or(last).unwrap_or(Format::Raw);
        option_help::print_new(format, last.is_some(), out)?;
        return Ok(0);
    }
    let (target, sources) = match args.files.split_last() {
        Some((target, sources)) if !sources.is_empty() => (target, sources),
        _ => return Err(Failure::new("a source and a target are needed")),
    };
    let job = interrupt::job()?;
    let target = target_spec(args, target)?;
    let sources = open_sources(args, sources)?;
    check_apart(&target, &sources)?;
    if let (true, Some(format @ (Format::Raw | Format::Luks))) = (args.compress, target.format()) {
        let message = format!("-c: a {format} image has no compressed clusters");
        let failure = Failure::about(target.path(), message);
        return Err(failure.hint("-O qcow2 makes an image that has"));
    }
    let bitmaps = read_bitmaps(args, &sources, &target)?;
    let flush = target_cache(args) != CacheMode::Unsafe && !target.ignores_flushes();
    let mut new = plan_target(args, &target, &sources)?;
    if let Some(new) = new.as_mut().filter(|_| !flush) {
        new.skip_flushes();
    }
    if let Some(new) = &new {
        if args.compress {
            new.check_level(args.compression_level)?;
        }
        check_data_apart(new, &sources)?;
        if args.compress && new.is_encrypted() {
            let message = "-c: an encrypted image has no compressed clusters";
            return Err(Failure::about(target.path(), message));
        }
        new.make(false, &job)?;
    }
    let copy = open_target(args, &target, sources, new.as_ref())?;
    if !flush {
        copy.target.skip_flushes();
    }
    bitmaps.check(&copy.target, copy.total_bytes())?;
    copy_all(args, &copy, (flush, bitmaps), &job).map_err(|failure| {
        let path = target.path();
        failure.hint(format!("{path} is incomplete and not to be used"))
    })?;
    if !args.show.quiet {
        tell_lookalike(&target, &copy);
    }
    Ok(0)
}

/// The bitmaps to copy, read before anything is written.
fn read_bitmaps(
    args: &Args,
    sources: &[SharedImage],
    target: &ImageSpec,
) -> Result<CopiedBitmaps, Failure> {
    if !args.bitmaps {
        return Ok(CopiedBitmaps::default());
    }
    let [source] = sources else {
        let message = "--bitmaps takes one source, but several are given";
        return Err(Failure::new(message));
    };
    if let Some(format @ (Format::Raw | Format::Luks)) = target.format() {
        let message = format!("--bitmaps: a {format} image has no bitmaps");
        let failure = Failure::about(target.path(), message);
        return Err(failure.hint("-O qcow2 makes an image that has"));
    }
    CopiedBitmaps::read(source, args.skip_broken_bitmaps)
}

/// Warns that the raw target would be probed as another format, because the guest's disk holds an image.
fn tell_lookalike(target: &ImageSpec, copy: &Copy) {
    let raw = target.format() == Some(Format::Raw);
    let Some(file) = copy.target.top_file().filter(|_| raw) else {
        return;
    };
    match block_on(gaur_engine::probe(&file)) {
        Ok(ImageFormat::Raw) | Err(_) => {}
        Ok(other) => {
            let what = format!("raw, but its disk looks like a {other} image");
            say(format!(
                "{}: {what}; say -f raw wherever it is used",
                target.path()
            ));
        }
    }
}

/// Refuses to write over what is read: a source, or what one stands on.
fn check_apart(target: &ImageSpec, sources: &[SharedImage]) -> Result<(), Failure> {
    let own = new_image::file_id(target.file_path());
    let is_target = |id: FileId| Some(id) == own;
    match sources
        .iter()
        .find(|source| source.file_ids().any(is_target))
    {
        None => Ok(()),
        Some(source) => {
            let message = format!(
                "the target is a source, or a backing file of one: {}",
                source.name()
            );
            Err(Failure::about(target.path(), message))
        }
    }
}

/// The same for the external data file of a new target.
fn check_data_apart(new: &NewImage, sources: &[SharedImage]) -> Result<(), Failure> {
    let Some(path) = new.data_path() else {
        return Ok(());
    };
    let own = new_image::file_id(&path);
    let is_data = |id: FileId| Some(id) == own;
    match sources.iter().find(|source| source.file_ids().any(is_data)) {
        None => Ok(()),
        Some(source) => {
            let message = format!("the data file is one of a source: {}", source.name());
            Err(Failure::about(&path, message))
        }
    }
}

fn open_sources(args: &Args, given: &[OsString]) -> Result<Vec<SharedImage>, Failure> {
    if args.snapshot.is_some() && given.len() > 1 {
        return Err(Failure::new(
            "-l takes a snapshot of one source, but several are given",
        ));
    }
    let mut options = open::reading(None, args.force_share, args.references.references());
    options.direct = args.source_cache.direct();
    options.keys = args.keys.keys()?;
    let choice = args
        .snapshot
        .as_deref()
        .map(SnapshotChoice::parse)
        .transpose()?;
    let open = |given: &OsString| {
        let spec = ImageSpec::parse(given, args.image_opts, args.source_format)?;
        let which = choice
            .as_ref()
            .map(|choice| choice.resolve(&spec, &options));
        let options = OpenOptions {
            snapshot: which.transpose()?,
            ..options.clone()
        };
        SharedImage::open(&spec, &options)
    };
    given.iter().map(open).collect()
}

/// The target and its format.
fn target_spec(args: &Args, given: &OsStr) -> Result<ImageSpec, Failure> {
    if !args.no_create {
        let format = match args.target_format {
            Some(format) => format,
            None => new_image::format_by_name(given, "-O")?,
        };
        return Ok(ImageSpec::plain(given, Some(format)));
    }
    let spec = ImageSpec::parse(given, args.target_image_opts, args.target_format)?;
    // What an image that is there is, its content tells better than its name.
    spec.format_switch("-O")
        .with_probed_format(args.references.untrusted)
}

/// The target to make; nothing with `-n`.
fn plan_target(
    args: &Args,
    spec: &ImageSpec,
    sources: &[SharedImage],
) -> Result<Option<NewImage>, Failure> {
    let target = spec.path();
    let mut options = OptionList::parse(&args.target_options)?;
    if args.no_create {
        // QEMU's program takes -B here, and all the same writes what the source shows.
        let backing = args.backing.is_some() && !is_qemu();
        if options.rest().next().is_some() || backing {
            let message = "-n writes to an image that is there, so -o and -B have no use";
            return Err(Failure::about(target, message));
        }
        return Ok(None);
    }
    if let Some(backing) = &args.backing {
        options.add_switch("backing_file", backing, "-B")?;
    }
    if let Some(format) = &args.backing_format {
        options.add_switch("backing_fmt", format, "-F")?;
    }
    let total: u64 = sources.iter().map(SharedImage::size_bytes).sum();
    let size = options.take_size("size")?.unwrap_or(total);
    if size < total {
        let message = format!("a size of {size} bytes does not hold the sources' {total}");
        return Err(Failure::about(target, message));
    }
    if options.has("backing_file") && sources.len() > 1 {
        let message = "a target with a backing file can have only one source";
        return Err(Failure::about(target, message));
    }
    spec.check_whole()?;
    let format = spec.format().unwrap_or(Format::Raw);
    let references = Some(args.references.references());
    let keys = args.keys.keys()?;
    NewImage::new(
        spec.file_path(),
        format,
        options,
        Some(size),
        references,
        keys,
    )
    .map(Some)
}

fn open_target(
    args: &Args,
    target: &ImageSpec,
    sources: Vec<SharedImage>,
    new: Option<&NewImage>,
) -> Result<Copy, Failure> {
    let references = args.references.references();
    let options = OpenOptions {
        direct: target_cache(args).direct(),
        allocation: args.allocation,
        drop_bitmaps: args.drop_bitmaps,
        keys: match new {
            Some(new) => new.open_keys(),
            None => args.keys.keys()?,
        },
        data_file: new.and_then(NewImage::data_path),
        ..OpenOptions::new(match new.and_then(NewImage::checked_backing) {
            Some(backing) => references.over(&backing),
            None => references,
        })
    };
    let opened = SharedImage::open(target, &options)?;
    let backing_bytes = new.and_then(NewImage::backing_bytes);
    let file = opened.top_file();
    let fixed = file.is_some_and(|file| !file.limits().resizable);
    // The rest of a device that a raw image does not cover is not ours; its content is unknown.
    // What was never written of a container decrypts to noise.
    let noise = target.format() == Some(Format::Luks);
    let fresh = new.is_some() && !noise && !(fixed && target.format() == Some(Format::Raw));
    // Where the disk's own offsets are the file's, an order makes nothing tidier, and a server waits between two requests.
    let placed = opened.is_remote() && target.format() == Some(Format::Raw);
    let is_raw = opened.image().layers().top().format() == Format::Raw;
    let copy = Copy {
        target: opened,
        sources,
        backing_bytes,
        target_is_zero: fresh || args.target_is_zero,
        sparse_bytes: args.sparse_size,
        workers: workers(args),
        in_order: !args.oob_writes && !placed,
        clones: is_raw && may_clone(args, new),
        salvage: args.salvage,
        rate: args.rate.map(Rate::new),
        compression: args.compress.then_some(Compression {
            level: args.compression_level,
        }),
    };
    let (needed, there) = (copy.total_bytes(), copy.target.size_bytes());
    if there < needed {
        let message = format!("the target has {there} bytes, the sources {needed}");
        return Err(Failure::about(target.path(), message));
    }
    Ok(copy)
}

/// Whether a raw target may share the space of its sources. Not space that was asked for, and not one that was there;
/// QEMU's program makes holes of zeros, which clones do not, unless it is told to leave that to the host.
fn may_clone(args: &Args, new: Option<&NewImage>) -> bool {
    let owns_space = new.is_none_or(NewImage::is_preallocated);
    let finds_zeros = args.sparse_size == 0 || is_qemu() && !args.copy_range_offloading;
    !owns_space && !finds_zeros && !args.salvage && args.rate.is_none()
}

/// What is written is on the disk in the end, unless that is not wanted, as QEMU's program takes for granted.
fn target_cache(args: &Args) -> CacheMode {
    args.target_cache.unwrap_or(match is_qemu() {
        true => CacheMode::Unsafe,
        false => CacheMode::Writeback,
    })
}

/// Reads how many requests may be in flight.
fn parse_parallel(text: &str) -> Result<u8, String> {
    match parse_whole_number(text)? {
        count @ 1..=16 => Ok(count),
        count => Err(format!("{count} is not in 1..=16")),
    }
}

fn workers(args: &Args) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let least = if args.compress { 1 } else { WORKERS_MIN };
    args.parallel
        .map_or(processors.clamp(least, WORKERS_MAX), usize::from)
}

fn copy_all(
    args: &Args,
    copy: &Copy,
    (flush, bitmaps): (bool, CopiedBitmaps),
    job: &Job,
) -> Result<(), Failure> {
    let mut progress = args.show.start(Some(copy.total_bytes()));
    let copied = copy.run(job, &mut |done| progress.set(done));
    let copied = copied.and_then(|()| bitmaps.store(&copy.target, job));
    let guest: Guest = copy.target.guest();
    let flushed = match &copied {
        Ok(()) if flush => guest
            .flush()
            .map_err(|errno| Failure::system(copy.target.name(), "cannot flush", errno)),
        _ => Ok(()),
    };
    let closed = guest
        .close()
        .map_err(|error| Failure::image(copy.target.name(), &error));
    let done = copied.and(flushed).and(closed);
    progress.end(&done);
    done
}
