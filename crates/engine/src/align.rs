//! Alignment: requests of any shape on a file of any limits, by bounce buffers and read-modify-write.
//!
//! The flows of the engine ask for the bytes they want; a file may take whole blocks only, want its
//! memory aligned, or cap the length of a transfer. A request that already obeys goes straight
//! through after a few comparisons. Otherwise its bytes take a detour through a buffer of the pool,
//! in pieces, and blocks that a write covers in part are read first and written back whole, under
//! [`SectorLocks`].
//!
//! * Offsets and lengths are bytes; an empty request does nothing.
//! * Every write, zeroing and discard of a file must come through here once any of them does: a
//!   read-modify-write excludes only those that ask the same locks. Reads need no lock.
//! * A write that is split or that rewrites a block is not atomic. Neighbouring bytes of a rewritten
//!   block keep their value at any crash, torn or not, because the same bytes are written again.
//! * Memory registered with the host's ring cannot be looked into, so it can be split but not
//!   realigned: [`Errno::EOPNOTSUPP`], and the export asks again with memory.

use std::ops::Range;

use gaur_block::{Errno, File, FileLimits, Segments, SegmentsMut, Source, Target};
use gaur_luks::SECTOR_BYTES;

use crate::encryption::RunCipher;
use crate::pool::Pool;
use crate::sector_locks::{Fast, Held, SectorLocks};

/// Longest detour in one piece, in bytes.
const PIECE_BYTES: u64 = 1 << 20;
/// Longest run of zeros written from memory at once, in bytes.
const ZEROES_BYTES: u64 = 256 << 10;

/// Whether a run of bytes lies on block borders.
fn on_blocks(limits: &FileLimits, offset_bytes: u64, len_bytes: u64) -> bool {
    let mask = u64::from(limits.request_alignment).saturating_sub(1);
    (offset_bytes | len_bytes) & mask == 0
}

/// Whether the kernel may touch this memory directly.
fn memory_fits(limits: &FileLimits, memory: Segments<'_>) -> bool {
    let address = limits.memory_alignment.max(1);
    memory.is_aligned(
        address as usize,
        address.max(limits.request_alignment) as usize,
    )
}

/// The blocks that cover a run of bytes.
fn cover(limits: &FileLimits, offset_bytes: u64, len_bytes: u64) -> Result<Range<u64>, Errno> {
    let block = u64::from(limits.request_alignment).max(1);
    let end = offset_bytes.checked_add(len_bytes).ok_or(Errno::EFBIG)?;
    let end = end.checked_next_multiple_of(block).ok_or(Errno::EFBIG)?;
    Ok(offset_bytes - offset_bytes % block..end)
}

/// How long a piece may be, a multiple of the block, at most `wanted` unless a block is longer.
fn piece_bytes(limits: &FileLimits, wanted: u64) -> u64 {
    let block = u64::from(limits.request_alignment).max(1);
    let most = wanted.min(u64::from(limits.max_transfer));
    (most - most % block).max(block)
}

/// Fills `target` from `offset_bytes` on. Bytes past the end of the file are zeros.
pub(crate) async fn read<F: File>(
    file: &F,
    pool: &Pool<F>,
    offset_bytes: u64,
    target: Target<'_>,
) -> Result<(), Errno> {
    let limits = file.limits();
    let len_bytes = target.len() as u64;
    if len_bytes == 0 {
        return Ok(());
    }
    let direct = on_blocks(&limits, offset_bytes, len_bytes)
        && match target {
            Target::Memory(memory) => memory_fits(&limits, *memory),
            Target::Registered(_) => true,
        };
    if direct && len_bytes <= u64::from(limits.max_transfer) {
        return file.read_at(offset_bytes, target).await;
    }
    offset_bytes.checked_add(len_bytes).ok_or(Errno::EFBIG)?;
    match target {
        _ if direct => read_split(file, offset_bytes, target).await,
        // On the heap, so that requests that go straight through do not carry its state.
        Target::Memory(memory) => {
            Box::pin(read_detour(file, pool, None, offset_bytes, memory)).await
        }
        Target::Registered(_) => Err(Errno::EOPNOTSUPP),
    }
}

/// A file's limits for requests in whole sectors, as encrypted data has them.
fn sectors(file_limits: FileLimits) -> FileLimits {
    FileLimits {
        request_alignment: file_limits.request_alignment.max(SECTOR_BYTES as u32),
        ..file_limits
    }
}

/// The same for encrypted data.
pub(crate) async fn read_encrypted<F: File>(
    file: &F,
    pool: &Pool<F>,
    cipher: RunCipher<'_>,
    offset_bytes: u64,
    target: Target<'_>,
) -> Result<(), Errno> {
    match target {
        Target::Memory(memory) if memory.is_empty() => Ok(()),
        Target::Memory(memory) => read_detour(file, pool, Some(cipher), offset_bytes, memory).await,
        Target::Registered(_) => Err(Errno::EOPNOTSUPP),
    }
}

async fn read_split<F: File>(
    file: &F,
    mut offset_bytes: u64,
    mut target: Target<'_>,
) -> Result<(), Errno> {
    let most = piece_bytes(&file.limits(), u64::MAX) as usize;
    while !target.is_empty() {
        let mid = most.min(target.len());
        let (piece, rest) = target.split_at(mid);
        let len_bytes = piece.len() as u64;
        file.read_at(offset_bytes, piece).await?;
        offset_bytes += len_bytes;
        target = rest;
    }
    Ok(())
}

async fn read_detour<F: File>(
    file: &F,
    pool: &Pool<F>,
    cipher: Option<RunCipher<'_>>,
    mut offset_bytes: u64,
    mut memory: SegmentsMut<'_>,
) -> Result<(), Errno> {
    let limits = limits_for(file, cipher);
    let cover = cover(&limits, offset_bytes, memory.len() as u64)?;
    let most = piece_bytes(&limits, PIECE_BYTES);
    let len = most.min(cover.end - cover.start) as usize;
    let mut buffer = pool.take_bounce(file, len).await;
    let mut start = cover.start;
    while start < cover.end {
        let len = most.min(cover.end - start) as usize;
        read_plain(file, cipher, start, &mut buffer[..len]).await?;
        let skip = (offset_bytes - start) as usize;
        let count = (len - skip).min(memory.len());
        let (piece, rest) = memory.split_at(count);
        piece.copy_from(&buffer[skip..skip + count]);
        memory = rest;
        offset_bytes += count as u64;
        start += len as u64;
    }
    Ok(())
}

/// The limits that a detour keeps to.
fn limits_for<F: File>(file: &F, cipher: Option<RunCipher<'_>>) -> FileLimits {
    let limits = file.limits();
    cipher.map_or(limits, |_| sectors(limits))
}

/// Reads whole blocks, and decrypts them.
async fn read_plain<F: File>(
    file: &F,
    cipher: Option<RunCipher<'_>>,
    start: u64,
    memory: &mut [u8],
) -> Result<(), Errno> {
    file.read_at(start, Target::memory(memory)).await?;
    if let Some(cipher) = cipher {
        cipher.decrypt(start, memory);
    }
    Ok(())
}

/// Leave to write a range, for as long as it lives.
enum Leave<'a> {
    /// The file takes any range, so no request writes back what others wrote.
    Free,
    /// Whole blocks, and no request is rewriting one.
    Whole { _guard: Fast<'a> },
    /// The range is held.
    Range { _guard: Held<'a> },
}

async fn leave<'a>(
    limits: &FileLimits,
    locks: &'a SectorLocks,
    offset_bytes: u64,
    len_bytes: u64,
) -> Result<Leave<'a>, Errno> {
    if limits.request_alignment <= 1 {
        return Ok(Leave::Free);
    }
    if on_blocks(limits, offset_bytes, len_bytes)
        && let Some(guard) = locks.enter()
    {
        return Ok(Leave::Whole { _guard: guard });
    }
    let guard = locks.lock(cover(limits, offset_bytes, len_bytes)?).await;
    Ok(Leave::Range { _guard: guard })
}

/// Stores `source` at `offset_bytes`.
pub(crate) async fn write<F: File>(
    file: &F,
    pool: &Pool<F>,
    locks: &SectorLocks,
    offset_bytes: u64,
    source: Source<'_>,
) -> Result<(), Errno> {
    let limits = file.limits();
    let len_bytes = source.len() as u64;
    if len_bytes == 0 {
        return Ok(());
    }
    let _leave = leave(&limits, locks, offset_bytes, len_bytes).await?;
    let direct = on_blocks(&limits, offset_bytes, len_bytes)
        && match source {
            Source::Memory(memory) => memory_fits(&limits, memory),
            Source::Registered(_) => true,
        };
    if direct && len_bytes <= u64::from(limits.max_transfer) {
        return file.write_at(offset_bytes, source).await;
    }
    offset_bytes.checked_add(len_bytes).ok_or(Errno::EFBIG)?;
    match source {
        _ if direct => write_split(file, offset_bytes, source).await,
        // As in `read`.
        Source::Memory(memory) => {
            Box::pin(write_detour(file, pool, None, offset_bytes, memory)).await
        }
        Source::Registered(_) => Err(Errno::EOPNOTSUPP),
    }
}

/// The same for data that is to be encrypted.
pub(crate) async fn write_encrypted<F: File>(
    file: &F,
    pool: &Pool<F>,
    locks: &SectorLocks,
    cipher: RunCipher<'_>,
    offset_bytes: u64,
    source: Source<'_>,
) -> Result<(), Errno> {
    let Source::Memory(memory) = source else {
        return Err(Errno::EOPNOTSUPP);
    };
    if memory.is_empty() {
        return Ok(());
    }
    let limits = sectors(file.limits());
    let _leave = leave(&limits, locks, offset_bytes, memory.len() as u64).await?;
    write_detour(file, pool, Some(cipher), offset_bytes, memory).await
}

async fn write_split<F: File>(
    file: &F,
    mut offset_bytes: u64,
    mut source: Source<'_>,
) -> Result<(), Errno> {
    let most = piece_bytes(&file.limits(), u64::MAX) as usize;
    while !source.is_empty() {
        let (piece, rest) = source.split_at(most.min(source.len()));
        file.write_at(offset_bytes, piece).await?;
        offset_bytes += piece.len() as u64;
        source = rest;
    }
    Ok(())
}

/// Writes through a buffer, block by whole block. The caller holds the blocks if it must.
async fn write_detour<F: File>(
    file: &F,
    pool: &Pool<F>,
    cipher: Option<RunCipher<'_>>,
    offset_bytes: u64,
    mut data: Segments<'_>,
) -> Result<(), Errno> {
    let limits = limits_for(file, cipher);
    let end = offset_bytes + data.len() as u64;
    let cover = cover(&limits, offset_bytes, data.len() as u64)?;
    let most = piece_bytes(&limits, PIECE_BYTES);
    let len = most.min(cover.end - cover.start) as usize;
    let mut buffer = pool.take_bounce(file, len).await;
    let mut start = cover.start;
    while start < cover.end {
        let piece = start..cover.end.min(start + most);
        let wanted = offset_bytes.max(piece.start)..end.min(piece.end);
        let memory = &mut buffer[..(piece.end - piece.start) as usize];
        read_edges(file, cipher, &piece, &wanted, memory).await?;
        let inside = (wanted.start - piece.start) as usize..(wanted.end - piece.start) as usize;
        let (now, later) = data.split_at(inside.len());
        now.copy_to(&mut memory[inside]);
        data = later;
        if let Some(cipher) = cipher {
            cipher.encrypt(piece.start, memory);
        }
        file.write_at(piece.start, Source::memory(memory)).await?;
        start = piece.end;
    }
    Ok(())
}

/// Reads the first and the last block of `piece` into their places, if `wanted` leaves some of it.
async fn read_edges<F: File>(
    file: &F,
    cipher: Option<RunCipher<'_>>,
    piece: &Range<u64>,
    wanted: &Range<u64>,
    memory: &mut [u8],
) -> Result<(), Errno> {
    let block = u64::from(limits_for(file, cipher).request_alignment.max(1));
    let head = wanted.start > piece.start;
    let tail = wanted.end < piece.end;
    if head && tail && memory.len() as u64 <= 2 * block {
        return read_plain(file, cipher, piece.start, memory).await;
    }
    let block_len = block as usize;
    if head {
        read_plain(file, cipher, piece.start, &mut memory[..block_len]).await?;
    }
    if tail {
        let last = memory.len() - block_len;
        read_plain(file, cipher, piece.end - block, &mut memory[last..]).await?;
    }
    Ok(())
}

/// Makes a range read as zeros: by the file if it can, else by writing zeros. With `may_unmap` the
/// space may be given back.
pub(crate) async fn write_zeroes<F: File>(
    file: &F,
    pool: &Pool<F>,
    locks: &SectorLocks,
    range: Range<u64>,
    may_unmap: bool,
) -> Result<(), Errno> {
    if range.is_empty() {
        return Ok(());
    }
    let limits = file.limits();
    let len_bytes = range.end - range.start;
    {
        let _leave = leave(&limits, locks, range.start, len_bytes).await?;
        match file
            .write_zeroes_at(range.start, len_bytes, may_unmap)
            .await
        {
            Err(Errno::EOPNOTSUPP) => {}
            result => return result,
        }
    }
    write_zero_bytes(file, pool, locks, range).await
}

/// Writes zeros from memory, so that the space is there afterwards.
pub(crate) async fn write_zero_bytes<F: File>(
    file: &F,
    pool: &Pool<F>,
    locks: &SectorLocks,
    range: Range<u64>,
) -> Result<(), Errno> {
    if range.is_empty() {
        return Ok(());
    }
    let most = piece_bytes(&file.limits(), ZEROES_BYTES);
    let mut zeros = pool.take(file, most.min(range.end - range.start) as usize);
    zeros.fill(0);
    let mut start = range.start;
    while start < range.end {
        // Pieces end on multiples of their length, so all but the first and last are whole blocks.
        let end = range.end.min((start - start % most).saturating_add(most));
        let piece = &zeros[..(end - start) as usize];
        write(file, pool, locks, start, Source::memory(piece)).await?;
        start = end;
    }
    Ok(())
}

/// Gives the space of a range back if the file can; what it reads as afterwards is zeros when the
/// file's limits say `discard_zeroes`, otherwise anything.
pub(crate) async fn discard<F: File>(
    file: &F,
    locks: &SectorLocks,
    range: Range<u64>,
) -> Result<(), Errno> {
    if range.is_empty() {
        return Ok(());
    }
    let len_bytes = range.end - range.start;
    let _leave = leave(&file.limits(), locks, range.start, len_bytes).await?;
    file.discard_at(range.start, len_bytes).await
}

#[cfg(test)]
mod tests;
