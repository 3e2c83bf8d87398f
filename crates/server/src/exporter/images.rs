//! The images that a process has open for its exports: each file once, however many exports show it.
//!
//! Rule: an image that one export writes to has no other export; any number of exports may read.
//! Exports that read an image in the same way share it, and overlays over one base share that. Lock order: [`Images::open`], then
//! [`OpenImage::uses`].

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use gaur_engine::ErrorKind;
use gaur_reactor::Stop;
use parking_lot::{Condvar, Mutex};

use super::image_options::ImageOptions;
use crate::cache_cleaner::CacheCleaner;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::open::Bases;
use crate::shared_image::SharedImage;

/// An open image.
pub struct OpenImage {
    image: SharedImage,
    /// Device and number of its file, by which it is told apart.
    file: Option<(u64, u64)>,
    /// What decides whether another export may share it.
    way: String,
    writes_file: bool,
    /// What was written to it is not kept.
    temporary: bool,
    uses: Mutex<Uses>,
    /// Rung when a use ends.
    idle: Condvar,
    /// Raised when commands about it are given up.
    ending: Stop,
}

#[derive(Default)]
struct Uses {
    exports: Vec<String>,
    commands: usize,
}

impl OpenImage {
    /// The image.
    pub fn shared(&self) -> &SharedImage {
        &self.image
    }

    fn share(&self, export: &str) {
        self.uses.lock().exports.push(export.to_owned());
    }

    /// Waits until no command is under way, and after `patience` until it has been given up.
    fn wait_for_commands(&self, patience: Duration) {
        let busy = |uses: &mut Uses| uses.commands > 0;
        let mut uses = self.uses.lock();
        self.idle.wait_while_for(&mut uses, busy, patience);
        self.ending.stop();
        self.idle.wait_while(&mut uses, busy);
    }

    fn first_export(&self) -> String {
        let uses = self.uses.lock();
        uses.exports.first().cloned().unwrap_or_default()
    }
}

/// Keeps an image open during a command that no export waits for.
pub struct CommandUse(Arc<OpenImage>);

impl CommandUse {
    /// The image.
    pub fn shared(&self) -> &SharedImage {
        &self.0.image
    }

    /// Raised when the command is to be given up, because the image is to be closed.
    pub fn ending(&self) -> &Stop {
        &self.0.ending
    }
}

impl Drop for CommandUse {
    fn drop(&mut self) {
        let mut uses = self.0.uses.lock();
        uses.commands = uses.commands.saturating_sub(1);
        self.0.idle.notify_all();
    }
}

/// All that are open.
#[derive(Default)]
pub struct Images {
    open: Mutex<Vec<Arc<OpenImage>>>,
    /// What overlays over one base share.
    bases: Bases,
    cleaner: CacheCleaner,
}

impl Images {
    /// Opens the image for the export `name`, or shares it with those that show it already.
    pub fn acquire(
        &self,
        name: &str,
        spec: &ImageSpec,
        options: &ImageOptions,
    ) -> Result<Arc<OpenImage>, Failure> {
        // Held while the file is opened: of two commands for one file the second finds the first's.
        let mut open = self.open.lock();
        let file = std::fs::metadata(spec.file_path());
        let file = file.ok().map(|found| (found.dev(), found.ino()));
        let way = format!("{spec:?} {options:?}");
        let writes_file = options.writes_file(spec);
        let same_file = || {
            open.iter()
                .filter(|other| file.is_some() && other.file == file)
        };
        if let Some(other) = same_file().find(|other| writes_file || other.writes_file) {
            return Err(in_use(spec, &other.first_export(), other.writes_file));
        }
        let shared = same_file().find(|other| other.way == way && !options.temporary);
        if let Some(image) = shared {
            image.share(name);
            return Ok(Arc::clone(image));
        }
        let image = options.open(spec, &self.bases)?;
        if let Some(interval) = spec.clean_interval() {
            self.cleaner.add(image.image(), interval);
        }
        let image = Arc::new(OpenImage {
            image,
            file,
            way,
            writes_file,
            temporary: options.temporary,
            uses: Mutex::default(),
            idle: Condvar::new(),
            ending: Stop::new(),
        });
        image.share(name);
        open.push(Arc::clone(&image));
        Ok(image)
    }

    /// The export `name` is through with an image, and has no queue of it any more. The last one closes
    /// it, once the commands about it are over; after `patience` they are given up.
    pub fn release(
        &self,
        name: &str,
        image: &Arc<OpenImage>,
        patience: Duration,
    ) -> Result<(), Failure> {
        {
            let mut open = self.open.lock();
            let mut uses = image.uses.lock();
            if let Some(place) = uses.exports.iter().position(|export| export == name) {
                uses.exports.swap_remove(place);
            }
            if !uses.exports.is_empty() {
                return Ok(());
            }
            // Until it is closed, its lock keeps everybody else out.
            open.retain(|other| !Arc::ptr_eq(other, image));
        }
        image.wait_for_commands(patience);
        match image.temporary {
            true => Ok(()),
            false => image.image.close(),
        }
    }

    /// Keeps `image` open during a command; `None` when its last export is going.
    pub fn command(&self, image: &Arc<OpenImage>) -> Option<CommandUse> {
        let _held = self.open.lock();
        let mut uses = image.uses.lock();
        if uses.exports.is_empty() {
            return None;
        }
        uses.commands += 1;
        Some(CommandUse(Arc::clone(image)))
    }
}

fn in_use(spec: &ImageSpec, export: &str, writes: bool) -> Failure {
    let what = if writes {
        "may write to it"
    } else {
        "reads it"
    };
    let message = format!("the image is in use: export {export:?} of this server {what}");
    let failure = Failure::about(spec.path(), message).kind(ErrorKind::Locked);
    failure.hint("an image has one export that may write, or any number that only read")
}
