//! Holes: discarded host space inside clusters that stay. Subclusters lost their data while others of
//! their cluster kept theirs.
//!
//! A hole goes the way that a freed cluster goes (`alloc`): its mapping changes in memory, a
//! writeback pass makes that durable, the requests that may still be using it end, and then it is
//! given back to the host. Its cluster stays where it is and the guest may write there at any time,
//! so the pass that gives it back claims its guest range and looks again.
//!
//! The list is bounded: what does not fit is forgotten, and stays allocated on the host.

use gaur_format::addr::GuestOffset;
use gaur_format::geometry::Geometry;

use crate::statistics::HoleStatistics;

/// A run of bytes in one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hole {
    /// Guest offset of the first byte.
    pub(crate) guest: u64,
    /// Host offset of the first byte.
    pub(crate) host: u64,
    /// Length in bytes.
    pub(crate) len: u64,
}

/// Holes on their way to the host.
#[derive(Debug, Default)]
pub(crate) struct Holes {
    /// Made in memory since the last writeback pass began.
    pub(crate) unmapped: Vec<Hole>,
    /// Their mapping is durable.
    pub(crate) durable: Vec<Hole>,
    /// Of those, the ones that wait for requests that may be using them.
    pub(crate) draining: Vec<Hole>,
    /// To be given back.
    pub(crate) ready: Vec<Hole>,
    /// What was given back.
    pub(crate) made: HoleStatistics,
}

/// Most holes that wait.
const HOLES_MAX: usize = 1 << 14;

impl Holes {
    /// Notes a hole; one that continues the last in its cluster lengthens it.
    pub(crate) fn add(&mut self, hole: Hole, geometry: &Geometry) {
        if let Some(last) = self.unmapped.last_mut()
            && last.guest + last.len == hole.guest
            && last.host + last.len == hole.host
            && geometry.offset_in_cluster(GuestOffset(hole.guest)) != 0
        {
            last.len += hole.len;
            return;
        }
        if self.len() < HOLES_MAX {
            self.unmapped.push(hole);
        }
    }

    /// Whether so many wait for a pass that one is due.
    pub(crate) fn pressure(&self) -> bool {
        self.unmapped.len() > HOLES_MAX / 4
    }

    /// Forgets those that wait: their space stays allocated.
    pub(crate) fn forget(&mut self) {
        for list in [
            &mut self.unmapped,
            &mut self.durable,
            &mut self.draining,
            &mut self.ready,
        ] {
            list.clear();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.unmapped.len() + self.durable.len() + self.draining.len() + self.ready.len()
    }
}

#[cfg(test)]
mod tests {
    use gaur_format::Version;

    use super::*;

    const KIB: u64 = 1024;

    fn geometry(cluster_bits: u32) -> Geometry {
        Geometry::new(Version::V3, cluster_bits, true, 4).unwrap()
    }

    #[test]
    fn adjacent_holes_merge_within_a_cluster_only() {
        let geometry = geometry(16);
        let mut holes = Holes::default();
        let hole = |guest, host| Hole {
            guest: guest * KIB,
            host: host * KIB,
            len: 4 * KIB,
        };
        for (guest, host) in [(56, 656), (60, 660), (64, 664), (68, 668), (72, 999)] {
            holes.add(hole(guest, host), &geometry);
        }
        let found: Vec<(u64, u64)> = holes
            .unmapped
            .iter()
            .map(|hole| (hole.guest / KIB, hole.len / KIB))
            .collect();
        assert_eq!(found, [(56, 8), (64, 8), (72, 4)]);
    }

    #[test]
    fn the_list_is_bounded() {
        let geometry = geometry(16);
        let mut holes = Holes::default();
        for number in 0..2 * HOLES_MAX as u64 {
            let guest = number << 20;
            holes.add(
                Hole {
                    guest,
                    host: guest,
                    len: 4096,
                },
                &geometry,
            );
            if number == 100 {
                holes.durable.append(&mut holes.unmapped);
            }
        }
        assert!(holes.pressure());
        assert_eq!(holes.len(), HOLES_MAX);
    }
}
