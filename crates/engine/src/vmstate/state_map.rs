//! Which clusters of the state are in which clusters of the file.
//!
//! Kept as runs: a state that was written in order is a few of them, whatever its size.

use std::collections::BTreeMap;
use std::ops::Range;

/// Clusters of the state that lie next to each other in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MappedRun {
    /// Number of the first, counted from the start of the state.
    pub(super) first: u64,
    /// Its cluster in the file.
    pub(super) host: u64,
    /// How many.
    pub(super) len: u64,
}

/// Runs by the number of their first cluster: where it is, and how many follow.
#[derive(Debug, Default)]
pub(super) struct StateMap(BTreeMap<u64, (u64, u64)>);

impl StateMap {
    /// Notes a run of clusters, none of which has a place yet.
    pub(super) fn insert(&mut self, place: MappedRun) {
        if let Some((first, (host, len))) = self.0.range_mut(..place.first).next_back()
            && *first + *len == place.first
            && *host + *len == place.host
        {
            *len += place.len;
            return;
        }
        self.0.insert(place.first, (place.host, place.len));
    }

    /// The runs inside `range`, cut where it begins and ends.
    pub(super) fn inside(&self, range: Range<u64>) -> impl Iterator<Item = MappedRun> {
        let before = self.0.range(..range.start).next_back();
        let before = before.filter(|(first, (_, len))| **first + *len > range.start);
        before
            .into_iter()
            .chain(self.0.range(range.clone()))
            .map(move |(first, (host, len))| {
                let skipped = range.start.saturating_sub(*first);
                let end = (*first + *len).min(range.end);
                MappedRun {
                    first: *first + skipped,
                    host: *host + skipped,
                    len: end - (*first + skipped),
                }
            })
    }

    /// The parts of `range` that have no place.
    pub(super) fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for place in self.inside(range.clone()) {
            if place.first > at {
                gaps.push(at..place.first);
            }
            at = place.first + place.len;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// The first cluster at or after `from` that has a place.
    pub(super) fn next_from(&self, from: u64) -> Option<u64> {
        self.inside(from..u64::MAX).next().map(|place| place.first)
    }

    /// Takes all of them out.
    pub(super) fn take(&mut self) -> Vec<MappedRun> {
        let all = std::mem::take(&mut self.0).into_iter();
        all.map(|(first, (host, len))| MappedRun { first, host, len })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(first: u64, host: u64, len: u64) -> MappedRun {
        MappedRun { first, host, len }
    }

    #[test]
    fn a_state_in_order_is_one_run_however_it_came() {
        let mut places = StateMap::default();
        for number in 0..100 {
            places.insert(place(number * 4, 1000 + number * 4, 4));
        }
        assert_eq!(places.take(), [place(0, 1000, 400)]);
    }

    #[test]
    fn what_lies_inside_a_range_is_cut_and_the_rest_of_it_is_gaps() {
        let mut places = StateMap::default();
        places.insert(place(10, 100, 10));
        places.insert(place(30, 200, 10));
        places.insert(place(0, 50, 5));
        let inside: Vec<_> = places.inside(15..33).collect();
        assert_eq!(inside, [place(15, 105, 5), place(30, 200, 3)]);
        assert_eq!(places.gaps(15..33), vec![20..30; 1]);
        assert_eq!(places.gaps(2..45), [5..10, 20..30, 40..45]);
        assert_eq!(places.gaps(12..18), []);
        assert_eq!(places.next_from(5), Some(10));
        assert_eq!(places.next_from(12), Some(12));
        assert_eq!(places.next_from(40), None);
    }
}
