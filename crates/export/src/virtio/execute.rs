//! What a request asks, put to the device.
//!
//! Memory in one run goes to the device as it is. Of memory in many runs the long ones go one by
//! one, and short neighbours together through a piece of [`super::bounce`], some transfers of a request
//! at a time.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use gaur_block::{Device, Errno, Payload, Request, Source, Tag, Target};

use super::bounce::PIECE_MAX;
use super::chain::{Chain, take_front};
use super::memory::Run;
use super::station::Station;
use super::wire::{self, RANGE_BYTES, RANGES_MAX, SECTOR_BYTES, kind, status};

/// A run of this many bytes is worth a request of its own.
const DIRECT_MIN: usize = 64 << 10;

/// So many transfers of a request run at once.
const LANES: usize = 4;

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

/// Fills `runs` with what the device has from `offset` bytes on.
pub(super) async fn read<D: Device>(
    station: &Station<D>,
    terms: Terms,
    offset: u64,
    runs: &[Run],
) -> Result<(), Errno> {
    let way = RefCell::new(Way::new(offset, runs, station.piece_max));
    in_lanes(runs, || read_lane(station, terms.tag, &way)).await
}

/// Does transfers until there are none left, or one fails.
async fn read_lane<D: Device>(
    station: &Station<D>,
    tag: Tag,
    way: &RefCell<Way<'_>>,
) -> Result<(), Errno> {
    while let Some((offset, step)) = next_of(way) {
        let result = match step {
            Step::Direct(run) => read_run(station, tag, offset, run).await,
            Step::Gather(mut from, len) => {
                let mut piece = station.bounce.take(len).await;
                let result = read_at(station, tag, offset, &mut piece[..len]).await;
                if result.is_ok() {
                    from.visit(len, |at, run| run.copy_from(&piece[at..at + run.len]));
                }
                station.bounce.give(piece);
                result
            }
        };
        result.inspect_err(|_| way.borrow_mut().give_up())?;
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

/// Stores what `runs` hold at `offset` bytes.
pub(super) async fn write<D: Device>(
    station: &Station<D>,
    terms: Terms,
    offset: u64,
    runs: &[Run],
) -> Result<(), Errno> {
    let way = RefCell::new(Way::new(offset, runs, station.piece_max));
    in_lanes(runs, || write_lane(station, terms, &way)).await
}

/// Does transfers until there are none left, or one fails.
async fn write_lane<D: Device>(
    station: &Station<D>,
    terms: Terms,
    way: &RefCell<Way<'_>>,
) -> Result<(), Errno> {
    while let Some((offset, step)) = next_of(way) {
        let result = match step {
            Step::Direct(run) => {
                // SAFETY: the run is mapped, and stays so until this request is done. It is only
                // copied from; a guest that writes to it meanwhile stores a mixture on its own disk.
                let memory = unsafe { std::slice::from_raw_parts(run.start.as_ptr(), run.len) };
                write_at(station, terms, offset, memory).await
            }
            Step::Gather(mut from, len) => {
                let mut piece = station.bounce.take(len).await;
                from.visit(len, |at, run| run.copy_to(&mut piece[at..at + run.len]));
                let result = write_at(station, terms, offset, &piece[..len]).await;
                station.bounce.give(piece);
                result
            }
        };
        result.inspect_err(|_| way.borrow_mut().give_up())?;
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

/// Serves a request by as many lanes as it is worth.
async fn in_lanes<F>(runs: &[Run], lane: impl Fn() -> F) -> Result<(), Errno>
where
    F: Future<Output = Result<(), Errno>>,
{
    if is_short(runs) {
        return lane().await;
    }
    side_by_side([(); LANES].map(|()| lane())).await
}

/// Whether a request is a single transfer as a rule.
fn is_short(runs: &[Run]) -> bool {
    match runs {
        [_] => true,
        runs => runs.iter().map(|run| run.len).sum::<usize>() <= PIECE_MAX,
    }
}

/// Waits for all; the result is that of the first that failed.
async fn side_by_side<F: Future<Output = Result<(), Errno>>>(
    lanes: [F; LANES],
) -> Result<(), Errno> {
    let [first, second, third, fourth] = lanes;
    let (first, second, third, fourth) = (pin!(first), pin!(second), pin!(third), pin!(fourth));
    let mut running = [Some(first), Some(second), Some(third), Some(fourth)];
    let mut result = Ok(());
    poll_fn(move |context| {
        for lane in &mut running {
            let polled = lane.as_mut().map(|lane| lane.as_mut().poll(context));
            if let Some(Poll::Ready(ended)) = polled {
                *lane = None;
                result = result.and(ended);
            }
        }
        match running.iter().all(Option::is_none) {
            true => Poll::Ready(result),
            false => Poll::Pending,
        }
    })
    .await
}

/// What to do next with the runs of a request.
enum Step<'a> {
    /// A transfer to or from this memory.
    Direct(Run),
    /// A transfer by way of a piece to or from so many bytes, which begin there.
    Gather(Cursor<'a>, usize),
}

/// What is left to do of a request.
struct Way<'a> {
    /// Where on the device.
    offset: u64,
    left: Cursor<'a>,
    /// Longest transfer in bytes.
    most: usize,
}

fn next_of<'a>(way: &RefCell<Way<'a>>) -> Option<(u64, Step<'a>)> {
    way.borrow_mut().next()
}

impl<'a> Way<'a> {
    fn new(offset: u64, runs: &'a [Run], most: usize) -> Way<'a> {
        Way {
            offset,
            left: Cursor { runs, done: 0 },
            most,
        }
    }

    /// The next transfer, and where on the device.
    fn next(&mut self) -> Option<(u64, Step<'a>)> {
        let first = self.left.first()?;
        let (step, len) =
            if first.len >= DIRECT_MIN || self.left.runs.len() == 1 || self.most <= first.len {
                let run = first.first(first.len.min(self.most));
                (Step::Direct(run), run.len)
            } else {
                let len = self.left.short_runs(self.most.min(PIECE_MAX));
                (Step::Gather(self.left, len), len)
            };
        self.left.visit(len, |_, _| {});
        let offset = self.offset;
        self.offset += len as u64;
        Some((offset, step))
    }

    /// There is no next one.
    fn give_up(&mut self) {
        self.left.runs = &[];
    }
}

/// A place in runs.
#[derive(Clone, Copy)]
struct Cursor<'a> {
    runs: &'a [Run],
    /// Bytes of the first run that are behind us.
    done: usize,
}

impl Cursor<'_> {
    /// The first run, or what is left of it.
    fn first(&self) -> Option<Run> {
        let first = self.runs.first()?;
        Some(first.skip(self.done))
    }

    /// Bytes from here up to a run that is worth a request of its own, at most `most`. The first run is
    /// shorter than that.
    fn short_runs(&self, most: usize) -> usize {
        let mut len = self.first().map_or(0, |first| first.len);
        for run in self.runs.iter().skip(1) {
            if run.len >= DIRECT_MIN || len == most {
                break;
            }
            len += run.len.min(most - len);
        }
        len
    }

    /// Visits the next `len` bytes, which are there, run by run, and leaves them behind.
    fn visit(&mut self, len: usize, mut visitor: impl FnMut(usize, Run)) {
        let mut at = 0;
        while at < len {
            let run = self.runs[0].skip(self.done);
            let run = run.first(run.len.min(len - at));
            visitor(at, run);
            at += run.len;
            self.done += run.len;
            if self.done == self.runs[0].len {
                self.runs = &self.runs[1..];
                self.done = 0;
            }
        }
    }
}
