//! Damage to the directory of bitmaps, and to their tables.

use gaur_format::bitmap::{Bitmap, parse_directory};
use gaur_format::extension;

use crate::image::{header, part, put};

/// What is damaged, and whether the other bitmaps are lost with it.
pub const DAMAGES: [(&str, bool); 10] = [
    ("outside", false),
    ("unaligned", false),
    ("too long", false),
    ("flags", false),
    ("type", false),
    ("granularity", false),
    ("reserved", false),
    ("bits outside", false),
    ("count", true),
    ("endless", true),
];

pub fn bitmaps(file: &[u8]) -> Vec<Bitmap> {
    let header = header(file);
    let Some(pointer) = header.bitmaps() else {
        return Vec::new();
    };
    let bytes = part(
        file,
        pointer.directory_offset.0,
        pointer.directory_len_bytes,
    );
    parse_directory(&bytes, pointer.count, &header.geometry()).unwrap()
}

/// Damages the second bitmap, or the directory.
pub fn damage(file: &mut [u8], what: &str) {
    let header = header(file);
    let all = bitmaps(file);
    let at = header.bitmaps().unwrap().directory_offset.0 + all[0].entry_bytes();
    let table = all[1].table_offset.0;
    let far = (file.len() as u64 + (64 << 20)).to_be_bytes();
    match what {
        "outside" => put(file, at, &far),
        "unaligned" => put(file, at, &(table + 8).to_be_bytes()),
        "too long" => put(file, at + 8, &[0x7f; 4]),
        "flags" => put(file, at + 12, &[0x80]),
        "type" => put(file, at + 16, &[9]),
        "granularity" => put(file, at + 17, &[60]),
        "reserved" => put(file, table, &[0xff; 8]),
        "bits outside" => put(file, table, &far),
        "count" => {
            let at = header.extension_at(extension::BITMAPS).unwrap();
            put(file, at + 8, &4_u32.to_be_bytes());
        }
        _ => put(file, at + 20, &[0xff; 4]),
    }
}
