//! Keys of an encrypted image: adding and erasing them.
//!
//! ```text
//! add     the key's stripes and the slot's fields to a free slot, FLUSH; the mark that makes it active, FLUSH
//! erase   the mark that makes the slot free, FLUSH; its fields and stripes are overwritten, FLUSH
//! ```
//!
//! A mark has four bytes in one sector. An active slot is never overwritten: who changes a key adds the new one and then
//! erases the old one, so that at any moment one of them opens the image.

use gaur_block::File;
use gaur_format::extension::LuksPointer;
use gaur_format::header::CryptMethod;
use gaur_luks::{Cipher, Hash, Header as LuksHeader, KEY_SLOTS, Passphrase, Random, VolumeKey};

use super::Editor;
use crate::encryption::{failed, stripes_inside};
use crate::error::{ErrorKind, ImageError};
use crate::layer::check_supported;
#[cfg(feature = "broken-order")]
use crate::options::BrokenRule;

/// A key that is to open the image.
#[derive(Clone, Copy, Debug)]
pub struct NewKey<'a> {
    /// What opens it.
    pub passphrase: &'a Passphrase,
    /// How often it is hashed.
    pub iterations: u32,
    /// The slot, which is free; `None` takes the first that is.
    pub slot: Option<usize>,
}

/// The key slots of an encrypted image that nothing has open.
pub struct KeySlots<'a, F: File> {
    editor: Editor<'a, F>,
    pointer: LuksPointer,
    luks: LuksHeader,
}

impl<'a, F: File> KeySlots<'a, F> {
    /// Reads them from an image's file, which is open for writing.
    ///
    /// # Errors
    /// Those of the host, of a damaged image, and of one that is not encrypted with LUKS.
    pub async fn open(file: &'a F) -> Result<KeySlots<'a, F>, ImageError> {
        let editor = Editor::new(file).await?;
        let header = editor.header().await?;
        check_supported(&header, true)?;
        if header.crypt_method != CryptMethod::Luks {
            return Err(refused("the image is not encrypted, so it has no keys"));
        }
        let (pointer, luks) = editor.reader.luks_header(&header).await?;
        Ok(KeySlots {
            editor,
            pointer,
            luks,
        })
    }

    /// The same for the file of a LUKS container.
    ///
    /// # Errors
    /// Those of the host, and of a damaged header.
    pub async fn open_container(file: &'a F) -> Result<KeySlots<'a, F>, ImageError> {
        let editor = Editor::new(file).await?;
        let pointer = editor.reader.container_header();
        let luks = editor.reader.luks_header_at(&pointer).await?;
        Ok(KeySlots {
            editor,
            pointer,
            luks,
        })
    }

    /// Breaks one rule of the write order, for tests of the tests.
    #[cfg(feature = "broken-order")]
    pub fn break_rule(&mut self, broken: Option<BrokenRule>) {
        self.editor.broken = broken;
    }

    /// How the image is encrypted.
    pub fn cipher(&self) -> Cipher {
        self.luks.cipher
    }

    /// The hash of its passphrases.
    pub fn hash(&self) -> Hash {
        self.luks.hash
    }

    /// The slots that a passphrase opens.
    ///
    /// # Errors
    /// Those of the host and of a damaged header.
    pub async fn opened_by(&self, passphrase: &Passphrase) -> Result<Vec<usize>, ImageError> {
        let mut found = Vec::new();
        for index in 0..KEY_SLOTS {
            if self.key_of(index, passphrase).await?.is_some() {
                found.push(index);
            }
        }
        Ok(found)
    }

    async fn key_of(
        &self,
        index: usize,
        passphrase: &Passphrase,
    ) -> Result<Option<VolumeKey>, ImageError> {
        match self.luks.slots.get(index) {
            Some(slot) if slot.iterations.is_some() => {
                let reader = &self.editor.reader;
                reader
                    .luks_key(&self.pointer, &self.luks, slot, passphrase)
                    .await
            }
            _ => Ok(None),
        }
    }

    fn is_active(&self, index: usize) -> Result<bool, ImageError> {
        let slot = self.luks.slots.get(index).ok_or_else(|| {
            refused(format!(
                "there is no key slot {index} (0 to {} are)",
                KEY_SLOTS - 1
            ))
        })?;
        Ok(slot.iterations.is_some())
    }

    /// Adds a key; in which slot. `opener` is one that is there.
    ///
    /// # Errors
    /// [`ErrorKind::WrongKey`] for the opener, [`ErrorKind::InvalidInput`] where the slot is in use or none is free,
    /// and those of the host.
    pub async fn add(
        &mut self,
        opener: &Passphrase,
        new: NewKey<'_>,
        random: Random<'_>,
    ) -> Result<usize, ImageError> {
        let index = match new.slot {
            Some(index) if self.is_active(index)? => {
                let text = format!("key slot {index} is in use; erase it first, or name no slot");
                return Err(refused(text));
            }
            Some(index) => index,
            None => {
                let free = self
                    .luks
                    .slots
                    .iter()
                    .position(|slot| slot.iterations.is_none());
                free.ok_or_else(|| refused("all key slots are in use"))?
            }
        };
        let mut key = None;
        for index in 0..KEY_SLOTS {
            key = self.key_of(index, opener).await?;
            if key.is_some() {
                break;
            }
        }
        let key = key.ok_or_else(|| {
            let text = "the key does not open the image: no key slot has it";
            ImageError::new(ErrorKind::WrongKey, text)
        })?;
        let mut luks = self.luks.clone();
        let stripes = luks
            .set_slot(index, &key, new.passphrase, new.iterations, random)
            .map_err(failed)?;
        luks.check_work().map_err(failed)?;
        let place = match luks.slots.get(index) {
            Some(slot) => stripes_inside(&self.pointer, &luks, slot)?,
            None => return Err(refused("there is no such key slot")),
        };
        self.editor.write(place.start, &stripes).await?;
        let fields = LuksHeader::slot_place(index);
        let bytes = luks.encode();
        let (mark, rest) = split(&bytes, &fields);
        let at = self.pointer.offset.0 + fields.start as u64;
        self.editor.write(at + mark.len() as u64, rest).await?;
        self.editor.flush_before_switch().await?;
        self.editor.write(at, mark).await?;
        self.editor.flush().await?;
        self.luks = luks;
        Ok(index)
    }

    /// Erases keys. Without `force` some key has to be left, and a slot that is free is an error.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for what needs `force`, and those of the host.
    pub async fn erase(
        &mut self,
        slots: &[usize],
        force: bool,
        random: Random<'_>,
    ) -> Result<(), ImageError> {
        let mut luks = self.luks.clone();
        for index in slots {
            if !self.is_active(*index)? && !force {
                return Err(refused(format!("key slot {index} is free already")));
            }
            luks.erase_slot(*index).map_err(failed)?;
        }
        let had_keys = self.luks.active_slots().next().is_some();
        if had_keys && luks.active_slots().next().is_none() && !force {
            let text = "this would erase the last key, and nothing could read the image again";
            return Err(refused(text));
        }
        let bytes = luks.encode();
        for index in slots {
            let fields = LuksHeader::slot_place(*index);
            let at = self.pointer.offset.0 + fields.start as u64;
            self.editor.write(at, split(&bytes, &fields).0).await?;
        }
        self.editor.flush().await?;
        for index in slots {
            let fields = LuksHeader::slot_place(*index);
            let at = self.pointer.offset.0 + fields.start as u64;
            let (mark, rest) = split(&bytes, &fields);
            self.editor.write(at + mark.len() as u64, rest).await?;
            if let Some(slot) = luks.slots.get(*index) {
                let place = stripes_inside(&self.pointer, &luks, slot)?;
                let mut noise = vec![0; (place.end - place.start) as usize];
                random(&mut noise);
                self.editor.write(place.start, &noise).await?;
            }
        }
        self.editor.flush().await?;
        self.luks = luks;
        Ok(())
    }
}

/// The mark of a slot, and its other fields.
fn split<'b>(bytes: &'b [u8], fields: &std::ops::Range<usize>) -> (&'b [u8], &'b [u8]) {
    let slot = bytes.get(fields.clone()).unwrap_or_default();
    slot.split_at(LuksHeader::MARK_BYTES.min(slot.len()))
}

fn refused(text: impl Into<String>) -> ImageError {
    ImageError::new(ErrorKind::InvalidInput, text)
}
