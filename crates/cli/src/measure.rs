//! `gaur measure`: how large a new image would be, by the figures of `qemu-img measure`.

use std::ffi::OsString;
use std::io::Write;

use gaur_engine::{Format, Job, Keys, OpenOptions};
use gaur_format::Version;
use gaur_format::bitmap::Bitmap;
use gaur_format::plan::{self, CreateOptions, Preallocation};
use serde::Serialize;

use crate::bitmaps;
use crate::failure::Failure;
use crate::file_holes::FileHoles;
use crate::guest::Guest;
use crate::image_spec::ImageSpec;
use crate::interrupt;
use crate::json;
use crate::new_image::NewImage;
use crate::notice::is_qemu;
use crate::open::{self, Output, SourceOptions, target_format_parser};
use crate::option_help;
use crate::options::OptionList;
use crate::size::parse_size;
use crate::snapshot_choice::SnapshotChoice;

/// Say how large a new image would be
///
/// Of an image of that size, or with the data of the one that is named.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Format of the new image
    #[arg(short = 'O', long, value_name = "FMT", value_parser = target_format_parser(), default_value = "raw")]
    target_format: Format,
    /// Options of the new image; '-o help' lists them
    #[arg(short = 'o', long, value_name = "KEY=VALUE,..")]
    target_options: Vec<String>,
    /// Size of the new image for the guest; nothing is in it
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "file")]
    size: Option<u64>,
    #[command(flatten)]
    how: SourceOptions,
    /// Measure this internal snapshot of it: an id, a name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", requires = "file")]
    snapshot: Option<String>,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// An image whose data the new one is to hold
    #[arg(required_unless_present_any = ["size", "target_options"])]
    file: Option<OsString>,
}

/// Bytes of a new image.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Sizes {
    #[serde(skip_serializing_if = "Option::is_none")]
    bitmaps: Option<u64>,
    required: u64,
    fully_allocated: u64,
}

/// What the new image is to hold.
#[derive(Debug, Default)]
struct Contents {
    size_bytes: u64,
    /// Clusters of the new image with data.
    data_clusters: u64,
    /// `None` where the source has no place for any.
    bitmaps: Option<Vec<Bitmap>>,
}

/// Measures.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if OptionList::asks_for_help(&args.target_options)? {
        option_help::print_new(args.target_format, false, out)?;
        return Ok(0);
    }
    let options = || {
        let mut options = OptionList::parse(&args.target_options)?;
        // It need not be there, and its format makes no difference.
        if is_qemu() && options.has("backing_file") && !options.has("backing_fmt") {
            options.add("backing_fmt", Format::Raw.name());
        }
        Ok::<_, Failure>(options)
    };
    let new = |size| {
        let (format, keys) = (args.target_format, Keys::default());
        NewImage::new("the new image", format, options()?, size, None, keys)
    };
    let (image, contents) = match &args.file {
        None => {
            let image = new(args.size)?;
            let size_bytes = image.plan().size_bytes;
            let contents = Contents {
                size_bytes,
                ..Contents::default()
            };
            (image, contents)
        }
        Some(file) => {
            let spec = args.how.spec(file)?;
            // The size is the source's; what else the options say has to be known to read it.
            let image = new(Some(0))?;
            let cluster_bytes = 1 << image.plan().cluster_bits;
            let contents = examine(args, &spec, cluster_bytes, &*interrupt::job()?)?;
            (image, contents)
        }
    };
    let sizes = match args.target_format {
        Format::Raw | Format::Luks | Format::Foreign(_) => {
            let bytes = image.flat_bytes(contents.size_bytes);
            Sizes {
                bitmaps: None,
                required: bytes,
                fully_allocated: bytes,
            }
        }
        Format::Qcow2 => {
            let mut options = image.measured_plan();
            // How much of the data is in the backing file already is not known.
            if options.backing_file.take().is_some() && args.file.is_some() {
                options.preallocation = Preallocation::Full;
            }
            options.backing_format = None;
            options.size_bytes = contents.size_bytes;
            sizes_of_qcow2(&options, &contents)?
        }
    };
    match args.output {
        Output::Json => json::write(out, &sizes)?,
        Output::Human => {
            writeln!(out, "required size: {}", sizes.required)?;
            writeln!(out, "fully allocated size: {}", sizes.fully_allocated)?;
            if let Some(bytes) = sizes.bitmaps {
                writeln!(out, "bitmaps size: {bytes}")?;
            }
        }
    }
    Ok(0)
}

fn sizes_of_qcow2(options: &CreateOptions, contents: &Contents) -> Result<Sizes, Failure> {
    let cluster_bytes = 1_u64 << options.cluster_bits;
    let measured = plan::measure(options, contents.data_clusters);
    let measured = measured.map_err(|error| Failure::about("the new image", error.to_string()))?;
    let size = contents.size_bytes;
    Ok(Sizes {
        bitmaps: contents
            .bitmaps
            .as_deref()
            .filter(|_| options.version == Version::V3)
            .map(|bitmaps| bitmaps_bytes(bitmaps, size, cluster_bytes)),
        required: measured.required,
        fully_allocated: measured.fully_allocated,
    })
}

/// Looks what the image has, for clusters of `cluster_bytes`.
fn examine(
    args: &Args,
    spec: &ImageSpec,
    cluster_bytes: u64,
    job: &Job,
) -> Result<Contents, Failure> {
    let mut base = open::reading(None, args.force_share, args.how.references());
    base.keys = args.how.keys()?;
    if let Some(text) = &args.snapshot {
        base.snapshot = Some(SnapshotChoice::parse(text)?.resolve(spec, &base)?);
    }
    let bitmaps = bitmaps::storable(
        spec,
        &OpenOptions {
            snapshot: None,
            ..base.clone()
        },
    )?;
    let opened = spec.open(&base)?;
    let image = opened.image;
    let size_bytes = image.size_bytes();
    let holes = FileHoles::new(&opened.files);
    let guest = Guest::new(image.queue(opened.files));
    let failed = |offset: u64, errno| {
        let what = format!("cannot map offset {offset}");
        guest.failed(spec.path(), &what, errno)
    };
    let mut holes = holes.map_err(|errno| failed(0, errno))?;
    let (mut at, mut data_clusters) = (0, 0);
    while at < size_bytes {
        interrupt::check(job)?;
        let extent = guest.map(at, size_bytes - at).and_then(|mut extent| {
            holes.refine(&image, &mut extent)?;
            Ok(extent)
        });
        let extent = extent.map_err(|errno| failed(at, errno))?;
        let mut end = at + extent.len_bytes;
        if extent.present && extent.data && !extent.zero {
            let clusters = end.div_ceil(cluster_bytes) - at / cluster_bytes;
            data_clusters += clusters;
            end = (at / cluster_bytes + clusters) * cluster_bytes;
        }
        at = end;
    }
    Ok(Contents {
        size_bytes,
        data_clusters,
        bitmaps,
    })
}

/// Bytes that the bitmaps of a disk take, each of them all stored.
fn bitmaps_bytes(bitmaps: &[Bitmap], size_bytes: u64, cluster_bytes: u64) -> u64 {
    const ENTRY_BYTES: u64 = 24;
    let whole = |bytes: u64| bytes.next_multiple_of(cluster_bytes);
    let mut directory = 0;
    let mut sum = 0;
    for bitmap in bitmaps {
        let bits = size_bytes.div_ceil(1 << bitmap.granularity_bits.min(63));
        let clusters = bits.div_ceil(8).div_ceil(cluster_bytes);
        sum += clusters * cluster_bytes + whole(clusters * 8);
        directory += (ENTRY_BYTES + bitmap.name.len() as u64).next_multiple_of(8);
    }
    sum + whole(directory)
}
