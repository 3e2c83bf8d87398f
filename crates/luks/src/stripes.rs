//! Anti-forensic stripes: a key is spread over many bytes, all of which are needed to have it back, so that
//! erasing any of them erases it. Section 2.4 of the specification.

use zeroize::Zeroizing;

use crate::algorithm::Hash;
use crate::header::STRIPES;
use crate::secret::{Random, VolumeKey};

/// Spreads a key over [`STRIPES`] times its bytes.
pub(crate) fn split(hash: Hash, key: &VolumeKey, random: Random<'_>) -> Zeroizing<Vec<u8>> {
    let len = key.as_bytes().len();
    let mut stripes = Zeroizing::new(vec![0; len.saturating_mul(STRIPES as usize)]);
    let rest = stripes.len().saturating_sub(len);
    let (first, last) = stripes.split_at_mut(rest);
    random(first);
    let sum = mixed(hash, first, len);
    for ((to, sum), key) in last.iter_mut().zip(sum.iter()).zip(key.as_bytes()) {
        *to = sum ^ key;
    }
    stripes
}

/// The key that was spread, of `len` bytes.
pub(crate) fn merge(hash: Hash, stripes: &[u8], len: usize) -> VolumeKey {
    let (first, last) = stripes.split_at(stripes.len().saturating_sub(len));
    let sum = mixed(hash, first, len);
    let mut key = VolumeKey::zeros(len);
    for ((to, sum), last) in key.0.iter_mut().zip(sum.iter()).zip(last) {
        *to = sum ^ last;
    }
    key
}

/// All stripes but the last, each added and the sum diffused.
fn mixed(hash: Hash, stripes: &[u8], len: usize) -> Zeroizing<Vec<u8>> {
    let mut sum = Zeroizing::new(vec![0; len]);
    for stripe in stripes.chunks_exact(len) {
        for (to, from) in sum.iter_mut().zip(stripe) {
            *to ^= from;
        }
        diffuse(hash, &mut sum);
    }
    sum
}

/// Every byte of a block comes to depend on all of its digest's bytes.
fn diffuse(hash: Hash, block: &mut [u8]) {
    for (number, piece) in (0_u32..).zip(block.chunks_mut(hash.digest_bytes())) {
        let mut digest = Zeroizing::new([0; 64]);
        hash.digest([&number.to_be_bytes(), piece], &mut *digest);
        for (to, from) in piece.iter_mut().zip(digest.iter()) {
            *to = *from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_gives_back_what_was_split_and_every_stripe_counts() {
        for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
            for len in [16, 24, 32, 48, 64] {
                let mut key = VolumeKey::zeros(len);
                key.0.iter_mut().zip(1..).for_each(|(to, n)| *to = n);
                let mut state = 7_u8;
                let mut stripes = split(hash, &key, &mut |out| {
                    for byte in out {
                        state = state.wrapping_mul(5).wrapping_add(3);
                        *byte = state;
                    }
                });
                assert_eq!(stripes.len(), len * 4000);
                assert!(merge(hash, &stripes, len).matches(&key));
                stripes[len * 1234] ^= 1;
                assert!(!merge(hash, &stripes, len).matches(&key));
            }
        }
    }
}
