//! From what the kernel does to what [`gaur_block::File`] promises: whole transfers, zeros past the
//! end of the file, zeroing of any range.
//!
//! [`Raw`] is one system call each, done by a ring or by the thread itself; everything that has to
//! be said about partial transfers, file ends and sectors is said here, once for both.

use gaur_block::{Errno, Extent, Registered, Segments, SegmentsMut, Source, Target};

use crate::memory::Buffer;
use crate::nbd::Via;
use crate::open::OpenFile;
use crate::syscall::{self, IOV_MAX, RW_MAX};

const PUNCH: libc::c_int = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: libc::c_int = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
const ALLOCATE: libc::c_int = libc::FALLOC_FL_KEEP_SIZE;

/// Single operations on a file. Counts may be short; `EINTR` and `EAGAIN` do not come out.
pub(crate) trait Raw {
    fn file(&self) -> &OpenFile;
    /// The export that the file is, if it is one.
    fn nbd(&self) -> Option<Via<'_>>;
    /// Waits for something that happens on another thread.
    async fn wait<F: Future>(&self, future: F) -> F::Output;
    /// At most [`IOV_MAX`] pieces.
    async fn read(&self, offset_bytes: u64, into: SegmentsMut<'_>) -> Result<usize, Errno>;
    // A registered buffer belongs to a ring; without one there is none.
    async fn read_registered(&self, _: u64, _to: Registered) -> Result<usize, Errno> {
        Err(Errno::EOPNOTSUPP)
    }
    /// Fills part of a registered buffer with zeros.
    async fn zero_registered(&self, _to: Registered) -> Result<(), Errno> {
        Err(Errno::EOPNOTSUPP)
    }
    /// At most [`IOV_MAX`] pieces.
    async fn write(&self, offset_bytes: u64, from: Segments<'_>) -> Result<usize, Errno>;
    async fn write_registered(&self, _: u64, _from: Registered) -> Result<usize, Errno> {
        Err(Errno::EOPNOTSUPP)
    }
    async fn fallocate(&self, mode: libc::c_int, offset: u64, len: u64) -> Result<(), Errno>;
    async fn fdatasync(&self) -> Result<(), Errno>;
    async fn ftruncate(&self, len_bytes: u64) -> Result<(), Errno>;
}

/// Implements [`gaur_block::File`] for a type that is [`Raw`], whose buffers come from `$buffer`.
macro_rules! file_by_raw {
    ($type:ty, |$file:pat_param, $len:ident| $buffer:expr) => {
        impl gaur_block::File for $type {
            type Buffer = $crate::memory::Buffer;

            fn limits(&self) -> gaur_block::FileLimits {
                self.open_file().limits()
            }

            fn id(&self) -> Option<gaur_block::FileId> {
                Some(self.open_file().id())
            }

            fn is_disk(&self) -> bool {
                self.open_file().is_disk()
            }

            fn buffer(&self, $len: usize) -> Self::Buffer {
                let $file = self;
                $buffer
            }

            async fn len(&self) -> Result<u64, Errno> {
                self.open_file().len()
            }

            // What an export needs is on the heap: requests to files are to be small.
            async fn read_at(&self, at: u64, to: gaur_block::Target<'_>) -> Result<(), Errno> {
                let (at, to) = $crate::window::place_read(self, at, to).await?;
                if let Some(export) = $crate::whole::Raw::nbd(self) {
                    return self.wait(Box::pin(export.read_at(at, to))).await;
                }
                if let Some(remote) = self.open_file().far_side() {
                    return Box::pin($crate::remote::read_at(self, remote, at, to)).await;
                }
                $crate::whole::read_at(self, at, to).await
            }

            async fn write_at(&self, at: u64, from: gaur_block::Source<'_>) -> Result<(), Errno> {
                let at = self.open_file().place(at, from.len() as u64)?;
                if let Some(export) = $crate::whole::Raw::nbd(self) {
                    return self.wait(Box::pin(export.write_at(at, from))).await;
                }
                $crate::whole::write_at(self, at, from).await
            }

            async fn write_zeroes_at(&self, at: u64, len: u64, unmap: bool) -> Result<(), Errno> {
                let (at, len) = self.open_file().place_of(at, len)?;
                if let Some(export) = $crate::whole::Raw::nbd(self) {
                    return self
                        .wait(Box::pin(export.write_zeroes_at(at, len, unmap)))
                        .await;
                }
                $crate::whole::write_zeroes_at(self, at, len, unmap).await
            }

            async fn allocate_at(&self, at: u64, len: u64) -> Result<(), Errno> {
                let at = self.open_file().place(at, len)?;
                if self.open_file().nbd().is_some() {
                    return Err(Errno::EOPNOTSUPP);
                }
                $crate::whole::allocate_at(self, at, len).await
            }

            async fn discard_at(&self, at: u64, len: u64) -> Result<(), Errno> {
                let (at, len) = self.open_file().place_of(at, len)?;
                if let Some(export) = $crate::whole::Raw::nbd(self) {
                    return self.wait(Box::pin(export.discard_at(at, len))).await;
                }
                $crate::whole::discard_at(self, at, len).await
            }

            async fn flush(&self) -> Result<(), Errno> {
                if self.open_file().skips_flushes() {
                    return Ok(());
                }
                if let Some(export) = $crate::whole::Raw::nbd(self) {
                    return self.wait(Box::pin(export.flush())).await;
                }
                self.fdatasync().await
            }

            async fn set_len(&self, len: u64) -> Result<(), Errno> {
                let (len, _) = self.open_file().place_of(len, 0)?;
                if self.open_file().nbd().is_some() {
                    return Err(Errno::EOPNOTSUPP);
                }
                $crate::whole::set_len(self, len).await
            }

            async fn extent_at(&self, at: u64) -> Result<gaur_block::Extent, Errno> {
                let file = self.open_file();
                let Some(window) = file.window() else {
                    return $crate::whole::extent_at(self, at).await;
                };
                if at >= file.len()? {
                    return Err(Errno::EINVAL);
                }
                let (place, _) = file.place_of(at, 0)?;
                let extent = $crate::whole::extent_at(self, place).await?;
                Ok(window.extent(extent, at))
            }
        }
    };
}
pub(crate) use file_by_raw;

/// The run of data or hole at an offset of the whole file.
pub(crate) async fn extent_at<R: Raw>(raw: &R, at: u64) -> Result<Extent, Errno> {
    if let Some(export) = raw.nbd() {
        return raw.wait(Box::pin(export.extent_at(at))).await;
    }
    raw.file().extent_at(at)
}

/// Refuses a range that does not fit a file (2^63 - 1 bytes).
fn check_range(offset_bytes: u64, len_bytes: u64) -> Result<(), Errno> {
    let end = offset_bytes.checked_add(len_bytes);
    match end {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => Err(Errno::EINVAL),
    }
}

fn check_change(raw: &impl Raw, offset_bytes: u64, len_bytes: u64) -> Result<(), Errno> {
    match raw.file().limits().read_only {
        true => Err(Errno::EROFS),
        false => check_range(offset_bytes, len_bytes),
    }
}

/// Whether a read that moved `count` bytes, fewer than asked for, met the end of the file. With
/// O_DIRECT a count that is no multiple of the alignment does, and to go on from there would fail.
fn is_end(file: &OpenFile, count: usize) -> bool {
    count == 0 || !count.is_multiple_of(file.limits().request_alignment as usize)
}

pub(crate) async fn read_at<R: Raw>(
    raw: &R,
    offset_bytes: u64,
    target: Target<'_>,
) -> Result<(), Errno> {
    check_range(offset_bytes, target.len() as u64)?;
    match target {
        Target::Memory(memory) => read_memory(raw, offset_bytes, memory).await,
        Target::Registered(registered) => read_registered(raw, offset_bytes, registered).await,
    }
}

async fn read_memory<R: Raw>(
    raw: &R,
    offset_bytes: u64,
    into: SegmentsMut<'_>,
) -> Result<(), Errno> {
    let (mut at, mut rest) = (offset_bytes, into);
    while !rest.is_empty() {
        let asked = rest.split_at(rest.len().min(RW_MAX)).0;
        let asked = asked.first_pieces(IOV_MAX);
        let count = raw.read(at, asked).await?;
        if count == rest.len() {
            break;
        }
        at += count as u64;
        rest = rest.split_at(count).1;
        if count < asked.len() && is_end(raw.file(), count) {
            rest.fill_zeros();
            break;
        }
    }
    Ok(())
}

async fn read_registered<R: Raw>(raw: &R, offset: u64, to: Registered) -> Result<(), Errno> {
    let mut done = 0;
    while done < to.len {
        let rest = part_of(to, done);
        let count = raw.read_registered(offset + done as u64, rest).await?;
        done += count;
        if count < rest.len && is_end(raw.file(), count) {
            return raw
                .zero_registered(Registered {
                    len: to.len - done,
                    ..part_of(to, done)
                })
                .await;
        }
    }
    Ok(())
}

/// What is left of a registered buffer after `done` bytes, as much as one call moves.
pub(crate) fn part_of(whole: Registered, done: usize) -> Registered {
    let len = (whole.len - done).min(RW_MAX);
    Registered {
        offset: whole.offset + done as u64,
        len,
        ..whole
    }
}

pub(crate) async fn write_at<R: Raw>(
    raw: &R,
    offset_bytes: u64,
    source: Source<'_>,
) -> Result<(), Errno> {
    check_change(raw, offset_bytes, source.len() as u64)?;
    if raw.file().is_null() {
        return Ok(());
    }
    match source {
        Source::Memory(memory) => write_memory(raw, offset_bytes, memory).await,
        Source::Registered(from) => {
            let mut done = 0;
            while done < from.len {
                let at = offset_bytes + done as u64;
                done += some(raw.write_registered(at, part_of(from, done)).await)?;
            }
            Ok(())
        }
    }
}

async fn write_memory<R: Raw>(raw: &R, offset_bytes: u64, from: Segments<'_>) -> Result<(), Errno> {
    let (mut at, mut rest) = (offset_bytes, from);
    while !rest.is_empty() {
        let asked = rest.split_at(rest.len().min(RW_MAX)).0;
        let count = some(raw.write(at, asked.first_pieces(IOV_MAX)).await)?;
        if count == rest.len() {
            break;
        }
        at += count as u64;
        rest = rest.split_at(count).1;
    }
    Ok(())
}

/// A write that moves nothing and does not say why would be repeated for ever.
fn some(count: Result<usize, Errno>) -> Result<usize, Errno> {
    match count {
        Ok(0) => Err(Errno::EIO),
        count => count,
    }
}

pub(crate) async fn write_zeroes_at<R: Raw>(
    raw: &R,
    offset_bytes: u64,
    len_bytes: u64,
    may_unmap: bool,
) -> Result<(), Errno> {
    check_change(raw, offset_bytes, len_bytes)?;
    if raw.file().is_null() {
        return Ok(());
    }
    let pieces = Pieces::of(offset_bytes, len_bytes, raw.file().sector_bytes());
    // The middle first: when the device cannot do it, nothing has been done at all.
    if pieces.middle.len > 0 {
        zero_range(raw, pieces.middle, may_unmap).await?;
    }
    for edge in [pieces.head, pieces.tail] {
        if edge.len > 0 {
            zero_edge(raw, edge).await?;
        }
    }
    Ok(())
}

pub(crate) async fn discard_at<R: Raw>(raw: &R, offset: u64, len: u64) -> Result<(), Errno> {
    check_change(raw, offset, len)?;
    if raw.file().is_null() {
        return Ok(());
    }
    // The file system zeroes the edges of a hole in a regular file; on a block device a discard
    // promises nothing about the contents, and its edges are left alone.
    let middle = Pieces::of(offset, len, raw.file().sector_bytes()).middle;
    if middle.len == 0 {
        return Ok(());
    }
    match fallocate(raw, PUNCH, middle).await {
        Err(Errno::EOPNOTSUPP) if raw.file().is_block_device() => {
            syscall::block_discard(raw.file().fd(), middle.offset, middle.len)
        }
        result => result,
    }
}

pub(crate) async fn allocate_at<R: Raw>(raw: &R, offset: u64, len: u64) -> Result<(), Errno> {
    check_change(raw, offset, len)?;
    // A block device has its space, and what `fallocate` does there is to write zeros.
    if len == 0 || raw.file().is_block_device() || raw.file().is_null() {
        return Ok(());
    }
    fallocate(raw, ALLOCATE, Range { offset, len }).await
}

pub(crate) async fn set_len<R: Raw>(raw: &R, len_bytes: u64) -> Result<(), Errno> {
    check_change(raw, len_bytes, 0)?;
    if !raw.file().limits().resizable {
        return Err(Errno::EOPNOTSUPP);
    }
    raw.file().forget_data();
    raw.ftruncate(len_bytes).await
}

/// `EOPNOTSUPP` in whichever way the kernel says it.
async fn fallocate<R: Raw>(raw: &R, mode: libc::c_int, range: Range) -> Result<(), Errno> {
    let done = raw.fallocate(mode, range.offset, range.len).await;
    raw.file().forget_data();
    done.map_err(|errno| match errno.raw() {
        libc::ENOSYS | libc::ENODEV | libc::ENOTTY => Errno::EOPNOTSUPP,
        _ => errno,
    })
}

/// Zeroes a range that lies on sector boundaries.
async fn zero_range<R: Raw>(raw: &R, range: Range, may_unmap: bool) -> Result<(), Errno> {
    let [first, second] = match may_unmap {
        true => [PUNCH, ZERO],
        false => [ZERO, PUNCH],
    };
    match fallocate(raw, first, range).await {
        Err(Errno::EOPNOTSUPP) if may_unmap || !raw.file().is_block_device() => {}
        result => return result,
    }
    fallocate(raw, second, range).await?;
    match may_unmap {
        true => Ok(()),
        // A hole was made where space is to stay: take it again.
        false => fallocate(raw, ALLOCATE, range).await,
    }
}

/// Zeroes part of one sector of a block device. With O_DIRECT the sector is read, changed and
/// written, so no other request may write to it meanwhile; the engine sends whole sectors.
async fn zero_edge<R: Raw>(raw: &R, edge: Range) -> Result<(), Errno> {
    let sector = u64::from(raw.file().sector_bytes());
    let sector_start = edge.offset - edge.offset % sector;
    let mut memory = Buffer::from_system(sector as usize);
    if !raw.file().is_direct() {
        let zeros = Segments::from(&memory[..edge.len as usize]);
        return write_memory(raw, edge.offset, zeros).await;
    }
    read_memory(raw, sector_start, SegmentsMut::from(&mut memory[..])).await?;
    let from = (edge.offset - sector_start) as usize;
    memory[from..from + edge.len as usize].fill(0);
    write_memory(raw, sector_start, Segments::from(&memory[..])).await
}

/// A run of bytes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// A range cut at sector boundaries: `head` and `tail` are each part of one sector, `middle` is
/// whole sectors. Any may be empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pieces {
    pub(crate) head: Range,
    pub(crate) middle: Range,
    pub(crate) tail: Range,
}

impl Pieces {
    /// `offset + len` must not overflow (`check_range`).
    pub(crate) fn of(offset: u64, len: u64, sector_bytes: u32) -> Pieces {
        let sector = u64::from(sector_bytes.max(1));
        let end = offset + len;
        let middle_start = offset.next_multiple_of(sector);
        let middle_end = end - end % sector;
        if middle_start > middle_end {
            // All of it is inside one sector.
            return Pieces {
                head: Range { offset, len },
                ..Pieces::default()
            };
        }
        Pieces {
            head: Range {
                offset,
                len: middle_start - offset,
            },
            middle: Range {
                offset: middle_start,
                len: middle_end - middle_start,
            },
            tail: Range {
                offset: middle_end,
                len: end - middle_end,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_range_and_lie_on_sectors() {
        for sector in [1_u32, 512, 4096] {
            for offset in [0_u64, 1, 511, 512, 513, 4095, 4096, 10_000] {
                for len in [0_u64, 1, 511, 512, 1024, 4096, 4097, 20_000] {
                    let pieces = Pieces::of(offset, len, sector);
                    let Pieces { head, middle, tail } = pieces;
                    assert_eq!(head.len + middle.len + tail.len, len, "{pieces:?}");
                    assert!(head.len < u64::from(sector) || head.len == 0, "{pieces:?}");
                    assert!(tail.len < u64::from(sector) || tail.len == 0, "{pieces:?}");
                    assert_eq!(middle.len % u64::from(sector), 0, "{pieces:?}");
                    if head.len > 0 {
                        assert_eq!(head.offset, offset);
                    }
                    if middle.len > 0 {
                        assert_eq!(middle.offset, offset + head.len);
                        assert_eq!(middle.offset % u64::from(sector), 0);
                    }
                    if tail.len > 0 {
                        assert_eq!(tail.offset, offset + head.len + middle.len);
                    }
                }
            }
        }
    }

    #[test]
    fn ranges_beyond_a_file_are_refused() {
        assert_eq!(check_range(i64::MAX as u64, 0), Ok(()));
        assert_eq!(check_range(i64::MAX as u64, 1), Err(Errno::EINVAL));
        assert_eq!(check_range(u64::MAX, 1), Err(Errno::EINVAL));
    }
}
