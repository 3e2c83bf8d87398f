//! Features and configuration space of the block device (virtio 1.3, section 5.2).

use super::wire::{self, DESCRIPTORS_MAX, RANGES_MAX, SECTOR_BYTES, feature};
use crate::serve::Geometry;

/// Length of the configuration space in bytes, without secure erase and zones.
pub(crate) const CONFIG_BYTES: usize = 60;

/// Where the byte is that says whether the write cache is on.
pub(crate) const WRITE_CACHE_AT: usize = 32;

/// A block device as its driver sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockConfig {
    pub(crate) geometry: Geometry,
    pub(crate) read_only: bool,
    pub(crate) rings: u16,
    /// Most segments of data in a request.
    pub(crate) segments: u32,
    /// The driver may turn the write cache off.
    pub(crate) cache_switch: bool,
}

impl BlockConfig {
    /// What is offered to the driver.
    pub(crate) fn features(&self) -> u64 {
        let mut offered = feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::FLUSH
            | feature::TOPOLOGY
            | feature::INDIRECT_DESC
            | feature::EVENT_IDX
            | feature::VERSION_1;
        if self.rings > 1 {
            offered |= feature::MQ;
        }
        if self.cache_switch {
            offered |= feature::CONFIG_WCE;
        }
        if self.read_only || self.geometry.limits.read_only {
            offered | feature::RO
        } else {
            offered | feature::DISCARD | feature::WRITE_ZEROES
        }
    }

    /// The configuration space.
    pub(crate) fn config(&self, write_cache: bool) -> [u8; CONFIG_BYTES] {
        let limits = self.geometry.limits;
        let block = limits.preferred_block.clamp(512, 4096);
        let mut config = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.geometry.size_bytes / SECTOR_BYTES).to_le_bytes());
        put(
            12,
            &self.segments.min(DESCRIPTORS_MAX as u32 - 2).to_le_bytes(),
        );
        put(20, &512_u32.to_le_bytes());
        // Logical blocks of a physical one as a power of two; smallest transfer in logical blocks.
        put(24, &[(block / 512).ilog2() as u8]);
        put(26, &((block / 512) as u16).to_le_bytes());
        put(WRITE_CACHE_AT, &[u8::from(write_cache)]);
        put(34, &self.rings.to_le_bytes());
        put(36, &wire::DISCARD_MAX_SECTORS.to_le_bytes());
        put(40, &(RANGES_MAX as u32).to_le_bytes());
        put(44, &(limits.discard_block / 512).max(1).to_le_bytes());
        put(48, &wire::ZEROES_MAX_SECTORS.to_le_bytes());
        put(52, &(RANGES_MAX as u32).to_le_bytes());
        put(56, &[1]);
        config
    }
}
