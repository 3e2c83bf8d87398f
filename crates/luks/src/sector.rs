//! Encryption of sectors: AES in the modes XTS (IEEE 1619-2007) and CBC (NIST SP 800-38A).
//!
//! The blocks of several sectors go through the cipher together where the mode allows it, because the processor
//! works on many at once, and each call costs: XTS both ways, CBC only to decrypt.

use std::fmt;

use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes192, Aes256, Block};
use zeroize::Zeroizing;

use crate::algorithm::{Cipher, Hash, Iv, KeyBits, Mode};
use crate::secret::Passphrase;

/// Bytes of a sector.
pub const SECTOR_BYTES: usize = 512;
const BLOCK_BYTES: usize = 16;
const BLOCKS: usize = SECTOR_BYTES / BLOCK_BYTES;
/// Sectors that are encrypted together.
const GROUP: usize = 8;

/// Encrypts and decrypts sectors with one key. Shared by threads.
pub struct SectorCipher {
    data: Box<Aes>,
    iv: Iv,
    /// The second key of XTS.
    tweak: Option<Box<Aes>>,
    /// Encrypts sector numbers, for essiv.
    salt: Option<Box<Aes>>,
}

impl fmt::Debug for SectorCipher {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("SectorCipher(..)")
    }
}

#[derive(Clone, Copy)]
enum Way {
    Encrypt,
    Decrypt,
}

impl SectorCipher {
    /// For data that is encrypted as `cipher` says with `key`, of [`Cipher::key_bytes`].
    pub(crate) fn new(cipher: Cipher, key: &[u8]) -> SectorCipher {
        let (data, tweak) = key.split_at(key.len().min(cipher.bits.bytes()));
        let salt = (cipher.iv == Iv::EssivSha256).then(|| {
            let mut digest = Zeroizing::new([0; 32]);
            Hash::Sha256.digest([key, &[]], &mut *digest);
            Box::new(Aes::new(KeyBits::Aes256, &*digest))
        });
        let xts = cipher.mode == Mode::Xts;
        SectorCipher {
            data: Box::new(Aes::new(cipher.bits, data)),
            iv: cipher.iv,
            tweak: xts.then(|| Box::new(Aes::new(cipher.bits, tweak))),
            salt,
        }
    }

    /// The encryption of old qcow2 images: AES-128 in mode CBC, its key being the first 16 bytes of the passphrase,
    /// up to a byte of 0, with zeros behind them. Every passphrase fits; nothing says which is right.
    pub fn legacy(passphrase: &Passphrase) -> SectorCipher {
        let mut key = Zeroizing::new([0; 16]);
        let bytes = passphrase.as_bytes().iter().take_while(|byte| **byte != 0);
        for (to, from) in key.iter_mut().zip(bytes) {
            *to = *from;
        }
        let cipher = Cipher {
            bits: KeyBits::Aes128,
            mode: Mode::Cbc,
            iv: Iv::Plain64,
        };
        SectorCipher::new(cipher, &*key)
    }

    /// Encrypts `bytes` in place: sectors, of which the first has number `sector`. The last may be short by some
    /// blocks, as in the stripes of a key of 24 bytes.
    pub fn encrypt(&self, sector: u64, bytes: &mut [u8]) {
        self.run(Way::Encrypt, sector, bytes);
    }

    /// Decrypts `bytes` in place; the reverse of [`SectorCipher::encrypt`].
    pub fn decrypt(&self, sector: u64, bytes: &mut [u8]) {
        self.run(Way::Decrypt, sector, bytes);
    }

    fn run(&self, way: Way, sector: u64, bytes: &mut [u8]) {
        assert!(
            bytes.len().is_multiple_of(BLOCK_BYTES),
            "whole blocks are encrypted"
        );
        let mut number = sector;
        for group in bytes.chunks_mut(GROUP * SECTOR_BYTES) {
            let mut ivs = [Block::default(); GROUP];
            for iv in &mut ivs {
                *iv = self.iv_of(number);
                number = number.wrapping_add(1);
            }
            for key in [&self.salt, &self.tweak].into_iter().flatten() {
                key.encrypt(&mut ivs);
            }
            match (&self.tweak, way) {
                (Some(_), way) => self.xts(way, &ivs, group),
                (None, Way::Encrypt) => self.cbc_encrypt(ivs, group),
                (None, Way::Decrypt) => self.cbc_decrypt(&ivs, group),
            }
        }
    }

    fn iv_of(&self, sector: u64) -> Block {
        let number = match self.iv {
            Iv::Plain => u128::from(sector as u32),
            Iv::Plain64 | Iv::EssivSha256 => u128::from(sector),
        };
        Block::from(number.to_le_bytes())
    }

    fn xts(&self, way: Way, ivs: &[Block; GROUP], group: &mut [u8]) {
        let mut tweaks = [[0_u128; BLOCKS]; GROUP];
        for (sector, iv) in tweaks.iter_mut().zip(ivs) {
            let mut tweak = u128::from_le_bytes((*iv).into());
            for slot in sector {
                *slot = tweak;
                // Times x in the field of 2^128 elements.
                let carry = (tweak >> 127).wrapping_mul(0x87);
                tweak = (tweak << 1) ^ carry;
            }
        }
        let whiten = |blocks: &mut [Block]| {
            for (block, tweak) in blocks.iter_mut().zip(tweaks.as_flattened()) {
                let sum = u128::from_le_bytes((*block).into()) ^ tweak;
                *block = Block::from(sum.to_le_bytes());
            }
        };
        let (blocks, _) = Block::slice_as_chunks_mut(group);
        whiten(blocks);
        match way {
            Way::Encrypt => self.data.encrypt(blocks),
            Way::Decrypt => self.data.decrypt(blocks),
        }
        whiten(blocks);
    }

    /// A block waits for the one before it, so that those of several sectors go together.
    fn cbc_encrypt(&self, ivs: [Block; GROUP], group: &mut [u8]) {
        let mut chains = ivs;
        for number in 0..BLOCKS {
            let mut sectors = group.chunks_mut(SECTOR_BYTES);
            for chain in &mut chains {
                if let Some(block) = sectors.next().and_then(|sector| nth(sector, number)) {
                    add(chain, block);
                }
            }
            self.data.encrypt(&mut chains);
            for (sector, chain) in group.chunks_mut(SECTOR_BYTES).zip(&chains) {
                if let Some(block) = nth(sector, number) {
                    *block = *chain;
                }
            }
        }
    }

    fn cbc_decrypt(&self, ivs: &[Block; GROUP], group: &mut [u8]) {
        let (blocks, _) = Block::slice_as_chunks_mut(group);
        let mut before = [[Block::default(); BLOCKS]; GROUP];
        let shifted = before.as_flattened_mut();
        for (to, from) in shifted.iter_mut().skip(1).zip(blocks.iter()) {
            *to = *from;
        }
        for (sector, iv) in before.iter_mut().zip(ivs) {
            sector[0] = *iv;
        }
        self.data.decrypt(blocks);
        for (block, before) in blocks.iter_mut().zip(before.as_flattened()) {
            add(block, before);
        }
    }
}

/// A block of a sector, if it is as long.
fn nth(sector: &mut [u8], number: usize) -> Option<&mut Block> {
    Block::slice_as_chunks_mut(sector).0.get_mut(number)
}

fn add(to: &mut Block, from: &Block) {
    for (to, from) in to.iter_mut().zip(from) {
        *to ^= from;
    }
}

/// AES with a key. Its round keys are zeroed when it is dropped.
enum Aes {
    Aes128(Aes128),
    Aes192(Aes192),
    Aes256(Aes256),
}

impl Aes {
    /// The key is as long as `bits` says.
    fn new(bits: KeyBits, key: &[u8]) -> Aes {
        // `Cipher::key_bytes` is what all keys are made by.
        const LEN: &str = "a key has the length of its cipher";
        match bits {
            KeyBits::Aes128 => Aes::Aes128(Aes128::new_from_slice(key).expect(LEN)),
            KeyBits::Aes192 => Aes::Aes192(Aes192::new_from_slice(key).expect(LEN)),
            KeyBits::Aes256 => Aes::Aes256(Aes256::new_from_slice(key).expect(LEN)),
        }
    }

    fn encrypt(&self, blocks: &mut [Block]) {
        match self {
            Aes::Aes128(aes) => aes.encrypt_blocks(blocks),
            Aes::Aes192(aes) => aes.encrypt_blocks(blocks),
            Aes::Aes256(aes) => aes.encrypt_blocks(blocks),
        }
    }

    fn decrypt(&self, blocks: &mut [Block]) {
        match self {
            Aes::Aes128(aes) => aes.decrypt_blocks(blocks),
            Aes::Aes192(aes) => aes.decrypt_blocks(blocks),
            Aes::Aes256(aes) => aes.decrypt_blocks(blocks),
        }
    }
}

#[cfg(test)]
mod tests;
