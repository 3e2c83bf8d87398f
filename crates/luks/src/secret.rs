//! Secrets: zeroed when they are dropped, and never shown.

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// Fills memory with random bytes that cannot be guessed.
pub type Random<'a> = &'a mut dyn FnMut(&mut [u8]);

/// What opens a key slot.
#[derive(Clone)]
pub struct Passphrase(Zeroizing<Vec<u8>>);

impl Passphrase {
    /// Takes over the bytes, all of which count: a newline at the end, too.
    pub fn new(bytes: Vec<u8>) -> Passphrase {
        Passphrase(Zeroizing::new(bytes))
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Passphrase(..)")
    }
}

/// The key that the sectors are encrypted with. Key slots keep it, each under a passphrase of its own.
#[derive(Clone)]
pub struct VolumeKey(pub(crate) Zeroizing<Vec<u8>>);

impl VolumeKey {
    pub(crate) fn zeros(len_bytes: usize) -> VolumeKey {
        VolumeKey(Zeroizing::new(vec![0; len_bytes]))
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Compares in a time that does not tell where they differ.
    pub fn matches(&self, other: &VolumeKey) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Debug for VolumeKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("VolumeKey(..)")
    }
}
