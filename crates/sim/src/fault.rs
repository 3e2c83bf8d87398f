//! Fault injection: which requests of a disk fail.

use crate::Random;

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FaultKind {
    /// A read ends with EIO.
    Read,
    /// A write, discard or write-zeroes ends with EIO; any part of it may have happened.
    Write,
    /// A write, or growing the file, ends with ENOSPC; any part of a write may have happened.
    NoSpace,
    /// A flush ends with EIO; what was not durable yet is partly lost without another word.
    Flush,
}

/// How likely each fault is on one disk, and faults that strike for certain.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Failing reads per thousand.
    pub read_per_mille: u32,
    /// Failing writes per thousand.
    pub write_per_mille: u32,
    /// Writes and growths without space per thousand.
    pub no_space_per_mille: u32,
    /// Failing flushes per thousand.
    pub flush_per_mille: u32,
    /// This kind of request fails when it has been counted down to zero (0: the next one).
    pub nth: Option<(FaultKind, u64)>,
    /// The file cannot grow beyond this length: the file system is full.
    pub max_len_bytes: Option<u64>,
}

impl Faults {
    /// Whether a request that can fail in this way does; counts down [`Faults::nth`].
    pub(crate) fn strike(&mut self, kind: FaultKind, random: &mut Random) -> bool {
        if let Some((wanted, left)) = &mut self.nth
            && *wanted == kind
        {
            if *left == 0 {
                self.nth = None;
                return true;
            }
            *left -= 1;
        }
        let per_mille = match kind {
            FaultKind::Read => self.read_per_mille,
            FaultKind::Write => self.write_per_mille,
            FaultKind::NoSpace => self.no_space_per_mille,
            FaultKind::Flush => self.flush_per_mille,
        };
        per_mille > 0 && random.chance(per_mille)
    }
}
