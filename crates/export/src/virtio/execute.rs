//! What a request asks, put to the device.
//!
//! The memory of a request goes to the device as it is, in however many pieces it lies. Only what is longer
//! than the device takes at once is split.

use gaur_block::{Device, Errno, Request, SegmentsMut};

use super::chain::Chain;
use super::thread_context::ThreadContext;
use super::wire::{self, RANGE_BYTES, RANGES_MAX, SECTOR_BYTES, kind, status};

/// The serial number of every disk.
const SERIAL: &[u8] = b"gaur";

/// How the requests of a ring are served, as the driver agreed to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestFlags {
    /// Nothing is written.
    pub(super) read_only: bool,
    /// Every write is durable when it completes.
    pub(super) write_through: bool,
}

/// Serves the request of `chain` and returns how many bytes of its memory were written.
pub(super) async fn execute<D: Device>(
    context: &ThreadContext<D>,
    flags: RequestFlags,
    chain: &Chain,
) -> u32 {
    let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = chain.header();
    let kind = u32::from_le_bytes([k0, k1, k2, k3]);
    let sector = u64::from_le_bytes(sector);
    let outcome = match kind {
        kind::OUT | kind::DISCARD | kind::WRITE_ZEROES if flags.read_only => Err(Errno::EROFS),
        kind::IN => read(context, sector, chain).await,
        kind::OUT => write(context, flags, sector, chain).await,
        kind::FLUSH => context.device.ask(Request::Flush).await.map(|()| 0),
        kind::GET_ID => Ok(identify(chain.target())),
        kind::DISCARD | kind::WRITE_ZEROES => ranges(context, flags, kind, chain).await.map(|()| 0),
        _ => Err(Errno::EOPNOTSUPP),
    };
    let (code, written) = match outcome {
        Ok(written) => (status::OK, written),
        Err(Errno::EOPNOTSUPP) => (status::UNSUPP, 0),
        Err(_) => (status::IOERR, 0),
    };
    chain.set_status(code);
    written.saturating_add(1)
}

async fn read<D: Device>(
    context: &ThreadContext<D>,
    sector: u64,
    chain: &Chain,
) -> Result<u32, Errno> {
    let target = chain.target();
    let offset = place(context, sector, target.len())?;
    context.device.read(offset, target).await?;
    Ok(target.len() as u32)
}

async fn write<D: Device>(
    context: &ThreadContext<D>,
    flags: RequestFlags,
    sector: u64,
    chain: &Chain,
) -> Result<u32, Errno> {
    let source = chain.source();
    let offset = place(context, sector, source.len())?;
    let written = context.device.write(offset, source, flags.write_through);
    written.await.map(|()| 0)
}

/// The byte offset of a transfer of `len` bytes at `sector`.
fn place<D: Device>(context: &ThreadContext<D>, sector: u64, len: usize) -> Result<u64, Errno> {
    let len = len as u64;
    let offset = sector.checked_mul(SECTOR_BYTES).ok_or(Errno::EINVAL)?;
    let end = offset.checked_add(len).ok_or(Errno::EINVAL)?;
    if !len.is_multiple_of(SECTOR_BYTES)
        || end > context.device.size_bytes()
        || u32::try_from(len).is_err()
    {
        return Err(Errno::EINVAL);
    }
    Ok(offset)
}

/// Discards or zeroes each of the ranges that the request lists.
async fn ranges<D: Device>(
    context: &ThreadContext<D>,
    flags: RequestFlags,
    kind: u32,
    chain: &Chain,
) -> Result<(), Errno> {
    let len = chain.source().len();
    if len == 0 || !len.is_multiple_of(RANGE_BYTES) || len > RANGES_MAX * RANGE_BYTES {
        return Err(Errno::EINVAL);
    }
    let mut list = [0; RANGES_MAX * RANGE_BYTES];
    let list = &mut list[..len];
    chain.source().copy_to(list);
    // Nothing is done unless all of it can be.
    for range in list.chunks_exact(RANGE_BYTES) {
        range_request(context, flags, kind, range)?;
    }
    for range in list.chunks_exact(RANGE_BYTES) {
        let request = range_request(context, flags, kind, range)?;
        context.device.ask(request).await?;
    }
    Ok(())
}

fn range_request<D: Device>(
    context: &ThreadContext<D>,
    flags: RequestFlags,
    kind: u32,
    range: &[u8],
) -> Result<Request, Errno> {
    let raw = u128::from_le_bytes(range.try_into().map_err(|_| Errno::EINVAL)?);
    let (sector, sectors, range_flags) = (raw as u64, (raw >> 64) as u32, (raw >> 96) as u32);
    let unmap = range_flags & wire::RANGE_UNMAP != 0;
    let (limit, known) = if kind == kind::DISCARD {
        (wire::DISCARD_MAX_SECTORS, 0)
    } else {
        (wire::ZEROES_MAX_SECTORS, wire::RANGE_UNMAP)
    };
    if range_flags & !known != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let offset_bytes = sector.checked_mul(SECTOR_BYTES).ok_or(Errno::EINVAL)?;
    let len_bytes = u64::from(sectors) * SECTOR_BYTES;
    let end = offset_bytes.checked_add(len_bytes).ok_or(Errno::EINVAL)?;
    if sectors > limit || end > context.device.size_bytes() {
        return Err(Errno::EINVAL);
    }
    Ok(if kind == kind::DISCARD {
        Request::Discard {
            offset_bytes,
            len_bytes,
        }
    } else {
        Request::WriteZeroes {
            offset_bytes,
            len_bytes,
            fua: flags.write_through,
            may_unmap: unmap,
        }
    })
}

/// Copies the device's serial number to the guest, as much as it has room for.
fn identify(room: SegmentsMut<'_>) -> u32 {
    let mut serial = [0; wire::ID_BYTES];
    serial[..SERIAL.len()].copy_from_slice(SERIAL);
    let len = serial.len().min(room.len());
    room.split_at(len).0.copy_from(&serial[..len]);
    len as u32
}
