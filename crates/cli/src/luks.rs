//! LUKS header parsing, for `gaur info`: the fields that need no key.
//!
//! Source: "LUKS On-Disk Format Specification" 1.2.3, figures 1 and 2; all numbers are big endian.

use serde::Serialize;

/// Bytes of the header: 208 and eight slots of 48.
pub const HEADER_BYTES: u64 = 592;

const MAGIC: &[u8; 6] = b"LUKS\xba\xbe";
const SECTOR_BYTES: u64 = 512;
const SLOTS_AT: usize = 208;
const SLOT_BYTES: usize = 48;
const SLOTS: usize = 8;
/// Mark of a slot that has a key.
const SLOT_ACTIVE: u32 = 0x00ac_71f3;

/// The facts, in qemu-img's schema.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LuksInfo {
    ivgen_alg: String,
    detached_header: bool,
    hash_alg: String,
    cipher_alg: String,
    uuid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    ivgen_hash_alg: Option<String>,
    format: &'static str,
    cipher_mode: String,
    slots: Vec<KeySlot>,
    payload_offset: u64,
    master_key_iters: u32,
}

/// A place for a key.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
struct KeySlot {
    active: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    iters: Option<u32>,
    key_offset: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    stripes: Option<u32>,
}

impl LuksInfo {
    /// Reads a header of version 1; `None` when it is none.
    pub fn parse(bytes: &[u8]) -> Option<LuksInfo> {
        let version = bytes.get(6..8)?;
        if !bytes.starts_with(MAGIC) || version != [0, 1] {
            return None;
        }
        // For example `xts-plain64` or `cbc-essiv:sha256`.
        let mode = text(bytes, 40, 32)?;
        let (cipher_mode, ivgen) = mode.split_once('-')?;
        let (ivgen_alg, ivgen_hash_alg) = match ivgen.split_once(':') {
            Some((ivgen, hash)) => (ivgen, Some(hash.to_owned())),
            None => (ivgen, None),
        };
        let key_bits = u64::from(number(bytes, 108)?) * 8;
        // An xts key is two keys of the cipher.
        let cipher_bits = key_bits / if cipher_mode == "xts" { 2 } else { 1 };
        let slots = (0..SLOTS).map(|slot| KeySlot::parse(bytes, SLOTS_AT + slot * SLOT_BYTES));
        Some(LuksInfo {
            ivgen_alg: ivgen_alg.to_owned(),
            ivgen_hash_alg,
            detached_header: false,
            hash_alg: text(bytes, 72, 32)?,
            cipher_alg: format!("{}-{cipher_bits}", text(bytes, 8, 32)?),
            uuid: text(bytes, 168, 40)?,
            format: "luks",
            cipher_mode: cipher_mode.to_owned(),
            slots: slots.collect::<Option<Vec<KeySlot>>>()?,
            payload_offset: u64::from(number(bytes, 104)?) * SECTOR_BYTES,
            master_key_iters: number(bytes, 164)?,
        })
    }
}

impl KeySlot {
    fn parse(bytes: &[u8], at: usize) -> Option<KeySlot> {
        let active = number(bytes, at)? == SLOT_ACTIVE;
        let if_active = |at| number(bytes, at).map(|value| active.then_some(value));
        Some(KeySlot {
            active,
            iters: if_active(at + 4)?,
            key_offset: u64::from(number(bytes, at + 40)?) * SECTOR_BYTES,
            stripes: if_active(at + 44)?,
        })
    }
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
        let info = LuksInfo::parse(&header()).expect("a header");
        assert_eq!(info.cipher_alg, "aes-128");
        assert_eq!(
            (info.cipher_mode.as_str(), info.ivgen_alg.as_str()),
            ("cbc", "essiv")
        );
        assert_eq!(info.ivgen_hash_alg.as_deref(), Some("sha256"));
        assert_eq!(
            (info.slots[0].active, info.slots[0].key_offset),
            (true, 4096)
        );
        assert!(!info.slots[7].active);
    }

    #[test]
    fn invalid_luks_header_yields_none() {
        let bytes = header();
        assert_eq!(LuksInfo::parse(&bytes[..bytes.len() - 1]), None);
        assert_eq!(LuksInfo::parse(&[]), None);
        let mut other = bytes.clone();
        other[7] = 2;
        assert_eq!(LuksInfo::parse(&other), None);
        let mut other = bytes;
        other[40..56].fill(b'x');
        assert_eq!(LuksInfo::parse(&other), None);
    }
}
