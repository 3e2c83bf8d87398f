//! Reclaimable space: allocated file space of subclusters that hold no guest data, in clusters that do.
//! The policy *compact* gives it back when the guest discards. Writers that do not know the policy
//! leave such space, and so do crashes.
//!
//! Only for images that a check found sound: then a table or a cluster with the copied flag is
//! referred to once, so nothing is looked at twice. Offsets are bytes of the file.

use gaur_block::Errno;
use gaur_format::allocation::empty_blocks;
use gaur_format::{Header, HostOffset, L2Entry, l1, l2};

use crate::image_file::ImageFile;

/// Bytes of the L1 table that are read at once.
const PIECE_BYTES: u64 = 1 << 20;

/// How many bytes that are.
pub fn bytes(file: &ImageFile, header: &Header) -> Result<u64, Errno> {
    let geometry = header.geometry();
    // What a data file has is not looked at: a check does not open it.
    if !geometry.extended_l2() || geometry.data_file() {
        return Ok(0);
    }
    let mut sum = 0;
    let end = header.l1_table_offset.0 + u64::from(header.l1_size) * 8;
    let mut at = header.l1_table_offset.0;
    while at < end {
        let len = (end - at).min(PIECE_BYTES);
        let piece = file.try_read(at, len)?;
        let entries = piece.as_chunks::<8>().0;
        for raw in entries.iter().map(|raw| u64::from_be_bytes(*raw)) {
            if let Ok(Some(table)) = l1::decode(raw, &geometry)
                && table.copied
            {
                sum += in_table(file, header, table.offset)?;
            }
        }
        at += len;
    }
    Ok(sum)
}

fn in_table(file: &ImageFile, header: &Header, table: HostOffset) -> Result<u64, Errno> {
    let geometry = header.geometry();
    let table = file.try_read(table.0, geometry.cluster_size())?;
    let mut sum = 0;
    for index in 0..geometry.l2_entries() {
        let Some((raw, bitmap)) = l2::raw_at(&table, index, &geometry) else {
            break;
        };
        if let Ok(L2Entry::Cluster {
            host: Some(host),
            copied: true,
            alloc,
            ..
        }) = L2Entry::decode(raw, bitmap, &geometry)
        {
            let (mut from, end) = (0, geometry.cluster_size());
            while let Some((start, upto)) = empty_blocks(alloc, from, end, &geometry) {
                sum += in_file(file, host.0 + start, host.0 + upto)?;
                from = upto;
            }
        }
    }
    Ok(sum)
}

/// Bytes of a range for which the file has space.
fn in_file(file: &ImageFile, start: u64, end: u64) -> Result<u64, Errno> {
    let end = end.min(file.len_bytes());
    let (mut at, mut sum) = (start, 0);
    while at < end {
        let extent = file.extent_at(at)?;
        let len = extent.len.clamp(1, end - at);
        sum += if extent.data { len } else { 0 };
        at += len;
    }
    Ok(sum)
}
