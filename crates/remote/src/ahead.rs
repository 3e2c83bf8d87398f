//! Which chunks will be wanted next: those behind a run of reads, the more the longer the run is.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Runs of reads that are followed at once.
const STREAMS: usize = 8;
/// Chunks that are asked for ahead: at first, and at most.
const WINDOW: u64 = 4;
const WINDOW_MAX: u64 = 128;
/// No chunk.
const NONE: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct Ahead {
    streams: Mutex<Streams>,
    /// A chunk of each run: when it is read, more is asked for.
    marks: [AtomicU64; STREAMS],
}

#[derive(Debug, Default)]
struct Streams {
    list: [Stream; STREAMS],
    clock: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// Behind the last chunk that was read.
    next: u64,
    /// Behind the last that was asked for.
    end: u64,
    window: u64,
    used: u64,
}

impl Default for Ahead {
    fn default() -> Ahead {
        Ahead {
            streams: Mutex::default(),
            marks: [const { AtomicU64::new(NONE) }; STREAMS],
        }
    }
}

impl Ahead {
    /// Whether reading a chunk is a sign to ask for more; it is so once.
    pub(crate) fn is_mark(&self, chunk: u64) -> bool {
        let found = self
            .marks
            .iter()
            .find(|mark| mark.load(Ordering::Relaxed) == chunk);
        found.is_some_and(|mark| {
            let taken = mark.compare_exchange(chunk, NONE, Ordering::Relaxed, Ordering::Relaxed);
            taken.is_ok()
        })
    }

    /// Notes a read of chunks; returns those to ask for, up to the end of the object.
    pub(crate) fn note(&self, read: Range<u64>, chunks: u64) -> Range<u64> {
        let mut streams = self.streams.lock();
        streams.clock += 1;
        let clock = streams.clock;
        let continues = |stream: &Stream| {
            stream.used > 0 && (stream.next.saturating_sub(1)..=stream.end).contains(&read.start)
        };
        let known = streams.list.iter().position(continues);
        let oldest = || {
            let ages = streams.list.iter().enumerate();
            ages.min_by_key(|(_, stream)| stream.used)
                .map_or(0, |(index, _)| index)
        };
        let index = known.unwrap_or_else(oldest);
        let stream = &mut streams.list[index];
        stream.used = clock;
        if known.is_none() {
            *stream = Stream {
                next: read.end,
                end: read.end,
                window: 0,
                used: clock,
            };
            self.marks[index].store(NONE, Ordering::Relaxed);
            return 0..0;
        }
        if read.end <= stream.next && stream.window == 0 {
            // The same chunk again says nothing.
            return 0..0;
        }
        stream.next = stream.next.max(read.end);
        stream.window = (stream.window * 2).clamp(WINDOW, WINDOW_MAX);
        let start = stream.end.max(read.end);
        let end = (stream.next + stream.window).min(chunks);
        if start >= end {
            return 0..0;
        }
        stream.end = end;
        let mark = start + (end - start) / 2;
        self.marks[index].store(mark, Ordering::Relaxed);
        start..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_read_ahead_further_and_further_and_scattered_reads_are_not() {
        let ahead = Ahead::default();
        for chunk in [500, 17, 300, 90, 44, 900] {
            assert!(ahead.note(chunk..chunk + 1, 1000).is_empty());
        }
        assert!(ahead.note(0..1, 1000).is_empty());
        assert_eq!(ahead.note(1..2, 1000), 2..6);
        assert!(!ahead.is_mark(2) && ahead.is_mark(4) && !ahead.is_mark(4));
        assert_eq!(ahead.note(4..5, 1000), 6..13);
        assert!(ahead.is_mark(9));
        assert_eq!(ahead.note(9..10, 1000), 13..26);
        assert_eq!(ahead.note(19..20, 30), 26..30);
        assert!(ahead.note(29..30, 30).is_empty());
    }

    #[test]
    fn one_chunk_read_over_and_over_is_no_run() {
        let ahead = Ahead::default();
        for _ in 0..10 {
            assert!(ahead.note(7..8, 100).is_empty());
        }
    }
}
