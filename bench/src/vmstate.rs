//! Saving the state of a machine: the same stream of pages through four writers, and beside them the
//! bare file.
//!
//! All four write to an image of their own, which is new, through the same engine and the same host; what
//! differs is how the stream gets from pieces of 8 bytes and 4 KiB to requests. A save is over when its
//! bytes are durable.

mod aligned;
pub mod disk;
mod guest;
mod ours;
mod raw;
mod vectors;

pub mod run;

pub use guest::Guest;

use gaur_block::File;
use gaur_engine::Queue;

use crate::engine::Failure;

/// How a stream is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// As QEMU does: up to 64 pieces are collected, copied to aligned memory with what the blocks at both ends
    /// hold, and written; one such request at a time.
    Vectors64,
    /// The same with up to 1024 pieces, the most that Linux takes.
    Vectors1024,
    /// Two aligned buffers of 1 MiB: one is filled while the other is written.
    TwoBuffers,
    /// `VmStateSave`.
    Ours,
    /// No image: requests of 1 MiB from memory that is ready, eight at a time, to a plain file.
    Bare,
}

impl Writer {
    /// All of them, in the order of history; the bare file is the last.
    pub const ALL: [Writer; 5] = [
        Writer::Vectors64,
        Writer::Vectors1024,
        Writer::TwoBuffers,
        Writer::Ours,
        Writer::Bare,
    ];

    /// What it is called in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Writer::Vectors64 => "64 vectors, one request at a time",
            Writer::Vectors1024 => "1024 vectors, one request at a time",
            Writer::TwoBuffers => "two aligned buffers of 1 MiB",
            Writer::Ours => "VmStateSave",
            Writer::Bare => "bare file, 1 MiB, 8 at a time",
        }
    }
}

/// Writes `bytes` of the guest's stream, to the start of the disk or as a state, and makes them durable.
pub async fn save<F: File>(
    writer: Writer,
    queue: &Queue<F>,
    file: &F,
    guest: &Guest,
    bytes: u64,
) -> Result<(), Failure> {
    match writer {
        Writer::Vectors64 => vectors::save(queue, file, guest, bytes, 64).await,
        Writer::Vectors1024 => vectors::save(queue, file, guest, bytes, 1024).await,
        Writer::TwoBuffers => aligned::save(queue, file, guest, bytes).await,
        Writer::Ours => ours::save(queue, guest, bytes).await,
        Writer::Bare => raw::save(file, bytes).await,
    }
}

/// Reads back `bytes` that `writer` wrote: a state from its snapshot, the bare file eight requests at a
/// time. `None` if the writer has no reader of its own.
pub async fn load<F: File>(
    writer: Writer,
    queue: &Queue<F>,
    file: &F,
    bytes: u64,
) -> Result<Option<()>, Failure> {
    match writer {
        Writer::Ours => ours::load(queue, bytes).await.map(Some),
        Writer::Bare => raw::load(file, bytes).await.map(Some),
        Writer::Vectors64 | Writer::Vectors1024 | Writer::TwoBuffers => Ok(None),
    }
}
