//! `gaur resize`: change the guest size of an image.

use std::io::Write;
use std::sync::Arc;

use gaur_engine::{AllocationPolicy, ErrorKind, Format, Job, OpenOptions};
use gaur_format::plan::Preallocation;

use crate::drive::{drive, watch};
use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::notice::say;
use crate::open::{SourceArgs, allocation_parser};
use crate::progress::ProgressOptions;
use crate::shared_image::SharedImage;
use crate::size::{self, NewSize, parse_new_size};

/// Change the size of an image
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Allow a smaller size; what lies beyond it is lost
    #[arg(long)]
    shrink: bool,
    /// Allocation of the space that is added
    #[arg(long, value_name = "MODE", value_enum, default_value = "off")]
    preallocation: PreallocationArg,
    /// What to do with the host's space, whatever the image says
    #[arg(long, value_name = "POLICY", value_parser = allocation_parser())]
    allocation: Option<AllocationPolicy>,
    /// Remove the image's persistent bitmaps with the first change instead of keeping them
    #[arg(long)]
    drop_bitmaps: bool,
    #[command(flatten)]
    show: ProgressOptions,
    /// The new size, or how much to add (+SIZE) or take away (-SIZE); suffixes k M G T P E
    #[arg(value_name = "[+|-]SIZE", allow_hyphen_values = true, value_parser = parse_new_size)]
    size: NewSize,
}

/// What of the new space is taken at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PreallocationArg {
    /// Space is allocated when it is written
    Off,
    /// Clusters have their place, the file may have holes there
    Metadata,
    /// The same, and the host reserves the space
    Falloc,
    /// The same, and all of it is written
    Full,
}

impl From<PreallocationArg> for Preallocation {
    fn from(arg: PreallocationArg) -> Preallocation {
        match arg {
            PreallocationArg::Off => Preallocation::Off,
            PreallocationArg::Metadata => Preallocation::Metadata,
            PreallocationArg::Falloc => Preallocation::Falloc,
            PreallocationArg::Full => Preallocation::Full,
        }
    }
}

/// Resizes the image.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let spec = args.source.spec()?;
    let options = OpenOptions {
        allocation: args.allocation,
        drop_bitmaps: args.drop_bitmaps,
        keys: args.source.keys()?,
        ..OpenOptions::new(args.source.references())
    };
    let told = spec.format();
    let spec = spec.with_probed_format(args.source.is_untrusted())?;
    let image = SharedImage::open(&spec, &options).map_err(|failure| {
        failure
            .hint_if_locked("'gaur export resize' changes one that 'gaur serve --control' has open")
    })?;
    let old = image.size_bytes();
    let probed_raw = told.is_none() && spec.format() == Some(Format::Raw);
    let new = size::checked(spec.path(), old, args.size, args.shrink)?;
    if probed_raw && !args.show.quiet {
        out.flush()?;
        let advice = "taken for a raw image by its content (say -f raw to be sure)";
        say(format!("{}: {advice}", spec.path()));
    }
    out.flush()?;
    let job = Arc::new(Job::default());
    let progress = args.show.start(None);
    let resized = drive(
        &image,
        HostKind::Auto,
        progress,
        watch(&job),
        async |queue| {
            let how = args.preallocation.into();
            let resized = queue.resize_preallocated(new, args.shrink, how, &job).await;
            resized.map_err(|error| {
                match error.kind() {
            ErrorKind::Cancelled if new < old => Failure::cancelled(spec.path()).message(
                "cancelled; the size is unchanged, but what lies beyond the new one may be lost",
            ),
            _ => Failure::image(spec.path(), &error),
        }
            })
        },
    );
    resized.and(image.close())?;
    if !args.show.quiet {
        writeln!(out, "Image resized.")?;
    }
    Ok(0)
}
