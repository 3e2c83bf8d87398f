//! `gaur dd`: copy a part of an image, from its front or its middle, to a new image.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use gaur_block::File;
use gaur_engine::{Format, Job, OpenOptions};

use crate::compare::is_zero;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::interrupt;
use crate::new_image::{self, NewImage};
use crate::notice::is_qemu;
use crate::open::{self, KeyOptions, ReferenceOptions, format_parser, target_format_parser};
use crate::option_help;
use crate::options::OptionList;
use crate::shared_image::SharedImage;
use crate::size::{parse_size, parse_whole_number};

/// Copy a part of an image to a new image
///
/// As with 'qemu-img dd', 'count' is where the part ends, counted from the start of the input like 'skip'.
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur dd [OPTIONS] [bs=SIZE] [count=N] [skip=N] if=FILE of=FILE")]
pub struct Args {
    /// Format of the input (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    format: Option<Format>,
    /// The input is a list of options, driver=qcow2,file.filename=PATH,..
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,
    /// Format of the output
    #[arg(short = 'O', long, value_name = "FMT", value_parser = target_format_parser(), default_value = "raw")]
    output_format: Format,
    /// Options of the output's format; '-o help' lists them
    #[arg(short = 'o', value_name = "KEY=VALUE,..")]
    output_options: Vec<String>,
    /// Open the input even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    references: ReferenceOptions,
    #[command(flatten)]
    keys: KeyOptions,
    /// bs=SIZE of a block (512), count=BLOCKS, skip=BLOCKS, if=INPUT, of=OUTPUT
    #[arg(required_unless_present = "output_options", value_name = "KEY=VALUE")]
    operands: Vec<OsString>,
}

/// What the operands say.
struct Operands<'a> {
    block_bytes: u64,
    count: Option<u64>,
    skip: u64,
    input: &'a OsStr,
    output: &'a OsStr,
}

/// Longest block, in bytes, that qemu-img takes.
const BLOCK_BYTES_MAX: u64 = i32::MAX as u64;
/// Most bytes copied at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Images are whole sectors.
const SECTOR_BYTES: u64 = 512;

impl<'a> Operands<'a> {
    fn parse(given: &'a [OsString]) -> Result<Operands<'a>, Failure> {
        let mut operands = Operands {
            block_bytes: SECTOR_BYTES,
            count: None,
            skip: 0,
            input: OsStr::new(""),
            output: OsStr::new(""),
        };
        for operand in given {
            let bytes = operand.as_bytes();
            let at = bytes.iter().position(|byte| *byte == b'=');
            let (key, value) = bytes.split_at(at.unwrap_or(bytes.len()));
            let value = OsStr::from_bytes(value.get(1..).unwrap_or_default());
            match key {
                b"bs" => operands.block_bytes = number("bs", value)?,
                b"count" => operands.count = Some(number("count", value)?),
                b"skip" => operands.skip = number("skip", value)?,
                b"if" => operands.input = value,
                b"of" => operands.output = value,
                _ => {
                    let failure = Failure::new(format!("unknown operand {operand:?}"));
                    return Err(failure.hint("bs, count, skip, if and of are known"));
                }
            }
        }
        if !(1..=BLOCK_BYTES_MAX).contains(&operands.block_bytes) {
            let message = format!("bs is between 1 and {BLOCK_BYTES_MAX} bytes");
            return Err(Failure::new(message));
        }
        if operands.input.is_empty() || operands.output.is_empty() {
            return Err(Failure::new(
                "an input (if=FILE) and an output (of=FILE) are needed",
            ));
        }
        Ok(operands)
    }

    /// Where the part begins and ends in an input of `size` bytes; both alike for nothing.
    fn part(&self, size: u64) -> (u64, u64) {
        let bytes = |blocks: u64| blocks.saturating_mul(self.block_bytes).min(size);
        let end = self.count.map_or(size, bytes);
        (bytes(self.skip).min(end), end)
    }
}

fn number(key: &str, value: &OsStr) -> Result<u64, Failure> {
    let text = value.to_str().unwrap_or_default();
    // QEMU's program counts blocks in C's numbers, and sizes with suffixes are ours.
    if is_qemu()
        && key != "bs"
        && let Ok(count) = parse_whole_number(text)
    {
        return Ok(count);
    }
    parse_size(text).map_err(|error| Failure::new(format!("{key}={}: {error}", value.display())))
}

/// Copies.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if OptionList::asks_for_help(&args.output_options)? {
        option_help::print_new(args.output_format, true, out)?;
        return Ok(0);
    }
    let operands = Operands::parse(&args.operands)?;
    let spec = ImageSpec::parse(operands.input, args.image_opts, args.format)?;
    let references = args.references.references();
    let mut reading = open::reading(None, args.force_share, references.clone());
    reading.keys = args.keys.keys()?;
    let input = SharedImage::open(&spec, &reading)?;
    let own = new_image::file_id(operands.output.as_ref());
    if input.file_ids().any(|id| Some(id) == own) {
        let message = "the output is the input, or a backing file of it";
        return Err(Failure::about(operands.output, message));
    }
    let (start, end) = operands.part(input.size_bytes());
    let job = interrupt::job()?;
    let new = NewImage::new(
        operands.output,
        args.output_format,
        OptionList::parse(&args.output_options)?,
        Some((end - start).next_multiple_of(SECTOR_BYTES)),
        Some(references.clone()),
        reading.keys,
    )?;
    if let Some(backing) = new.checked_backing() {
        let message = "what is zeros in the input would show its backing file";
        return Err(Failure::about(operands.output, message).hint(format!(
            "gaur convert -B {} makes an overlay",
            backing.display()
        )));
    }
    new.make(false, &job)?;
    let target = ImageSpec::plain(operands.output, Some(args.output_format));
    let writing = OpenOptions {
        keys: new.open_keys(),
        data_file: new.data_path(),
        ..OpenOptions::new(references)
    };
    let output = SharedImage::open(&target, &writing)?;
    copy(&input, &output, (start, end), &job).map_err(|failure| {
        let path = target.path();
        failure.hint(format!("{path} is incomplete and not to be used"))
    })?;
    Ok(0)
}

fn copy(
    input: &SharedImage,
    output: &SharedImage,
    (start, end): (u64, u64),
    job: &Job,
) -> Result<(), Failure> {
    let (from, to) = (input.guest(), output.guest());
    // A device holds what it held before, and what nobody wrote to a container decrypts to noise.
    let is_device = output
        .top_file()
        .is_some_and(|file| !file.limits().resizable);
    let is_container = output.image().layers().top().format() == Format::Luks;
    let writes_all = is_device || is_container;
    let mut buffer = vec![0; CHUNK_BYTES as usize];
    let mut at = start;
    while at < end {
        interrupt::check(job)?;
        let extent = from.map(at, end - at);
        let extent = extent.map_err(|errno| input.failed("read the allocation", at, errno))?;
        let zero = extent.zero || !extent.present;
        let mut len = extent.len_bytes.min(end - at);
        let target = at - start;
        if zero && !writes_all {
            at += len;
            continue;
        }
        len = len.min(CHUNK_BYTES);
        let bytes = buffer.get_mut(..len as usize).unwrap_or_default();
        let read = from.read(at, bytes);
        read.map_err(|errno| input.failed("read", at, errno))?;
        if writes_all || !is_zero(bytes) {
            let written = to.write(target, bytes);
            written.map_err(|errno| output.failed("write", target, errno))?;
        }
        at += len;
    }
    let copied = end - start;
    let rest = copied.next_multiple_of(SECTOR_BYTES) - copied;
    if is_container && rest > 0 {
        let written = to.write(copied, &[0; SECTOR_BYTES as usize][..rest as usize]);
        written.map_err(|errno| output.failed("write", copied, errno))?;
    }
    drop(to);
    output.close()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn parts_are_what_qemu_copies() {
        for (text, part) in [
            ("bs=1k count=3", (0, 3072)),
            ("bs=1k skip=2", (2048, 10240)),
            ("bs=1k count=3 skip=2", (2048, 3072)),
            ("bs=1k count=2 skip=5", (2048, 2048)),
            ("count=5", (0, 2560)),
            ("bs=1M", (0, 10240)),
            ("bs=1k skip=50", (10240, 10240)),
            ("bs=2G skip=1", (0, 0)),
        ] {
            let given = parse(&format!("{text} if=a of=b=c"));
            match Operands::parse(&given) {
                Ok(operands) => {
                    assert_eq!(operands.part(10240), part, "{text}");
                    assert_eq!(operands.output, "b=c");
                }
                Err(failure) => assert_eq!(part, (0, 0), "{text}: {failure}"),
            }
        }
        for bad in [
            "bs=0 if=a of=b",
            "if=a",
            "of=a",
            "if=a of=b x=1",
            "bs=x if=a of=b",
            "if of",
        ] {
            assert!(Operands::parse(&parse(bad)).is_err(), "{bad}");
        }
    }
}
