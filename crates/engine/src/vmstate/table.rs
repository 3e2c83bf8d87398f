//! L2 tables of a state as a reader needs them: what the next bytes are, and where.
//!
//! Everything in them may be wrong. Slices of tables are kept as they are in the file, a bounded number
//! of bytes of them, and decoded when something is looked up; so no table, however odd, makes more of
//! itself in memory than it is.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use gaur_format::geometry::Geometry;
use gaur_format::l2::{self, L2Entry};
use gaur_format::{CompressedDescriptor, Corruption};

/// Bytes of tables that are kept.
const KEPT_BYTES: usize = 8 << 20;

/// What some bytes of a state are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// In the file, at this offset.
    Data { host: u64 },
    /// Zeros.
    Zero,
    /// Not in this image: what the backing file has there, else zeros.
    Nothing,
    /// Inside a compressed cluster.
    Compressed { descriptor: CompressedDescriptor },
}

impl Kind {
    /// Whether `next`, `len` bytes further on, just continues this.
    fn goes_on(self, len: u64, next: Kind) -> bool {
        match (self, next) {
            (Kind::Data { host }, Kind::Data { host: next }) => host + len == next,
            (Kind::Zero, Kind::Zero) | (Kind::Nothing, Kind::Nothing) => true,
            _ => false,
        }
    }

    /// The same, `len` bytes further on.
    fn skip(self, len: u64) -> Kind {
        match self {
            Kind::Data { host } => Kind::Data { host: host + len },
            other => other,
        }
    }
}

/// The run that begins `within` bytes after the start of what the table's slice maps, and is at most
/// `max` bytes (1 or more) long. `slice` holds whole entries, and the run ends where it does.
pub(super) fn run_in(
    slice: &[u8],
    geometry: &Geometry,
    within: u64,
    max: u64,
) -> Result<(Kind, u64), Corruption> {
    let unit = geometry.subcluster_size();
    let per_cluster = u64::from(geometry.subclusters());
    let mut found: Option<(Kind, u64)> = None;
    let mut skipped = within % unit;
    let mut number = within / unit;
    while let Some((raw, bitmap)) = l2::raw_at(slice, number / per_cluster, geometry) {
        let entry = L2Entry::decode(raw, bitmap, geometry)?;
        // The subclusters that are left of this cluster.
        for sub in number % per_cluster..per_cluster {
            let kind = kind_of(entry, sub, unit).skip(skipped);
            let len = unit - skipped;
            skipped = 0;
            match &mut found {
                None => found = Some((kind, len)),
                Some((first, so_far)) if first.goes_on(*so_far, kind) => *so_far += len,
                Some((first, so_far)) => return Ok((*first, (*so_far).min(max))),
            }
            number += 1;
        }
        let enough =
            found.is_some_and(|(kind, len)| len >= max || matches!(kind, Kind::Compressed { .. }));
        if enough {
            break;
        }
    }
    let (kind, len) = found.unwrap_or((Kind::Nothing, max));
    Ok((kind, len.min(max)))
}

fn kind_of(entry: L2Entry, sub: u64, unit: u64) -> Kind {
    match entry {
        L2Entry::Compressed(descriptor) => Kind::Compressed { descriptor },
        L2Entry::Cluster {
            host, alloc, zero, ..
        } => match host {
            Some(host) if alloc >> sub & 1 != 0 => Kind::Data {
                host: host.0 + sub * unit,
            },
            _ if zero >> sub & 1 != 0 => Kind::Zero,
            _ => Kind::Nothing,
        },
    }
}

/// Slices of tables, by host offset; the oldest go first.
#[derive(Debug, Default)]
pub(super) struct Slices {
    kept: BTreeMap<u64, Arc<[u8]>>,
    order: VecDeque<u64>,
    bytes: usize,
}

impl Slices {
    pub(super) fn get(&self, offset: u64) -> Option<Arc<[u8]>> {
        self.kept.get(&offset).map(Arc::clone)
    }

    pub(super) fn insert(&mut self, offset: u64, slice: Arc<[u8]>) {
        self.bytes += slice.len();
        match self.kept.insert(offset, slice) {
            Some(old) => self.bytes -= old.len(),
            None => self.order.push_back(offset),
        }
        while self.bytes > KEPT_BYTES
            && self.order.len() > 1
            && let Some(oldest) = self.order.pop_front()
        {
            self.bytes -= self.kept.remove(&oldest).map_or(0, |old| old.len());
        }
    }
}
