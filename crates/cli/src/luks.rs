//! LUKS header parsing, for `gaur info`: the fields that need no key.
//!
//! Source: "LUKS On-Disk Format Specification" 1.2.3, figures 1 and 2; all numbers are big endian.

use serde_json::{Value, json};

use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::info_report;

/// Bytes of the header: 208 and eight slots of 48.
pub const HEADER_BYTES: u64 = 592;

const MAGIC: &[u8; 6] = b"LUKS\xba\xbe";
const SECTOR_BYTES: u64 = 512;
const SLOTS_AT: usize = 208;
const SLOT_BYTES: usize = 48;
const SLOTS: usize = 8;
/// Mark of a slot that has a key.
const SLOT_ACTIVE: u32 = 0x00ac_71f3;

/// What a header of version 1 says, in qemu-img's schema; `None` when it is none.
pub fn facts(bytes: &[u8]) -> Option<Value> {
    let version = bytes.get(6..8)?;
    if !bytes.starts_with(MAGIC) || version != [0, 1] {
        return None;
    }
    // For example `xts-plain64` or `cbc-essiv:sha256`.
    let mode = text(bytes, 40, 32)?;
    let (cipher_mode, ivgen) = mode.split_once('-')?;
    let (ivgen_alg, ivgen_hash_alg) = match ivgen.split_once(':') {
        Some((ivgen, hash)) => (ivgen, Some(hash)),
        None => (ivgen, None),
    };
    let key_bits = u64::from(number(bytes, 108)?) * 8;
    // An xts key is two keys of the cipher.
    let cipher_bits = key_bits / if cipher_mode == "xts" { 2 } else { 1 };
    let cipher = text(bytes, 8, 32)?;
    let slots = (0..SLOTS).map(|slot| key_slot(bytes, SLOTS_AT + slot * SLOT_BYTES));
    Some(info_report::facts([
        ("ivgen-alg", json!(ivgen_alg)),
        ("detached-header", json!(false)),
        ("hash-alg", json!(text(bytes, 72, 32)?)),
        ("cipher-alg", json!(format!("{cipher}-{cipher_bits}"))),
        ("uuid", json!(text(bytes, 168, 40)?)),
        ("ivgen-hash-alg", json!(ivgen_hash_alg)),
        ("format", json!("luks")),
        ("cipher-mode", json!(cipher_mode)),
        ("slots", json!(slots.collect::<Option<Vec<Value>>>()?)),
        ("payload-offset", json!(sectors(bytes, 104)?)),
        ("master-key-iters", json!(number(bytes, 164)?)),
    ]))
}

/// Where the disk is in a container of version 1: behind how many bytes, and how long; `None` for anything else.
pub fn disk_of(file: &ImageFile) -> Result<Option<(u64, u64)>, Failure> {
    let bytes = file.read(0, HEADER_BYTES)?;
    let is_first = bytes.starts_with(MAGIC) && bytes.get(6..8) == Some(&[0, 1]);
    let payload = sectors(&bytes, 104).filter(|payload| is_first && *payload > 0);
    let len = payload.and_then(|payload| file.len_bytes().checked_sub(payload));
    let whole = len.map(|len| len - len % SECTOR_BYTES);
    Ok(payload.zip(whole))
}

/// A place for a key.
fn key_slot(bytes: &[u8], at: usize) -> Option<Value> {
    let active = number(bytes, at)? == SLOT_ACTIVE;
    let if_active = |at| number(bytes, at).map(|value| json!(active.then_some(value)));
    Some(info_report::facts([
        ("active", json!(active)),
        ("iters", if_active(at + 4)?),
        ("key-offset", json!(sectors(bytes, at + 40)?)),
        ("stripes", if_active(at + 44)?),
    ]))
}

/// Bytes of a number of sectors.
fn sectors(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(number(bytes, at)?) * SECTOR_BYTES)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_be_bytes(bytes))
}

/// Text that ends with a zero byte or with its field.
fn text(bytes: &[u8], at: usize, len: usize) -> Option<String> {
    let field = bytes.get(at..at + len)?;
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(len);
    Some(String::from_utf8_lossy(&field[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES as usize];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, MAGIC);
        put(6, &[0, 1]);
        put(8, b"aes");
        put(40, b"cbc-essiv:sha256");
        put(72, b"sha1");
        put(108, &16_u32.to_be_bytes());
        put(SLOTS_AT, &SLOT_ACTIVE.to_be_bytes());
        put(SLOTS_AT + 40, &8_u32.to_be_bytes());
        bytes
    }

    #[test]
    fn luks_header_fields_are_parsed() {
        let info = facts(&header()).expect("a header");
        assert_eq!(info["cipher-alg"], "aes-128");
        assert_eq!(info["cipher-mode"], "cbc");
        assert_eq!(info["ivgen-alg"], "essiv");
        assert_eq!(info["ivgen-hash-alg"], "sha256");
        assert_eq!(info["slots"][0]["active"], true);
        assert_eq!(info["slots"][0]["key-offset"], 4096);
        assert_eq!(info["slots"][7]["active"], false);
    }

    #[test]
    fn invalid_luks_header_yields_none() {
        let bytes = header();
        assert_eq!(facts(&bytes[..bytes.len() - 1]), None);
        assert_eq!(facts(&[]), None);
        let mut other = bytes.clone();
        other[7] = 2;
        assert_eq!(facts(&other), None);
        let mut other = bytes;
        other[40..56].fill(b'x');
        assert_eq!(facts(&other), None);
    }
}
