//! Ciphers, modes, initialisation vectors and hashes, by the names that headers give them.

use pbkdf2::pbkdf2_hmac;
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};

use crate::error::Error;
use crate::secret::Passphrase;

/// Bits of an AES key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KeyBits {
    /// AES-128.
    Aes128,
    /// AES-192.
    Aes192,
    /// AES-256.
    #[default]
    Aes256,
}

impl KeyBits {
    /// Bytes of one key.
    pub const fn bytes(self) -> usize {
        match self {
            KeyBits::Aes128 => 16,
            KeyBits::Aes192 => 24,
            KeyBits::Aes256 => 32,
        }
    }

    /// The cipher that QEMU calls by this name, for example `aes-256`.
    pub fn from_name(name: &str) -> Option<KeyBits> {
        match name {
            "aes-128" => Some(KeyBits::Aes128),
            "aes-192" => Some(KeyBits::Aes192),
            "aes-256" => Some(KeyBits::Aes256),
            _ => None,
        }
    }
}

/// How blocks of a sector are chained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// IEEE 1619; a key is two keys of the cipher.
    #[default]
    Xts,
    /// Each block depends on the one before.
    Cbc,
}

impl Mode {
    /// The name in headers and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Xts => "xts",
            Mode::Cbc => "cbc",
        }
    }

    /// The mode with this name.
    pub fn from_name(name: &str) -> Option<Mode> {
        [Mode::Xts, Mode::Cbc]
            .into_iter()
            .find(|mode| mode.name() == name)
    }
}

/// How the initialisation vector of a sector is made of its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Iv {
    /// The number as 64 bits.
    #[default]
    Plain64,
    /// The number's low 32 bits: beyond 2 TiB vectors come again.
    Plain,
    /// The number, encrypted with the SHA-256 of the key.
    EssivSha256,
}

impl Iv {
    /// The name in headers.
    pub const fn name(self) -> &'static str {
        match self {
            Iv::Plain64 => "plain64",
            Iv::Plain => "plain",
            Iv::EssivSha256 => "essiv:sha256",
        }
    }

    /// The generator with this name.
    pub fn from_name(name: &str) -> Option<Iv> {
        [Iv::Plain64, Iv::Plain, Iv::EssivSha256]
            .into_iter()
            .find(|iv| iv.name() == name)
    }
}

/// How sectors are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cipher {
    /// Length of a key of the cipher.
    pub bits: KeyBits,
    /// Chaining.
    pub mode: Mode,
    /// Initialisation vectors.
    pub iv: Iv,
}

impl Cipher {
    /// Bytes of a volume key.
    pub const fn key_bytes(self) -> usize {
        match self.mode {
            Mode::Xts => self.bits.bytes().saturating_mul(2),
            Mode::Cbc => self.bits.bytes(),
        }
    }

    /// What a header says: its cipher (`aes`), its mode (`xts-plain64`) and the bytes of its key.
    pub(crate) fn of_header(name: &str, mode: &str, key_bytes: u32) -> Result<Cipher, Error> {
        if name != "aes" {
            let text = format!("cipher {name:?} is not supported (aes is)");
            return Err(Error::unsupported(text));
        }
        let known = mode
            .split_once('-')
            .and_then(|(mode, iv)| Some((Mode::from_name(mode)?, Iv::from_name(iv)?)));
        let Some((mode, iv)) = known else {
            let text = format!(
                "cipher mode {mode:?} is not supported (xts and cbc are, with plain64, plain or essiv:sha256)"
            );
            return Err(Error::unsupported(text));
        };
        let fits = |bits: &KeyBits| {
            Cipher {
                bits: *bits,
                mode,
                iv,
            }
            .key_bytes() as u64
                == u64::from(key_bytes)
        };
        let mut sizes = [KeyBits::Aes128, KeyBits::Aes192, KeyBits::Aes256].into_iter();
        let Some(bits) = sizes.find(fits) else {
            let text = format!(
                "a key of {key_bytes} bytes does not suit aes-{}",
                mode.name()
            );
            return Err(Error::damaged(text));
        };
        Ok(Cipher { bits, mode, iv })
    }

    /// The mode as a header names it, for example `xts-plain64`.
    pub(crate) fn mode_name(self) -> String {
        format!("{}-{}", self.mode.name(), self.iv.name())
    }
}

/// A hash, for passphrases, stripes and digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Hash {
    /// SHA-1, as old headers have it. What is asked of it here does not need collisions to be hard.
    Sha1,
    /// SHA-256.
    #[default]
    Sha256,
    /// SHA-512.
    Sha512,
}

impl Hash {
    /// The name in headers and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Hash::Sha1 => "sha1",
            Hash::Sha256 => "sha256",
            Hash::Sha512 => "sha512",
        }
    }

    /// The hash with this name.
    pub fn from_name(name: &str) -> Option<Hash> {
        [Hash::Sha1, Hash::Sha256, Hash::Sha512]
            .into_iter()
            .find(|hash| hash.name() == name)
    }

    pub(crate) fn of_header(name: &str) -> Result<Hash, Error> {
        Hash::from_name(name).ok_or_else(|| {
            let text = format!("hash {name:?} is not supported (sha1, sha256 and sha512 are)");
            Error::unsupported(text)
        })
    }

    /// Bytes of a digest.
    pub const fn digest_bytes(self) -> usize {
        match self {
            Hash::Sha1 => 20,
            Hash::Sha256 => 32,
            Hash::Sha512 => 64,
        }
    }

    /// Fills `out` with the digest of `parts` one after the other, as much of it as fits.
    pub(crate) fn digest(self, parts: [&[u8]; 2], out: &mut [u8]) {
        fn run<D: Digest>(parts: [&[u8]; 2], out: &mut [u8]) {
            let mut hash = D::new();
            parts.iter().for_each(|part| hash.update(part));
            for (to, from) in out.iter_mut().zip(hash.finalize()) {
                *to = from;
            }
        }
        match self {
            Hash::Sha1 => run::<Sha1>(parts, out),
            Hash::Sha256 => run::<Sha256>(parts, out),
            Hash::Sha512 => run::<Sha512>(parts, out),
        }
    }

    /// PBKDF2 (RFC 8018) with HMAC of this hash: fills `out` with a key made of a passphrase.
    pub fn derive(self, passphrase: &Passphrase, salt: &[u8], iterations: u32, out: &mut [u8]) {
        self.derive_of(passphrase.as_bytes(), salt, iterations, out);
    }

    pub(crate) fn derive_of(self, secret: &[u8], salt: &[u8], iterations: u32, out: &mut [u8]) {
        match self {
            Hash::Sha1 => pbkdf2_hmac::<Sha1>(secret, salt, iterations, out),
            Hash::Sha256 => pbkdf2_hmac::<Sha256>(secret, salt, iterations, out),
            Hash::Sha512 => pbkdf2_hmac::<Sha512>(secret, salt, iterations, out),
        }
    }

    /// How often deriving `len_bytes` runs the HMAC.
    pub(crate) fn work(self, iterations: u32, len_bytes: usize) -> u64 {
        let blocks = len_bytes.div_ceil(self.digest_bytes()) as u64;
        u64::from(iterations).saturating_mul(blocks)
    }
}
