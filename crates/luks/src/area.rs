//! The area of a new image: header and first key slot, made with what the caller has of its machine.

use std::time::Duration;

use crate::algorithm::{Cipher, Hash};
use crate::error::Error;
use crate::header::{Header, ITERATIONS_MIN, New};
use crate::secret::{Passphrase, Random};

/// How long the speed of hashing is measured.
const MEASURED: Duration = Duration::from_millis(100);
/// The digest of the volume key costs this much less than a passphrase.
const DIGEST_DIVISOR: u32 = 8;

/// How new data is to be encrypted, and what a passphrase is to cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encryption {
    /// How sectors are encrypted.
    pub cipher: Cipher,
    /// Hash of passphrases.
    pub hash: Hash,
    /// Processor time that trying a passphrase takes.
    pub unlock_time: Duration,
}

impl Default for Encryption {
    /// As QEMU: AES-256 in mode xts, SHA-256, two seconds.
    fn default() -> Encryption {
        Encryption {
            cipher: Cipher::default(),
            hash: Hash::default(),
            unlock_time: Duration::from_secs(2),
        }
    }
}

impl Encryption {
    /// Bytes of the area with all key slots.
    pub fn area_bytes(&self) -> u64 {
        Header::new_bytes(self.cipher)
    }

    /// Makes a header with a new key, which `passphrase` opens, and its key slot: the start of the area. `clock` is the
    /// processor time of this thread.
    pub fn make(
        &self,
        passphrase: &Passphrase,
        random: Random<'_>,
        clock: &mut dyn FnMut() -> Duration,
    ) -> Result<Vec<u8>, Error> {
        let iterations = iterations(self.cipher, self.hash, self.unlock_time, clock);
        let new = New {
            cipher: self.cipher,
            hash: self.hash,
            iterations,
            digest_iterations: iterations.div_euclid(DIGEST_DIVISOR).max(ITERATIONS_MIN),
            uuid: uuid(random),
        };
        let created = Header::create(&new, passphrase, random)?;
        let first = created.header.slots.first();
        let slot = first.map_or(0, |slot| created.header.stripes_of(slot).start);
        let mut bytes = created.header.encode();
        bytes.resize(slot as usize, 0);
        bytes.extend(created.stripes);
        Ok(bytes)
    }
}

/// Iterations that take so much processor time here, at least as many as QEMU and cryptsetup want, at most as many as a
/// reader does.
pub fn iterations(
    cipher: Cipher,
    hash: Hash,
    time: Duration,
    clock: &mut dyn FnMut() -> Duration,
) -> u32 {
    let wanted = time.min(MEASURED);
    let passphrase = Passphrase::new(b"passphrase".to_vec());
    let mut key = vec![0; cipher.key_bytes()];
    let (mut tried, mut taken) = (1_u32 << 10, Duration::ZERO);
    while taken < wanted && tried < 1 << 28 {
        tried = tried.saturating_mul(2);
        let start = clock();
        hash.derive(&passphrase, b"salt", tried, &mut key);
        taken = clock().saturating_sub(start);
    }
    let all = u128::from(tried).saturating_mul(time.as_nanos());
    let found = all.checked_div(taken.as_nanos()).unwrap_or(all);
    let most = Header::iterations_max(cipher, hash);
    let found = u32::try_from(found).unwrap_or(u32::MAX);
    found.clamp(ITERATIONS_MIN, most)
}

/// A random name (RFC 9562, version 4).
fn uuid(random: Random<'_>) -> String {
    let mut bytes = [0; 16];
    random(&mut bytes);
    let number = u128::from_be_bytes(bytes);
    let number = number & !(0xf << 76) & !(0b11 << 62) | 0x4 << 76 | 0b10 << 62;
    let digits = format!("{number:032x}");
    let (a, rest) = digits.split_at(8);
    let (b, rest) = rest.split_at(4);
    let (c, rest) = rest.split_at(4);
    let (d, e) = rest.split_at(4);
    format!("{a}-{b}-{c}-{d}-{e}")
}
