//! The checker: whether the refcount of every cluster equals the number of its references.
//!
//! [`Check`] is a machine. It never reads: it says which bytes it needs next, is fed them, and in
//! the end hands out a [`Report`]. So it runs on files, on simulated disks and in fuzzers alike.
//!
//! ```
//! # use gaur_format::check::{Check, Step};
//! # fn f(header: &[u8], file_len: u64, read: impl Fn(u64, u64) -> Vec<u8>) -> Option<()> {
//! let mut check = Check::new(header, file_len).ok()?;
//! let report = loop {
//!     match check.next() {
//!         Step::Need { offset, len } => check.feed(&read(offset, len)),
//!         Step::Done(report) => break report,
//!     }
//! };
//! # Some(()) }
//! ```
//!
//! It reads, in this order: snapshot table, refcount table and blocks, the L1 tables (active one and
//! those of all snapshots), every L2 table once, in the order of the file, bitmap directory and
//! bitmap tables. L2 tables may be taken out in parts, for several threads ([`Check::split`]). Runs of clusters
//! with the same count take next to no memory, others about one bit for a cluster of the file, twice, and a few bytes
//! for an L2 table; [`crate::limit`] bounds both. Nothing is read twice, and nothing outside the file, so time
//! is bounded by the length of the file whatever the tables say. An image may be written to meanwhile if the caller
//! says what changes ([`Check::follow`]).
//!
//! The counters are those of `qemu-img check`. Where this checker is stricter, it counts a corruption
//! that QEMU does not: bit 0 of an extended L2 entry, and the zero flag in version 2.

mod bitmaps;
mod counts;
mod machine;
mod mapping;
mod online;
mod parts;
mod reader;
mod refcounts;
mod repair;
mod report;
mod snapshots;
mod tally;

pub use machine::{Check, Step};
pub use online::Changes;
pub use parts::TablePart;
pub use repair::{Action, Repair, RepairMode, RepairStep, Repaired};
pub use report::{Finding, Miscount, Report, Severity};
