//! `gaur create`: create an image.

use std::ffi::OsString;
use std::io::Write;

use gaur_engine::{Format, Job, OpenOptions};

use crate::copied_bitmaps::CopiedBitmaps;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::interrupt;
use crate::new_image::{self, NewImage, layout};
use crate::notice::is_qemu;
use crate::open::{self, KeyOptions, ReferenceOptions, target_format_parser};
use crate::option_help;
use crate::options::OptionList;
use crate::shared_image::SharedImage;
use crate::size::parse_size;

/// Make a new image
///
/// An image that is there already is overwritten, unless another program uses it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// Format of the image (qcow2 if the name ends in .qcow2, otherwise raw)
    #[arg(short, long, value_name = "FMT", value_parser = target_format_parser())]
    format: Option<Format>,
    /// Image to stack the new one on; what the new one does not have is read from it
    #[arg(short, long, value_name = "BACKING")]
    backing: Option<OsString>,
    /// Format of the backing file
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,
    /// Do not look whether the backing file is there
    #[arg(short = 'u', long)]
    backing_unsafe: bool,
    /// The new image goes on with the backing file's persistent bitmaps: those that can be used are copied
    #[arg(long, requires = "backing", conflicts_with = "backing_unsafe")]
    bitmaps: bool,
    #[command(flatten)]
    references: ReferenceOptions,
    #[command(flatten)]
    keys: KeyOptions,
    /// Options of the format; '-o help' lists them
    #[arg(short, long, value_name = "KEY=VALUE,..")]
    options: Vec<String>,
    /// The image
    #[arg(required_unless_present = "options")]
    file: Option<OsString>,
    /// Size for the guest: bytes, or a number with a suffix k M G T P E; taken from the backing
    /// file if there is one
    #[arg(value_parser = parse_size)]
    size: Option<u64>,
}

/// Makes the image.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if OptionList::asks_for_help(&args.options)? {
        let name = args.file.as_ref();
        let by_name = name.and_then(|name| new_image::format_by_name(name, "-f").ok());
        let usual = if is_qemu() {
            Format::Raw
        } else {
            Format::Qcow2
        };
        let format = args.format.or(by_name).unwrap_or(usual);
        option_help::print_new(format, args.file.is_some(), out)?;
        if format == Format::Qcow2 && !is_qemu() {
            writeln!(out, "\n{}", layout::HELP)?;
        }
        return Ok(0);
    }
    let Some(file) = &args.file else {
        return Err(Failure::new("no image is named").hint("see 'gaur create --help'"));
    };
    let mut options = OptionList::parse(&args.options)?;
    if let Some(backing) = &args.backing {
        options.add_switch("backing_file", backing, "-b")?;
    }
    if let Some(format) = &args.backing_format {
        options.add_switch("backing_fmt", format, "-F")?;
    }
    let format = match args.format {
        Some(format) => format,
        None => new_image::format_by_name(file, "-f")?,
    };
    let chosen = layout::choose(format, &mut options);
    let references = (!args.backing_unsafe).then(|| args.references.references());
    let mut image = NewImage::new(
        file,
        format,
        options,
        args.size,
        references,
        args.keys.keys()?,
    )?;
    image.keep_data_file();
    if !args.quiet {
        writeln!(out, "{}", image.describe())?;
        if chosen {
            writeln!(out, "{}", layout::CHOICE_NOTE)?;
        }
    }
    let job = interrupt::job()?;
    image.make(false, &job)?;
    if args.bitmaps {
        copy_bitmaps(args, ImageSpec::plain(file, Some(format)), &job)?;
    }
    if !args.quiet {
        out.flush()?;
        image.tell_distant_backing();
    }
    Ok(0)
}

/// Gives the new image the bitmaps of its backing file.
fn copy_bitmaps(args: &Args, spec: ImageSpec, job: &Job) -> Result<(), Failure> {
    let references = args.references.references();
    let options = OpenOptions {
        keys: args.keys.keys()?,
        ..OpenOptions::new(references.clone())
    };
    let image = SharedImage::open(&spec, &options)?;
    let copied = image.image().layers().get(1).map_or(Ok(()), |base| {
        let base = ImageSpec::plain(base.path().as_os_str(), Some(base.format()));
        let options = OpenOptions {
            keys: args.keys.keys()?,
            ..open::reading(None, false, references)
        };
        let base = SharedImage::open(&base, &options)?;
        let bitmaps = CopiedBitmaps::read(&base, true)?;
        bitmaps.check(&image, base.size_bytes())?;
        bitmaps.store(&image, job)
    });
    let done = copied.and(image.close());
    done.map_err(|failure| failure.hint("the image was made, without bitmaps"))
}
