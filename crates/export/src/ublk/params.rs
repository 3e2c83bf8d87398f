//! What the block device looks like: sizes, limits and attributes, from what the device says.

use gaur_block::DeviceLimits;

use super::uapi::{BUFFER_BYTES_MIN, SECTOR_BYTES, take};
use crate::error::ServeError;

/// Length of `struct ublk_params` up to and with its DMA part, which is all that is used here. A
/// driver takes any length and has defaults for the rest.
pub(super) const PARAMS_BYTES: usize = 116;

/// Parts of the structure.
const TYPE_BASIC: u32 = 1 << 0;
const TYPE_DISCARD: u32 = 1 << 1;
const TYPE_DMA_ALIGN: u32 = 1 << 4;

/// Attributes of the block device.
const ATTR_READ_ONLY: u32 = 1 << 0;
const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
const ATTR_FUA: u32 = 1 << 3;

/// The longest discard or write of zeros is this much, in bytes. It is one request whatever its
/// length, and the kernel counts in 32 bits.
const RANGE_BYTES_MAX: u64 = 1 << 30;

/// The largest physical block: what file systems take as a sector of theirs.
const PHYSICAL_BYTES_MAX: u32 = 4096;

/// Memory of zero-copy requests is aligned to this much plus one, in bytes: what O_DIRECT on the
/// image's file asks for.
const DMA_ALIGNMENT: u32 = 511;

/// What the driver is told with `SET_PARAMS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Params {
    pub(super) size_sectors: u64,
    pub(super) read_only: bool,
    /// Longest request in sectors.
    max_sectors: u32,
    physical_shift: u8,
    /// Requests of this length leave nothing to be copied.
    optimal_shift: u8,
    discard_block: u32,
    zero_copy: bool,
}

impl Params {
    /// For a device of `size_sectors` whose requests are at most `buffer_bytes` long.
    pub(super) fn new(
        size_sectors: u64,
        limits: DeviceLimits,
        read_only: bool,
        buffer_bytes: u32,
        zero_copy: bool,
    ) -> Params {
        let preferred = power_of_two(limits.preferred_block);
        let discard_block = power_of_two(limits.discard_block);
        // The kernel discards in physical blocks at least.
        let physical = preferred.min(PHYSICAL_BYTES_MAX).min(discard_block);
        let longest = limits.max_transfer.clamp(BUFFER_BYTES_MIN, buffer_bytes);
        Params {
            size_sectors,
            read_only: read_only || limits.read_only,
            max_sectors: longest / BUFFER_BYTES_MIN * (BUFFER_BYTES_MIN / SECTOR_BYTES as u32),
            physical_shift: shift(physical),
            optimal_shift: shift(preferred.max(physical)),
            discard_block,
            zero_copy,
        }
    }

    /// `struct ublk_params`.
    pub(super) fn encode(&self) -> [u8; PARAMS_BYTES] {
        let mut bytes = [0; PARAMS_BYTES];
        let mut put = |at: usize, value: u32| {
            bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        };
        let mut types = TYPE_BASIC;
        let mut attributes = ATTR_VOLATILE_CACHE | ATTR_FUA;
        if self.read_only {
            attributes = ATTR_READ_ONLY;
        } else {
            types |= TYPE_DISCARD;
        }
        if self.zero_copy {
            types |= TYPE_DMA_ALIGN;
            put(108, DMA_ALIGNMENT);
        }
        put(0, PARAMS_BYTES as u32);
        put(4, types);
        put(8, attributes);
        put(16, self.max_sectors);
        // chunk_sectors (at 20) stays 0. The kernel cuts every request at multiples of it, so at the
        // cluster size a sequential 512 KiB request would come as eight. The engine joins what
        // lies together and cuts at clusters that do not, and knows which; the cluster size is told
        // as the optimal length instead.
        //
        // The shortest length without penalty (io_min) is the physical block: larger ones make file
        // systems pad each write of their log to it.
        bytes[12..16].copy_from_slice(&[
            9,
            self.physical_shift,
            self.optimal_shift,
            self.physical_shift,
        ]);
        bytes[24..32].copy_from_slice(&self.size_sectors.to_ne_bytes());
        if !self.read_only {
            self.put_discard(&mut bytes);
        }
        bytes
    }

    /// `struct ublk_param_discard`: discards and zeros in units of which the image can be rid.
    fn put_discard(&self, bytes: &mut [u8; PARAMS_BYTES]) {
        let mut put = |at: usize, value: u32| {
            bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        };
        let unit = u64::from(self.discard_block);
        let longest = (RANGE_BYTES_MAX / unit).max(1) * unit / SECTOR_BYTES;
        put(44, self.discard_block);
        put(48, longest as u32);
        put(52, longest as u32);
        bytes[56..58].copy_from_slice(&1_u16.to_ne_bytes());
    }
}

/// What of the parameters of an existing device matters to its next server: sectors, and whether it
/// is read-only. `None` for an answer without the basic part.
pub(super) fn decode(bytes: &[u8; PARAMS_BYTES]) -> Option<(u64, bool)> {
    if u32::from_ne_bytes(take(bytes, 4)) & TYPE_BASIC == 0 {
        return None;
    }
    let read_only = u32::from_ne_bytes(take(bytes, 8)) & ATTR_READ_ONLY != 0;
    Some((u64::from_ne_bytes(take(bytes, 24)), read_only))
}

/// Sectors of a block device for `size_bytes`.
///
/// # Errors
/// A block device has whole sectors. Bytes behind the last whole one would be out of reach, and of a
/// sector that is not all there the guest could write what is kept nowhere; only a reader can be shown
/// zeros.
pub(super) fn sectors(size_bytes: u64, read_only: bool) -> Result<u64, ServeError> {
    if size_bytes == 0 {
        return Err(ServeError::new(
            "an image of 0 bytes cannot be a block device",
        ));
    }
    if !read_only && !size_bytes.is_multiple_of(SECTOR_BYTES) {
        return Err(ServeError::new(format!(
            "the image has {size_bytes} bytes, not a multiple of {SECTOR_BYTES}, so its end would \
             be lost in a block device: resize it to {} bytes, or export it read-only",
            size_bytes.next_multiple_of(SECTOR_BYTES)
        )));
    }
    Ok(size_bytes.div_ceil(SECTOR_BYTES))
}

/// The nearest power of two that is a sector at least and fits what the driver takes.
fn power_of_two(bytes: u32) -> u32 {
    let bytes = bytes.clamp(SECTOR_BYTES as u32, 256 << 20);
    1 << bytes.ilog2()
}

fn shift(bytes: u32) -> u8 {
    bytes.trailing_zeros() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(preferred_block: u32, discard_block: u32, max_transfer: u32) -> DeviceLimits {
        DeviceLimits {
            preferred_block,
            discard_block,
            max_transfer,
            read_only: false,
        }
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(take(bytes, at))
    }

    #[test]
    fn an_image_with_clusters_of_64_kib() {
        let limits = limits(65536, 65536, 16 << 20);
        let bytes = Params::new(1 << 21, limits, false, 512 << 10, false).encode();
        assert_eq!(word(&bytes, 0), 116);
        assert_eq!(word(&bytes, 4), TYPE_BASIC | TYPE_DISCARD);
        assert_eq!(word(&bytes, 8), ATTR_VOLATILE_CACHE | ATTR_FUA);
        assert_eq!(bytes[12..16], [9, 12, 16, 12]);
        assert_eq!(word(&bytes, 16), 1024, "512 KiB stay whole");
        assert_eq!(word(&bytes, 20), 0, "nothing is cut at clusters");
        assert_eq!(word(&bytes, 44), 65536);
        assert_eq!(word(&bytes, 48), 1 << 21, "1 GiB");
        assert_eq!(word(&bytes, 52), 1 << 21);
        assert_eq!(bytes[56], 1);
        assert_eq!(decode(&bytes), Some((1 << 21, false)));
    }

    #[test]
    fn limits_that_no_block_device_has_are_rounded() {
        let params = Params::new(8, limits(1, 1, 100), false, 1 << 20, true);
        let bytes = params.encode();
        assert_eq!(word(&bytes, 16), 8, "a page at least");
        assert_eq!(bytes[12..16], [9, 9, 9, 9]);
        assert_eq!(word(&bytes, 44), 512);
        assert_eq!(word(&bytes, 108), 511);
        let params = Params::new(8, limits(3 << 20, u32::MAX, 10_000), false, 1 << 20, false);
        let bytes = params.encode();
        assert_eq!(word(&bytes, 16), 16, "whole pages");
        assert_eq!(bytes[14], 21);
        assert_eq!(word(&bytes, 44), 256 << 20);
        assert_eq!(word(&bytes, 108), 0);
    }

    #[test]
    fn a_read_only_device_takes_no_discards() {
        let bytes = Params::new(8, limits(4096, 4096, 1 << 20), true, 4096, false).encode();
        assert_eq!(word(&bytes, 4), TYPE_BASIC);
        assert_eq!(word(&bytes, 8), ATTR_READ_ONLY);
        assert_eq!(word(&bytes, 44), 0);
        assert_eq!(decode(&bytes), Some((8, true)));
        assert_eq!(decode(&[0; PARAMS_BYTES]), None);
    }

    #[test]
    fn sizes_that_are_no_whole_sectors() {
        assert_eq!(sectors(1024, false), Ok(2));
        assert_eq!(sectors(1025, true), Ok(3));
        let error = sectors(1025, false).unwrap_err().to_string();
        assert!(error.contains("resize it to 1536 bytes"), "{error}");
        assert!(sectors(0, true).is_err());
    }
}
