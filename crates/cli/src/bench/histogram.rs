//! Latency histogram. The shortest, longest and mean time are exact, percentiles to one part in a hundred.

use std::time::Duration;

/// Longest time that is told from longer ones: 18 minutes.
const LONGEST_NS: u64 = 1 << 40;
/// Decimal digits of a time that are kept.
const DIGITS: u8 = 2;

/// Times of requests in nanoseconds. Recording touches one counter.
#[derive(Clone, Debug)]
pub struct Histogram {
    times: hdrhistogram::Histogram<u64>,
    sum_ns: u64,
    min_ns: u64,
    max_ns: u64,
}

impl Histogram {
    /// Nothing recorded.
    pub fn new() -> Histogram {
        let times = hdrhistogram::Histogram::new_with_bounds(1, LONGEST_NS, DIGITS);
        Histogram {
            times: times.expect("bounds that a histogram can have"),
            sum_ns: 0,
            min_ns: u64::MAX,
            max_ns: 0,
        }
    }

    /// Counts one request.
    pub fn record(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.times.saturating_record(ns);
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Counts what another one counted.
    pub fn add(&mut self, other: &Histogram) {
        let added = self.times.add(&other.times);
        added.expect("histograms of the same bounds");
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.min_ns = self.min_ns.min(other.min_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The shortest time in microseconds; 0 when there is none.
    pub fn min_us(&self) -> f64 {
        self.min_ns.min(self.max_ns) as f64 / 1e3
    }

    /// The longest time in microseconds.
    pub fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1e3
    }

    /// The mean time in microseconds.
    pub fn mean_us(&self) -> f64 {
        self.sum_ns as f64 / self.times.len().max(1) as f64 / 1e3
    }

    /// The time in microseconds that `percent` of the requests did not exceed.
    pub fn percentile_us(&self, percent: f64) -> f64 {
        let ns = self.times.value_at_percentile(percent);
        ns.max(self.min_ns).min(self.max_ns) as f64 / 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
