//! In-flight requests of a simulated disk.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::task::{Poll, Waker};

use gaur_block::Errno;

use crate::disk::{Disk, Sector, Tick};
use crate::fault::FaultKind;
use crate::rotating::Command;
use crate::scheduler::Pending;
use crate::{Handle, Random, SECTOR_BYTES, Trace};

/// What a change puts on the disk.
pub(crate) enum Fill {
    /// These bytes.
    Data(Vec<u8>),
    /// Zeros.
    Zeros,
    /// The disk may do as it likes, sector by sector: keep, zero, or anything else.
    Anything,
}

/// A write, discard or write-zeroes on its way to the disk.
pub(crate) struct Change {
    pub(crate) request: u64,
    range: Range<u64>,
    fill: Fill,
    remaining: RefCell<Vec<u64>>,
}

impl Change {
    /// Sectors that it touches.
    pub(crate) fn sectors(&self) -> Range<u64> {
        self.range.start / SECTOR_BYTES..self.range.end.div_ceil(SECTOR_BYTES)
    }

    /// Sectors not applied yet.
    pub(crate) fn remaining(&self) -> Vec<u64> {
        self.remaining.borrow().clone()
    }

    /// Takes every sector not applied yet.
    pub(crate) fn take_all(&self) -> Vec<u64> {
        std::mem::take(&mut self.remaining.borrow_mut())
    }

    /// Takes some of the sectors not applied yet.
    fn take_some(&self, random: &mut Random) -> Vec<u64> {
        let share = random.pick(&[0, 300, 700]);
        let (taken, kept) = self
            .take_all()
            .into_iter()
            .partition(|_| random.chance(share));
        *self.remaining.borrow_mut() = kept;
        taken
    }

    /// The part of `sector` that it touches.
    pub(crate) fn range_in(&self, sector: u64) -> Range<usize> {
        let start = sector * SECTOR_BYTES;
        let first = self.range.start.max(start) - start;
        let end = self.range.end.min(start + SECTOR_BYTES) - start;
        first as usize..end as usize
    }

    /// Puts the new content of a part of `sector` into `target`, which holds the old.
    pub(crate) fn fill(
        &self,
        sector: u64,
        part: Range<usize>,
        target: &mut [u8],
        random: &mut Random,
    ) {
        match &self.fill {
            Fill::Data(data) => {
                let first = (sector * SECTOR_BYTES + part.start as u64 - self.range.start) as usize;
                target.copy_from_slice(&data[first..first + part.len()]);
            }
            Fill::Zeros => target.fill(0),
            Fill::Anything => match random.below(3) {
                0 => {}
                1 => target.fill(0),
                _ => target.fill(0xdb),
            },
        }
    }

    fn describe(&self) -> String {
        let what = match &self.fill {
            Fill::Data(_) => "write",
            Fill::Zeros => "zero",
            Fill::Anything => "discard",
        };
        format!("{what} {}..{}", self.range.start, self.range.end)
    }
}

pub(crate) enum OperationKind {
    Read(Range<u64>),
    Change(Rc<Change>),
    /// Of what was complete at that moment.
    Flush(Tick),
    SetLen(u64),
    /// Takes space; no byte changes.
    Allocate(Range<u64>),
}

/// A request in flight; the file's future and the scheduler share it.
pub(crate) struct Operation {
    disk: Rc<RefCell<Disk>>,
    kind: OperationKind,
    outcome: RefCell<Outcome>,
    /// It does not end before.
    due_ns: Cell<u64>,
}

#[derive(Default)]
struct Outcome {
    result: Option<Result<Vec<u8>, Errno>>,
    waker: Option<Waker>,
}

impl Operation {
    pub(crate) fn change(disk: &Rc<RefCell<Disk>>, range: Range<u64>, fill: Fill) -> Rc<Operation> {
        let mut state = disk.borrow_mut();
        let sectors = range.start / SECTOR_BYTES..range.end.div_ceil(SECTOR_BYTES);
        let remaining = match &fill {
            Fill::Data(_) => sectors.collect(),
            Fill::Zeros | Fill::Anything => stored(&state, sectors),
        };
        let request = state.next_request();
        let change = Rc::new(Change {
            request,
            range,
            fill,
            remaining: RefCell::new(remaining),
        });
        state.in_flight.insert(request, Rc::clone(&change));
        drop(state);
        Operation::new(disk, OperationKind::Change(change))
    }

    pub(crate) fn new(disk: &Rc<RefCell<Disk>>, kind: OperationKind) -> Rc<Operation> {
        Rc::new(Operation {
            disk: Rc::clone(disk),
            kind,
            outcome: RefCell::default(),
            due_ns: Cell::new(0),
        })
    }

    /// Hands the request to the scheduler and waits for its end.
    pub(crate) async fn run(self: Rc<Self>, handle: &Handle) -> Result<Vec<u8>, Errno> {
        handle
            .trace()
            .record(&[2, self.word()], || format!("submit {}", self.describe()));
        self.due_ns.set(self.due(handle.now_ns()));
        handle.submit(Rc::<Operation>::clone(&self));
        std::future::poll_fn(|context| {
            let mut outcome = self.outcome.borrow_mut();
            match outcome.result.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    outcome.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// When the disk has done it, if it says so.
    fn due(&self, now_ns: u64) -> u64 {
        let mut disk = self.disk.borrow_mut();
        let command = match &self.kind {
            OperationKind::Read(range) if !is_hole(&disk, range) => Command::Read(range.clone()),
            OperationKind::Change(change) if matches!(change.fill, Fill::Data(_)) => {
                Command::Write(change.range.clone())
            }
            OperationKind::Flush(_) => Command::Flush,
            _ => Command::Other,
        };
        let mechanics = disk.mechanics.as_mut();
        mechanics.map_or(0, |mechanics| mechanics.take(now_ns, &command))
    }

    fn word(&self) -> u64 {
        match &self.kind {
            OperationKind::Read(range) => range.start ^ (range.end << 20),
            OperationKind::Change(change) => {
                change.range.start ^ (change.range.end << 20) ^ (1 << 62)
            }
            OperationKind::Flush(mark) => *mark ^ (1 << 63),
            OperationKind::SetLen(len_bytes) => *len_bytes ^ (3 << 62),
            OperationKind::Allocate(range) => range.start ^ (range.end << 20) ^ (1 << 61),
        }
    }

    /// What happens next; `None` when the request is not over yet.
    fn act(&self, random: &mut Random) -> Option<Result<Vec<u8>, Errno>> {
        let mut disk = self.disk.borrow_mut();
        match &self.kind {
            OperationKind::Read(range) => Some(read(&mut disk, range, random)),
            OperationKind::Change(change) => apply(&mut disk, change, random),
            OperationKind::Flush(mark) => Some(flush(&mut disk, *mark, random)),
            OperationKind::SetLen(len_bytes) => Some(set_len(&mut disk, *len_bytes, random)),
            OperationKind::Allocate(_) if disk.strikes(FaultKind::NoSpace, random) => {
                Some(Err(Errno::ENOSPC))
            }
            OperationKind::Allocate(_) => Some(Ok(Vec::new())),
        }
    }
}

impl Pending for Operation {
    fn due_ns(&self) -> u64 {
        self.due_ns.get()
    }

    fn advance(&self, random: &mut Random, trace: &mut Trace) -> bool {
        let result = self.act(random);
        let code = match &result {
            None => 0,
            Some(Ok(_)) => 1,
            Some(Err(errno)) => errno.raw() as u64 + 2,
        };
        trace.record(&[3, self.word(), code], || match &result {
            None => format!("part   {}", self.describe()),
            Some(Ok(_)) => format!("end    {}", self.describe()),
            Some(Err(errno)) => format!("fail   {}: {errno:?}", self.describe()),
        });
        let Some(result) = result else {
            return false;
        };
        let mut outcome = self.outcome.borrow_mut();
        outcome.result = Some(result);
        if let Some(waker) = outcome.waker.take() {
            waker.wake();
        }
        true
    }

    fn describe(&self) -> String {
        let name = &self.disk.borrow().name;
        match &self.kind {
            OperationKind::Read(range) => format!("{name} read {}..{}", range.start, range.end),
            OperationKind::Change(change) => {
                format!("{name} {} #{}", change.describe(), change.request)
            }
            OperationKind::Flush(mark) => format!("{name} flush @{mark}"),
            OperationKind::SetLen(len_bytes) => format!("{name} set length {len_bytes}"),
            OperationKind::Allocate(range) => {
                format!("{name} allocate {}..{}", range.start, range.end)
            }
        }
    }
}

/// Sectors in the range that hold something, or may once the writes in flight have ended.
fn stored(disk: &Disk, sectors: Range<u64>) -> Vec<u64> {
    let end = sectors
        .end
        .min(disk.image.len_bytes().div_ceil(SECTOR_BYTES));
    let mut found = Vec::new();
    let mut at = sectors.start;
    while let Some(sector) = disk.image.next_stored(at, end) {
        found.push(sector);
        at = sector + 1;
    }
    found
}

/// Whether no byte of the range was ever written.
fn is_hole(disk: &Disk, range: &Range<u64>) -> bool {
    let end = range.end.div_ceil(SECTOR_BYTES);
    disk.image
        .next_stored(range.start / SECTOR_BYTES, end)
        .is_none()
}

fn read(disk: &mut Disk, range: &Range<u64>, random: &mut Random) -> Result<Vec<u8>, Errno> {
    if disk.strikes(FaultKind::Read, random) {
        return Err(Errno::EIO);
    }
    Ok(disk
        .image
        .bytes(range.start, (range.end - range.start) as usize))
}

fn apply(
    disk: &mut Disk,
    change: &Rc<Change>,
    random: &mut Random,
) -> Option<Result<Vec<u8>, Errno>> {
    let several = change.remaining.borrow().len() > 1;
    let errno = if disk.strikes(FaultKind::Write, random) {
        Some(Errno::EIO)
    } else if matches!(change.fill, Fill::Data(_)) && disk.strikes(FaultKind::NoSpace, random) {
        Some(Errno::ENOSPC)
    } else {
        None
    };
    let torn = errno.is_some() || (several && random.chance(200));
    let sectors = if torn {
        change.take_some(random)
    } else {
        change.take_all()
    };
    for sector in sectors {
        disk.apply(change, sector, random);
    }
    if torn && errno.is_none() {
        return None;
    }
    disk.complete(change.request, change.sectors());
    disk.in_flight.remove(&change.request);
    Some(errno.map_or(Ok(Vec::new()), Err))
}

fn flush(disk: &mut Disk, mark: Tick, random: &mut Random) -> Result<Vec<u8>, Errno> {
    if disk.strikes(FaultKind::Flush, random) {
        disk.flush_failed(random);
        return Err(Errno::EIO);
    }
    disk.flushed(mark);
    Ok(Vec::new())
}

fn set_len(disk: &mut Disk, len_bytes: u64, random: &mut Random) -> Result<Vec<u8>, Errno> {
    let grows = len_bytes > disk.image.len_bytes();
    if grows && (disk.is_full_at(len_bytes) || disk.strikes(FaultKind::NoSpace, random)) {
        return Err(Errno::ENOSPC);
    }
    disk.set_len(len_bytes);
    Ok(Vec::new())
}

const _: () = assert!(size_of::<Sector>() as u64 == SECTOR_BYTES);
