//! How the bytes of requests get to and from the kernel, and what is asked of the device for them.
//!
//! By default the driver copies: each tag has told it of memory, into which the bytes of a write are
//! copied before the request comes and from which those of a read are taken with its answer, without
//! any call of the server's.
//!
//! With zero copy the driver registers the request's own pages with the ring of the thread, and the
//! device passes their number on to the file. A device that has to look into the bytes says so
//! (`EOPNOTSUPP`) before it has done anything; then they are copied to or from the tag's memory by
//! reading or writing the character device.

use std::rc::Rc;

use gaur_block::{Device, Errno, Payload, Registered, Request, Source, Target};
use gaur_reactor::{Buffer, uring};

use super::char_device::{CharDevice, Descriptor};
use super::uapi::{self, SECTOR_BYTES};

/// Memory of one tag, a part of what its thread has. The driver knows its address for as long as the
/// tag is fetched, so it neither moves nor goes before that.
pub(super) struct Memory {
    start: *mut u8,
    len_bytes: usize,
    /// Keeps it.
    _whole: Rc<Buffer>,
}

impl Memory {
    /// Cuts memory into parts of `len_bytes` each.
    pub(super) fn cut(mut whole: Buffer, len_bytes: usize) -> Vec<Memory> {
        let count = whole.len() / len_bytes;
        let start = whole.as_mut_ptr();
        let whole = Rc::new(whole);
        let part = |at| Memory {
            // SAFETY: the part ends inside the buffer.
            start: unsafe { start.add(at * len_bytes) },
            len_bytes,
            _whole: whole.clone(),
        };
        (0..count).map(part).collect()
    }

    /// Its address, for the driver.
    pub(super) fn address(&self) -> u64 {
        self.start as u64
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: parts do not overlap, the whole is never touched otherwise, and this part is
        // borrowed. The driver touches it only while the tag is fetched, when no code here does.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len_bytes) }
    }
}

/// How a device's requests are served, the same for all of a thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransferMode {
    /// The driver registers buffers rather than to copy.
    pub(super) zero_copy: bool,
    /// The device takes no longer payloads than this, in bytes.
    pub(super) max_transfer: usize,
}

/// A tag of a queue as its thread knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ThreadTag {
    pub(super) queue: u16,
    pub(super) tag: u16,
    /// Its number among the tags of its thread.
    pub(super) local: u16,
}

impl ThreadTag {
    /// The number of the ring's buffer that the driver registers this tag's requests with.
    pub(super) fn buffer(&self) -> u16 {
        uring::EXPORT_BUFFER_FIRST + self.local
    }
}

/// One request in flight.
pub(super) struct Transfer<'a, D> {
    pub(super) device: &'a D,
    pub(super) char_device: &'a CharDevice,
    pub(super) mode: TransferMode,
    pub(super) tag: ThreadTag,
    pub(super) memory: &'a mut Memory,
    pub(super) descriptor: Descriptor,
}

impl<D: Device> Transfer<'_, D> {
    /// Serves the request. The number of bytes that a read or write moved, 0 for anything else.
    pub(super) async fn run(mut self) -> Result<usize, Errno> {
        let descriptor = self.descriptor;
        if descriptor.operation() == uapi::OP_FLUSH {
            // It has no place; what its descriptor says of one means nothing.
            return self.submit(Request::Flush).await;
        }
        let first = descriptor.start_sector.checked_mul(SECTOR_BYTES);
        let offset_bytes = first.ok_or(Errno::EINVAL)?;
        let len_bytes = u64::from(descriptor.len_sectors) * SECTOR_BYTES;
        let request = match descriptor.operation() {
            uapi::OP_READ | uapi::OP_WRITE => return self.move_payload(offset_bytes).await,
            uapi::OP_DISCARD => Request::Discard {
                offset_bytes,
                len_bytes,
            },
            uapi::OP_WRITE_ZEROES => Request::WriteZeroes {
                offset_bytes,
                len_bytes,
                fua: descriptor.has(uapi::FLAG_FUA),
                may_unmap: !descriptor.has(uapi::FLAG_NOUNMAP),
            },
            _ => return Err(Errno::EOPNOTSUPP),
        };
        let discard = matches!(request, Request::Discard { .. });
        match self.submit(request).await {
            // A discard is a hint; a device that cannot has done what it could.
            Err(Errno::EOPNOTSUPP) if discard => Ok(0),
            result => result,
        }
    }

    async fn submit(&self, request: Request) -> Result<usize, Errno> {
        let done = self.device.submit(request, Payload::None);
        done.await.map(|()| 0)
    }

    /// Length of a read or write in bytes; a driver that sends more than there is memory for is not
    /// believed.
    fn payload_len(&self) -> Result<usize, Errno> {
        let len = self.descriptor.len_sectors as usize;
        let len = len
            .checked_mul(SECTOR_BYTES as usize)
            .ok_or(Errno::EINVAL)?;
        if len <= self.memory.len_bytes {
            Ok(len)
        } else {
            Err(Errno::EINVAL)
        }
    }

    /// The registered buffer from `at` on, if there is one for this request.
    fn registered(&self, at: usize, len: usize) -> Option<Registered> {
        let there = self.mode.zero_copy && !self.descriptor.has(uapi::FLAG_NEED_REG_BUF);
        there.then(|| Registered {
            index: self.tag.buffer(),
            offset: at as u64,
            len,
        })
    }

    /// Where the driver copies a request's bytes from `at` on.
    fn copy_offset(&self, at: usize) -> u64 {
        uapi::request_offset(self.tag.queue, self.tag.tag, at as u64)
    }

    async fn move_payload(&mut self, offset_bytes: u64) -> Result<usize, Errno> {
        let len = self.payload_len()?;
        let mut at = 0;
        while at < len {
            let piece = (len - at).min(self.mode.max_transfer);
            let offset_bytes = offset_bytes + at as u64;
            match self.descriptor.operation() {
                uapi::OP_READ => self.read_piece(offset_bytes, at, piece).await?,
                _ => self.write_piece(offset_bytes, at, piece).await?,
            }
            at += piece;
        }
        Ok(len)
    }

    async fn read_piece(&mut self, offset_bytes: u64, at: usize, len: usize) -> Result<(), Errno> {
        let request = Request::Read { offset_bytes };
        // The last sector of a read-only image may not be all there: the rest of it is zeros.
        let there = self.device.size_bytes().saturating_sub(offset_bytes);
        let there = len.min(usize::try_from(there).unwrap_or(usize::MAX));
        let in_reach = there == len || len - there < SECTOR_BYTES as usize;
        if !in_reach {
            return Err(Errno::EINVAL);
        }
        if let Some(registered) = self.registered(at, len).filter(|_| there == len) {
            let payload = Payload::Read(Target::Registered(registered));
            match self.device.submit(request, payload).await {
                Err(Errno::EOPNOTSUPP) => {}
                result => return result,
            }
        }
        let offset = self.copy_offset(at);
        let piece = &mut self.memory.bytes()[at..at + len];
        if there > 0 {
            let payload = Payload::Read(Target::memory(&mut piece[..there]));
            self.device.submit(request, payload).await?;
        }
        piece[there..].fill(0);
        if self.mode.zero_copy {
            self.char_device.deliver(offset, piece)?;
        }
        Ok(())
    }

    async fn write_piece(&mut self, offset_bytes: u64, at: usize, len: usize) -> Result<(), Errno> {
        let request = Request::Write {
            offset_bytes,
            fua: self.descriptor.has(uapi::FLAG_FUA),
        };
        if let Some(registered) = self.registered(at, len) {
            let payload = Payload::Write(Source::Registered(registered));
            match self.device.submit(request, payload).await {
                Err(Errno::EOPNOTSUPP) => {}
                result => return result,
            }
        }
        let offset = self.copy_offset(at);
        let piece = &mut self.memory.bytes()[at..at + len];
        if self.mode.zero_copy {
            self.char_device.fetch(offset, piece)?;
        }
        let payload = Payload::Write(Source::memory(piece));
        self.device.submit(request, payload).await
    }
}
