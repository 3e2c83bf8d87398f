//! The header: what is encrypted how, and where the key slots are. Figures 1 to 4 of the specification; all
//! numbers are big endian.

use std::ops::Range;

use crate::algorithm::{Cipher, Hash};
use crate::error::{Error, ErrorKind};
use crate::sector::SECTOR_BYTES;

/// Bytes of the header proper; the key slots lie behind it.
pub const HEADER_BYTES: usize = 592;
/// Number of key slots.
pub const KEY_SLOTS: usize = 8;
/// What a key's length is multiplied by in a key slot.
pub const STRIPES: u32 = 4000;
/// Fewest iterations for new headers and slots, as QEMU and cryptsetup have it.
pub const ITERATIONS_MIN: u32 = 1000;
/// Most runs of an HMAC to try a passphrase on all slots of a header. Two seconds of deriving on a fast
/// machine are 2^24; a header that wants more than this, half a minute's work, was made to keep its reader busy.
pub const WORK_MAX: u64 = 1 << 28;

const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const VERSION: u16 = 1;
const SLOT_ACTIVE: u32 = 0x00ac_71f3;
const SLOT_FREE: u32 = 0x0000_dead;
const SLOTS_AT: usize = 208;
const SLOT_BYTES: usize = 48;
/// Key slots begin here in new headers, and on multiples of this.
const SLOT_ALIGNMENT: u64 = 4096;

/// A place for the volume key under a passphrase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySlot {
    /// Iterations of PBKDF2; `None` when the slot is free.
    pub iterations: Option<u32>,
    /// Salt of the passphrase.
    pub salt: [u8; 32],
    /// First byte of the key's stripes, counted from the start of the header.
    pub offset_bytes: u64,
}

/// A sound header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// How sectors are encrypted.
    pub cipher: Cipher,
    /// Hash of passphrases, stripes and digest.
    pub hash: Hash,
    /// Bytes up to the encrypted data: header and key slots lie before it.
    pub payload_offset_bytes: u64,
    pub(crate) digest: [u8; 20],
    pub(crate) digest_salt: [u8; 32],
    /// Iterations for the digest of the key.
    pub digest_iterations: u32,
    /// A name for people and tools.
    pub uuid: String,
    /// The key slots.
    pub slots: [KeySlot; KEY_SLOTS],
}

/// Choices for a new header.
#[derive(Clone, Debug)]
pub struct New {
    /// How sectors are encrypted.
    pub cipher: Cipher,
    /// Hash of passphrases, stripes and digest.
    pub hash: Hash,
    /// Iterations for the first key slot, at least 1; see [`ITERATIONS_MIN`].
    pub iterations: u32,
    /// Iterations for the digest of the key, at least 1.
    pub digest_iterations: u32,
    /// A name, at most 39 bytes of ASCII.
    pub uuid: String,
}

impl Header {
    /// Parses and checks the first [`HEADER_BYTES`] of a header.
    pub fn parse(bytes: &[u8]) -> Result<Header, Error> {
        let reader = Reader { bytes };
        if reader.array::<6>(0)? != MAGIC {
            return Err(Error::damaged("there is no luks header (wrong magic)"));
        }
        let version = u16::from_be_bytes(reader.array(6)?);
        if version != VERSION {
            let text = format!("luks version {version} is not supported (1 is)");
            return Err(Error::unsupported(text));
        }
        let cipher = Cipher::of_header(
            &reader.text(8, 32)?,
            &reader.text(40, 32)?,
            reader.number(108)?,
        )?;
        let payload_offset_bytes = reader.sectors(104)?;
        if payload_offset_bytes == 0 {
            let text = "the luks header is a detached one (its payload offset is 0)";
            return Err(Error::unsupported(text));
        }
        let header = Header {
            cipher,
            hash: Hash::of_header(&reader.text(72, 32)?)?,
            payload_offset_bytes,
            digest: reader.array(112)?,
            digest_salt: reader.array(132)?,
            digest_iterations: reader.number(164)?,
            uuid: reader.text(168, 40)?,
            slots: reader.slots()?,
        };
        if header.digest_iterations == 0 {
            return Err(Error::damaged(
                "the luks header has a digest of no iterations",
            ));
        }
        header.check_slots()?;
        Ok(header)
    }

    /// The header's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| {
            for (to, from) in out.iter_mut().skip(at).zip(bytes) {
                *to = *from;
            }
        };
        put(0, &MAGIC);
        put(6, &VERSION.to_be_bytes());
        put(8, b"aes");
        put(40, self.cipher.mode_name().as_bytes());
        put(72, self.hash.name().as_bytes());
        put(104, &sectors(self.payload_offset_bytes).to_be_bytes());
        put(108, &(self.cipher.key_bytes() as u32).to_be_bytes());
        put(112, &self.digest);
        put(132, &self.digest_salt);
        put(164, &self.digest_iterations.to_be_bytes());
        put(168, self.uuid.as_bytes());
        for (index, slot) in self.slots.iter().enumerate() {
            let at = slot_at(index);
            let mark = slot.iterations.map_or(SLOT_FREE, |_| SLOT_ACTIVE);
            put(at, &mark.to_be_bytes());
            let iterations = slot.iterations.unwrap_or(0);
            put(at.saturating_add(4), &iterations.to_be_bytes());
            put(at.saturating_add(8), &slot.salt);
            let offset = sectors(slot.offset_bytes);
            put(at.saturating_add(40), &offset.to_be_bytes());
            put(at.saturating_add(44), &STRIPES.to_be_bytes());
        }
        out
    }

    /// Bytes of a key's stripes.
    pub fn stripes_bytes(&self) -> u64 {
        stripes_bytes(self.cipher)
    }

    /// Bytes of the mark that says whether a slot is active, the first of its fields.
    pub const MARK_BYTES: usize = 4;

    /// Where the fields of slot `index` are, from the start of the header.
    pub fn slot_place(index: usize) -> Range<usize> {
        let start = slot_at(index);
        start..start.saturating_add(SLOT_BYTES)
    }

    /// Where the stripes of a slot are, from the start of the header. Inside the payload offset.
    pub fn stripes_of(&self, slot: &KeySlot) -> Range<u64> {
        let start = slot.offset_bytes;
        start..start.saturating_add(self.stripes_bytes())
    }

    /// Slots that have a key.
    pub fn active_slots(&self) -> impl Iterator<Item = &KeySlot> {
        self.slots.iter().filter(|slot| slot.iterations.is_some())
    }

    /// Bytes of a new header with its key slots.
    pub fn new_bytes(cipher: Cipher) -> u64 {
        let slots = (KEY_SLOTS as u64).saturating_mul(slot_step(cipher));
        SLOT_ALIGNMENT.saturating_add(slots)
    }

    /// Free slots as new headers have them.
    pub(crate) fn new_slots(cipher: Cipher) -> [KeySlot; KEY_SLOTS] {
        let mut offset_bytes = SLOT_ALIGNMENT;
        std::array::from_fn(|_| {
            let slot = KeySlot {
                iterations: None,
                salt: [0; 32],
                offset_bytes,
            };
            offset_bytes = offset_bytes.saturating_add(slot_step(cipher));
            slot
        })
    }

    /// Refuses slots that overlap each other, the header or the data: writing one would destroy another.
    fn check_slots(&self) -> Result<(), Error> {
        let mut ranges: Vec<(Range<u64>, usize)> = (0..)
            .zip(&self.slots)
            .map(|(index, slot)| (self.stripes_of(slot), index))
            .collect();
        ranges.sort_by_key(|(range, _)| range.start);
        let mut end = HEADER_BYTES as u64;
        for (range, index) in ranges {
            if range.start < end || range.end > self.payload_offset_bytes {
                let text = format!(
                    "luks key slot {index} is out of place: bytes {} to {} of {}",
                    range.start, range.end, self.payload_offset_bytes
                );
                return Err(Error::damaged(text));
            }
            end = range.end;
        }
        Ok(())
    }

    /// Most iterations of a key slot that leave room for the others under [`WORK_MAX`].
    pub fn iterations_max(cipher: Cipher, hash: Hash) -> u32 {
        let one = hash.work(1, cipher.key_bytes());
        let work = (KEY_SLOTS as u64).saturating_mul(one).max(1);
        let most = (WORK_MAX >> 1).checked_div(work).unwrap_or(0);
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// Refuses a header on which trying a passphrase would take unreasonably long.
    pub fn check_work(&self) -> Result<(), Error> {
        let key_bytes = self.cipher.key_bytes();
        let tries = self.active_slots().map(|slot| {
            let key = self.hash.work(slot.iterations.unwrap_or(0), key_bytes);
            let digest = self.hash.work(self.digest_iterations, self.digest.len());
            key.saturating_add(digest)
        });
        let work = tries.fold(0, u64::saturating_add);
        if work > WORK_MAX {
            let text = format!(
                "the luks header wants {work} rounds of hashing to try a passphrase, at most {WORK_MAX} are done"
            );
            return Err(Error::new(ErrorKind::TooSlow, text));
        }
        Ok(())
    }
}

fn slot_at(index: usize) -> usize {
    SLOTS_AT.saturating_add(index.saturating_mul(SLOT_BYTES))
}

fn stripes_bytes(cipher: Cipher) -> u64 {
    (cipher.key_bytes() as u64).saturating_mul(u64::from(STRIPES))
}

fn slot_step(cipher: Cipher) -> u64 {
    stripes_bytes(cipher).next_multiple_of(SLOT_ALIGNMENT)
}

fn sectors(bytes: u64) -> u32 {
    u32::try_from(bytes >> SECTOR_BYTES.trailing_zeros()).unwrap_or(u32::MAX)
}

/// Takes fields out of a header.
struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N], Error> {
        self.bytes
            .get(at..)
            .and_then(|rest| rest.first_chunk())
            .copied()
            .ok_or_else(|| {
                let text = format!(
                    "the luks header is truncated: {} of {HEADER_BYTES} bytes",
                    self.bytes.len()
                );
                Error::damaged(text)
            })
    }

    fn number(&self, at: usize) -> Result<u32, Error> {
        self.array(at).map(u32::from_be_bytes)
    }

    /// Bytes of a number of sectors.
    fn sectors(&self, at: usize) -> Result<u64, Error> {
        let count = u64::from(self.number(at)?);
        Ok(count.saturating_mul(SECTOR_BYTES as u64))
    }

    /// Text that ends with a zero byte.
    fn text(&self, at: usize, len: usize) -> Result<String, Error> {
        let field = self.bytes.get(at..).and_then(|rest| rest.get(..len));
        let text = field
            .and_then(|field| field.split(|byte| *byte == 0).next())
            .filter(|text| text.len() < len && text.is_ascii());
        text.map(|text| String::from_utf8_lossy(text).into_owned())
            .ok_or_else(|| Error::damaged(format!("the luks header has no text at byte {at}")))
    }

    fn slots(&self) -> Result<[KeySlot; KEY_SLOTS], Error> {
        let mut slots = [KeySlot {
            iterations: None,
            salt: [0; 32],
            offset_bytes: 0,
        }; KEY_SLOTS];
        for (index, slot) in slots.iter_mut().enumerate() {
            *slot = self.slot(index)?;
        }
        Ok(slots)
    }

    fn slot(&self, index: usize) -> Result<KeySlot, Error> {
        let at = slot_at(index);
        let field = |offset: usize| at.saturating_add(offset);
        let mark = self.number(at)?;
        let iterations = self.number(field(4))?;
        let stripes = self.number(field(44))?;
        let wrong = |what: String| Err(Error::damaged(format!("luks key slot {index} {what}")));
        match mark {
            SLOT_ACTIVE if iterations == 0 => return wrong("has no iterations".to_owned()),
            SLOT_ACTIVE if stripes != STRIPES => {
                return wrong(format!("has {stripes} stripes, not {STRIPES}"));
            }
            SLOT_ACTIVE | SLOT_FREE => {}
            mark => return wrong(format!("is neither active nor free ({mark:#010x})")),
        }
        Ok(KeySlot {
            iterations: (mark == SLOT_ACTIVE).then_some(iterations),
            salt: self.array(field(8))?,
            offset_bytes: self.sectors(field(40))?,
        })
    }
}

#[cfg(test)]
mod tests;
