//! A simulated file or device: its current content, and every unflushed version of every sector.
//!
//! A write is applied sector by sector; each application adds a version to its sector. A flush makes
//! the newest version of every write that had completed before the flush was asked for durable and
//! forgets older ones; newer ones stay unsettled. Lengths have versions in the same way. A power cut
//! picks, for each sector, the durable value or any version ([`crate::crash`]).

use std::collections::BTreeMap;
use std::rc::Rc;

use gaur_block::{Errno, FileId, Segments};

use crate::fault::{FaultKind, Faults};
use crate::host::DiskProfile;
use crate::operation::Change;
use crate::rotating::Drive;
use crate::{FileImage, Random, SECTOR_BYTES};

/// Bytes of a sector.
pub(crate) type Sector = [u8; SECTOR_BYTES as usize];

/// A moment in the life of a disk; [`IN_FLIGHT`] for what has not happened yet.
pub(crate) type Tick = u64;

/// The completion of a request that is not complete.
const IN_FLIGHT: Tick = Tick::MAX;

/// What a sector held after a request touched it.
pub(crate) struct Version {
    pub(crate) bytes: Box<Sector>,
    pub(crate) request: u64,
    completed: Tick,
    /// Dropped by a failed flush: no later flush makes it durable.
    lost: bool,
}

/// A sector with unflushed versions, oldest first.
pub(crate) struct Dirty {
    pub(crate) durable: Box<Sector>,
    pub(crate) versions: Vec<Version>,
}

impl Dirty {
    /// Makes what completed until `mark` durable; true when nothing unflushed is left.
    fn settle(&mut self, mark: Tick) -> bool {
        let newest = self
            .versions
            .iter()
            .rposition(|one| one.completed <= mark && !one.lost);
        if let Some(index) = newest {
            let mut settled = self.versions.drain(..=index);
            if let Some(version) = settled.next_back() {
                self.durable = version.bytes;
            }
        }
        self.versions.is_empty()
    }
}

pub(crate) struct LenVersion {
    pub(crate) len_bytes: u64,
    pub(crate) request: u64,
    completed: Tick,
}

/// State of one file, shared by every handle on it.
pub(crate) struct Disk {
    pub(crate) name: String,
    pub(crate) id: FileId,
    pub(crate) profile: DiskProfile,
    pub(crate) faults: Faults,
    /// How long requests take; `None` if chance alone decides.
    pub(crate) mechanics: Option<Drive>,
    /// Faults that struck.
    pub(crate) struck: u64,
    /// Flushes that failed.
    pub(crate) flushes_failed: u64,
    /// What reads see.
    pub(crate) image: FileImage,
    pub(crate) dirty: BTreeMap<u64, Dirty>,
    pub(crate) durable_len: u64,
    pub(crate) lens: Vec<LenVersion>,
    /// Writes, zeroes and discards that have not completed.
    pub(crate) in_flight: BTreeMap<u64, Rc<Change>>,
    /// Handles that hold the write lock.
    pub(crate) writers: u32,
    now: Tick,
    next_request: u64,
}

impl Disk {
    pub(crate) fn new(name: &str, id: FileId, image: FileImage, profile: DiskProfile) -> Disk {
        Disk {
            name: name.to_owned(),
            id,
            profile,
            faults: Faults::default(),
            mechanics: None,
            struck: 0,
            flushes_failed: 0,
            durable_len: image.len_bytes(),
            image,
            dirty: BTreeMap::new(),
            lens: Vec::new(),
            in_flight: BTreeMap::new(),
            writers: 0,
            now: 0,
            next_request: 0,
        }
    }

    pub(crate) fn next_request(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request
    }

    /// The moment up to which completions count for a flush that is asked for now.
    pub(crate) fn mark(&self) -> Tick {
        self.now
    }

    pub(crate) fn strikes(&mut self, kind: FaultKind, random: &mut Random) -> bool {
        let strikes = self.faults.strike(kind, random);
        self.struck += u64::from(strikes);
        strikes
    }

    /// What `sector` holds now.
    pub(crate) fn sector(&self, sector: u64) -> Box<Sector> {
        let mut bytes = Box::new([0; SECTOR_BYTES as usize]);
        self.image.read(sector * SECTOR_BYTES, bytes.as_mut_slice());
        bytes
    }

    /// What `sector` would hold with `change` applied.
    pub(crate) fn changed(&self, change: &Change, sector: u64, random: &mut Random) -> Box<Sector> {
        let mut bytes = self.sector(sector);
        let range = change.range_in(sector);
        change.fill(sector, range.clone(), &mut bytes[range], random);
        bytes
    }

    /// Applies `change` to one sector.
    pub(crate) fn apply(&mut self, change: &Change, sector: u64, random: &mut Random) {
        let before = self.sector(sector);
        let after = self.changed(change, sector, random);
        let range = change.range_in(sector);
        let len_before = self.image.len_bytes();
        self.image
            .write(sector * SECTOR_BYTES + range.start as u64, &after[range]);
        if self.image.len_bytes() > len_before {
            self.push_len(change.request, self.image.len_bytes());
        }
        self.push_version(sector, change.request, before, after);
    }

    fn push_version(&mut self, sector: u64, request: u64, before: Box<Sector>, bytes: Box<Sector>) {
        let dirty = self.dirty.entry(sector).or_insert_with(|| Dirty {
            durable: before,
            versions: Vec::new(),
        });
        dirty.versions.push(Version {
            bytes,
            request,
            completed: IN_FLIGHT,
            lost: false,
        });
    }

    fn push_len(&mut self, request: u64, len_bytes: u64) {
        match self.lens.last_mut() {
            Some(last) if last.request == request => last.len_bytes = len_bytes,
            _ => self.lens.push(LenVersion {
                len_bytes,
                request,
                completed: IN_FLIGHT,
            }),
        }
    }

    /// Changes the length and drops what is cut off, as one request that is complete at once.
    pub(crate) fn set_len(&mut self, len_bytes: u64) {
        let request = self.next_request();
        let old_len = self.image.len_bytes();
        let first = len_bytes / SECTOR_BYTES;
        let end = old_len.div_ceil(SECTOR_BYTES);
        let mut before = Vec::new();
        let mut at = first;
        while let Some(sector) = self.image.next_stored(at, end) {
            before.push((sector, self.sector(sector)));
            at = sector + 1;
        }
        self.image.set_len(len_bytes);
        for (sector, old) in before {
            let new = self.sector(sector);
            if new != old {
                self.push_version(sector, request, old, new);
            }
        }
        self.push_len(request, len_bytes);
        self.complete(request, first..end);
    }

    /// Marks what `request` did to `sectors` as completed.
    pub(crate) fn complete(&mut self, request: u64, sectors: std::ops::Range<u64>) {
        self.now += 1;
        if sectors.start < sectors.end {
            let touched = self.dirty.range_mut(sectors);
            let versions = touched.flat_map(|(_, dirty)| dirty.versions.iter_mut());
            versions
                .filter(|one| one.request == request)
                .for_each(|one| one.completed = self.now);
        }
        let lens = self.lens.iter_mut().filter(|one| one.request == request);
        lens.for_each(|one| one.completed = self.now);
    }

    /// A flush that was asked for at `mark` has succeeded.
    pub(crate) fn flushed(&mut self, mark: Tick) {
        self.dirty.retain(|_, dirty| !dirty.settle(mark));
        if let Some(index) = self.lens.iter().rposition(|one| one.completed <= mark) {
            self.durable_len = self.lens[index].len_bytes;
            self.lens.drain(..=index);
        }
    }

    /// A flush has failed. Like Linux after a failed fsync, some of what was not durable is
    /// forgotten: its pages count as clean, and read as before or as the disk has them.
    pub(crate) fn flush_failed(&mut self, random: &mut Random) {
        self.flushes_failed += 1;
        let mut evicted = Vec::new();
        for (&sector, dirty) in &mut self.dirty {
            let settled = dirty.versions.iter().all(|one| one.completed != IN_FLIGHT);
            match random.below(3) {
                0 if settled => evicted.push(sector),
                1 => dirty
                    .versions
                    .iter_mut()
                    .for_each(|one| one.lost = one.completed != IN_FLIGHT),
                _ => {}
            }
        }
        for sector in evicted {
            if let Some(dirty) = self.dirty.remove(&sector) {
                let start = sector * SECTOR_BYTES;
                let len = self
                    .image
                    .len_bytes()
                    .saturating_sub(start)
                    .min(SECTOR_BYTES) as usize;
                self.image.write(start, &dirty.durable[..len]);
            }
        }
    }

    /// Whether growing to `len_bytes` finds no space left.
    pub(crate) fn is_full_at(&self, len_bytes: u64) -> bool {
        self.faults.max_len_bytes.is_some_and(|max| len_bytes > max)
    }

    /// Checks a transfer against the limits of the disk.
    ///
    /// # Panics
    /// When the caller broke one; that is a bug of the engine under test.
    pub(crate) fn assert_transfer(&self, what: &str, offset_bytes: u64, memory: Segments<'_>) {
        let request = u64::from(self.profile.request_alignment);
        let alignment = self.profile.memory_alignment as usize;
        let (len, max) = (memory.len() as u64, u64::from(self.profile.max_transfer));
        assert!(
            offset_bytes.is_multiple_of(request) && len.is_multiple_of(request),
            "{what} of {len} bytes at {offset_bytes} of {} is not aligned to {request}",
            self.name
        );
        assert!(
            memory.is_aligned(alignment, alignment.max(request as usize)),
            "{what} at {offset_bytes} of {} uses memory that is not aligned to {alignment}: {memory:?}",
            self.name
        );
        assert!(
            len <= max,
            "{what} of {len} bytes of {} exceeds {max}",
            self.name
        );
    }

    pub(crate) fn check_writable(&self, end: u64) -> Result<(), Errno> {
        if self.profile.device.is_some() && end > self.image.len_bytes() {
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }
}
