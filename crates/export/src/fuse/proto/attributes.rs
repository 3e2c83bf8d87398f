//! What a file is, apart from its bytes.

use std::time::Duration;

use super::wire::{Fields, ROOT_ID, file, set_flag};

/// What the kernel is told of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Length in bytes.
    pub size_bytes: u64,
    /// Space it is said to take, in bytes.
    pub allocated_bytes: u64,
    /// Permissions, the lowest nine bits.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The owner's group.
    pub gid: u32,
    /// Good length of a transfer in bytes, a power of two.
    pub block_bytes: u32,
    /// When it was last read, since 1970.
    pub accessed: Duration,
    /// When its bytes were last changed, since 1970.
    pub modified: Duration,
    /// When anything of it was last changed, since 1970.
    pub changed: Duration,
}

/// Bytes of `struct fuse_attr`.
pub(super) const LEN: usize = 88;
/// What a block is in the count of blocks, in bytes.
const BLOCK_BYTES: u64 = 512;

impl Attributes {
    pub(super) fn put(&self, put: &mut impl FnMut(&[u8])) {
        let times = [self.accessed, self.modified, self.changed];
        put(&ROOT_ID.to_ne_bytes());
        put(&self.size_bytes.to_ne_bytes());
        put(&self.allocated_bytes.div_ceil(BLOCK_BYTES).to_ne_bytes());
        for time in times {
            put(&time.as_secs().to_ne_bytes());
        }
        for time in times {
            put(&time.subsec_nanos().to_ne_bytes());
        }
        put(&(file::REGULAR | self.mode & 0o777).to_ne_bytes());
        let (links, device, flags) = (1_u32, 0_u32, 0_u32);
        for field in [links, self.uid, self.gid, device, self.block_bytes, flags] {
            put(&field.to_ne_bytes());
        }
    }
}

/// A time that `SETATTR` sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// When the request is served.
    Now,
    /// Since 1970.
    At(Duration),
}

/// What `SETATTR` wants changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The new length in bytes.
    pub size_bytes: Option<u64>,
    /// The new permissions, nine bits and the three above them.
    pub mode: Option<u32>,
    /// The new owner.
    pub uid: Option<u32>,
    /// The new group.
    pub gid: Option<u32>,
    /// The new time of the last read.
    pub accessed: Option<Moment>,
    /// The new time of the last change of bytes.
    pub modified: Option<Moment>,
}

impl Change {
    pub(super) fn read(fields: &mut Fields<'_>) -> Change {
        let valid = fields.u32();
        let size_bytes = fields.skip::<12>().u64();
        let accessed_s = fields.skip::<8>().u64();
        let modified_s = fields.u64();
        let accessed_ns = fields.skip::<8>().u32();
        let modified_ns = fields.u32();
        let mode = fields.skip::<4>().u32();
        let uid = fields.skip::<4>().u32();
        let gid = fields.u32();
        fields.skip::<4>();
        let is = |flag: u32| valid & flag != 0;
        let moment = |given: bool, now: bool, seconds: u64, nanoseconds: u32| match (given, now) {
            (_, true) => Some(Moment::Now),
            (true, false) => Some(Moment::At(
                Duration::from_secs(seconds)
                    .saturating_add(Duration::from_nanos(u64::from(nanoseconds))),
            )),
            (false, false) => None,
        };
        Change {
            size_bytes: is(set_flag::SIZE).then_some(size_bytes),
            mode: is(set_flag::MODE).then_some(mode & 0o7777),
            uid: is(set_flag::UID).then_some(uid),
            gid: is(set_flag::GID).then_some(gid),
            accessed: moment(
                is(set_flag::ATIME),
                is(set_flag::ATIME_NOW),
                accessed_s,
                accessed_ns,
            ),
            modified: moment(
                is(set_flag::MTIME),
                is(set_flag::MTIME_NOW),
                modified_s,
                modified_ns,
            ),
        }
    }
}
