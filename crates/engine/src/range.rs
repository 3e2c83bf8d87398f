//! Ranges of addresses: guest bytes, host bytes, host clusters.
//!
//! Each kind is a type of its own, so that a guest range is never used as a host range, and a start never as
//! an end. A range never reaches beyond the last address: [`GuestRange::checked`] sees to it where the
//! numbers come from outside, and the engine's own are bounded by the size of a disk or a file.

use gaur_format::Geometry;
use gaur_format::addr::GuestOffset;

macro_rules! range {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub(crate) struct $name {
            pub(crate) start: u64,
            pub(crate) len: u64,
        }

        #[allow(dead_code, reason = "one set of operations for every kind of range")]
        impl $name {
            /// `len` addresses from `start` on, which does not overflow.
            #[inline]
            pub(crate) const fn new(start: u64, len: u64) -> $name {
                $name { start, len }
            }

            /// The same for numbers that were not checked.
            pub(crate) fn checked(start: u64, len: u64) -> Option<$name> {
                start.checked_add(len).map(|_| $name::new(start, len))
            }

            /// From `start` up to `end`; empty where that lies before it.
            #[inline]
            pub(crate) fn between(start: u64, end: u64) -> $name {
                $name { start, len: end.saturating_sub(start) }
            }

            /// The first address behind it.
            #[inline]
            pub(crate) fn end(self) -> u64 {
                self.start.saturating_add(self.len)
            }

            #[inline]
            pub(crate) fn is_empty(self) -> bool {
                self.len == 0
            }

            #[inline]
            pub(crate) fn contains(self, address: u64) -> bool {
                self.start <= address && address < self.end()
            }

            #[inline]
            pub(crate) fn overlaps(self, other: $name) -> bool {
                self.start < other.end() && other.start < self.end()
            }

            /// What both have.
            #[inline]
            pub(crate) fn intersect(self, other: $name) -> $name {
                let start = self.start.max(other.start);
                $name::between(start, self.end().min(other.end()))
            }

            /// The first `len` addresses, or all if there are fewer.
            #[inline]
            pub(crate) fn first(self, len: u64) -> $name {
                $name { len: self.len.min(len), ..self }
            }

            /// What follows the first `len` addresses.
            #[inline]
            pub(crate) fn after(self, len: u64) -> $name {
                $name::between(self.start.saturating_add(len), self.end())
            }

            /// The whole units that it touches; none if it is empty.
            #[inline]
            pub(crate) fn widened(self, unit: u64) -> $name {
                if self.is_empty() {
                    return self;
                }
                let start = self.start - self.start % unit;
                let end = self.end().next_multiple_of(unit);
                $name::new(start, end - start)
            }

            /// Its parts, cut at multiples of `unit`.
            pub(crate) fn pieces(self, unit: u64) -> impl Iterator<Item = $name> {
                let mut rest = self;
                std::iter::from_fn(move || {
                    let piece = rest.first(unit - rest.start % unit);
                    rest = rest.after(piece.len);
                    (!piece.is_empty()).then_some(piece)
                })
            }

            /// Adds it to a list, to the last range of the list where it follows that.
            pub(crate) fn join(self, list: &mut Vec<$name>) {
                match list.last_mut() {
                    Some(last) if last.end() == self.start => last.len += self.len,
                    _ => list.push(self),
                }
            }
        }
    };
}

range! {
    /// Bytes of the virtual disk.
    GuestRange
}
range! {
    /// Bytes of an image file.
    HostRange
}
range! {
    /// Clusters of an image file, by number.
    ClusterRange
}

impl GuestRange {
    /// The subclusters of a cluster that it touches, as bits; it lies in one cluster and is not empty.
    #[inline]
    pub(crate) fn subclusters(self, geometry: &Geometry) -> u32 {
        let first = geometry.subcluster_index(GuestOffset(self.start));
        let last = geometry.subcluster_index(GuestOffset(self.end() - 1));
        (u32::MAX << first) & (u32::MAX >> (31 - last))
    }
}

impl HostRange {
    /// The clusters that it touches; none if it is empty.
    #[inline]
    pub(crate) fn clusters(self, geometry: &Geometry) -> ClusterRange {
        let bits = geometry.cluster_bits();
        let first = self.start >> bits;
        match self.is_empty() {
            true => ClusterRange::new(first, 0),
            false => ClusterRange::new(first, ((self.end() - 1) >> bits) - first + 1),
        }
    }
}

impl ClusterRange {
    /// Their bytes.
    pub(crate) fn bytes(self, geometry: &Geometry) -> HostRange {
        let bits = geometry.cluster_bits();
        HostRange::new(self.start << bits, self.len << bits)
    }

    /// The number of each cluster.
    #[inline]
    pub(crate) fn numbers(self) -> std::ops::Range<u64> {
        self.start..self.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_widened_and_intersected_at_its_bounds() {
        let range = GuestRange::new(100, 50);
        assert_eq!(range.widened(64), GuestRange::new(64, 128));
        assert!(GuestRange::new(100, 0).widened(64).is_empty());
        let pieces: Vec<_> = range.pieces(64).collect();
        assert_eq!(pieces, [GuestRange::new(100, 28), GuestRange::new(128, 22)]);
        assert_eq!(range.intersect(GuestRange::new(140, 100)).len, 10);
        assert!(range.intersect(GuestRange::new(150, 1)).is_empty());
        assert!(!range.overlaps(GuestRange::new(150, 1)));
        assert_eq!(range.first(60), range);
        assert_eq!(range.after(49), GuestRange::new(149, 1));
        assert!(range.after(51).is_empty());
        assert_eq!(GuestRange::checked(u64::MAX, 1), None);
    }

    #[test]
    fn subclusters_are_the_bits_that_a_part_of_a_cluster_touches() {
        let geometry = Geometry::new(gaur_format::Version::V3, 16, true, 4).unwrap();
        let bits =
            |start: u64, len: u64| GuestRange::new((7 << 16) + start, len).subclusters(&geometry);
        assert_eq!(bits(0, 1 << 16), u32::MAX);
        assert_eq!(bits(2048, 4096), 0b110);
        assert_eq!(bits(2047, 2), 0b11);
        assert_eq!(bits(31 * 2048, 2048), 1 << 31);
    }

    #[test]
    fn neighbours_in_a_list_become_one_range() {
        let mut list = Vec::new();
        for (start, len) in [(3, 2), (5, 1), (7, 1)] {
            ClusterRange::new(start, len).join(&mut list);
        }
        assert_eq!(list, [ClusterRange::new(3, 3), ClusterRange::new(7, 1)]);
    }
}
