//! Event trace of a run: always as a hash, on request as text.

use std::fmt;

/// Receives the lines of a trace.
type Sink = Box<dyn FnMut(&str)>;

/// The record of a run.
pub struct Trace {
    hash: u64,
    events: u64,
    sink: Option<Sink>,
}

impl Default for Trace {
    fn default() -> Trace {
        // The offset basis of FNV-1a with 64 bits.
        Trace {
            hash: 0xcbf2_9ce4_8422_2325,
            events: 0,
            sink: None,
        }
    }
}

impl Trace {
    /// A trace that also hands every line to `sink`.
    pub fn with_sink(sink: impl FnMut(&str) + 'static) -> Trace {
        Trace {
            sink: Some(Box::new(sink)),
            ..Trace::default()
        }
    }

    /// Records an event: `words` go into the hash, `line` is only formatted when the trace is kept as text.
    pub fn record(&mut self, words: &[u64], line: impl FnOnce() -> String) {
        self.events += 1;
        for word in words {
            for byte in word.to_le_bytes() {
                self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
        if let Some(sink) = &mut self.sink {
            sink(&line());
        }
    }

    /// The hash of every event so far. Equal hashes: the same run.
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "Trace({:016x} after {} events)",
            self.hash, self.events
        )
    }
}
