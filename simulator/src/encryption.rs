//! Encrypted images: two fixed headers, and the ciphers that they stand for.
//!
//! The cipher is the one that is tested: vectors of its standards and QEMU say that it is right. What is
//! looked at here is where it is used, and with which sector numbers, which is the simulator's own arithmetic.

use std::sync::OnceLock;

use gaur_luks::{
    Cipher, Hash, Header, Iv, KeyBits, Mode, New, Passphrase, SECTOR_BYTES, SectorCipher,
};
use gaur_sim::{FileImage, Random};

/// The header extension that leads to the LUKS header.
pub const LUKS_EXTENSION: u32 = 0x0537_be77;

const SECTOR: u64 = SECTOR_BYTES as u64;

/// How an image is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    /// AES-128 in CBC mode, essiv: a byte changes all that follow in its sector.
    Cbc,
    /// AES-128 in XTS mode.
    Xts,
}

struct Made {
    /// Header and first key slot; what else a header has is free slots.
    area: Vec<u8>,
    cipher: SectorCipher,
}

impl Encryption {
    /// Bytes of the area with header and key.
    pub fn area(self) -> &'static [u8] {
        &self.made().area
    }

    /// What opens all of them.
    pub fn passphrase() -> Passphrase {
        Passphrase::new(b"simulated".to_vec())
    }

    /// Encrypts whole sectors that go to `host`.
    pub fn encrypt(self, host: u64, bytes: &mut [u8]) {
        self.made().cipher.encrypt(host / SECTOR, bytes);
    }

    /// Reads what is at `host`.
    pub fn read(self, file: &FileImage, host: u64, target: &mut [u8]) {
        let start = host / SECTOR * SECTOR;
        let end = (host + target.len() as u64).next_multiple_of(SECTOR);
        let mut sectors = file.bytes(start, (end - start) as usize);
        self.made().cipher.decrypt(start / SECTOR, &mut sectors);
        let skip = (host - start) as usize;
        target.copy_from_slice(&sectors[skip..skip + target.len()]);
    }

    /// What the header of an image says: `None` for one that is not encrypted.
    pub fn of(file: &FileImage) -> Result<Option<Encryption>, String> {
        match file.bytes(32, 4).as_slice() {
            [0, 0, 0, 0] => return Ok(None),
            [0, 0, 0, 2] => {}
            other => return Err(format!("the encryption method is {other:?}")),
        }
        let version = file.bytes(7, 1);
        let mut at = if version == [3] { 112 } else { 72 };
        loop {
            let word = |at: u64| {
                let bytes = file.bytes(at, 4);
                bytes
                    .iter()
                    .fold(0, |sum: u32, &byte| sum << 8 | u32::from(byte))
            };
            let (kind, len) = (word(at), word(at + 4));
            if kind == LUKS_EXTENSION {
                let offset = u64::from(word(at + 8)) << 32 | u64::from(word(at + 12));
                let known = [Encryption::Cbc, Encryption::Xts].into_iter();
                let mut same =
                    known.filter(|one| file.bytes(offset, one.area().len()) == one.area());
                return same
                    .next()
                    .map(Some)
                    .ok_or("the luks header was changed".to_owned());
            }
            if kind == 0 || at > 4096 {
                return Err("the pointer to the luks header is gone".to_owned());
            }
            at += 8 + u64::from(len).next_multiple_of(8);
        }
    }

    fn made(self) -> &'static Made {
        static CBC: OnceLock<Made> = OnceLock::new();
        static XTS: OnceLock<Made> = OnceLock::new();
        match self {
            Encryption::Cbc => CBC.get_or_init(|| make(Mode::Cbc, Iv::EssivSha256)),
            Encryption::Xts => XTS.get_or_init(|| make(Mode::Xts, Iv::Plain64)),
        }
    }
}

fn make(mode: Mode, iv: Iv) -> Made {
    let new = New {
        cipher: Cipher {
            bits: KeyBits::Aes128,
            mode,
            iv,
        },
        hash: Hash::Sha256,
        iterations: 1,
        digest_iterations: 1,
        uuid: String::new(),
    };
    let mut random = Random::new(0x6c75_6b73);
    let made = Header::create(&new, &Encryption::passphrase(), &mut |out: &mut [u8]| {
        for byte in out {
            *byte = random.number() as u8;
        }
    });
    let made = made.expect("a header of small numbers");
    let place = made.header.stripes_of(&made.header.slots[0]);
    let mut area = made.header.encode();
    area.resize(place.start as usize, 0);
    area.extend(&made.stripes);
    Made {
        cipher: made.header.data_cipher(&made.key),
        area,
    }
}
