//! Key slots: the volume key under a passphrase. Sections 2.2, 4.1 and 4.2 of the specification.

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::error::{Error, ErrorKind};
use crate::header::{Header, KEY_SLOTS, KeySlot, New};
use crate::secret::{Passphrase, Random, VolumeKey};
use crate::sector::SectorCipher;
use crate::stripes;

/// A new header, its key, and what the first slot holds.
#[derive(Debug)]
pub struct Created {
    /// With one key, in slot 0.
    pub header: Header,
    /// The key of the data.
    pub key: VolumeKey,
    /// What belongs at the slot's place ([`Header::stripes_of`]).
    pub stripes: Vec<u8>,
}

impl Header {
    /// Makes a header with a new key, which `passphrase` opens.
    pub fn create(
        new: &New,
        passphrase: &Passphrase,
        random: Random<'_>,
    ) -> Result<Created, Error> {
        if new.uuid.len() > 39 || !new.uuid.is_ascii() {
            let text = format!("uuid {:?} is not up to 39 bytes of ASCII", new.uuid);
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let mut key = VolumeKey::zeros(new.cipher.key_bytes());
        random(&mut key.0);
        let mut header = Header {
            cipher: new.cipher,
            hash: new.hash,
            payload_offset_bytes: Header::new_bytes(new.cipher),
            digest: [0; 20],
            digest_salt: [0; 32],
            digest_iterations: new.digest_iterations.max(1),
            uuid: new.uuid.clone(),
            slots: Header::new_slots(new.cipher),
        };
        random(&mut header.digest_salt);
        header.digest = header.digest_of(&key);
        let stripes = header.set_slot(0, &key, passphrase, new.iterations, random)?;
        header.check_work()?;
        Ok(Created {
            header,
            key,
            stripes,
        })
    }

    /// Tries a passphrase on an active slot, whose stripes these are; they are decrypted in place.
    pub fn open_slot(
        &self,
        slot: &KeySlot,
        stripes: &mut [u8],
        passphrase: &Passphrase,
    ) -> Option<VolumeKey> {
        let iterations = slot.iterations?;
        if stripes.len() as u64 != self.stripes_bytes() {
            return None;
        }
        self.slot_cipher(slot, passphrase, iterations)
            .decrypt(0, stripes);
        let key = stripes::merge(self.hash, stripes, self.cipher.key_bytes());
        let right: bool = self.digest_of(&key).ct_eq(&self.digest).into();
        right.then_some(key)
    }

    /// Puts the key into a slot, whatever it held. What is returned belongs at the slot's place, and has to be
    /// there before the header is.
    pub fn set_slot(
        &mut self,
        index: usize,
        key: &VolumeKey,
        passphrase: &Passphrase,
        iterations: u32,
        random: Random<'_>,
    ) -> Result<Vec<u8>, Error> {
        let iterations = iterations.max(1);
        let mut salt = [0; 32];
        random(&mut salt);
        let slot = self.slot_mut(index)?;
        slot.salt = salt;
        slot.iterations = Some(iterations);
        let slot = *slot;
        let mut stripes = stripes::split(self.hash, key, random);
        self.slot_cipher(&slot, passphrase, iterations)
            .encrypt(0, &mut stripes);
        // Not secret any more.
        Ok(stripes.to_vec())
    }

    /// Frees a slot. The header has to be written first, and then its stripes be overwritten.
    pub fn erase_slot(&mut self, index: usize) -> Result<(), Error> {
        let slot = self.slot_mut(index)?;
        slot.iterations = None;
        slot.salt = [0; 32];
        Ok(())
    }

    /// The cipher of the data.
    pub fn data_cipher(&self, key: &VolumeKey) -> SectorCipher {
        SectorCipher::new(self.cipher, key.as_bytes())
    }

    fn slot_mut(&mut self, index: usize) -> Result<&mut KeySlot, Error> {
        self.slots.get_mut(index).ok_or_else(|| {
            let text = format!("there is no key slot {index} (0 to {} are)", KEY_SLOTS - 1);
            Error::new(ErrorKind::InvalidInput, text)
        })
    }

    /// The cipher of a slot's stripes.
    fn slot_cipher(
        &self,
        slot: &KeySlot,
        passphrase: &Passphrase,
        iterations: u32,
    ) -> SectorCipher {
        let mut key = Zeroizing::new(vec![0; self.cipher.key_bytes()]);
        self.hash
            .derive(passphrase, &slot.salt, iterations, &mut key);
        SectorCipher::new(self.cipher, &key)
    }

    fn digest_of(&self, key: &VolumeKey) -> [u8; 20] {
        let mut digest = [0; 20];
        let salt = &self.digest_salt;
        self.hash
            .derive_of(key.as_bytes(), salt, self.digest_iterations, &mut digest);
        digest
    }
}
