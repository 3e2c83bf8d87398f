//! Persistent bitmaps, judged: one that is not in use has a bit for every block of the disk that is not what it was
//! when the load began.

use gaur_format::Header;
use gaur_format::bitmap::{
    self, AUTO, Bitmap, BitmapCluster, BitmapShape, IN_USE, decode_table_entry,
};
use gaur_sim::FileImage;

/// The bitmaps that somebody would believe.
pub fn valid(file: &FileImage) -> Result<Vec<Bitmap>, String> {
    let header = header_of(file)?;
    let Some(pointer) = header.bitmaps() else {
        return Ok(Vec::new());
    };
    let (at, len) = (pointer.directory_offset.0, pointer.directory_len_bytes);
    let bytes = file.bytes(at, len as usize);
    let list = bitmap::parse_directory(&bytes, pointer.count, &header.geometry())
        .map_err(|error| format!("the directory of bitmaps: {error}"))?;
    let is_valid = |one: &Bitmap| one.has(AUTO) && !one.has(IN_USE);
    Ok(list.into_iter().filter(is_valid).collect())
}

fn header_of(file: &FileImage) -> Result<Header, String> {
    let start = file.bytes(0, 512);
    let size = Header::cluster_size_of(&start).map_err(|error| error.to_string())?;
    Header::parse(&file.bytes(0, size as usize)).map_err(|error| error.to_string())
}

/// Compares the bitmaps with how `disk` differs from what was there at first.
pub fn check(file: &FileImage, disk: &[u8], first: &[u8]) -> Result<(), String> {
    let header = header_of(file)?;
    for one in valid(file)? {
        let name = String::from_utf8_lossy(&one.name);
        let shape = BitmapShape::new(disk.len() as u64, one.granularity_bits, &header.geometry())
            .map_err(|error| error.to_string())?;
        if shape.table_entries() != one.table_entries {
            return Err(format!("{name} is not for a disk of this size"));
        }
        let block_bytes = 1 << one.granularity_bits;
        for (bit, block) in (0..).zip(disk.chunks(block_bytes)) {
            let start = first.len().min(bit as usize * block_bytes);
            let before = &first[start..first.len().min(start + block.len())];
            let (same, added) = block.split_at(before.len());
            let differs = same != before || added.iter().any(|byte| *byte != 0);
            if differs && !is_set(file, &header, &one, bit)? {
                return Err(format!("{name} says that block {bit} was not changed"));
            }
        }
    }
    Ok(())
}

fn is_set(file: &FileImage, header: &Header, one: &Bitmap, bit: u64) -> Result<bool, String> {
    let geometry = header.geometry();
    let bits = geometry.cluster_size() * 8;
    let raw = file.bytes(one.table_offset.0 + bit / bits * 8, 8);
    let raw = raw.first_chunk().map_or(0, |raw| u64::from_be_bytes(*raw));
    let cluster = decode_table_entry(raw, &geometry).map_err(|what| what.to_string())?;
    Ok(match cluster {
        BitmapCluster::Zeros => false,
        BitmapCluster::Ones => true,
        BitmapCluster::Stored(offset) => {
            let byte = file.bytes(offset.0 + bit % bits / 8, 1);
            byte.first().is_some_and(|byte| byte >> (bit % 8) & 1 == 1)
        }
    })
}
