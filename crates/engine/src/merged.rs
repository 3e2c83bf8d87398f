//! The merged index: what the layers below the top show, as runs, so that a chain of any depth costs a read one look-up
//! behind that of the top layer.
//!
//! Those layers do not change while an image is open. A region of the disk is looked up layer by layer when it is first
//! wanted, and what comes out is kept: its runs of one kind, each with the layer that has it. Bounded in
//! bytes; a region that was dropped is looked up again.
//!
//! A chain of one backing file has none: its own mapping is as quick.

use gaur_block::{Errno, File};

use crate::clock::Clock;
use crate::metadata::maps::{Extent, Kind};
use crate::queue::Queue;
use crate::range::GuestRange;
use crate::sync::Mutex;
use crate::waiters::KeyLocks;

/// Guest bytes of a region.
const REGION_BYTES: u64 = 2 << 20;
/// Parts with a lock each.
const PARTS: usize = 16;
/// Most bytes of all regions, if the user does not say what L2 slices may take.
const BUDGET_BYTES: u64 = 32 << 20;
/// What a region takes beside its runs.
const REGION_OVERHEAD: u64 = 128;

/// A run of a region.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Where it begins, from the start of the region.
    start: u32,
    layer: u32,
    kind: Kind,
}

/// The index of one chain.
#[derive(Debug)]
pub(crate) struct MergedIndex {
    part_bytes: u64,
    parts: [Mutex<Clock<u64, Box<[Run]>>>; PARTS],
    /// Regions being looked up.
    loads: KeyLocks,
}

impl MergedIndex {
    /// One that takes `budget_bytes` at most.
    pub(crate) fn new(budget_bytes: Option<u64>) -> MergedIndex {
        MergedIndex {
            part_bytes: budget_bytes.unwrap_or(BUDGET_BYTES) / PARTS as u64,
            parts: Default::default(),
            loads: KeyLocks::default(),
        }
    }

    /// The region that holds a guest offset.
    pub(crate) fn region_of(at: u64) -> u64 {
        at / REGION_BYTES
    }

    fn part(&self, region: u64) -> &Mutex<Clock<u64, Box<[Run]>>> {
        // Fewer than there are parts.
        &self.parts[region as usize % PARTS]
    }

    /// The run at the start of a range; `None` when its region has to be looked up first.
    #[inline]
    pub(crate) fn extent(&self, range: GuestRange) -> Option<Extent> {
        let region = MergedIndex::region_of(range.start);
        let at = (range.start % REGION_BYTES) as u32;
        let mut part = self.part(region).lock();
        let runs = part.get(region)?;
        let next = runs.partition_point(|run| run.start <= at);
        let run = runs.get(next.checked_sub(1)?)?;
        let end = runs
            .get(next)
            .map_or(REGION_BYTES, |next| u64::from(next.start));
        Some(Extent {
            layer: run.layer as usize,
            len: range.len.min(end - u64::from(at)),
            kind: run.kind.later(u64::from(at - run.start)),
        })
    }

    /// Keeps the runs of a region, which is not there yet.
    fn insert(&self, region: u64, runs: Vec<Run>) {
        let mut part = self.part(region).lock();
        let bytes = size_of_val(runs.as_slice()) as u64 + REGION_OVERHEAD;
        while part.len() > 0 && part.held_bytes() + bytes > self.part_bytes {
            part.evict();
        }
        part.insert(region, runs.into_boxed_slice(), bytes);
    }

    /// Drops regions that were not read since the last call.
    pub(crate) fn clean(&self) {
        for part in &self.parts {
            part.lock().clean();
        }
    }
}

impl<F: File> Queue<F> {
    /// Looks a region up in the layers below the top.
    pub(crate) async fn merge_region(
        &self,
        merged: &MergedIndex,
        region: u64,
    ) -> Result<(), Errno> {
        let Some(_loading) = merged.loads.lock_or_wait(region).await else {
            return Ok(());
        };
        if merged.part(region).lock().contains(region) {
            return Ok(());
        }
        let mut runs: Vec<Run> = Vec::new();
        let mut at = 0;
        while at < REGION_BYTES {
            let rest = GuestRange::new(region * REGION_BYTES + at, REGION_BYTES - at);
            let found = self.find_below(rest).await?;
            let joins = runs.last().is_some_and(|last| {
                let len = at - u64::from(last.start);
                last.layer as usize == found.layer && last.kind.joined(found.kind, len).is_some()
            });
            if !joins {
                runs.push(Run {
                    start: at as u32,
                    layer: found.layer as u32,
                    kind: found.kind,
                });
            }
            at += found.len;
        }
        merged.insert(region, runs);
        Ok(())
    }
}

impl Kind {
    /// The kind of the same run from `bytes` further on.
    #[inline]
    fn later(self, bytes: u64) -> Kind {
        let moved = |host: Option<u64>| host.map(|host| host + bytes);
        match self {
            Kind::Unallocated { host } => Kind::Unallocated { host: moved(host) },
            Kind::Zero { host } => Kind::Zero { host: moved(host) },
            Kind::Data { host, copied } => Kind::Data {
                host: host + bytes,
                copied,
            },
            Kind::Compressed { descriptor } => Kind::Compressed { descriptor },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 64 KiB of a region in turn: data of layer 1, zeros of layer 2.
    fn runs(region: u64) -> Vec<Run> {
        (0..32_u32)
            .map(|number| Run {
                start: number << 16,
                layer: 1 + number % 2,
                kind: match number % 2 {
                    0 => Kind::Data {
                        host: (region << 32) + (u64::from(number) << 20),
                        copied: true,
                    },
                    _ => Kind::Zero { host: None },
                },
            })
            .collect()
    }

    #[test]
    fn a_run_is_found_at_every_byte_of_it_and_ends_with_it() {
        let merged = MergedIndex::new(None);
        merged.insert(3, runs(3));
        let region = 3 * REGION_BYTES;
        let extent = |at: u64, len: u64| merged.extent(GuestRange::new(region + at, len));
        let host = (3 << 32) + (2 << 20);
        let data = |host: u64, len: u64| {
            Some(Extent {
                layer: 1,
                len,
                kind: Kind::Data { host, copied: true },
            })
        };
        assert_eq!(extent(2 << 16, 4 << 16), data(host, 1 << 16));
        assert_eq!(extent((2 << 16) + 4096, 512), data(host + 4096, 512));
        assert_eq!(extent((3 << 16) - 1, 9), data(host + 0xffff, 1));
        let zeros = extent(REGION_BYTES - 5, 50).expect("the last run");
        assert_eq!((zeros.layer, zeros.len), (2, 5));
        assert_eq!(zeros.kind, Kind::Zero { host: None });
        assert_eq!(extent(REGION_BYTES, 1), None);
    }

    #[test]
    fn regions_go_when_the_budget_is_reached_and_those_in_use_stay() {
        let merged = MergedIndex::new(Some(PARTS as u64 * 4096));
        let first = |region: u64| merged.extent(GuestRange::new(region * REGION_BYTES, 1));
        merged.insert(0, runs(0));
        for region in (1..100).map(|number| number * PARTS as u64) {
            merged.insert(region, runs(region));
            assert!(first(0).is_some() && merged.parts[0].lock().held_bytes() <= 4096);
        }
        assert!(first(PARTS as u64).is_none());
        merged.clean();
        merged.clean();
        assert_eq!(merged.parts[0].lock().held_bytes(), 0);
    }
}
