//! An open image that several threads use: opened once, which takes its locks, with a queue of
//! each thread's own on the same open files.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gaur_block::{Errno, FileId};
use gaur_engine::{ErrorKind, Format, Image, ImageFiles, OpenOptions, Opened, Queue};
use gaur_format::Version;
use gaur_reactor::{BlockingFile, OpenFile, ThreadFile};

use crate::failure::Failure;
use crate::guest::Guest;
use crate::handover::Handover;
use crate::image_spec::ImageSpec;
use crate::kept::Kept;
use crate::notice::say;
use crate::open::Bases;

/// How long the kernel may take to finish the requests of a process that was killed. Until then they
/// hold the image's lock, rightly: what they write must not land on what the next server writes.
const PATIENCE: Duration = Duration::from_secs(20);
/// The same where it is not known whether a process was killed: locks may well be held by one that lives.
const PATIENCE_UNTOLD: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);

/// Opens something, and waits for its lock if it has to.
pub(crate) fn patiently<T>(
    patience: Duration,
    open: impl Fn() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let start = Instant::now();
    loop {
        match open() {
            Err(failure) if failure.is_locked() && start.elapsed() < patience => {
                std::thread::sleep(PAUSE);
            }
            opened => return opened,
        }
    }
}

/// Why an image cannot have a log, if it cannot: version 2 has no place for the log's number.
pub fn refuses_log(spec: &ImageSpec, base: &OpenOptions) -> Option<Failure> {
    let look = OpenOptions {
        read_only: true,
        lock: false,
        ..base.clone()
    };
    if matches!(spec.open_options(&look).ok()?.format, Some(format) if format != Format::Qcow2) {
        return None;
    }
    let header = spec.open_file(&look).ok()?.header().ok()?;
    (header.version == Version::V2).then(|| {
        let text = "a version 2 image cannot name a handover log";
        let hint = "'qemu-img amend -f qcow2 -o compat=1.1' makes it version 3";
        Failure::about(spec.path(), text).hint(hint)
    })
}

/// An open image and its files.
pub struct SharedImage {
    name: String,
    image: Arc<Image>,
    files: ImageFiles<BlockingFile>,
    /// What the next server gets if this one is killed.
    handover: Option<Handover>,
}

impl SharedImage {
    /// Opens the image and its chain.
    pub fn open(spec: &ImageSpec, base: &OpenOptions) -> Result<SharedImage, Failure> {
        SharedImage::open_sharing(spec, base, &Bases::default())
    }

    /// The same; its chain may be shared with images that were opened with the same `bases`.
    pub fn open_sharing(
        spec: &ImageSpec,
        base: &OpenOptions,
        bases: &Bases,
    ) -> Result<SharedImage, Failure> {
        let opened = spec.open_sharing(base, bases)?;
        Ok(SharedImage::new(spec.path(), opened))
    }

    /// The same for a server, which may be the next after one that was killed.
    pub fn open_to_serve(
        spec: &ImageSpec,
        base: &OpenOptions,
        bases: &Bases,
    ) -> Result<SharedImage, Failure> {
        patiently(PATIENCE_UNTOLD, || {
            SharedImage::open_sharing(spec, base, bases)
        })
    }

    /// Around an image that was opened, to be called `name`.
    pub fn new(name: &str, opened: Opened<BlockingFile>) -> SharedImage {
        SharedImage {
            name: name.to_owned(),
            files: opened.files,
            image: opened.image,
            handover: None,
        }
    }

    /// Opens the image with a log at `path`, and takes over what is left there.
    pub fn open_with_handover(
        spec: &ImageSpec,
        base: &OpenOptions,
        path: &Path,
        bases: &Bases,
    ) -> Result<SharedImage, Failure> {
        if let Some(failure) = refuses_log(spec, base) {
            return Err(failure);
        }
        let handover = patiently(PATIENCE_UNTOLD, || Handover::open(path, spec.file_path()));
        let handover = handover.map_err(|failure| match failure.is_locked() {
            true => SharedImage::explain(spec, base, failure),
            false => failure,
        });
        SharedImage::open_after(spec, base, handover?, bases, || true)
    }

    /// The same with a log that counts only for who uses the disk still. The image is served without a
    /// log when that cannot be had.
    pub fn open_with_kept(
        spec: &ImageSpec,
        base: &OpenOptions,
        kept: &Kept,
        bases: &Bases,
    ) -> Result<SharedImage, Failure> {
        let open = || Handover::open(&kept.log, spec.file_path());
        match patiently(PATIENCE_UNTOLD, open) {
            Ok(handover) => SharedImage::open_after(spec, base, handover, bases, || kept.is_used()),
            // Its server may be on its way out, and what it leaves will count.
            Err(locked) if locked.is_locked() => Err(SharedImage::explain(spec, base, locked)),
            Err(damaged) if damaged.kind == Some(ErrorKind::Corrupt) => {
                // It is ours to remove where no user counts on it.
                match !kept.is_used() && std::fs::remove_file(&kept.log).is_ok() {
                    true => SharedImage::open_with_kept(spec, base, kept, bases),
                    false => Err(damaged),
                }
            }
            Err(failure) => {
                let image = SharedImage::open_to_serve(spec, base, bases)?;
                say(format_args!(
                    "nothing is kept for another server: {failure}"
                ));
                Ok(image)
            }
        }
    }

    /// Why there is no log: who has it has the image as well, and that is the better thing to say.
    fn explain(spec: &ImageSpec, base: &OpenOptions, failure: Failure) -> Failure {
        SharedImage::open(spec, base).err().unwrap_or(failure)
    }

    /// Opens the image with a log, and takes over what is left there if it `counts`.
    fn open_after(
        spec: &ImageSpec,
        base: &OpenOptions,
        handover: Handover,
        bases: &Bases,
        counts: impl FnOnce() -> bool,
    ) -> Result<SharedImage, Failure> {
        let patience = match handover.is_left() {
            true => PATIENCE,
            false => PATIENCE_UNTOLD,
        };
        let options = OpenOptions {
            commit_log: Some(handover.log()),
            ..base.clone()
        };
        let mut image = patiently(patience, || {
            SharedImage::open_sharing(spec, &options, bases)
        })?;
        // A server that was killed had the image's lock to its very end.
        if handover.is_left() && !counts() {
            handover.forget()?;
        }
        handover.take_over(&image)?;
        image.handover = Some(handover);
        Ok(image)
    }

    /// The path it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What all queues share.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// Size for the guest, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.image.size_bytes()
    }

    /// Its files, the top layer's first.
    pub fn file_ids(&self) -> impl Iterator<Item = FileId> {
        self.open_files().map(OpenFile::id)
    }

    /// Whether all files go past the host's cache.
    pub fn is_direct(&self) -> bool {
        self.open_files().all(OpenFile::is_direct)
    }

    /// From now on flushes of its own files do nothing.
    pub fn skip_flushes(&self) {
        for file in &self.files.own {
            file.open_file().skip_flushes();
        }
    }

    /// Its files whose bytes are elsewhere.
    pub(crate) fn remote_files(&self) -> Vec<OpenFile> {
        let remote = self.open_files().filter(|file| file.is_remote());
        remote.cloned().collect()
    }

    /// Whether some of its bytes are on another machine.
    pub fn is_remote(&self) -> bool {
        self.open_files().any(OpenFile::is_remote)
    }

    fn open_files(&self) -> impl Iterator<Item = &OpenFile> {
        self.files.iter().map(BlockingFile::open_file)
    }

    /// The files of the layers and their data files.
    pub fn files(&self) -> &ImageFiles<BlockingFile> {
        &self.files
    }

    /// The file of the top layer.
    pub fn top_file(&self) -> Option<BlockingFile> {
        self.files.own.first().cloned()
    }

    /// A queue for the calling thread.
    pub fn queue<F: ThreadFile>(&self) -> Queue<F> {
        let own = self.files.own.iter();
        self.image.queue(ImageFiles {
            own: own.map(|file| F::of(file.open_file().clone())).collect(),
            below: F::of_shared(&self.files.below),
        })
    }

    /// The calling thread's own view, with calls that block.
    pub fn guest(&self) -> Guest {
        Guest::new(self.queue::<BlockingFile>())
    }

    /// The last thing done to an image, after all queues are gone.
    pub fn close(&self) -> Result<(), Failure> {
        self.guest()
            .close()
            .map_err(|error| Failure::image(&self.name, &error))?;
        if let Some(handover) = &self.handover {
            handover.remove();
        }
        Ok(())
    }

    /// The failure to do `what` at an offset.
    pub fn failed(&self, what: &str, offset: u64, errno: Errno) -> Failure {
        let what = format!("cannot {what} at offset {offset}");
        let failure = Failure::request(self.image(), &self.name, &what, errno);
        failure.because(self.open_files().find_map(OpenFile::trouble))
    }
}
