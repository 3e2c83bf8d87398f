//! `--snapshot`: a temporary overlay over an image, or over one of its internal snapshots. The overlay's
//! file is unlinked once it is open, so it disappears with the process, however that ends.

use std::path::Path;

use gaur_engine::{BackingFile, Format, OpenOptions};
use gaur_format::plan::CreateOptions;
use gaur_reactor::{BlockingFile, CreateFile, OpenFile, block_on};

use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::open::{self, Bases};
use crate::shared_image::SharedImage;

/// Opens the image, or its snapshot `base.snapshot`, below a new overlay in `$TMPDIR`. The options that
/// are about writing are the overlay's.
pub fn open(spec: &ImageSpec, base: &OpenOptions, bases: &Bases) -> Result<SharedImage, Failure> {
    let fail = |message: &str| Failure::about(spec.path(), message);
    let reading = OpenOptions {
        read_only: true,
        allocation: None,
        ..base.clone()
    };
    // Stays open, and so locked, until the overlay has opened it for itself.
    let below = spec.open(&reading)?;
    let options = spec.open_options(&reading)?;
    if !options.backing {
        return Err(fail(
            "a temporary overlay cannot leave the chain of its image out",
        ));
    }
    spec.check_whole()?;
    let path = open::absolute(spec.file_path())?;
    let references = base.references.over(&path);
    let format = below.image.layers().top().format();
    let plan = CreateOptions {
        size_bytes: below.image.size_bytes(),
        // Small writes copy next to nothing from below.
        extended_l2: true,
        backing_file: Some(path.into_os_string().into_encoded_bytes()),
        backing_format: Some(format.name().to_owned()),
        ..CreateOptions::default()
    };
    let directory = tempfile::Builder::new().prefix("gaur-").tempdir();
    let directory = directory.map_err(|error| {
        Failure::io(std::env::temp_dir(), &error).hint("TMPDIR says where temporary files go")
    })?;
    let overlay = directory.path().join("temporary.qcow2");
    make(&overlay, &plan)?;
    // What is told of the layers is told of them one below.
    let mut backing_files = options.backing_files.clone();
    if !backing_files.is_empty() {
        backing_files.insert(0, BackingFile::default());
    }
    let options = OpenOptions {
        format: Some(Format::Qcow2),
        keys: options.keys.above(1),
        backing_files,
        read_only: false,
        copy_on_read: base.copy_on_read,
        direct: false,
        backing_direct: Some(options.direct),
        force_share: false,
        allocation: base.allocation,
        backing_snapshot: options.snapshot.clone(),
        snapshot: None,
        references,
        ..options
    };
    let opened = open::open_sharing(&overlay, &options, bases)?;
    Ok(SharedImage::new(spec.path(), opened))
}

/// Makes an image.
pub fn make(overlay: &Path, plan: &CreateOptions) -> Result<(), Failure> {
    let name = &*overlay.to_string_lossy();
    let file = OpenFile::create(overlay, CreateFile::default())
        .map_err(|error| Failure::about(name, format!("cannot create: {error}")))?;
    let file = BlockingFile::new(file);
    block_on(gaur_engine::create(
        &file,
        plan,
        &gaur_engine::Job::default(),
    ))
    .map_err(|error| Failure::image(name, &error))
}
