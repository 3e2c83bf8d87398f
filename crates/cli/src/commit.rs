//! `gaur commit`: write what an overlay holds into an image below it.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use gaur_block::FileId;
use gaur_engine::{Format, Image, Job, OpenOptions, Shares};
use gaur_reactor::ReactorFile;

use crate::drive::drive_together;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::new_image::file_id;
use crate::notice;
use crate::open::{self, CacheMode, SourceArgs};
use crate::progress::ProgressOptions;
use crate::rate::{Pace, parse_rate};
use crate::shared_image::SharedImage;

/// Write what an overlay holds into its backing file
///
/// The overlay is empty afterwards. Interrupted at any moment it still shows the same disk.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Write into this image of the chain, what lies between as well; the overlay keeps what it holds, and
    /// images in between are not to be used any more
    #[arg(short, long, value_name = "BASE")]
    base: Option<OsString>,
    /// Leave the overlay as it is
    #[arg(short = 'd', long = "drop")]
    keep: bool,
    /// Use of the host's cache
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,
    /// Move at most so many bytes of data a second
    #[arg(short, long, value_name = "RATE", value_parser = parse_rate)]
    rate: Option<u64>,
    /// Remove the persistent bitmaps of both images, which this would make useless
    #[arg(long)]
    drop_bitmaps: bool,
    #[command(flatten)]
    show: ProgressOptions,
}

/// The image of a chain that is written to.
struct Base {
    path: PathBuf,
    format: Format,
    id: FileId,
    /// How many images lie between it and the overlay.
    between: usize,
}

impl Args {
    fn options(&self) -> Result<OpenOptions, Failure> {
        Ok(OpenOptions {
            direct: self.cache.direct(),
            drop_bitmaps: self.drop_bitmaps,
            keys: self.source.keys()?,
            ..OpenOptions::new(self.source.references())
        })
    }

    /// Finds the base in the overlay's chain, all of which may be opened then.
    fn find_base(&self, spec: &ImageSpec) -> Result<Base, Failure> {
        let mut options = open::reading(None, true, self.source.references());
        options.keys = self.source.keys()?;
        let opened = spec.open(&options)?;
        let layers = opened.image.layers();
        let about = |message: String| Failure::about(spec.path(), message);
        let depth = match &self.base {
            None if layers.len() < 2 => {
                return Err(about("the image has no backing file".to_owned()));
            }
            None => 1,
            Some(name) => {
                let depth = self.depth_of(&opened.image, name);
                depth.filter(|depth| *depth > 0).ok_or_else(|| {
                    about(format!("{name:?} is not below it"))
                        .hint("-b names an image of the chain")
                })?
            }
        };
        let layer = &layers[depth];
        let id = layer
            .id()
            .ok_or_else(|| about("its base is no file".to_owned()))?;
        Ok(Base {
            path: layer.path().to_owned(),
            format: layer.format(),
            id,
            between: depth - 1,
        })
    }

    /// Which layer `name` is: a path from here, or a name as images have it.
    fn depth_of(&self, image: &Image, name: &OsString) -> Option<usize> {
        let layers = image.layers();
        let found = |id: FileId| layers.iter().position(|layer| layer.id() == Some(id));
        let own = layers.top().path();
        let beside = gaur_engine::resolve_backing(own, name.as_bytes()).ok();
        let ids = [Some(PathBuf::from(name)), beside].into_iter().flatten();
        ids.filter_map(|path| file_id(&path)).find_map(found)
    }

    /// Opens the base for writing: the file that the chain has, whatever its name means by now.
    fn open_base(&self, overlay: &ImageSpec, base: &Base) -> Result<SharedImage, Failure> {
        let spec = ImageSpec::plain(&base.path, Some(base.format));
        let mut options = self.options()?;
        // As the overlay's options name them, counted from there.
        options.keys = overlay.open_options(&options)?.keys.below(base.between + 1);
        let opened = SharedImage::open(&spec, &options)?;
        if opened.file_ids().next() != Some(base.id) {
            return Err(Failure::about(spec.path(), "was exchanged meanwhile"));
        }
        Ok(opened)
    }
}

/// Commits.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let spec = args.source.spec()?;
    let found = args.find_base(&spec)?;
    let overlay = OpenOptions {
        stop_at: Some(found.id),
        ..args.options()?
    };
    let overlay = SharedImage::open(&spec, &overlay)?;
    let base = args.open_base(&spec, &found)?;
    let keeps = args.keep || args.base.is_some();
    let job = Arc::new(Job::default());
    let _pace = args.rate.map(|rate| Pace::start(&job, rate));
    let progress = args.show.start(None);
    let failed = |error| Failure::image(spec.path(), &error);
    let shares = Shares::default();
    let work = drive_together(
        &overlay,
        progress,
        &job,
        async |queue| {
            let into = base.queue::<ReactorFile>();
            let committed = queue.commit_into(&into, &shares, &job).await;
            committed.map_err(failed)
        },
        async |queue| {
            base.close()?;
            match keeps {
                true => Ok(()),
                false => queue.make_empty(&job).await.map_err(failed),
            }
        },
    );
    work.and(overlay.close())?;
    if !args.show.quiet {
        writeln!(out, "Image committed.")?;
        if found.between > 0 && !notice::is_qemu() {
            writeln!(
                out,
                "{} images between it and {:?} do not show what they did and are not to be used.",
                found.between, found.path
            )?;
        }
    }
    Ok(0)
}
