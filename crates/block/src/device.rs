//! The guest side: what an export asks of whatever serves its requests.

use core::future::Future;

use crate::{Errno, Payload};

/// A request of the guest. Offsets and lengths are bytes and need no alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Fill the payload from `offset_bytes`; the payload has the length.
    Read {
        /// First byte.
        offset_bytes: u64,
    },
    /// Store the payload at `offset_bytes`.
    Write {
        /// First byte.
        offset_bytes: u64,
        /// Durable before the request completes.
        fua: bool,
    },
    /// Make a range read as zeros.
    WriteZeroes {
        /// First byte.
        offset_bytes: u64,
        /// Length in bytes.
        len_bytes: u64,
        /// Durable before the request completes.
        fua: bool,
        /// Space may be given back; otherwise it stays allocated.
        may_unmap: bool,
    },
    /// The guest no longer needs a range. What it reads as afterwards is zeros or what was there.
    Discard {
        /// First byte.
        offset_bytes: u64,
        /// Length in bytes.
        len_bytes: u64,
    },
    /// Every request completed before this one was submitted, on any queue of the device, is
    /// durable when it completes.
    Flush,
}

/// What a [`Device`] can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Requests of this size and alignment run at full speed (bytes, a power of two).
    pub preferred_block: u32,
    /// Zeroing and discarding work in these units (bytes, a power of two).
    pub discard_block: u32,
    /// Longest payload of one request in bytes.
    pub max_transfer: u32,
    /// Writes, zeroes and discards are refused with [`Errno::EROFS`].
    pub read_only: bool,
}

/// What a run of guest bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Length of the run in bytes, at least 1, at most what was asked for.
    pub len_bytes: u64,
    /// Space is allocated for it somewhere in the chain (NBD: not a hole).
    pub allocated: bool,
    /// It is known to read as zeros.
    pub zero: bool,
}

/// The guest side of the waist: one value per queue, used by one thread, many requests at once.
pub trait Device {
    /// Size in bytes. It may change while the device is open (resize).
    fn size_bytes(&self) -> u64;

    /// Limits of this device.
    fn limits(&self) -> DeviceLimits;

    /// Serves one request. A request beyond the size fails with [`Errno::EINVAL`], a write beyond
    /// it with [`Errno::ENOSPC`]; nothing is transferred then. The future is driven to its end:
    /// requests are never cancelled.
    fn submit(
        &self,
        request: Request,
        payload: Payload<'_>,
    ) -> impl Future<Output = Result<(), Errno>>;

    /// Status of the run that starts at `offset_bytes` and is at most `len_bytes` long; both lie
    /// inside the device, `len_bytes` is at least 1.
    fn status(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> impl Future<Output = Result<Status, Errno>>;

    /// Length of the run that starts at `offset_bytes` and is at most `len_bytes` long, as for [`Device::status`], and
    /// how deep in the backing chain it lies: 0 for nowhere, 1 for the image itself, 2 for its backing file.
    fn allocation_depth(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> impl Future<Output = Result<(u64, u32), Errno>> {
        async move {
            let found = self.status(offset_bytes, len_bytes).await?;
            Ok((found.len_bytes, u32::from(found.allocated)))
        }
    }

    /// Whether zeroing a range takes far less time than writing zeros there, wherever it lies.
    fn zeroes_fast(&self) -> bool {
        false
    }
}
