//! `gaur compare`: compare the guest's view of two images.

use std::ffi::{OsStr, OsString};
use std::io::Write;

use gaur_engine::{Format, MapExtent};

use crate::failure::Failure;
use crate::file_holes::FileHoles;
use crate::guest::Guest;
use crate::image_spec::ImageSpec;
use crate::interrupt;
use crate::open::{self, CacheMode, KeyOptions, ReferenceOptions, format_parser};
use crate::progress::Progress;

/// Compare what two images show the guest
///
/// Exits with 0 when they are identical, 1 when they differ, 2 when one cannot be opened, 3 when
/// an allocation status and 4 when data cannot be read.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Format of the first image (probed by default)
    #[arg(short, long = "a-format", value_name = "FMT", value_parser = format_parser())]
    format: Option<Format>,
    /// Format of the second image (probed by default)
    #[arg(short = 'F', long = "b-format", value_name = "FMT", value_parser = format_parser())]
    second_format: Option<Format>,
    /// FILE1 and FILE2 are lists of options, driver=qcow2,file.filename=PATH,..
    #[arg(long, conflicts_with_all = ["format", "second_format"])]
    image_opts: bool,
    #[command(flatten)]
    references: ReferenceOptions,
    #[command(flatten)]
    keys: KeyOptions,
    /// Use of the host's cache
    #[arg(
        short = 'T',
        long = "cache",
        value_name = "MODE",
        default_value = "writeback"
    )]
    cache: CacheMode,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Say nothing, only exit with a code
    #[arg(short, long)]
    quiet: bool,
    /// Sizes and allocation must be the same too
    #[arg(short, long)]
    strict: bool,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The first image
    file1: OsString,
    /// The second image
    file2: OsString,
}

/// An image cannot be opened, or the command line is wrong.
pub const EXIT_OPEN: u8 = 2;
/// The allocation status of an image cannot be read.
const EXIT_STATUS: u8 = 3;
/// The data of an image cannot be read.
const EXIT_READ: u8 = 4;

/// Most bytes compared at once.
const CHUNK_BYTES: u64 = 2 << 20;
/// Granularity in bytes at which a mismatch is reported.
const SECTOR_BYTES: usize = 512;

/// One of the two.
struct ComparedImage {
    name: String,
    guest: Guest,
    holes: FileHoles,
    size: u64,
    buffer: Vec<u8>,
}

impl ComparedImage {
    fn open(
        given: &OsStr,
        format: Option<Format>,
        switch: &'static str,
        args: &Args,
    ) -> Result<ComparedImage, Failure> {
        let spec = ImageSpec::parse(given, args.image_opts, format);
        let spec = spec.map_err(|failure| failure.code(EXIT_OPEN))?;
        let spec = spec.format_switch(switch);
        let mut options = open::reading(None, args.force_share, args.references.references());
        options.direct = args.cache.direct();
        options.keys = args.keys.keys()?;
        let opened = spec
            .open(&options)
            .map_err(|failure| failure.code(EXIT_OPEN))?;
        let holes = FileHoles::new(&opened.files).map_err(|errno| {
            let name = spec.path().to_string();
            Failure::system(&name, "cannot tell its length", errno).code(EXIT_STATUS)
        })?;
        Ok(ComparedImage {
            holes,
            name: spec.path().to_owned(),
            size: opened.image.size_bytes(),
            guest: Guest::new(opened.image.queue(opened.files)),
            buffer: Vec::new(),
        })
    }

    /// What is at `offset`; beyond the end there are zeros.
    fn map(&mut self, offset: u64, len_bytes: u64) -> Result<MapExtent, Failure> {
        if offset >= self.size {
            return Ok(MapExtent {
                len_bytes,
                ..MapExtent::default()
            });
        }
        let len = len_bytes.min(self.size - offset);
        let image = self.guest.image();
        let mapped = self.guest.map(offset, len).and_then(|mut extent| {
            self.holes.refine(image, &mut extent)?;
            Ok(extent)
        });
        mapped.map_err(|errno| {
            let what = format!("cannot read the allocation at offset {offset}");
            self.guest
                .failed(&self.name, &what, errno)
                .code(EXIT_STATUS)
        })
    }

    /// Reads into `self.buffer`, unless the range is known to be zeros.
    fn read(&mut self, offset: u64, len: usize, zero: bool) -> Result<(), Failure> {
        if zero {
            self.buffer.clear();
        }
        self.buffer.resize(len, 0);
        if zero {
            return Ok(());
        }
        self.guest.read(offset, &mut self.buffer).map_err(|errno| {
            let what = format!("cannot read offset {offset}");
            self.guest.failed(&self.name, &what, errno).code(EXIT_READ)
        })
    }
}

/// What came out.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Identical,
    SizeDiffers,
    StatusDiffers { offset: u64 },
    ContentDiffers { offset: u64 },
}

/// Compares and says the result. When that cannot be said, the code must not be the one that says that
/// they differ.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let compared = compare_files(args, out)?;
    out.flush().map_err(unsaid)?;
    Ok(compared)
}

fn unsaid(error: std::io::Error) -> Failure {
    Failure::from(error).code(EXIT_OPEN)
}

fn compare_files(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let mut first = ComparedImage::open(&args.file1, args.format, "-f", args)?;
    let mut second = ComparedImage::open(&args.file2, args.second_format, "-F", args)?;
    let total = first.size.max(second.size);
    let mut progress = Progress::new(Some(total), args.progress, args.quiet, false);
    let job = interrupt::job()?;
    let outcome = compare(&mut first, &mut second, args.strict, &mut |done| {
        progress.set(done);
        interrupt::check(&job)
    });
    match outcome {
        Ok(Outcome::Identical) => progress.finish(),
        _ => progress.stop(),
    }
    let outcome = outcome?;
    if args.quiet {
        return Ok(u8::from(outcome != Outcome::Identical));
    }
    let compared_all = matches!(outcome, Outcome::Identical)
        || matches!(outcome, Outcome::ContentDiffers { offset } if offset >= first.size.min(second.size));
    if first.size != second.size && compared_all {
        writeln!(out, "Warning: Image size mismatch!").map_err(unsaid)?;
    }
    let text = match outcome {
        Outcome::Identical => "Images are identical.".to_owned(),
        Outcome::SizeDiffers => "Strict mode: Image size mismatch!".to_owned(),
        Outcome::StatusDiffers { offset } => {
            format!("Strict mode: Offset {offset} block status mismatch!")
        }
        Outcome::ContentDiffers { offset } => format!("Content mismatch at offset {offset}!"),
    };
    writeln!(out, "{text}").map_err(unsaid)?;
    Ok(u8::from(outcome != Outcome::Identical))
}

fn compare(
    first: &mut ComparedImage,
    second: &mut ComparedImage,
    strict: bool,
    progress: &mut dyn FnMut(u64) -> Result<(), Failure>,
) -> Result<Outcome, Failure> {
    if strict && first.size != second.size {
        return Ok(Outcome::SizeDiffers);
    }
    let total = first.size.max(second.size);
    let mut offset = 0;
    while offset < total {
        let left = first.map(offset, total - offset)?;
        let right = second.map(offset, total - offset)?;
        if strict && status(&left) != status(&right) {
            return Ok(Outcome::StatusDiffers { offset });
        }
        let mut len = left.len_bytes.min(right.len_bytes);
        let (left, right) = (reads_as_zero(&left), reads_as_zero(&right));
        if !(left && right) {
            len = len.min(CHUNK_BYTES);
            first.read(offset, len as usize, left)?;
            second.read(offset, len as usize, right)?;
            if let Some(at) = first_difference(&first.buffer, &second.buffer) {
                let offset = offset + at as u64;
                return Ok(Outcome::ContentDiffers { offset });
            }
        }
        offset += len;
        progress(offset)?;
    }
    Ok(Outcome::Identical)
}

/// What must be the same in strict mode.
fn status(extent: &MapExtent) -> (bool, bool, bool, bool, bool) {
    (
        extent.present,
        extent.zero,
        extent.data,
        extent.compressed,
        extent.host_offset.is_some(),
    )
}

fn reads_as_zero(extent: &MapExtent) -> bool {
    extent.zero || !extent.present
}

/// The first sector that is not the same.
fn first_difference(left: &[u8], right: &[u8]) -> Option<usize> {
    if left == right {
        return None;
    }
    let mut sectors = left.chunks(SECTOR_BYTES).zip(right.chunks(SECTOR_BYTES));
    let sector = sectors.position(|(left, right)| left != right)?;
    Some(sector * SECTOR_BYTES)
}

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Blocks of 64 bytes compare quickly.
    let (blocks, tail) = bytes.as_chunks::<64>();
    blocks.iter().all(|block| *block == [0; 64]) && tail.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_told_by_the_sector() {
        let mut left = vec![0; 2048];
        let right = vec![0; 2048];
        assert_eq!(first_difference(&left, &right), None);
        left[1500] = 1;
        assert_eq!(first_difference(&left, &right), Some(1024));
    }

    #[test]
    fn zeros_are_found_at_any_length() {
        for len in [0, 1, 63, 64, 65, 4096] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            if let Some(last) = bytes.last_mut() {
                *last = 1;
                assert!(!is_zero(&bytes));
            }
        }
    }
}
