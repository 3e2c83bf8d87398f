//! One request against the disk, up to its answer.

use gaur_block::{Device, Errno, Request as Ask};
use gaur_reactor::yield_now;

use super::reader::Reader;
use super::request_buffer::RequestBuffer;
use crate::fuse::proto::wire::{file, open_flag};
use crate::fuse::proto::{Change, Head, Operation, Reply, Request, Whence};

/// `ENXIO`: nothing of the kind from there on.
const ENXIO: Errno = Errno::from_raw(libc::ENXIO);
/// Questions about where data is after which other requests have their turn.
const LOOKUPS_BETWEEN_YIELDS: u32 = 64;

/// What the kernel gets.
pub(super) enum Answer {
    /// This.
    Reply(Reply),
    /// This, and so many bytes of the payload.
    Data(Reply, usize),
}

impl<D: Device + 'static> Reader<D> {
    /// Serves a request whose bytes lie in the buffer, where the payload of the answer goes too.
    pub(super) async fn execute(&self, buffer: &mut RequestBuffer, request: &Request) -> Answer {
        let answer = self.try_execute(buffer, request).await;
        answer.unwrap_or_else(|errno| Answer::Reply(Reply::error(&request.head, errno)))
    }

    async fn try_execute(
        &self,
        buffer: &mut RequestBuffer,
        request: &Request,
    ) -> Result<Answer, Errno> {
        let head = &request.head;
        let reply = match request.operation {
            Operation::Read {
                offset_bytes,
                len_bytes,
            } => {
                let len = self.read(buffer, offset_bytes, len_bytes).await?;
                return Ok(Answer::Data(Reply::data(head, len), len));
            }
            Operation::Write {
                offset_bytes,
                len_bytes,
                fua,
            } => {
                let written = self.write(buffer, offset_bytes, len_bytes, fua).await?;
                Reply::written(head, written)
            }
            // It was agreed on when the file was mounted.
            Operation::Init(_) => return Err(Errno::EIO),
            Operation::GetAttributes => self.attributes(head),
            Operation::SetAttributes(change) => {
                self.set_attributes(&change).await?;
                self.attributes(head)
            }
            Operation::Open { write } => Reply::open(head, self.open_flags(write)?),
            Operation::Flush => {
                if !self.file.read_only {
                    self.device.ask(Ask::Flush).await?;
                }
                Reply::done(head)
            }
            Operation::Nothing => Reply::done(head),
            Operation::FileSystem => Reply::file_system(head, self.size()),
            Operation::Allocate {
                offset_bytes,
                len_bytes,
                mode,
            } => {
                self.allocate(offset_bytes, len_bytes, mode).await?;
                Reply::done(head)
            }
            Operation::Seek {
                offset_bytes,
                whence,
            } => Reply::found(head, self.seek(offset_bytes, whence).await?),
        };
        Ok(Answer::Reply(reply))
    }

    fn size(&self) -> u64 {
        self.device.size_bytes()
    }

    fn attributes(&self, head: &Head) -> Reply {
        Reply::attributes(head, &self.file.attributes(self.size()))
    }

    fn writable(&self) -> Result<(), Errno> {
        if self.file.read_only {
            return Err(Errno::EROFS);
        }
        self.file.touch();
        Ok(())
    }

    fn open_flags(&self, write: bool) -> Result<u32, Errno> {
        if write && self.file.read_only {
            return Err(Errno::EROFS);
        }
        // The disk has a cache of its own, and programs expect of a disk that what others write by
        // another way is seen.
        let flags = open_flag::DIRECT_IO | open_flag::PARALLEL_DIRECT_WRITES;
        Ok(if write {
            flags
        } else {
            flags | open_flag::NOFLUSH
        })
    }

    /// Fills the payload; returns how much of it, less than was asked for at the end of the file.
    async fn read(
        &self,
        buffer: &mut RequestBuffer,
        offset_bytes: u64,
        len_bytes: u32,
    ) -> Result<usize, Errno> {
        let left = self.size().saturating_sub(offset_bytes);
        let len = u64::from(len_bytes).min(left) as usize;
        let target = (&mut buffer.payload()[..len]).into();
        self.device.read(offset_bytes, target).await?;
        Ok(len)
    }

    /// Stores the payload; returns how much of it, less than there is at the end of a file that does
    /// not grow.
    async fn write(
        &self,
        buffer: &mut RequestBuffer,
        offset_bytes: u64,
        len_bytes: u32,
        fua: bool,
    ) -> Result<u32, Errno> {
        self.writable()?;
        let len = self.room(offset_bytes, u64::from(len_bytes)).await? as usize;
        let source = (&buffer.payload()[..len]).into();
        self.device.write(offset_bytes, source, fua).await?;
        Ok(len as u32)
    }

    /// How much of a range there is room for, after growing the file if that is possible.
    async fn room(&self, offset_bytes: u64, len_bytes: u64) -> Result<u64, Errno> {
        let end = offset_bytes + len_bytes;
        if end <= self.size() {
            return Ok(len_bytes);
        }
        if self.resizer.resizable {
            self.resizer.resize(end, true).await?;
        }
        match self.size().saturating_sub(offset_bytes).min(len_bytes) {
            0 if len_bytes > 0 => Err(Errno::ENOSPC),
            len_bytes => Ok(len_bytes),
        }
    }

    async fn set_attributes(&self, change: &Change) -> Result<(), Errno> {
        self.file.check(change)?;
        if let Some(size_bytes) = change.size_bytes
            && size_bytes != self.size()
        {
            self.writable()?;
            if !self.resizer.resizable {
                return Err(Errno::EPERM);
            }
            self.resizer.resize(size_bytes, false).await?;
        }
        self.file.change(change)
    }

    async fn allocate(&self, offset_bytes: u64, len_bytes: u64, mode: u32) -> Result<(), Errno> {
        self.writable()?;
        let keep_size = mode & file::KEEP_SIZE != 0;
        let may_unmap = match mode & !file::KEEP_SIZE {
            0 => return self.reserve(offset_bytes, len_bytes, keep_size).await,
            file::PUNCH_HOLE if keep_size => true,
            file::ZERO_RANGE => false,
            _ => return Err(Errno::EOPNOTSUPP),
        };
        let len_bytes = if keep_size {
            self.size().saturating_sub(offset_bytes).min(len_bytes)
        } else {
            let room = self.room(offset_bytes, len_bytes).await?;
            if room < len_bytes {
                return Err(Errno::ENOSPC);
            }
            room
        };
        if len_bytes == 0 {
            return Ok(());
        }
        self.device
            .ask(Ask::WriteZeroes {
                offset_bytes,
                len_bytes,
                fua: false,
                may_unmap,
            })
            .await
    }

    /// Plain allocation grows the file. Inside of it there is no request that takes space and leaves
    /// the bytes alone.
    async fn reserve(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        keep_size: bool,
    ) -> Result<(), Errno> {
        let end = offset_bytes + len_bytes;
        if keep_size || end <= self.size() {
            return Err(Errno::EOPNOTSUPP);
        }
        match self.room(offset_bytes, len_bytes).await? {
            room if room < len_bytes => Err(Errno::ENOSPC),
            _ => Ok(()),
        }
    }

    async fn seek(&self, offset_bytes: u64, whence: Whence) -> Result<u64, Errno> {
        let (mut at, mut lookups) = (offset_bytes, 0_u32);
        loop {
            let size = self.size();
            if at >= size {
                break;
            }
            let left = size - at;
            let found = self.device.status(at, left).await?;
            if found.zero == (whence == Whence::Hole) {
                return Ok(at);
            }
            at += found.len_bytes.clamp(1, left);
            lookups += 1;
            if lookups.is_multiple_of(LOOKUPS_BETWEEN_YIELDS) {
                if self.over() {
                    return Err(Errno::EIO);
                }
                yield_now().await;
            }
        }
        // The end of the file is a hole, for a search that starts inside of it.
        match whence {
            Whence::Hole if offset_bytes < at => Ok(at),
            _ => Err(ENXIO),
        }
    }
}
