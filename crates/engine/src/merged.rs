//! The merged index: what the layers below the top show, as runs, so that a chain of any depth costs a read one look-up
//! behind that of the top layer.
//!
//! Those layers do not change while an image is open. A region of the disk is looked up when it is first wanted: all of it
//! in the highest layer, then what that does not have in the next, and so on down. What comes out is kept: runs of one
//! kind, each with the layer that has it. Bounded in bytes; a region that was dropped is looked up again.
//!
//! A chain of one backing file has none: its own mapping is as quick.

use gaur_block::{Errno, File};
use gaur_format::{CompressedDescriptor, limit};

use crate::clock::Clock;
use crate::corruption::Fault;
use crate::image::Layer;
use crate::metadata::maps::{Extent, Kind, Lookup, Walk};
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

/// A run of a region, in 16 bytes: many regions are looked up at random, so that what counts is how few cache lines
/// each takes.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// From the highest bit: where it begins (from the start of the region), the layer, the kind, and the sectors of a
    /// compressed cluster.
    head: u64,
    /// Host offset, where there is one.
    host: u64,
}

/// Bits for the sectors of a compressed cluster, and for the kind above them, and for the layer above that.
const SECTORS_BITS: u32 = 24;
const KIND_BITS: u32 = 3;
const LAYER_BITS: u32 = 16;
const START_SHIFT: u32 = SECTORS_BITS + KIND_BITS + LAYER_BITS;
const _: () = assert!(limit::CHAIN_DEPTH_MAX <= 1 << LAYER_BITS);
const _: () = assert!((REGION_BYTES - 1) << START_SHIFT >> START_SHIFT == REGION_BYTES - 1);

impl Run {
    fn new(start: u64, layer: usize, kind: Kind) -> Run {
        let (number, host, sectors) = match kind {
            Kind::Unallocated { host: None } => (0, 0, 0),
            Kind::Unallocated { host: Some(host) } => (1, host, 0),
            Kind::Zero { host: None } => (2, 0, 0),
            Kind::Zero { host: Some(host) } => (3, host, 0),
            Kind::Data {
                host,
                copied: false,
            } => (4, host, 0),
            Kind::Data { host, copied: true } => (5, host, 0),
            Kind::Compressed { descriptor } => (6, descriptor.offset, descriptor.sectors),
        };
        debug_assert!(
            sectors < 1 << SECTORS_BITS,
            "a cluster has 4096 sectors at most"
        );
        let head = (start << LAYER_BITS | layer as u64) << KIND_BITS | number;
        Run {
            head: head << SECTORS_BITS | sectors,
            host,
        }
    }

    #[inline]
    fn start(self) -> u64 {
        self.head >> START_SHIFT
    }

    #[inline]
    fn layer(self) -> usize {
        (self.head >> (SECTORS_BITS + KIND_BITS)) as usize & ((1 << LAYER_BITS) - 1)
    }

    #[inline]
    fn kind(self) -> Kind {
        let host = self.host;
        match self.head >> SECTORS_BITS & ((1 << KIND_BITS) - 1) {
            0 => Kind::Unallocated { host: None },
            1 => Kind::Unallocated { host: Some(host) },
            2 => Kind::Zero { host: None },
            3 => Kind::Zero { host: Some(host) },
            number @ (4 | 5) => Kind::Data {
                host,
                copied: number == 5,
            },
            _ => Kind::Compressed {
                descriptor: CompressedDescriptor {
                    offset: host,
                    sectors: self.head & ((1 << SECTORS_BITS) - 1),
                },
            },
        }
    }
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
        let at = range.start % REGION_BYTES;
        let mut part = self.part(region).lock();
        let runs = part.get(region)?;
        let next = runs.partition_point(|run| run.start() <= at);
        let run = runs.get(next.checked_sub(1)?)?;
        let end = runs.get(next).map_or(REGION_BYTES, |next| next.start());
        Some(Extent {
            layer: run.layer(),
            len: range.len.min(end - at),
            kind: run.kind().later(at - run.start()),
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
        let mut merge = Merge::new(region);
        for depth in 1..self.image.layers().len() {
            if merge.open.is_empty() {
                break;
            }
            self.merge_layer(&mut merge, depth).await?;
        }
        merged.insert(region, merge.runs());
        Ok(())
    }

    /// Looks up in one layer what those above it do not have: a look at each slice, however many runs it has there.
    async fn merge_layer(&self, merge: &mut Merge, depth: usize) -> Result<(), Errno> {
        let layer = self.image.layers().get(depth).ok_or(Errno::EIO)?;
        for piece in std::mem::take(&mut merge.open) {
            let mut rest = merge.within(piece, layer.size_bytes());
            while !rest.is_empty() {
                let note = |range: GuestRange, kind| {
                    merge.note(Piece {
                        range,
                        layer: depth,
                        kind,
                    });
                };
                match self.walk_layer(layer, rest, note) {
                    Ok(Walk::Done(len)) => rest = rest.after(len),
                    Ok(Walk::Miss(slice)) => self.load(depth, slice).await?,
                    Err(fault) => return Err(self.image.corrupt(depth, fault)),
                }
            }
        }
        Ok(())
    }

    fn walk_layer(
        &self,
        layer: &Layer,
        range: GuestRange,
        mut note: impl FnMut(GuestRange, Kind),
    ) -> Result<Walk, Fault> {
        let lookup = match (&layer.qcow2, &layer.foreign) {
            (Some(qcow2), _) => return qcow2.maps.walk(range, note),
            (None, Some(foreign)) => foreign.extent(range)?,
            (None, None) => {
                let (host, copied) = (layer.flat_host(range.start), true);
                note(range, Kind::Data { host, copied });
                return Ok(Walk::Done(range.len));
            }
        };
        Ok(match lookup {
            Lookup::Miss(slice) => Walk::Miss(slice),
            Lookup::Extent(found) => {
                note(range.first(found.len), found.kind);
                Walk::Done(found.len)
            }
        })
    }
}

/// A part of a region, and what is known of it.
#[derive(Clone, Copy, Debug)]
struct Piece {
    range: GuestRange,
    layer: usize,
    kind: Kind,
}

/// A region that is being looked up.
#[derive(Debug)]
struct Merge {
    start: u64,
    /// What no layer has so far, in order.
    open: Vec<Piece>,
    /// The rest, in any order.
    settled: Vec<Piece>,
}

impl Merge {
    fn new(region: u64) -> Merge {
        let start = region * REGION_BYTES;
        Merge {
            start,
            open: vec![Piece {
                range: GuestRange::new(start, REGION_BYTES),
                layer: 0,
                kind: Kind::Unallocated { host: None },
            }],
            settled: Vec::new(),
        }
    }

    /// What a layer of `size_bytes` has of a piece. It and those below it do not reach the rest, of which the one above
    /// has the last word.
    fn within(&mut self, piece: Piece, size_bytes: u64) -> GuestRange {
        let inside = size_bytes.saturating_sub(piece.range.start);
        let rest = piece.range.after(inside.min(piece.range.len));
        if !rest.is_empty() {
            self.settled.push(Piece {
                range: rest,
                kind: piece.kind.later(rest.start - piece.range.start),
                ..piece
            });
        }
        piece.range.first(inside)
    }

    /// Adds what a layer says.
    fn note(&mut self, piece: Piece) {
        let pieces = match piece.kind {
            Kind::Unallocated { .. } => &mut self.open,
            _ => &mut self.settled,
        };
        match pieces.last_mut() {
            Some(last) if last.joins(&piece) => last.range.len += piece.range.len,
            _ => pieces.push(piece),
        }
    }

    fn runs(mut self) -> Vec<Run> {
        self.settled.append(&mut self.open);
        self.settled.sort_unstable_by_key(|piece| piece.range.start);
        let mut runs: Vec<Run> = Vec::with_capacity(self.settled.len());
        let mut last: Option<Piece> = None;
        for piece in self.settled {
            match &mut last {
                Some(last) if last.joins(&piece) => last.range.len += piece.range.len,
                _ => {
                    let start = piece.range.start - self.start;
                    runs.push(Run::new(start, piece.layer, piece.kind));
                    last = Some(piece);
                }
            }
        }
        runs
    }
}

impl Piece {
    /// Whether `next` goes on with it.
    fn joins(&self, next: &Piece) -> bool {
        self.range.end() == next.range.start
            && self.layer == next.layer
            && self.kind.joined(next.kind, self.range.len).is_some()
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
            .map(|number| {
                let kind = match number % 2 {
                    0 => Kind::Data {
                        host: (region << 32) + (u64::from(number) << 20),
                        copied: true,
                    },
                    _ => Kind::Zero { host: None },
                };
                Run::new(u64::from(number) << 16, 1 + number as usize % 2, kind)
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
    fn packed_runs_are_what_was_packed() {
        let descriptor = CompressedDescriptor {
            offset: (1 << 56) - 1,
            sectors: 8191,
        };
        let host = (1 << 63) - 512;
        for kind in [
            Kind::Unallocated { host: None },
            Kind::Unallocated { host: Some(host) },
            Kind::Zero { host: None },
            Kind::Zero { host: Some(0) },
            Kind::Data {
                host,
                copied: false,
            },
            Kind::Data { host, copied: true },
            Kind::Compressed { descriptor },
        ] {
            for start in [0, 512, REGION_BYTES - 1] {
                for layer in [1, limit::CHAIN_DEPTH_MAX] {
                    let run = Run::new(start, layer, kind);
                    assert_eq!((run.start(), run.layer(), run.kind()), (start, layer, kind));
                }
            }
        }
        assert_eq!(size_of::<Run>(), 16);
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
