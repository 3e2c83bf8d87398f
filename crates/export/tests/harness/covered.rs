//! A file of the test's own that is covered by a disk.
//!
//! Programs of their own use the file, or the test does; the server's threads are others. A program
//! that is started has copies of everything the test has open until it has begun: of its client's
//! files, which it closes, and of its server's, which must go before anybody is told that the server
//! has. Between the two it would wait for ever, so one of these tests runs at a time, and starts
//! nothing while a server ends.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gaur_block::{Device, DeviceLimits, Errno, Payload, Request, Status};
use gaur_export::Server;
use gaur_export::device::Memory;
use gaur_export::fuse::{self, Options};
use gaur_export::{Front, ServeError};

pub type Lines = Arc<Mutex<Vec<String>>>;

/// A folder that is removed at the end, with an empty file in it.
pub struct Place {
    pub folder: PathBuf,
    pub file: PathBuf,
    pub lines: Lines,
    _alone: MutexGuard<'static, ()>,
}

impl Place {
    pub fn new() -> Place {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::Builder::new().prefix("gaur fuse-").tempdir();
        let folder = folder.expect("a new folder").keep();
        let file = folder.join("disk.raw");
        std::fs::write(&file, b"covered").expect("a new file");
        let lines = Lines::default();
        Place {
            folder,
            file,
            lines,
            _alone: alone,
        }
    }

    pub fn options(&self) -> Options {
        let mut options = Options::new(&self.file);
        let lines = self.lines.clone();
        options.log = Some(Arc::new(move |line: &str| {
            lines.lock().unwrap().push(line.to_owned());
        }));
        options
    }

    /// Another file of the folder, by name.
    pub fn path(&self, name: &str) -> String {
        text(&self.folder.join(name))
    }

    pub fn text(&self) -> String {
        text(&self.file)
    }

    /// Whether something is mounted over the file; nobody is asked who might not answer.
    pub fn is_covered(&self) -> bool {
        let list = std::fs::read_to_string("/proc/self/mountinfo").expect("a list of mounts");
        let path = self.text().replace(' ', "\\040");
        list.lines()
            .any(|line| line.split(' ').any(|word| word == path))
    }

    /// What lies below is seen again.
    pub fn expect_uncovered(&self) {
        assert!(!self.is_covered());
        let bytes = std::fs::read(&self.file).expect("a file again");
        assert_eq!(bytes, b"covered");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Of a test that failed the mount may be left, of one that did not there is none.
        let path = std::ffi::CString::new(self.text()).expect("no NUL");
        // SAFETY: the path ends in NUL.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH | libc::MNT_FORCE) };
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn text(path: &Path) -> String {
    path.to_str().expect("text").to_owned()
}

/// Covers the place's file with a device that every thread has a clone of.
pub fn cover<D>(options: Options, device: D) -> Server
where
    D: Device + Clone + Send + Sync + 'static,
{
    fuse::start(options, move |_| Ok(device.clone())).expect("it can be covered")
}

/// Stops in order.
pub fn finish(server: Server) {
    end(server).expect("an orderly end");
}

pub fn end(server: Server) -> Result<(), ServeError> {
    server.stop();
    Box::new(server).finish()
}

/// A disk in memory that can have other sizes.
#[derive(Clone)]
pub struct Elastic {
    memory: Memory,
    size_bytes: Arc<AtomicU64>,
}

impl Elastic {
    pub const MOST: u64 = 64 << 20;

    pub fn new(size_bytes: u64) -> Elastic {
        Elastic {
            memory: Memory::new(Elastic::MOST),
            size_bytes: Arc::new(AtomicU64::new(size_bytes)),
        }
    }

    /// Like a disk of whole sectors.
    pub fn resize(&self, size_bytes: u64) -> Result<(), String> {
        if size_bytes > Elastic::MOST {
            return Err("the test's disk is not that elastic".to_owned());
        }
        let size_bytes = size_bytes.next_multiple_of(512);
        self.size_bytes.store(size_bytes, Ordering::SeqCst);
        Ok(())
    }
}

impl Device for Elastic {
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::SeqCst)
    }

    fn limits(&self) -> DeviceLimits {
        self.memory.limits()
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        self.memory.submit(request, payload).await
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
        self.memory.status(offset_bytes, len_bytes).await
    }
}
