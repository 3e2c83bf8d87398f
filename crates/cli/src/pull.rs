//! `gaur pull`: write a published image to a file, every chunk verified.

use std::ffi::OsString;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use gaur_block::File;
use gaur_engine::{Format, Job, Keys, OpenOptions, References};
use gaur_remote::published::{CHUNK_BYTES, PublishedImage};

use crate::compare::is_zero;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::interrupt;
use crate::new_image::{self, NewImage};
use crate::open::{KeyOptions, target_format_parser};
use crate::option_help;
use crate::options::OptionList;
use crate::progress::{Progress, ProgressOptions};
use crate::shared_image::SharedImage;
use crate::workers::{self, Shared};

/// Write a published image to a new image, every chunk verified
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur pull [OPTIONS] NAME FILE")]
pub struct Args {
    /// Format of the file (qcow2 if its name ends in .qcow2, otherwise raw)
    #[arg(short = 'O', long, value_name = "FMT", value_parser = target_format_parser())]
    format: Option<Format>,
    /// Options of the file's format; '-o help' lists them
    #[arg(short = 'o', long, value_name = "KEY=VALUE,..")]
    options: Vec<String>,
    #[command(flatten)]
    keys: KeyOptions,
    /// Chunks in flight, 1 to 64
    #[arg(short = 'm', long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u8).range(1..=64))]
    parallel: u8,
    #[command(flatten)]
    show: ProgressOptions,
    /// The published image: s3://BUCKET/PREFIX/NAME.gaur
    #[arg(required_unless_present = "options", value_name = "NAME")]
    name: Option<String>,
    /// The file to write
    #[arg(required_unless_present = "options", value_name = "FILE")]
    file: Option<OsString>,
}

/// Pulls.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if OptionList::asks_for_help(&args.options)? {
        option_help::print_new(args.format.unwrap_or(Format::Raw), true, out)?;
        return Ok(0);
    }
    let (Some(name), Some(file)) = (&args.name, &args.file) else {
        return Err(Failure::new("the name of an image and a file are needed"));
    };
    let job = interrupt::job()?;
    let format = match args.format {
        Some(format) => format,
        None => new_image::format_by_name(file, "-O")?,
    };
    let image = PublishedImage::open(name).map_err(|text| Failure::about(name, text))?;
    let new = new_file(args, file, format, &image)?;
    new.make(false, &job)?;
    let target = ImageSpec::plain(file, Some(format));
    let writing = OpenOptions {
        keys: new.open_keys(),
        data_file: new.data_path(),
        ..OpenOptions::new(References::Beside)
    };
    let output = SharedImage::open(&target, &writing)?;
    let fixed = output
        .top_file()
        .is_some_and(|file| !file.limits().resizable);
    let pull = Pull {
        name,
        // A device holds what it held before, and what was never written of a container is noise.
        writes_zeros: (fixed && format == Format::Raw) || format == Format::Luks,
        image,
        output,
        next: AtomicU64::new(0),
    };
    pull.run(args, &job).map_err(|failure| {
        let path = target.path();
        failure.hint(format!("{path} is incomplete and not to be used"))
    })?;
    Ok(0)
}

fn new_file(
    args: &Args,
    file: &OsString,
    format: Format,
    image: &PublishedImage,
) -> Result<NewImage, Failure> {
    let options = OptionList::parse(&args.options)?;
    if options.has("backing_file") {
        let message = "a published image is written whole, and a backing file has no use";
        return Err(Failure::about(file, message));
    }
    let size = Some(image.manifest().size_bytes());
    let keys: Keys = args.keys.keys()?;
    NewImage::new(file, format, options, size, Some(References::Beside), keys)
}

/// What the threads share.
struct Pull<'a> {
    name: &'a str,
    image: PublishedImage,
    output: SharedImage,
    writes_zeros: bool,
    next: AtomicU64,
}

impl Pull<'_> {
    fn run(&self, args: &Args, job: &Job) -> Result<(), Failure> {
        let mut progress: Progress = args.show.start(Some(self.image.manifest().size_bytes()));
        let threads = usize::from(args.parallel);
        let cancel = || self.image.cancel();
        let written = workers::run(threads, job, &mut progress, cancel, |shared| {
            self.work(shared)
        });
        let flushed = written.and_then(|()| {
            let flushed = self.output.guest().flush();
            flushed.map_err(|errno| Failure::system(self.output.name(), "cannot flush", errno))
        });
        let done = flushed.and(self.output.close());
        progress.end(&done);
        done
    }

    /// Writes chunks until there are no more.
    fn work(&self, shared: &Shared) -> Result<(), Failure> {
        let guest = self.output.guest();
        let size = self.image.manifest().size_bytes();
        while !shared.has_failed() {
            let chunk = self.next.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.image.chunks() {
                break;
            }
            let at = chunk * CHUNK_BYTES;
            let len = (size - at).min(CHUNK_BYTES);
            let zeros = match self.image.is_zero(chunk) {
                true => true,
                false => {
                    let bytes = self.image.fetch(chunk);
                    let bytes = bytes.map_err(|text| Failure::about(self.name, text))?;
                    // The part of a chunk that is on the disk may be zeros where the rest is not.
                    let zeros = is_zero(&bytes);
                    if !zeros {
                        let written = guest.write(at, &bytes);
                        written.map_err(|errno| self.output.failed("write", at, errno))?;
                    }
                    zeros
                }
            };
            if zeros && self.writes_zeros {
                let written = guest.write_zeroes(at, len);
                written.map_err(|errno| self.output.failed("write zeros", at, errno))?;
            }
            shared.add(len);
        }
        Ok(())
    }
}
