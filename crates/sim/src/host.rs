//! The file system of a simulated machine.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use gaur_block::{Access, Errno, FileId, Host, OpenError, Within};

use crate::disk::Disk;
use crate::file::WriteLock;
use crate::rotating::Drive;
use crate::{Faults, FileImage, Handle, Random, Rotating, SimFile, Survivors, crash};

/// What kind of disk a file lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskProfile {
    /// Offsets and lengths of transfers are multiples of this: 1 when cached, 512 or 4096 else.
    pub request_alignment: u32,
    /// Addresses of memory are multiples of this.
    pub memory_alignment: u32,
    /// Longest transfer in bytes.
    pub max_transfer: u32,
    /// A device of fixed length; the number is the seed of what lies in unused space.
    pub device: Option<u64>,
    /// Discarded space reads as zeros.
    pub discard_zeroes: bool,
    /// `write_zeroes_at` is supported.
    pub write_zeroes: bool,
}

impl Default for DiskProfile {
    /// A cached regular file.
    fn default() -> DiskProfile {
        DiskProfile {
            request_alignment: 1,
            memory_alignment: 1,
            max_transfer: 1 << 30,
            device: None,
            discard_zeroes: true,
            write_zeroes: true,
        }
    }
}

/// Names and the disks behind them.
#[derive(Clone)]
pub struct SimHost {
    handle: Handle,
    disks: Rc<RefCell<BTreeMap<String, Rc<RefCell<Disk>>>>>,
}

impl std::fmt::Debug for SimHost {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "SimHost({} files)", self.disks.borrow().len())
    }
}

impl SimHost {
    /// A machine without files.
    pub fn new(handle: &Handle) -> SimHost {
        SimHost {
            handle: handle.clone(),
            disks: Rc::default(),
        }
    }

    /// A machine with these files, all durable.
    pub fn from_images<'a>(
        handle: &Handle,
        images: impl IntoIterator<Item = (&'a str, FileImage, DiskProfile)>,
    ) -> SimHost {
        let host = SimHost::new(handle);
        for (name, image, profile) in images {
            host.add(name, image, profile);
        }
        host
    }

    /// The same machine and its files, unflushed writes and all, with a new scheduler: the process
    /// was killed and started again. What it had in flight happens or does not.
    pub fn restarted(&self, handle: &Handle) -> SimHost {
        for disk in self.disks.borrow().values() {
            crash::abandon(&mut disk.borrow_mut(), &mut handle.random());
        }
        SimHost {
            handle: handle.clone(),
            disks: Rc::clone(&self.disks),
        }
    }

    /// Adds a durable file.
    pub fn add(&self, name: &str, image: FileImage, profile: DiskProfile) {
        let mut disks = self.disks.borrow_mut();
        let id = FileId {
            device: 1,
            inode: disks.len() as u64 + 1,
        };
        let disk = Disk::new(name, id, image, profile);
        disks.insert(name.to_owned(), Rc::new(RefCell::new(disk)));
    }

    /// Requests on the file called `name` take their time from now on, as on a rotating disk.
    pub fn set_rotating(&self, name: &str, shape: Rotating) {
        if let Some(disk) = self.disks.borrow().get(name) {
            disk.borrow_mut().mechanics = Some(Drive::new(shape));
        }
    }

    /// Which requests on the file called `name` fail from now on.
    pub fn set_faults(&self, name: &str, faults: Faults) {
        if let Some(disk) = self.disks.borrow().get(name) {
            disk.borrow_mut().faults = faults;
        }
    }

    /// Faults that struck so far.
    pub fn faults_struck(&self) -> u64 {
        self.disks
            .borrow()
            .values()
            .map(|disk| disk.borrow().struck)
            .sum()
    }

    /// Flushes that failed so far.
    pub fn flushes_failed(&self) -> u64 {
        let disks = self.disks.borrow();
        disks
            .values()
            .map(|disk| disk.borrow().flushes_failed)
            .sum()
    }

    /// Whether the sector at `offset_bytes` of the file called `name` has an unflushed version.
    pub fn is_dirty(&self, name: &str, offset_bytes: u64) -> bool {
        let sector = offset_bytes / crate::SECTOR_BYTES;
        let disks = self.disks.borrow();
        disks
            .get(name)
            .is_some_and(|disk| disk.borrow().dirty.contains_key(&sector))
    }

    /// What the files hold for a reader now, power on.
    pub fn images(&self) -> BTreeMap<String, FileImage> {
        let disks = self.disks.borrow();
        disks
            .iter()
            .map(|(name, disk)| (name.clone(), disk.borrow().image.clone()))
            .collect()
    }

    /// What the files may hold after a power cut now. This machine goes on undisturbed.
    pub fn crash_images(
        &self,
        survivors: Survivors,
        random: &mut Random,
    ) -> BTreeMap<String, FileImage> {
        let disks = self.disks.borrow();
        let after = |disk: &Rc<RefCell<Disk>>, random: &mut Random| {
            crash::image_after(&disk.borrow(), survivors, random)
        };
        disks
            .iter()
            .map(|(name, disk)| (name.clone(), after(disk, random)))
            .collect()
    }

    /// The profile of the file called `name`.
    pub fn profile(&self, name: &str) -> Option<DiskProfile> {
        self.disks
            .borrow()
            .get(name)
            .map(|disk| disk.borrow().profile)
    }
}

impl Host for SimHost {
    type File = SimFile;

    async fn open_within(
        &self,
        name: &Path,
        within: Within<'_>,
        access: Access,
    ) -> Result<SimFile, OpenError> {
        if !within.admits(name) {
            return Err(within.refused());
        }
        let disk = name
            .to_str()
            .and_then(|name| self.disks.borrow().get(name).cloned());
        let Some(disk) = disk else {
            return Err(OpenError {
                errno: Errno::ENOENT,
                reason: "no such file or directory".to_owned(),
            });
        };
        let locks = access.write && access.lock;
        if locks && disk.borrow().writers > 0 {
            return Err(OpenError {
                errno: Errno::EAGAIN,
                reason: "write lock is held by another process".to_owned(),
            });
        }
        let lock = locks.then(|| {
            disk.borrow_mut().writers += 1;
            Rc::new(WriteLock {
                disk: Rc::clone(&disk),
            })
        });
        let handle = self.handle.clone();
        Ok(SimFile {
            disk,
            handle,
            writable: access.write,
            _lock: lock,
        })
    }
}
