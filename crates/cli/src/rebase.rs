//! `gaur rebase`: give an overlay another backing file.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use gaur_block::FileId;
use gaur_engine::{Compressor, Format, Job, OpenOptions, Shares};
use gaur_reactor::ReactorFile;

use crate::drive::drive_together;
use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::image_spec::ImageSpec;
use crate::new_image::file_id;
use crate::open::{self, CacheMode, SourceArgs};
use crate::progress::ProgressOptions;
use crate::shared_image::SharedImage;

/// Give an image another backing file
///
/// What reads differently over the new one is copied into the image first, so that it shows the same disk.
/// Interrupted at any moment it still does.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// The new backing file, as the image is to name it; "" makes it stand alone
    #[arg(short, long, value_name = "BACKING", default_value = "")]
    backing: OsString,
    /// Format of the new backing file
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,
    /// Change only the name: nothing is compared or copied, and neither backing file need be there. The disk changes
    /// unless the new file shows what the old one showed
    #[arg(short = 'u', long = "backing-unsafe")]
    name_only: bool,
    /// Store what is copied compressed
    #[arg(short, long, conflicts_with = "name_only")]
    compress: bool,
    /// Use of the host's cache for the image
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,
    /// Use of the host's cache for the backing files
    #[arg(
        short = 'T',
        long = "backing-cache",
        value_name = "MODE",
        default_value = "writeback"
    )]
    backing_cache: CacheMode,
    /// Open the new backing file even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Remove the image's persistent bitmaps, which this would make useless
    #[arg(long)]
    drop_bitmaps: bool,
    #[command(flatten)]
    show: ProgressOptions,
}

/// The backing file that the image is to name.
struct NewBacking {
    name: Vec<u8>,
    format: String,
    /// Open, unless only the name changes.
    image: Option<SharedImage>,
}

impl Args {
    fn open_image(&self, spec: &ImageSpec) -> Result<SharedImage, Failure> {
        let options = OpenOptions {
            backing: !self.name_only,
            direct: self.cache.direct(),
            backing_direct: Some(self.backing_cache.direct()),
            drop_bitmaps: self.drop_bitmaps,
            keys: self.source.keys()?,
            ..OpenOptions::new(self.source.references())
        };
        SharedImage::open(spec, &options)
    }

    /// Looks at the new backing file.
    fn new_backing(&self, spec: &ImageSpec) -> Result<Option<NewBacking>, Failure> {
        let about = |message: String| Failure::about(spec.path(), message);
        if self.backing.is_empty() {
            return match &self.backing_format {
                None => Ok(None),
                Some(_) => Err(about("a backing format without a backing file".to_owned())),
            };
        }
        let name = self.backing.as_bytes().to_vec();
        let path = match gaur_engine::resolve_backing(spec.file_path(), &name) {
            Ok(path) => Some(path),
            Err(_) if self.name_only && self.backing_format.is_some() => None,
            Err(error) => return Err(about(format!("backing file {:?}: {error}", self.backing))),
        };
        let format = match (&self.backing_format, &path) {
            (Some(format), _) => format.clone(),
            (None, Some(path)) => {
                let file = ImageFile::open(path, &self.reading(None)?);
                let probed = file.and_then(|file| file.probe());
                match probed {
                    Ok(known @ (Format::Qcow2 | Format::Luks)) => known.name().to_owned(),
                    Ok(foreign @ Format::Foreign(_)) => foreign.name().to_owned(),
                    Ok(Format::Raw) | Err(_) => {
                        let message = "the backing format must be told";
                        return Err(about(message.to_owned()).hint("say -F raw or -F qcow2"));
                    }
                }
            }
            (None, None) => String::new(),
        };
        let mut image = None;
        if let (Some(path), false) = (path, self.name_only) {
            let known = Format::from_name(&format).ok_or_else(|| {
                let message = format!("backing format {format:?} is not supported");
                about(message).hint(format!("{} are", open::known_formats()))
            })?;
            let new = ImageSpec::plain(path, Some(known));
            image = Some(SharedImage::open(&new, &self.reading(Some(known))?)?);
        }
        Ok(Some(NewBacking {
            name,
            format,
            image,
        }))
    }

    fn reading(&self, format: Option<Format>) -> Result<OpenOptions, Failure> {
        Ok(OpenOptions {
            direct: self.backing_cache.direct(),
            keys: self.source.keys()?,
            ..open::reading(format, self.force_share, self.source.references())
        })
    }
}

/// Rebases.
pub fn run(args: &Args) -> Result<u8, Failure> {
    let spec = args.source.spec()?;
    let new = args.new_backing(&spec)?;
    let base = new.as_ref().and_then(|new| new.image.as_ref());
    let own = file_id(spec.file_path());
    let bites = |base: &SharedImage| base.file_ids().any(|id| Some(id) == own);
    if base.is_some_and(bites) {
        let message = "the image would stand below its own backing file";
        return Err(Failure::about(spec.path(), message));
    }
    let image = args.open_image(&spec)?;
    let same_from = base.and_then(|base| same_from(&image, base.file_ids().next()));
    let job = Arc::new(Job::default());
    let progress = args.show.start(None);
    let failed = |error| Failure::image(spec.path(), &error);
    let shares = Shares::default();
    let rebased = drive_together(
        &image,
        progress,
        &job,
        async |queue| {
            if args.name_only {
                return Ok(());
            }
            let over = base.map(|base| base.queue::<ReactorFile>());
            let compressor = args.compress.then(|| Compressor::new(queue.image(), None));
            let compressor = compressor.transpose().map_err(failed)?;
            let copied = queue.rebase_onto(over.as_ref(), same_from, compressor, &shares, &job);
            copied.await.map_err(failed)
        },
        async |queue| {
            let name = new.as_ref().map(|new| &new.name[..]);
            let format = new.as_ref().map(|new| &new.format[..]);
            let changed = queue.set_backing(name, format.filter(|format| !format.is_empty()));
            changed.await.map_err(failed)
        },
    );
    rebased.and(image.close())?;
    Ok(0)
}

/// The layer of the image that is the new backing file: from there on both chains are the same.
fn same_from(image: &SharedImage, new: Option<FileId>) -> Option<u32> {
    let at = image.file_ids().position(|id| Some(id) == new)?;
    u32::try_from(at).ok().filter(|at| *at > 0)
}
