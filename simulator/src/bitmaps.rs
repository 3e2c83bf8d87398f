//! Persistent bitmaps, judged: one that can be used has a bit for every block of the disk that is not what it was
//! when the load began. One that is in use can be if the write-intent map vouches for it; its regions count then.

use gaur_format::Header;
use gaur_format::bitmap::{
    self, AUTO, Bitmap, BitmapCluster, BitmapShape, IN_USE, decode_table_entry,
};
use gaur_sim::FileImage;

/// A bitmap that somebody would believe.
pub struct Believed {
    bitmap: Bitmap,
    /// What a process that did not close it has left.
    map: Option<Bitmap>,
}

impl Believed {
    /// It was not closed.
    pub fn is_recovered(&self) -> bool {
        self.map.is_some()
    }
}

/// The bitmaps that somebody would believe.
pub fn valid(file: &FileImage) -> Result<Vec<Believed>, String> {
    let header = header_of(file)?;
    let Some(pointer) = header.bitmaps() else {
        return Ok(Vec::new());
    };
    let (at, len) = (pointer.directory_offset.0, pointer.directory_len_bytes);
    let bytes = file.bytes(at, len as usize);
    let mut list = bitmap::parse_directory(&bytes, pointer.count, &header.geometry())
        .map_err(|error| format!("the directory of bitmaps: {error}"))?;
    let map = bitmap::take_write_intent_map(&mut list);
    let map = map.filter(|(_, map)| map.is_kept());
    if let Some((_, map)) = &map {
        // QEMU opens no image with a bitmap of another length that is not in use.
        check_len(&header, map)?;
    }
    let mut believed = Vec::new();
    for (number, bitmap) in list.into_iter().enumerate() {
        let vouches = |(first, _): &&(usize, Bitmap)| number >= *first;
        let map = match bitmap.has(IN_USE) {
            true => match map.as_ref().filter(vouches) {
                Some((_, map)) => Some(map.clone()),
                None => continue,
            },
            false => None,
        };
        if bitmap.has(AUTO) {
            believed.push(Believed { bitmap, map });
        }
    }
    Ok(believed)
}

fn check_len(header: &Header, one: &Bitmap) -> Result<BitmapShape, String> {
    let name = String::from_utf8_lossy(&one.name);
    let (granularity, geometry) = (one.granularity_bits, header.geometry());
    let shape = BitmapShape::new(header.size_bytes, granularity, &geometry);
    let shape = shape.map_err(|error| error.to_string())?;
    match shape.table_entries() == one.table_entries {
        true => Ok(shape),
        false => Err(format!("{name} is not for a disk of this size")),
    }
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
        let Believed { bitmap, map } = &one;
        let name = String::from_utf8_lossy(&bitmap.name);
        if map.is_none() {
            check_len(&header, bitmap)?;
        }
        let block_bytes = 1 << bitmap.granularity_bits;
        for (bit, block) in (0..).zip(disk.chunks(block_bytes)) {
            let at = bit as usize * block_bytes;
            let start = first.len().min(at);
            let before = &first[start..first.len().min(start + block.len())];
            let (same, added) = block.split_at(before.len());
            let differs = same != before || added.iter().any(|byte| *byte != 0);
            if !differs || is_set(file, &header, bitmap, bit)? {
                continue;
            }
            let (from, end) = (at as u64, (at + block.len()) as u64);
            let is_in_map = match map {
                Some(map) => is_any_set(file, &header, map, (from, end))?,
                None => false,
            };
            if !is_in_map {
                return Err(format!("{name} says that block {bit} was not changed"));
            }
        }
    }
    Ok(())
}

/// Whether a bitmap has a bit for any of a range of the disk.
fn is_any_set(
    file: &FileImage,
    header: &Header,
    one: &Bitmap,
    (from, end): (u64, u64),
) -> Result<bool, String> {
    let shift = one.granularity_bits;
    for bit in from >> shift..=(end - 1) >> shift {
        if is_set(file, header, one, bit)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_set(file: &FileImage, header: &Header, one: &Bitmap, bit: u64) -> Result<bool, String> {
    let geometry = header.geometry();
    let bits = geometry.cluster_size() * 8;
    if bit / bits >= u64::from(one.table_entries) {
        return Ok(false);
    }
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
