//! A chunk: its digest, the name of its object, and how it is packed.

use std::cell::RefCell;
use std::fmt;

use super::CHUNK_BYTES;

/// Level of zstd: what it gains above costs more time than most stores take.
const LEVEL: i32 = 3;

/// The BLAKE3 hash of a chunk's bytes as the guest sees them, or of a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub(super) [u8; 32]);

impl Digest {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    /// Reads 64 digits in lower case.
    pub fn parse(text: &str) -> Option<Digest> {
        let lower = !text.bytes().any(|byte| byte.is_ascii_uppercase());
        let hash = blake3::Hash::from_hex(text).ok().filter(|_| lower)?;
        Some(Digest(*hash.as_bytes()))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// How a chunk is in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Not at all: it is zeros.
    Zero,
    /// As it is.
    Plain(Digest),
    /// As a frame of zstd.
    Zstd(Digest),
}

/// What the object of a packed chunk ends in.
const PACKED: &str = ".zst";
/// The folder of the chunks.
pub(super) const FOLDER: &str = "chunks";

/// The folder of chunks that begin with a byte, and the name of an object there.
pub(super) fn shelf(first: u8) -> String {
    format!("{FOLDER}/{first:02x}")
}

pub(super) fn object(digest: &Digest, packed: bool) -> String {
    let end = if packed { PACKED } else { "" };
    format!("{}/{digest}{end}", shelf(digest.0[0]))
}

/// The chunk that an object of this name holds, and whether it is packed.
pub(super) fn parse_object(file_name: &str) -> Option<(Digest, bool)> {
    let (digest, packed) = match file_name.strip_suffix(PACKED) {
        Some(digest) => (digest, true),
        None => (file_name, false),
    };
    Some((Digest::parse(digest)?, packed))
}

/// Whether an object of a chunk can have this length.
pub(super) fn fits(len_bytes: u64, packed: bool) -> bool {
    match packed {
        true => (1..CHUNK_BYTES).contains(&len_bytes),
        false => len_bytes == CHUNK_BYTES,
    }
}

/// Packs a chunk; nothing when it would not become shorter.
pub(super) fn pack(plain: &[u8]) -> Option<Vec<u8>> {
    thread_local! {
        static PACKER: RefCell<zstd_safe::CCtx<'static>> = RefCell::new(zstd_safe::CCtx::create());
    }
    let mut packed = Vec::with_capacity(plain.len().saturating_sub(1));
    // What does not fit into less than it takes plain is an error.
    let fitted = PACKER.with(|packer| packer.borrow_mut().compress(&mut packed, plain, LEVEL));
    fitted.is_ok().then_some(packed)
}

/// The bytes of a chunk from those of its object; the error is in words.
pub(super) fn unpack(bytes: &[u8], digest: &Digest, packed: bool) -> Result<Vec<u8>, &'static str> {
    let plain = match packed {
        true => {
            let mut plain = Vec::with_capacity(CHUNK_BYTES as usize);
            let unpacked = zstd_safe::decompress(&mut plain, bytes);
            unpacked.map_err(|_| "is no zstd of a chunk")?;
            plain
        }
        false => bytes.to_vec(),
    };
    if plain.len() as u64 != CHUNK_BYTES {
        return Err("has another length than a chunk");
    }
    match Digest::of(&plain) == *digest {
        true => Ok(plain),
        false => Err("holds other bytes than its digest says"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_chunk_round_trips_and_wrong_bytes_are_told() {
        let mut plain = vec![0; CHUNK_BYTES as usize];
        plain[5] = 7;
        let digest = Digest::of(&plain);
        let mut packed = pack(&plain).unwrap();
        assert!(packed.len() < 1000 && fits(packed.len() as u64, true));
        assert_eq!(unpack(&packed, &digest, true).unwrap(), plain);
        assert_eq!(unpack(&plain, &digest, false).unwrap(), plain);
        assert!(unpack(&plain[1..], &digest, false).is_err());
        assert!(unpack(&packed, &Digest::of(b"x"), true).is_err());
        packed.truncate(9);
        assert!(unpack(&packed, &digest, true).is_err());
        // More than a chunk is given up at a chunk's length.
        let bomb = vec![0; 64 << 20];
        let mut packed = Vec::with_capacity(1 << 20);
        zstd_safe::compress(&mut packed, &bomb, 3).unwrap();
        assert!(unpack(&packed, &digest, true).is_err());
    }

    #[test]
    fn noise_is_not_packed() {
        let mut noise = vec![0; CHUNK_BYTES as usize];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        assert_eq!(pack(&noise), None);
    }

    #[test]
    fn names_of_objects_are_those_of_chunks() {
        let digest = Digest::of(b"x");
        for packed in [true, false] {
            let name = object(&digest, packed);
            let (folder, file) = name.rsplit_once('/').unwrap();
            assert_eq!(folder, shelf(digest.0[0]));
            assert_eq!(parse_object(file), Some((digest, packed)));
        }
        let upper = digest.to_string().to_uppercase();
        for other in ["", "x", ".zst", &upper, "00.zst"] {
            assert_eq!(parse_object(other), None, "{other}");
        }
    }
}
