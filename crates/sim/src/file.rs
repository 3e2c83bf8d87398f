//! A handle on a simulated disk.

use std::cell::RefCell;
use std::rc::Rc;

use gaur_block::{Errno, Extent, File, FileId, FileLimits, Source, Target};

use crate::disk::Disk;
use crate::operation::{Fill, Operation, OperationKind};
use crate::{Handle, SECTOR_BYTES, SimBuffer};

/// The write lock of one open; given back when its last handle goes.
pub(crate) struct WriteLock {
    pub(crate) disk: Rc<RefCell<Disk>>,
}

impl Drop for WriteLock {
    fn drop(&mut self) {
        if let Ok(mut disk) = self.disk.try_borrow_mut() {
            disk.writers = disk.writers.saturating_sub(1);
        }
    }
}

/// A handle on a file of a [`crate::SimHost`]. A clone is a second handle of the same open, for
/// another queue.
#[derive(Clone)]
pub struct SimFile {
    pub(crate) disk: Rc<RefCell<Disk>>,
    pub(crate) handle: Handle,
    pub(crate) writable: bool,
    /// Held, never looked at.
    pub(crate) _lock: Option<Rc<WriteLock>>,
}

impl std::fmt::Debug for SimFile {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "SimFile({})", self.disk.borrow().name)
    }
}

impl SimFile {
    fn check_write(&self, end: u64) -> Result<(), Errno> {
        if !self.writable {
            return Err(Errno::EROFS);
        }
        self.disk.borrow().check_writable(end)
    }

    async fn run(&self, kind: OperationKind) -> Result<Vec<u8>, Errno> {
        Operation::new(&self.disk, kind).run(&self.handle).await
    }

    async fn change(&self, range: std::ops::Range<u64>, fill: Fill) -> Result<(), Errno> {
        let operation = Operation::change(&self.disk, range, fill);
        operation.run(&self.handle).await.map(drop)
    }

    /// The part of a range that lies inside the file.
    fn inside(&self, offset_bytes: u64, len_bytes: u64) -> Option<std::ops::Range<u64>> {
        let len = self.disk.borrow().image.len_bytes();
        let end = offset_bytes.saturating_add(len_bytes).min(len);
        (offset_bytes < end).then_some(offset_bytes..end)
    }
}

impl File for SimFile {
    type Buffer = SimBuffer;

    fn limits(&self) -> FileLimits {
        let disk = self.disk.borrow();
        let profile = &disk.profile;
        FileLimits {
            request_alignment: profile.request_alignment,
            memory_alignment: profile.memory_alignment,
            max_transfer: profile.max_transfer,
            resizable: profile.device.is_none(),
            discard_zeroes: profile.discard_zeroes,
            read_only: !self.writable,
        }
    }

    fn id(&self) -> Option<FileId> {
        Some(self.disk.borrow().id)
    }

    fn buffer(&self, len_bytes: usize) -> SimBuffer {
        SimBuffer::new(
            len_bytes,
            self.disk.borrow().profile.memory_alignment as usize,
        )
    }

    async fn len(&self) -> Result<u64, Errno> {
        Ok(self.disk.borrow().image.len_bytes())
    }

    async fn read_at(&self, offset_bytes: u64, target: Target<'_>) -> Result<(), Errno> {
        let Target::Memory(memory) = target else {
            return Err(Errno::EOPNOTSUPP);
        };
        let end = offset_bytes
            .checked_add(memory.len() as u64)
            .ok_or(Errno::EINVAL)?;
        self.disk
            .borrow()
            .assert_transfer("read", offset_bytes, *memory);
        let read = OperationKind::Read(offset_bytes..end);
        let bytes = self.run(read).await?;
        memory.copy_from(&bytes);
        Ok(())
    }

    async fn write_at(&self, offset_bytes: u64, source: Source<'_>) -> Result<(), Errno> {
        let Source::Memory(memory) = source else {
            return Err(Errno::EOPNOTSUPP);
        };
        self.disk
            .borrow()
            .assert_transfer("write", offset_bytes, memory);
        let end = offset_bytes
            .checked_add(memory.len() as u64)
            .ok_or(Errno::EINVAL)?;
        self.check_write(end)?;
        if self.disk.borrow().is_full_at(end) {
            return Err(Errno::ENOSPC);
        }
        let mut bytes = vec![0; memory.len()];
        memory.copy_to(&mut bytes);
        self.change(offset_bytes..end, Fill::Data(bytes)).await
    }

    async fn write_zeroes_at(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        _may_unmap: bool,
    ) -> Result<(), Errno> {
        self.check_write(0)?;
        if !self.disk.borrow().profile.write_zeroes {
            return Err(Errno::EOPNOTSUPP);
        }
        match self.inside(offset_bytes, len_bytes) {
            Some(range) => self.change(range, Fill::Zeros).await,
            None => Ok(()),
        }
    }

    async fn allocate_at(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), Errno> {
        self.check_write(0)?;
        if !self.disk.borrow().profile.write_zeroes {
            return Err(Errno::EOPNOTSUPP);
        }
        let end = offset_bytes.saturating_add(len_bytes);
        let allocate = OperationKind::Allocate(offset_bytes..end);
        self.run(allocate).await.map(drop)
    }

    async fn discard_at(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), Errno> {
        self.check_write(0)?;
        let zeroes = self.disk.borrow().profile.discard_zeroes;
        match self.inside(offset_bytes, len_bytes) {
            Some(range) if zeroes => self.change(range, Fill::Zeros).await,
            Some(range) => {
                // A device works in whole blocks and leaves the rest alone.
                let range = range.start.next_multiple_of(SECTOR_BYTES)
                    ..range.end / SECTOR_BYTES * SECTOR_BYTES;
                if range.start < range.end {
                    self.change(range, Fill::Anything).await?;
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    async fn flush(&self) -> Result<(), Errno> {
        let mark = self.disk.borrow().mark();
        self.run(OperationKind::Flush(mark)).await.map(drop)
    }

    async fn set_len(&self, len_bytes: u64) -> Result<(), Errno> {
        self.check_write(0)?;
        if self.disk.borrow().profile.device.is_some() {
            return Err(Errno::EOPNOTSUPP);
        }
        self.run(OperationKind::SetLen(len_bytes)).await.map(drop)
    }

    async fn extent_at(&self, offset_bytes: u64) -> Result<Extent, Errno> {
        let disk = self.disk.borrow();
        let len = disk.image.len_bytes();
        if offset_bytes >= len {
            return Err(Errno::EINVAL);
        }
        let end = len.div_ceil(SECTOR_BYTES);
        let sector = offset_bytes / SECTOR_BYTES;
        let next = disk.image.next_stored(sector, end);
        let data = next == Some(sector);
        let stop = if data {
            sector + 1
        } else {
            next.unwrap_or(end)
        };
        Ok(Extent {
            len: (stop * SECTOR_BYTES).min(len) - offset_bytes,
            data,
        })
    }
}
