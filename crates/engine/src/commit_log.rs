//! Log of commits: mappings that are committed in memory and not yet written back, which a process would
//! take with it when it is killed.
//!
//! A power cut may lose them, because no flush has said that they are durable. But where a device goes
//! on while its server is replaced (ublk with recovery, NBD with another connection), its client
//! has seen those writes succeed and will not send them again. So a server can keep a log of commits
//! in memory that outlives it; the next one adopts what is left in it ([`crate::Queue::adopt`]).
//!
//! Rules: a commit is noted before it becomes visible, under the lock of its slice. A writeback pass
//! starts a new part of the log before it copies anything that is dirty, and drops the older part once
//! what it copied is durable. So for every cluster the last record is at least as new as what the file
//! says. The log says nothing about durability: after a power cut it must be gone.
//!
//! It is worthless once another program has written to the image. So the image names it: the autoclear bits
//! of the header hold its number ([`gaur_format::feature::Autoclear`]), and a process that writes without it,
//! QEMU and other programs too, clears them before the first change.

use std::fmt::Debug;

/// A guest cluster and the L2 entry it was given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Commit {
    /// Number of the guest cluster.
    pub cluster: u64,
    /// The entry as it will be on disk.
    pub entry: u64,
    /// The bitmap of an extended entry, else 0.
    pub bitmap: u64,
    /// The entry and the bitmap that it had.
    pub before: (u64, u64),
}

/// Where commits are noted. Nothing here may block: it is called under locks.
pub trait CommitLog: Debug + Send + Sync {
    /// The number by which the image names it: 1 to 2^48 - 1, drawn at random.
    fn number(&self) -> u64;
    /// A cluster is about to get this entry.
    fn committed(&self, commit: Commit);
    /// What was noted before this call is about to be made durable.
    fn pass_starts(&self);
    /// What was noted before the last call of `pass_starts` is durable.
    fn pass_ends(&self);
    /// A pass has failed: it is unknown what of the file's data is there.
    fn failed(&self);
    /// It is time for a pass.
    fn is_filling(&self) -> bool;
}
