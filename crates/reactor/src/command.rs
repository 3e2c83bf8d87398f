//! Commands to a driver over the ring (`IORING_OP_URING_CMD`), as ublk has them.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};

use gaur_block::Errno;
use io_uring::{opcode, squeue, types};

use crate::context;
use crate::op::Op;

/// Where `addr` is in an entry (`struct io_uring_sqe`).
const ADDRESS_AT: usize = 16;

/// An entry of the ring as the bytes it is.
union Bytes {
    entry: ManuallyDrop<squeue::Entry>,
    bytes: [u8; 64],
}

const _: () = assert!(size_of::<squeue::Entry>() == 64);

/// Sends a command to the driver behind `fd` and waits for its result, 0 or more. `operation` is the
/// driver's number, `payload` its 16 bytes, `address` what the entry's `addr` is for it (0 for
/// nothing).
///
/// # Errors
/// What the driver says; [`Errno::EOPNOTSUPP`] on a thread without a ring.
///
/// # Safety
/// Whatever memory the driver is told of stays valid until the future is done.
pub async unsafe fn command(
    fd: BorrowedFd<'_>,
    operation: u32,
    payload: [u8; 16],
    address: u64,
) -> Result<u32, Errno> {
    let core = context::find().ok_or(Errno::EOPNOTSUPP)?;
    let ring = core.ring().ok_or(Errno::EOPNOTSUPP)?;
    let entry = opcode::UringCmd16::new(types::Fd(fd.as_raw_fd()), operation)
        .cmd(payload)
        .build();
    let mut raw = Bytes {
        entry: ManuallyDrop::new(entry),
    };
    // SAFETY: an entry is 64 bytes of plain integers, so any bytes are a valid one, and it has no
    // destructor.
    let entry = unsafe {
        raw.bytes[ADDRESS_AT..ADDRESS_AT + 8].copy_from_slice(&address.to_ne_bytes());
        ManuallyDrop::into_inner(raw.entry)
    };
    // SAFETY: the caller's promise.
    unsafe { Op::new(ring, entry) }.await
}
