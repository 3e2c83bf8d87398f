//! `gaur amend`: change what an image is, in place.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gaur_engine::{AllocationPolicy, Amendment, Format, Job, Keys, OpenOptions, Queue, amend};
use gaur_format::Version;
use gaur_format::feature::Autoclear;
use gaur_format::header::Header;
use gaur_reactor::{BlockingFile, block_on};

use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::image_spec::ImageSpec;
use crate::interrupt;
use crate::new_image;
use crate::open::{ALLOCATION_POLICIES, CacheMode, SourceArgs};
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
    source: SourceArgs,
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
}

const OPTIONS: &str = "\
Amend options for qcow2:
  allocation=<str>       - How it likes its space (allowed values: compact, contiguous)
  compat=<str>           - Compatibility level (v2 [0.10] or v3 [1.1])
  data_file=<str>        - File name of the external data file, which is there already
  encrypt.iter-time=<num> - Milliseconds that trying the new key takes (default: 2000)
  encrypt.keyslot=<num>  - Key slot to fill or to erase, 0 to 7
  encrypt.new-secret=<str> - Secret to add
  encrypt.old-secret=<str> - Secret to erase
  encrypt.state=<str>    - What to do with a key (allowed values: active, inactive)
  lazy_refcounts=<bool>  - Postpone refcount updates
  refcount_bits=<num>    - Width of a reference count entry in bits (1 to 64)
  size=<size>            - Virtual disk size, not smaller than it is
";

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
    if OptionList::asks_for_help(&args.options) {
        out.write_all(OPTIONS.as_bytes())?;
        return Ok(0);
    }
    let spec = args.source.spec()?;
    let base = OpenOptions {
        direct: args.cache.direct(),
        keys: args.source.keys()?,
        ..OpenOptions::new(args.source.references())
    };
    let file = spec.open_file(&base)?;
    let format = spec.format_of(&file)?;
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
        let key = KeyChange::take(&mut options, keys, args.force)?;
        if let Some(key) = options.rest().next() {
            let message = format!("option '{key}' cannot be amended");
            let hint = "'-o help' lists the options; 'gaur convert' makes an image with others";
            return Err(Failure::new(message).hint(hint));
        }
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
        if let Some(key) = &self.key {
            key.carry_out(&spec.open_file(base)?)?;
        }
        if let Some(size) = self.size.filter(|size| *size != header.size_bytes) {
            on_image(spec, base, |queue| {
                block_on(queue.resize(size, false, job)).map_err(failed)
            })?;
        }
        let goes_down =
            self.amendment.version == Some(Version::V2) && header.version == Version::V3;
        if goes_down && header.nb_snapshots == 0 {
            on_image(spec, base, |queue| {
                block_on(queue.expand_zeros(job)).map_err(failed)
            })?;
        }
        let file: ImageFile = spec.open_file(base)?;
        block_on(amend(file.file(), &self.amendment, job)).map_err(failed)?;
        Ok(())
    }
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
