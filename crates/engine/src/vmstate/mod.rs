//! State of a virtual machine beside a snapshot: written at the disk's speed, read without applying.
//!
//! QEMU keeps the state of a machine (memory, devices) in the snapshot it belongs to, behind the end of
//! the disk: at the first L1 index after the disk's own. [`VmStateSave`] writes it there while the
//! machine runs on, [`VmStateReader`] reads that of any snapshot.
//!
//! ```text
//! save.rs      what the threads that write one state share; begin, abort
//! chunk.rs     a piece of the state in memory; memory.rs, ranges.rs
//! state_map.rs which clusters of the state are in which host clusters
//! spill.rs     a chunk goes to the file: clusters are taken, bytes written
//! writer.rs    one thread's handle: write, write_vectored, write_at, flush
//! finish.rs    L2 tables, and the snapshot that refers to them
//! reader.rs    read, read_at; ahead.rs: several large reads on their way
//! adapter.rs   std::io::Write, Read and Seek for a thread that can wait for a future
//! ```
//!
//! **How bytes get to the disk.** A stream of machine state is a header of 8 bytes, a page, a header, a
//! page: nothing is aligned, and nothing is large. Every byte is copied once, into a *chunk*: the next
//! 1 MiB of the state (or one cluster, if that is more) in aligned memory. A chunk that is full goes to
//! the file as one write, while the next ones fill; several are under way at once. Host clusters
//! come from the run that a queue has reserved, so a state is a few runs on the disk.
//!
//! **Several threads** have a writer each and share the chunks. A chunk that is not full stays in memory
//! until too many are open; then the least recently used goes to the file, with zeros where nothing was
//! written. Bytes that come later, or while it is on its way, go to a new chunk, which follows and reads back
//! what its clusters lack. So pieces that meet inside one block lose nothing, whichever thread wrote them.
//!
//! **Crash rule.** Nothing on the disk refers to any of it before [`VmStateSave::finish`] makes the
//! snapshot, which flushes first and becomes visible by one sector. A crash before leaks the clusters;
//! giving up gives them back.
//!
//! **Locks.** The save's own, then the allocator's; neither is held over an await.
//!
//! # Example
//!
//! A machine monitor that saves and loads. `block` waits for a future, see [`BlockOn`]; on a reactor
//! the same calls are awaited.
//!
//! ```
//! use std::io::{Read, Write};
//! use gaur_engine::{BlockOn, ImageError, Job, NewSnapshot, Queue, VmStateReader, VmStateSave};
//!
//! fn save<F: gaur_block::File>(
//!     queue: &Queue<F>,
//!     block: impl BlockOn + Copy,
//!     pages: &[[u8; 4096]],
//! ) -> Result<(), Box<dyn std::error::Error>> {
//!     let save = VmStateSave::begin(queue.image())?;
//!     let mut out = save.writer(queue).into_io(block);
//!     for (number, page) in pages.iter().enumerate() {
//!         out.write_all(&(number as u64).to_be_bytes())?;
//!         out.write_all(page)?;
//!     }
//!     out.flush()?;
//!     let name = "before the upgrade".to_owned();
//!     let new = NewSnapshot { name, ..NewSnapshot::default() };
//!     block.block_on(save.finish(queue, &new, &Job::default()))?;
//!     Ok(())
//! }
//!
//! fn load<F: gaur_block::File>(
//!     queue: &Queue<F>,
//!     block: impl BlockOn + Copy,
//! ) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
//!     let reader = block.block_on(VmStateReader::open(queue, "before the upgrade"))?;
//!     let mut state = Vec::new();
//!     reader.into_io(block).read_to_end(&mut state)?;
//!     Ok(state)
//! }
//! ```

mod adapter;
mod ahead;
mod chunk;
mod finish;
mod memory;
mod ranges;
mod reader;
mod save;
mod spill;
mod state_map;
#[cfg(test)]
mod tests;
mod writer;

pub use adapter::{BlockOn, VmStateIo};
pub use reader::VmStateReader;
pub use save::VmStateSave;
pub use writer::VmStateWriter;
