//! `gaur amend`: change what an image is, in place.

use std::ffi::OsString;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gaur_engine::{
    AllocationPolicy, Amendment, BitmapAction, Format, ImageError, Job, Keys, OpenOptions, Queue,
    amend, check_amendment,
};
use gaur_format::Version;
use gaur_format::feature::Autoclear;
use gaur_format::header::Header;
use gaur_reactor::{BlockingFile, block_on};

use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::image_spec::ImageSpec;
use crate::interrupt;
use crate::new_image;
use crate::new_luks::PREFIX;
use crate::notice::say;
use crate::open::{ALLOCATION_POLICIES, CacheMode, SourceOptions};
use crate::option_help::{self, Of};
use crate::options::OptionList;
use crate::progress::ProgressOptions;
use crate::size::SIZE_MAX;

mod keys;

use keys::KeyChange;

/// Change the options of an image that is there
///
/// Each change is made whole or not at all, whatever interrupts it. No other program may use the image.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// What is to change; '-o help' lists the options
    #[arg(short, long, value_name = "KEY=VALUE,..", required = true)]
    options: Vec<String>,
    /// Allow a change that loses data, such as erasing the last key
    #[arg(long)]
    force: bool,
    /// Use of the host's cache
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,
    #[command(flatten)]
    show: ProgressOptions,
    /// The image
    file: Option<OsString>,
}

const OPTIONS: &[option_help::Row] = &[
    (
        Of::Gaur,
        "allocation=<str>",
        "How it likes its space (allowed values: compact, contiguous)",
    ),
    (
        Of::Format,
        "backing_file=<str>",
        "As it is: 'rebase' changes it",
    ),
    (
        Of::Format,
        "backing_fmt=<str>",
        "As it is: 'rebase -u' changes it",
    ),
    (
        Of::Format,
        "compat=<str>",
        "Compatibility level (v2 [0.10] or v3 [1.1])",
    ),
    (
        Of::Format,
        "data_file=<str>",
        "File name of the external data file, which is there already",
    ),
    (Of::Format, "data_file_raw=<bool (on/off)>", "As it is"),
    (
        Of::Format,
        "encrypt.iter-time=<num>",
        "Milliseconds that trying the new key takes (default: 2000)",
    ),
    (
        Of::Format,
        "encrypt.keyslot=<num>",
        "Key slot to fill or to erase, 0 to 7",
    ),
    (Of::Format, "encrypt.new-secret=<str>", "Secret to add"),
    (Of::Format, "encrypt.old-secret=<str>", "Secret to erase"),
    (
        Of::Format,
        "encrypt.state=<str>",
        "What to do with a key (allowed values: active, inactive)",
    ),
    (
        Of::Format,
        "lazy_refcounts=<bool (on/off)>",
        "Postpone refcount updates",
    ),
    (
        Of::Format,
        "refcount_bits=<num>",
        "Width of a reference count entry in bits (1 to 64)",
    ),
    (
        Of::Format,
        "size=<size>",
        "Virtual disk size, not smaller than it is",
    ),
];

/// What is to change.
struct Wanted {
    amendment: Amendment,
    size: Option<u64>,
    key: Option<KeyChange>,
}

/// Time between two looks at how far it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Amends.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let named = args.file.is_some() || args.source.format.is_some();
    if named && OptionList::asks_for_help(&args.options)? {
        let (format, options) = match args.source.format {
            Some(Format::Luks) => (Format::Luks, option_help::LUKS_KEYS),
            _ => (Format::Qcow2, OPTIONS),
        };
        let heading = format!("Amend options for '{format}':");
        option_help::print(&heading, options, true, out)?;
        return Ok(0);
    }
    let Some(file) = &args.file else {
        return Err(Failure::new("no image is named").hint("see 'gaur amend --help'"));
    };
    let spec = args.source.spec(file)?;
    let base = OpenOptions {
        direct: args.cache.direct(),
        keys: args.source.keys()?,
        ..OpenOptions::new(args.source.references())
    };
    let file = spec.open_file(&base)?;
    let format = spec.format_of(&file)?;
    if format == Format::Luks {
        let keys = spec.open_options(&base)?.keys;
        let changed = amend_container(args, &file, &keys);
        return changed
            .map(|()| 0)
            .map_err(|failure| failure.with_subject(spec.path()));
    }
    if format != Format::Qcow2 {
        let message = format!("{format} images have no options that could be amended");
        return Err(Failure::about(spec.path(), message));
    }
    let header = file.header()?;
    let keys = spec.open_options(&base)?.keys;
    let wanted = Wanted::take(args, &header, &keys);
    let wanted = wanted.map_err(|failure| failure.with_subject(spec.path()))?;
    // Opened again by steps that work on an opened image.
    drop(file);
    let job = interrupt::job()?;
    shown(&args.show, &job, || {
        wanted.carry_out(&spec, &base, &header, &job)
    })?;
    Ok(0)
}

impl Wanted {
    fn take(args: &Args, header: &Header, keys: &Keys) -> Result<Wanted, Failure> {
        let mut options = OptionList::parse(&args.options)?;
        refuse_fixed(&mut options, header)?;
        let size = options.take_size("size")?;
        if size.is_some_and(|size| size > SIZE_MAX) {
            return Err(Failure::new(format!(
                "the size is larger than {SIZE_MAX} bytes"
            )));
        }
        if size.is_some_and(|size| size < header.size_bytes) {
            let message = "the size cannot become smaller this way";
            return Err(Failure::new(message).hint("'gaur resize --shrink' does that"));
        }
        let data_file = options.take_path("data_file");
        let data_file = data_file.map(|name| new_image::stored_name(name.into_encoded_bytes()));
        let allocation = options.take_choice("allocation", &ALLOCATION_POLICIES, None)?;
        let allocation = allocation.map(|(_, policy): (_, AllocationPolicy)| policy);
        let amendment = Amendment {
            version: new_image::take_version(&mut options)?.map(|(_, version)| version),
            refcount_order: new_image::take_refcount_order(&mut options)?,
            lazy_refcounts: options.take_bool("lazy_refcounts")?,
            data_file,
            allocation,
        };
        let key = KeyChange::take(&mut options, PREFIX, keys, args.force)?;
        refuse_rest(&options)?;
        Ok(Wanted {
            amendment,
            size,
            key,
        })
    }

    /// Makes the changes, one after the other.
    fn carry_out(
        &self,
        spec: &ImageSpec,
        base: &OpenOptions,
        header: &Header,
        job: &Arc<Job>,
    ) -> Result<(), Failure> {
        let failed = |error| match job.is_cancelled() {
            true => Failure::interrupted().with_subject(spec.path()),
            false => Failure::image(spec.path(), &error),
        };
        let checked = spec.open_file(base)?;
        block_on(check_amendment(checked.file(), &self.amendment)).map_err(failed)?;
        if let Some(key) = &self.key {
            key.carry_out(&checked, Format::Qcow2)?;
        }
        // Opened again by steps that work on an opened image.
        drop(checked);
        if let Some(size) = self.size.filter(|size| *size != header.size_bytes) {
            on_image(spec, base, |queue| {
                block_on(queue.resize(size, false, job)).map_err(failed)
            })?;
        }
        let goes_down =
            self.amendment.version == Some(Version::V2) && header.version == Version::V3;
        if goes_down {
            on_image(spec, base, |queue| {
                block_on(remove_bitmaps(queue, job)).map_err(failed)?;
                block_on(queue.expand_zeros(job)).map_err(failed)
            })?;
        }
        let file: ImageFile = spec.open_file(base)?;
        block_on(amend(file.file(), &self.amendment, job)).map_err(failed)?;
        Ok(())
    }
}

/// Refuses options that nothing has taken.
fn refuse_rest(options: &OptionList) -> Result<(), Failure> {
    let Some(key) = options.rest().next() else {
        return Ok(());
    };
    let message = format!("option '{key}' cannot be amended");
    let hint = "'-o help' lists the options; 'gaur convert' makes an image with others";
    Err(Failure::new(message).hint(hint))
}

/// Changes the keys of a LUKS container.
fn amend_container(args: &Args, file: &ImageFile, keys: &Keys) -> Result<(), Failure> {
    let mut options = OptionList::parse(&args.options)?;
    let key = KeyChange::take(&mut options, "", keys, args.force)?;
    refuse_rest(&options)?;
    match key {
        Some(key) => key.carry_out(file, Format::Luks),
        None => Ok(()),
    }
}

/// Removes what version 2 does not have.
async fn remove_bitmaps(queue: &Queue<BlockingFile>, job: &Job) -> Result<(), ImageError> {
    for bitmap in queue.bitmaps().await? {
        let removed = queue.change_bitmap(&bitmap.name, &[BitmapAction::Remove], job);
        removed.await?;
        let name = bitmap.name;
        say(format_args!(
            "bitmap {name:?} is removed: version 2 has none"
        ));
    }
    Ok(())
}

/// Opens the image for a step, and closes it again.
fn on_image(
    spec: &ImageSpec,
    base: &OpenOptions,
    step: impl FnOnce(&Queue<BlockingFile>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let opened = spec.open(base)?;
    let queue = opened.image.queue(opened.files);
    let done = step(&queue);
    let closed = block_on(queue.close()).map_err(|error| Failure::image(spec.path(), &error));
    done.and(closed)
}

/// Refuses what cannot change, unless it is as it is.
fn refuse_fixed(options: &mut OptionList, header: &Header) -> Result<(), Failure> {
    let name = options.take_path("backing_file");
    let name = name.map(|name| name.into_encoded_bytes());
    if name.is_some_and(|name| header.backing_file().unwrap_or_default() != name) {
        let message = "the backing file cannot be amended";
        return Err(Failure::new(message).hint("'gaur rebase' changes it"));
    }
    let format = options.take("backing_fmt");
    if format.is_some_and(|format| header.backing_format().unwrap_or_default() != format) {
        let message = "the format of the backing file cannot be amended";
        return Err(Failure::new(message).hint("'gaur rebase -u' changes it"));
    }
    let is_raw = header.autoclear.has(Autoclear::RAW_DATA_FILE);
    if options
        .take_bool("data_file_raw")?
        .is_some_and(|raw| raw != is_raw)
    {
        let message =
            "option 'data_file_raw' cannot be amended: data may lie elsewhere in the file";
        return Err(Failure::new(message).hint("'gaur convert' makes an image that has it"));
    }
    Ok(())
}

/// Does the work, and shows how far it is.
fn shown<T>(
    show: &ProgressOptions,
    job: &Job,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mut progress = show.start(None);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                let (done, total) = job.progress_bytes();
                progress.update(done, total);
                std::thread::park_timeout(LOOK_INTERVAL);
            }
            progress
        });
        let outcome = work();
        over.store(true, Ordering::Release);
        watcher.thread().unpark();
        if let Ok(mut progress) = watcher.join() {
            progress.end(&outcome);
        }
        outcome
    })
}
