//! Latency histogram with logarithmic buckets, each divided into equal parts.
//!
//! A value is exact to one part in [`PARTS`], from nanoseconds to minutes. It takes a few tens of
//! kilobytes, once; recording touches one counter.

use std::time::Duration;

/// Bits of a value that are kept, after its first one.
const PART_BITS: u32 = 6;
/// Parts of an octave.
const PARTS: usize = 1 << PART_BITS;
/// Longest time that has a bucket of its own, in bits of nanoseconds: 18 minutes.
const VALUE_BITS: u32 = 40;
/// Small values have a bucket each, like an octave; then one octave a bit.
const BUCKETS: usize = (VALUE_BITS - PART_BITS + 1) as usize * PARTS;

/// Times of requests in nanoseconds.
#[derive(Clone, Debug)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum_ns: u64,
    min_ns: u64,
    max_ns: u64,
}

impl Histogram {
    /// Nothing recorded.
    pub fn new() -> Histogram {
        Histogram {
            buckets: vec![0; BUCKETS],
            count: 0,
            sum_ns: 0,
            min_ns: u64::MAX,
            max_ns: 0,
        }
    }

    /// Counts one request.
    pub fn record(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(bucket) = self.buckets.get_mut(bucket_of(ns)) {
            *bucket += 1;
        }
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Counts what another one counted.
    pub fn add(&mut self, other: &Histogram) {
        for (bucket, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *bucket += more;
        }
        self.count += other.count;
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The shortest time in microseconds; 0 when there is none.
    pub fn min_us(&self) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        self.min_ns as f64 / 1e3
    }

    /// The longest time in microseconds.
    pub fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1e3
    }

    /// The mean time in microseconds.
    pub fn mean_us(&self) -> f64 {
        self.sum_ns as f64 / self.count.max(1) as f64 / 1e3
    }

    /// The time in microseconds that `percent` of the requests did not exceed.
    pub fn percentile_us(&self, percent: f64) -> f64 {
        let rank = (percent / 100.0 * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (index, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                let ns = largest_in(index).clamp(self.min_ns, self.max_ns);
                return ns as f64 / 1e3;
            }
        }
        self.max_us()
    }
}

/// Where a value is counted.
fn bucket_of(ns: u64) -> usize {
    let ns = ns.min((1 << VALUE_BITS) - 1);
    // Below one octave of parts every value has a bucket of its own.
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(PART_BITS + 1);
    let part = (ns >> shift) as usize;
    part + (shift as usize) * PARTS
}

/// The largest value counted in a bucket.
fn largest_in(index: usize) -> u64 {
    let shift = (index / PARTS).saturating_sub(1);
    let part = (index - shift * PARTS) as u64;
    ((part + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_without_gap_or_overlap() {
        let mut next = 0;
        for index in 0..BUCKETS {
            assert_eq!(bucket_of(next), index, "{next}");
            assert_eq!(bucket_of(largest_in(index)), index);
            next = largest_in(index) + 1;
        }
        assert_eq!(next, 1 << VALUE_BITS);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_are_right_to_one_part_in_an_octave() {
        let mut histogram = Histogram::new();
        for us in 1..=1000 {
            histogram.record(Duration::from_micros(us));
        }
        for (percent, us) in [(50.0, 500.0), (90.0, 900.0), (99.0, 990.0), (99.9, 999.0)] {
            let found = histogram.percentile_us(percent);
            assert!(found >= us && found < us * 1.02, "{percent}: {found}");
        }
        assert_eq!(histogram.percentile_us(100.0), 1000.0);
        assert_eq!((histogram.min_us(), histogram.max_us()), (1.0, 1000.0));
        assert_eq!(histogram.mean_us(), 500.5);
    }

    #[test]
    fn two_threads_add_up() {
        let (mut one, mut two) = (Histogram::new(), Histogram::new());
        one.record(Duration::from_micros(10));
        two.record(Duration::from_micros(30));
        one.add(&two);
        one.add(&Histogram::new());
        assert_eq!(
            (one.min_us(), one.mean_us(), one.max_us()),
            (10.0, 20.0, 30.0)
        );
    }

    #[test]
    fn nothing_recorded_is_zero() {
        let empty = Histogram::new();
        assert_eq!(
            (empty.min_us(), empty.mean_us(), empty.max_us()),
            (0.0, 0.0, 0.0)
        );
    }
}
