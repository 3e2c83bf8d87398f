//! The qcow2 engine: shared image, one queue a thread, ordered metadata.
//!
//! [`open`] reads what an image and its backing chain say of themselves and gives an [`Image`],
//! which all threads share, and the file handles it was read through. Each thread makes a
//! [`Queue`] with handles of its own and submits requests to it through
//! [`gaur_block::Device`]. The engine knows no runtime, system call, clock, thread or random
//! source: the host that polls its futures and implements [`gaur_block::File`] decides about those.
//!
//! Inside, `metadata` is sync and answers with values, the flows (`read`, `write`, `zero`, `tables`,
//! `resize`) do the input and output between those answers, and `writeback` alone decides in which
//! order metadata reaches the disk.

#![forbid(unsafe_code)]

mod active;
mod adopt;
mod align;
mod amend;
mod area;
#[cfg(test)]
mod area_tests;
mod backing_name;
mod base;
mod bitmaps;
mod cache_options;
mod chain;
mod check;
mod clock;
mod close;
mod commit_log;
mod compress;
#[cfg(test)]
mod compressed_tests;
mod compressor;
mod container;
mod copy_on_read;
mod corruption;
mod create;
#[cfg(test)]
mod damaged_images;
mod data_file;
mod decompressed;
mod encryption;
mod error;
mod events;
mod expand_zeros;
mod fill;
mod flush;
mod foreign;
mod gate;
mod handover_log;
mod header_update;
mod image;
mod job;
mod keys;
mod layer;
mod map;
mod merge;
mod merged;
mod metadata;
mod options;
mod poison;
mod pool;
mod punch;
mod queue;
mod range;
mod raw;
mod read;
mod references;
mod repair;
mod resize;
#[cfg(test)]
mod scattered_tests;
mod sector_locks;
mod snapshot;
#[cfg(test)]
mod space_tests;
mod statistics;
mod sync;
mod tables;
#[cfg(test)]
mod test_file;
mod vmstate;
mod waiters;
mod write;
mod writeback;
mod zero;

#[cfg(feature = "broken-order")]
pub use amend::amend_breaking;
pub use amend::{Amendment, KeySlots, NewKey, amend, check_amendment};
pub use backing_name::{BadName, resolve as resolve_backing};
pub use base::{Bases, ImageFiles, Layers};
pub use bitmaps::{BitmapAction, BitmapBits, BitmapFacts, BitmapSource, LostBitmaps};
pub use cache_options::CacheOptions;
pub use chain::{Opened, open, open_sharing};
pub use check::Checked;
pub use commit_log::{Commit, CommitLog};
pub use compressor::{CompressedCluster, Compressor};
pub use corruption::{CorruptionReport, Finding, Structure};
pub use create::create;
pub use error::{ErrorKind, ImageError};
pub use foreign::{ForeignInfo, foreign_info};
pub use gaur_foreign::Format as ForeignFormat;
pub use gaur_format::{AllocationPolicy, ImageFormat};
pub use gaur_luks::Passphrase;
pub use handover_log::{HandoverLog, Left, LogError, LogOwner, LogWords, log_checksum};
pub use image::{DataFile, Image, Layer, Unclosed};
pub use job::Job;
pub use keys::Keys;
pub use layer::probe;
pub use map::MapExtent;
pub use merge::Shares;
#[cfg(feature = "broken-order")]
pub use options::BrokenRule;
pub use options::{BackingFile, DetectZeroes, Format, OpenOptions, PassDiscard};
pub use queue::Queue;
pub use references::{Places, References};
#[cfg(feature = "broken-order")]
pub use repair::repair_breaking;
pub use repair::{repair, repair_on};
pub use snapshot::{NewSnapshot, Snapshot, find_snapshot};
pub use statistics::{CacheStatistics, CopyStatistics, HoleStatistics};
pub use vmstate::{BlockOn, VmStateIo, VmStateReader, VmStateSave, VmStateWriter};
