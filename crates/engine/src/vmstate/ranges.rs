//! A set of bytes as ranges that do not touch.

use std::ops::Range;

/// Ranges in order, with a gap between any two. A chunk that is written in order is one of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// Adds a range, and joins what touches it.
    pub(super) fn insert(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        // Nearly always the next bytes of a stream.
        if let Some(last) = self.0.last_mut()
            && last.end == range.start
        {
            last.end = range.end;
            return;
        }
        let first = self.0.partition_point(|one| one.end < range.start);
        let after = self.0.partition_point(|one| one.start <= range.end);
        let mut joined = range;
        if let Some(touched) = self.0.get(first..after) {
            if let Some(one) = touched.first() {
                joined.start = joined.start.min(one.start);
            }
            if let Some(one) = touched.last() {
                joined.end = joined.end.max(one.end);
            }
        }
        self.0.splice(first..after.max(first), [joined]);
    }

    /// Whether every byte of `range` is in the set.
    pub(super) fn covers(&self, range: &Range<usize>) -> bool {
        let at = self.0.partition_point(|one| one.end <= range.start);
        let found = self.0.get(at);
        range.is_empty()
            || found.is_some_and(|one| one.start <= range.start && range.end <= one.end)
    }

    /// What of `range` is not in the set.
    pub(super) fn gaps(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for one in &self.0 {
            if one.start >= range.end {
                break;
            }
            if one.start > at {
                gaps.push(at..one.start);
            }
            at = at.max(one.end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// The same bytes and all others of the units they lie in; `unit` is a power of two.
    pub(super) fn rounded_out(&self, unit: usize) -> Ranges {
        let mut rounded = Ranges::default();
        for one in &self.0 {
            rounded.insert(one.start & !(unit - 1)..one.end.next_multiple_of(unit));
        }
        rounded
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Range<usize>> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_file::Random;

    #[test]
    fn a_set_of_ranges_is_a_set_of_bytes() {
        for seed in 1..200 {
            let mut random = Random::new(seed);
            let (mut ranges, mut bytes) = (Ranges::default(), [false; 64]);
            for _ in 0..20 {
                let start = random.below(64) as usize;
                let end = (start + random.below(9) as usize).min(64);
                ranges.insert(start..end);
                bytes[start..end].fill(true);
                for pair in ranges.0.windows(2) {
                    assert!(pair[0].end < pair[1].start, "{ranges:?}");
                }
                let within = random.below(32) as usize..32 + random.below(32) as usize;
                let all = bytes[within.clone()].iter().all(|in_it| *in_it);
                assert_eq!(ranges.covers(&within), all, "{ranges:?} {within:?}");
                let mut gap_bytes = [false; 64];
                for gap in ranges.gaps(&within) {
                    gap_bytes[gap].fill(true);
                }
                for at in within {
                    assert_eq!(gap_bytes[at], !bytes[at], "{ranges:?} at {at}");
                }
                for one in ranges.rounded_out(8).iter() {
                    let touched = |unit: usize| bytes[unit..unit + 8].iter().any(|in_it| *in_it);
                    assert!(one.clone().step_by(8).all(touched), "{ranges:?} {one:?}");
                }
            }
        }
    }

    #[test]
    fn a_stream_stays_one_range() {
        let mut ranges = Ranges::default();
        for at in (0..4096).step_by(8) {
            ranges.insert(at..at + 8);
        }
        assert_eq!(ranges.0, vec![0..4096; 1]);
    }
}
