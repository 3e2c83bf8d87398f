//! What a request asks, put to the device.
//!
//! Memory in one run goes to the device as it is. Of memory in many runs the long ones go one by
//! one, and short neighbours together through a piece of [`super::bounce`].

use gaur_block::{Device, Errno, Payload, Request, Source, Tag, Target};

use super::bounce::PIECE_MAX;
use super::chain::{Chain, take_front};
use super::memory::Run;
use super::station::Station;
use super::wire::{self, RANGE_BYTES, RANGES_MAX, SECTOR_BYTES, kind, status};

/// A run of this many bytes is worth a request of its own.
const DIRECT_MIN: usize = 64 << 10;

/// What the driver agreed to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) tag: Tag,
    /// Nothing is written.
    pub(super) read_only: bool,
    /// Every write is durable when it completes.
    pub(super) write_through: bool,
}

/// Serves the request of `chain` and returns how many bytes of its memory were written.
pub(super) async fn execute<D: Device>(
    station: &Station<D>,
    terms: Terms,
    chain: &mut Chain,
) -> u32 {
    let [k0, k1, k2, k3, _, _, _, _, sector @ ..] = chain.header;
    let kind = u32::from_le_bytes([k0, k1, k2, k3]);
    let sector = u64::from_le_bytes(sector);
    let outcome = match kind {
        kind::IN => {
            let len = chain.writable_bytes();
            let runs = &chain.writable;
            match place(station, sector, len) {
                Ok(offset) => read(station, terms, offset, runs)
                    .await
                    .map(|()| len as u32),
                Err(errno) => Err(errno),
            }
        }
        kind::OUT | kind::DISCARD | kind::WRITE_ZEROES if terms.read_only => Err(Errno::EROFS),
        kind::OUT => match place(station, sector, chain.readable_bytes()) {
            Ok(offset) => write(station, terms, offset, &chain.readable)
                .await
                .map(|()| 0),
            Err(errno) => Err(errno),
        },
        kind::FLUSH => station
            .device
            .submit(terms.tag, Request::Flush, Payload::None)
            .await
            .map(|()| 0),
        kind::GET_ID => Ok(identify(station, &chain.writable)),
        kind::DISCARD | kind::WRITE_ZEROES => ranges(station, terms, kind, chain).await.map(|()| 0),
        _ => Err(Errno::EOPNOTSUPP),
    };
    let (code, written) = match outcome {
        Ok(written) => (status::OK, written),
        Err(Errno::EOPNOTSUPP) => (status::UNSUPP, 0),
        Err(_) => (status::IOERR, 0),
    };
    if let Some(place) = chain.status {
        place.copy_from(&[code]);
    }
    written.saturating_add(1)
}

/// The byte offset of a transfer of `len` bytes at `sector`.
fn place<D: Device>(station: &Station<D>, sector: u64, len: u64) -> Result<u64, Errno> {
    let offset = sector.checked_mul(SECTOR_BYTES).ok_or(Errno::EINVAL)?;
    let end = offset.checked_add(len).ok_or(Errno::EINVAL)?;
    if !len.is_multiple_of(SECTOR_BYTES)
        || end > station.device.size_bytes()
        || u32::try_from(len).is_err()
    {
        return Err(Errno::EINVAL);
    }
    Ok(offset)
}

async fn read<D: Device>(
    station: &Station<D>,
    terms: Terms,
    mut offset: u64,
    runs: &[Run],
) -> Result<(), Errno> {
    let mut left = Cursor::new(runs);
    while let Some(step) = left.step(station.piece_max) {
        match step {
            Step::Direct(run) => {
                read_run(station, terms.tag, offset, run).await?;
                offset += run.len as u64;
            }
            Step::Gather(len) => {
                let mut piece = station.bounce.take(len).await;
                let result = read_at(station, terms.tag, offset, &mut piece[..len]).await;
                if result.is_ok() {
                    left.gather(len, |at, run| run.copy_from(&piece[at..at + run.len]));
                }
                station.bounce.give(piece);
                result?;
                offset += len as u64;
            }
        }
    }
    Ok(())
}

async fn read_run<D: Device>(
    station: &Station<D>,
    tag: Tag,
    offset: u64,
    run: Run,
) -> Result<(), Errno> {
    // SAFETY: the run is mapped, and stays so until this request is done. Only plain bytes are
    // stored through the slice and nothing is concluded from them; a guest that uses the memory at
    // the same time finds there a mixture of what both wrote.
    let memory = unsafe { std::slice::from_raw_parts_mut(run.start.as_ptr(), run.len) };
    read_at(station, tag, offset, memory).await
}

async fn read_at<D: Device>(
    station: &Station<D>,
    tag: Tag,
    offset_bytes: u64,
    into: &mut [u8],
) -> Result<(), Errno> {
    let payload = Payload::Read(Target::Memory(into));
    let request = Request::Read { offset_bytes };
    station.device.submit(tag, request, payload).await
}

async fn write<D: Device>(
    station: &Station<D>,
    terms: Terms,
    mut offset: u64,
    runs: &[Run],
) -> Result<(), Errno> {
    let mut left = Cursor::new(runs);
    while let Some(step) = left.step(station.piece_max) {
        match step {
            Step::Direct(run) => {
                // SAFETY: the run is mapped, and stays so until this request is done. It is only
                // copied from; a guest that writes to it meanwhile stores a mixture on its own disk.
                let memory = unsafe { std::slice::from_raw_parts(run.start.as_ptr(), run.len) };
                write_at(station, terms, offset, memory).await?;
                offset += run.len as u64;
            }
            Step::Gather(len) => {
                let mut piece = station.bounce.take(len).await;
                left.gather(len, |at, run| run.copy_to(&mut piece[at..at + run.len]));
                let result = write_at(station, terms, offset, &piece[..len]).await;
                station.bounce.give(piece);
                result?;
                offset += len as u64;
            }
        }
    }
    Ok(())
}

async fn write_at<D: Device>(
    station: &Station<D>,
    terms: Terms,
    offset_bytes: u64,
    from: &[u8],
) -> Result<(), Errno> {
    let request = Request::Write {
        offset_bytes,
        fua: terms.write_through,
    };
    let payload = Payload::Write(Source::Memory(from));
    station.device.submit(terms.tag, request, payload).await
}

/// Discards or zeroes each of the ranges that the request lists.
async fn ranges<D: Device>(
    station: &Station<D>,
    terms: Terms,
    kind: u32,
    chain: &mut Chain,
) -> Result<(), Errno> {
    let len = chain.readable_bytes() as usize;
    if len == 0 || !len.is_multiple_of(RANGE_BYTES) || len > RANGES_MAX * RANGE_BYTES {
        return Err(Errno::EINVAL);
    }
    let mut list = [0; RANGES_MAX * RANGE_BYTES];
    let list = &mut list[..len];
    take_front(&mut chain.readable, list);
    // Nothing is done unless all of it can be.
    for range in list.chunks_exact(RANGE_BYTES) {
        range_request(station, terms, kind, range)?;
    }
    for range in list.chunks_exact(RANGE_BYTES) {
        let request = range_request(station, terms, kind, range)?;
        station
            .device
            .submit(terms.tag, request, Payload::None)
            .await?;
    }
    Ok(())
}

fn range_request<D: Device>(
    station: &Station<D>,
    terms: Terms,
    kind: u32,
    range: &[u8],
) -> Result<Request, Errno> {
    let raw = u128::from_le_bytes(range.try_into().map_err(|_| Errno::EINVAL)?);
    let (sector, sectors, flags) = (raw as u64, (raw >> 64) as u32, (raw >> 96) as u32);
    let unmap = flags & wire::RANGE_UNMAP != 0;
    let (limit, known) = if kind == kind::DISCARD {
        (wire::DISCARD_MAX_SECTORS, 0)
    } else {
        (wire::ZEROES_MAX_SECTORS, wire::RANGE_UNMAP)
    };
    if flags & !known != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let offset_bytes = sector.checked_mul(SECTOR_BYTES).ok_or(Errno::EINVAL)?;
    let len_bytes = u64::from(sectors) * SECTOR_BYTES;
    let end = offset_bytes.checked_add(len_bytes).ok_or(Errno::EINVAL)?;
    if sectors > limit || end > station.device.size_bytes() {
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
            fua: terms.write_through,
            may_unmap: unmap,
        }
    })
}

/// Copies the device's name to the guest, as much as it has room for.
fn identify<D>(station: &Station<D>, runs: &[Run]) -> u32 {
    let mut left = &station.serial[..];
    let mut written = 0;
    for run in runs {
        let (now, rest) = left.split_at(run.len.min(left.len()));
        run.copy_from(now);
        written += now.len() as u32;
        left = rest;
    }
    written
}

/// What to do next with the runs of a request.
enum Step {
    /// A transfer to or from this memory.
    Direct(Run),
    /// A transfer of this many bytes by way of a piece, which [`Cursor::gather`] then visits.
    Gather(usize),
}

/// A way through runs.
struct Cursor<'a> {
    runs: &'a [Run],
    /// Bytes of the first run that are behind us.
    done: usize,
}

impl Cursor<'_> {
    fn new(runs: &[Run]) -> Cursor<'_> {
        Cursor { runs, done: 0 }
    }

    /// The next transfer, of at most `most` bytes.
    fn step(&mut self, most: usize) -> Option<Step> {
        let first = self.runs.first()?.skip(self.done);
        if first.len >= DIRECT_MIN || self.runs.len() == 1 || most <= first.len {
            let run = first.first(first.len.min(most));
            self.advance(run.len);
            return Some(Step::Direct(run));
        }
        let most = most.min(PIECE_MAX);
        let mut len = first.len;
        for run in &self.runs[1..] {
            if run.len >= DIRECT_MIN || len == most {
                break;
            }
            len += run.len.min(most - len);
        }
        Some(Step::Gather(len))
    }

    fn advance(&mut self, count: usize) {
        self.done += count;
        if self.runs.first().is_some_and(|run| run.len == self.done) {
            self.runs = &self.runs[1..];
            self.done = 0;
        }
    }

    /// Visits the next `len` bytes, which are there, run by run, and leaves them behind.
    fn gather(&mut self, len: usize, mut visit: impl FnMut(usize, Run)) {
        let mut at = 0;
        while at < len {
            let run = self.runs[0].skip(self.done);
            let run = run.first(run.len.min(len - at));
            visit(at, run);
            at += run.len;
            self.advance(run.len);
        }
    }
}
