//! The requests of a benchmark run: how many, at which offsets, reads or writes, when a flush is due.
//!
//! The sequence of a thread follows from the options alone, not from what completes when, so two
//! runs send the same requests.

use std::num::NonZeroU64;
use std::time::Duration;

use oorandom::Rand64;

/// A run, as asked for.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Guest size in bytes.
    pub size: u64,
    /// Requests of all threads; `None` for as many as fit the time.
    pub count: Option<u64>,
    /// Requests in flight in each thread.
    pub depth: u64,
    /// Bytes of each request.
    pub buffer: u64,
    /// Bytes from one request to the next.
    pub step: u64,
    /// Guest offset of the first request.
    pub offset: u64,
    /// How many of a hundred requests read.
    pub read_percent: u8,
    /// The seed, if offsets are random.
    pub random: Option<u64>,
    /// Requests between flushes.
    pub flush_interval: Option<NonZeroU64>,
    /// Nothing is in flight during a flush.
    pub drain: bool,
    /// What is written.
    pub pattern: u8,
    /// How long requests are sent.
    pub runtime: Option<Duration>,
    /// How many threads there are.
    pub threads: u64,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchRequest {
    /// Guest offset in bytes.
    pub offset: u64,
    /// Whether it writes.
    pub write: bool,
    /// Whether a flush follows before the next one.
    pub flush_after: bool,
}

/// The requests of one thread, in order.
#[derive(Clone, Debug)]
pub struct Sequence {
    load: Workload,
    offset: u64,
    /// What is added to the offset, less than the size of the image.
    step: u64,
    random: Rand64,
    left: u64,
    /// Requests until the depth is reached for the first time.
    unfilled: u64,
}

impl Workload {
    /// Whether there are writes.
    pub fn writes(&self) -> bool {
        self.read_percent < 100
    }

    /// Whether there are reads.
    pub fn reads(&self) -> bool {
        self.read_percent > 0
    }

    /// Requests that are in flight at most, in one thread.
    pub fn slots(&self) -> u64 {
        self.depth.min(self.count.unwrap_or(u64::MAX))
    }

    /// The share of one thread. Together the threads send what one would: thread 0 the first part,
    /// and so on. Without an end there are no parts, and they start at equal distances.
    pub fn sequence(&self, thread: u64) -> Sequence {
        let size = self.size.max(1);
        let (skipped, left) = match self.count {
            Some(count) => {
                let first = part_start(count, thread, self.threads);
                (first, part_start(count, thread + 1, self.threads) - first)
            }
            None => (part_start(size / self.step, thread, self.threads), u64::MAX),
        };
        let offset = match skipped {
            // As it was given: an offset beyond the end is the user's mistake and is to be seen.
            0 => self.offset,
            _ => {
                let at = u128::from(self.offset) + u128::from(skipped) * u128::from(self.step);
                (at % u128::from(size)) as u64
            }
        };
        Sequence {
            load: *self,
            offset,
            step: self.step % size,
            random: Rand64::new_inc(self.random.unwrap_or(0).into(), thread.into()),
            left,
            unfilled: self.depth,
        }
    }
}

/// Where part `index` of `total` in `parts` equal parts starts.
fn part_start(total: u64, index: u64, parts: u64) -> u64 {
    (u128::from(total) * u128::from(index) / u128::from(parts)) as u64
}

impl Sequence {
    /// Takes the next request.
    pub fn next(&mut self) -> Option<BenchRequest> {
        self.left = self.left.checked_sub(1)?;
        let offset = self.offset();
        let write = match self.load.read_percent {
            0 => true,
            100 => false,
            percent => self.random.rand_range(0..100) >= u64::from(percent),
        };
        let interval = self.load.flush_interval;
        self.unfilled = self.unfilled.saturating_sub(1);
        // Counted from the end and not before the depth is reached, as qemu-img does. The last flush
        // is the image's close.
        let flush_after = self.unfilled == 0
            && self.left > 0
            && interval.is_some_and(|interval| self.left.is_multiple_of(interval.get()));
        Some(BenchRequest {
            offset,
            write,
            flush_after,
        })
    }

    fn offset(&mut self) -> u64 {
        if self.load.random.is_some() {
            let places = (self.load.size / self.load.buffer).max(1);
            return self.random.rand_range(0..places) * self.load.buffer;
        }
        let offset = self.offset;
        self.offset += self.step;
        if self.offset >= self.load.size {
            // The step is less than the size; only the first offset may be beyond it.
            self.offset = self.offset.checked_rem(self.load.size).unwrap_or(0);
        }
        offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READS: Workload = Workload {
        size: 40960,
        count: Some(4),
        depth: 1,
        buffer: 4096,
        step: 4096,
        offset: 0,
        read_percent: 100,
        random: None,
        flush_interval: None,
        drain: true,
        pattern: 0,
        runtime: None,
        threads: 1,
    };

    fn offsets(load: Workload, thread: u64) -> Vec<u64> {
        let mut sequence = load.sequence(thread);
        std::iter::from_fn(|| sequence.next().map(|next| next.offset)).collect()
    }

    #[test]
    fn offsets_wrap_around_at_the_end_of_the_image() {
        // What `qemu-img bench` 10.0 was seen to write with these options.
        let load = Workload {
            offset: 8192,
            step: 32768,
            ..READS
        };
        assert_eq!(offsets(load, 0), [8192, 0, 32768, 24576]);
        let whole = Workload {
            step: 40960,
            ..load
        };
        assert_eq!(offsets(whole, 0), [8192; 4]);
        let beyond = Workload {
            offset: 50000,
            ..READS
        };
        assert_eq!(offsets(beyond, 0), [50000, 13136, 17232, 21328]);
    }

    #[test]
    fn threads_send_together_what_one_sends() {
        let one = Workload {
            count: Some(23),
            offset: 4096,
            step: 12288,
            ..READS
        };
        let three = Workload { threads: 3, ..one };
        let together: Vec<u64> = (0..3).flat_map(|thread| offsets(three, thread)).collect();
        assert_eq!(together, offsets(one, 0));
    }

    #[test]
    fn without_an_end_threads_start_at_equal_distances() {
        let load = Workload {
            count: None,
            threads: 2,
            ..READS
        };
        let first = |thread| load.sequence(thread).next().map(|next| next.offset);
        assert_eq!((first(0), first(1)), (Some(0), Some(20480)));
    }

    #[test]
    fn random_offsets_are_whole_requests_inside_the_image_and_repeat() {
        let load = Workload {
            size: 10_000_000,
            count: Some(10_000),
            random: Some(1),
            ..READS
        };
        let found = offsets(load, 0);
        assert!(
            found
                .iter()
                .all(|at| at % 4096 == 0 && at + 4096 <= load.size)
        );
        assert_eq!(found, offsets(load, 0));
        let other = Workload {
            random: Some(2),
            ..load
        };
        assert_ne!(found, offsets(other, 0));
        let mut different = found.clone();
        different.sort_unstable();
        different.dedup();
        assert!(
            different.len() > 2000,
            "of 2441 blocks, {}",
            different.len()
        );
    }

    #[test]
    fn flushes_are_due_at_intervals_counted_from_the_end() {
        let load = Workload {
            count: Some(10),
            read_percent: 0,
            flush_interval: NonZeroU64::new(3),
            ..READS
        };
        let after = |load: Workload| -> Vec<usize> {
            let mut sequence = load.sequence(0);
            let due = std::iter::from_fn(|| sequence.next().map(|next| next.flush_after));
            let due = (1..).zip(due).filter(|(_, due)| *due);
            due.map(|(number, _)| number).collect()
        };
        assert_eq!(after(load), [1, 4, 7]);
        assert_eq!(after(Workload { depth: 2, ..load }), [4, 7]);
        assert_eq!(after(Workload { depth: 4, ..load }), [4, 7]);
    }

    #[test]
    fn reads_and_writes_mix_as_told() {
        let load = Workload {
            count: Some(10_000),
            read_percent: 70,
            ..READS
        };
        let mut sequence = load.sequence(0);
        let writes = std::iter::from_fn(|| sequence.next())
            .filter(|next| next.write)
            .count();
        assert!((2800..3200).contains(&writes), "{writes}");
    }

    #[test]
    fn empty_image_does_not_divide_by_zero() {
        let load = Workload { size: 0, ..READS };
        assert_eq!(offsets(load, 0), [0; 4]);
        let random = Workload {
            random: Some(1),
            ..load
        };
        assert_eq!(offsets(random, 0), [0; 4]);
    }
}
