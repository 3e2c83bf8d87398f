//! The shape of a qcow2 image, and its entries bit by bit.
//!
//! This is the simulator's own reading of the format, on purpose not `gaur-format`: what builds and
//! judges images shares no line with what is being tested. The layout is that of
//! `docs/interop/qcow2.txt` in QEMU's source.

/// Which entries, how large.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// 2 or 3.
    pub version: u32,
    /// Binary logarithm of the cluster size, 9 to 21.
    pub cluster_bits: u32,
    /// Entries of 128 bits with subclusters.
    pub extended: bool,
    /// Binary logarithm of the bits of a refcount, 0 to 6.
    pub refcount_order: u32,
}

/// Bit 63: the refcount is one.
pub const COPIED: u64 = 1 << 63;
/// Bit 62: compressed.
pub const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of a standard entry: reads as zeros.
pub const ZERO_FLAG: u64 = 1;
/// Bits 9 to 55: a host offset.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

impl Shape {
    /// The same with subclusters, in clusters of this size.
    pub fn with_subclusters(self, cluster_bits: u32) -> Shape {
        Shape {
            version: 3,
            cluster_bits,
            extended: true,
            ..self
        }
    }

    /// Bytes of a cluster.
    pub fn cluster_bytes(self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of an L2 entry.
    pub fn entry_bytes(self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    /// Entries of an L2 table.
    pub fn entries(self) -> u64 {
        self.cluster_bytes() / self.entry_bytes()
    }

    /// L1 entries for a disk of `bytes`.
    pub fn l1_entries(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_bytes() * self.entries())
    }

    /// Parts of a cluster that have bits of their own.
    pub fn subclusters(self) -> u64 {
        if self.extended { 32 } else { 1 }
    }

    /// The largest refcount, at most `u32::MAX` here.
    pub fn refcount_max(self) -> u64 {
        match 1_u32 << self.refcount_order {
            bits @ 0..32 => (1 << bits) - 1,
            _ => u64::from(u32::MAX),
        }
    }

    /// Refcounts in a block.
    pub fn block_entries(self) -> u64 {
        (self.cluster_bytes() * 8) >> self.refcount_order
    }

    /// Bits of the offset in a compressed descriptor.
    pub fn compressed_offset_bits(self) -> u32 {
        62 - (self.cluster_bits - 8)
    }

    /// The descriptor of `len` compressed bytes at `offset`.
    pub fn compressed_entry(self, offset: u64, len: u64) -> u64 {
        let sectors = (offset + len - 1) / 512 - offset / 512;
        COMPRESSED | (sectors << self.compressed_offset_bits()) | offset
    }

    /// Offset and end of the sectors that a compressed descriptor names.
    pub fn compressed_range(self, entry: u64) -> std::ops::Range<u64> {
        let bits = self.compressed_offset_bits();
        let offset = entry & ((1 << bits) - 1);
        let sectors = (entry & !COMPRESSED & !COPIED) >> bits;
        offset..(offset / 512 + sectors + 1) * 512
    }

    /// Refcount number `index` of a block.
    pub fn refcount(self, block: &[u8], index: u64) -> u64 {
        let bits = 1_u64 << self.refcount_order;
        if bits < 8 {
            let byte = u64::from(block[(index * bits / 8) as usize]);
            (byte >> (index * bits % 8)) & ((1 << bits) - 1)
        } else {
            let len = (bits / 8) as usize;
            let at = index as usize * len;
            block[at..at + len]
                .iter()
                .fold(0, |sum, &byte| (sum << 8) | u64::from(byte))
        }
    }

    /// Sets refcount number `index` in a block.
    pub fn set_refcount(self, block: &mut [u8], index: u64, value: u64) {
        let bits = 1_u64 << self.refcount_order;
        if bits < 8 {
            let byte = &mut block[(index * bits / 8) as usize];
            let shift = index * bits % 8;
            let mask = ((1 << bits) - 1) << shift;
            *byte = (*byte & !(mask as u8)) | ((value << shift) & mask) as u8;
        } else {
            let len = (bits / 8) as usize;
            let at = index as usize * len;
            block[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
        }
    }
}
