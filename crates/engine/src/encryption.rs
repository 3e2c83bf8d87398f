//! Encryption of guest data: LUKS 1, whose header lies in clusters of the image, and for reading the AES of old
//! images, whose key is the passphrase itself.
//!
//! * Data clusters are encrypted, those of VM state too. Metadata is not.
//! * The number of a sector is its place in the file that has it: host offset / 512. So a cluster that is
//!   copied to another place is encrypted anew. In old images it is the place on the disk: guest offset / 512.
//! * Guest memory is never encrypted in place: it may be changing, and it is the guest's. Bytes go through a
//!   bounce buffer of the queue, which `align` reads and writes in whole sectors.
//! * Bytes that no mapping shows are no zeros here: space that reads as zeros decrypts to noise. So a new
//!   cluster is filled around the first write.
//! * Compressed clusters are not encrypted, and the format has none in an encrypted image: they fail their
//!   requests, because who has no key could have put them there. Only old images show them: QEMU wrote some, and
//!   a key that nothing checks protects from nobody.

use std::ops::Range;
use std::sync::Arc;

use gaur_block::{Errno, File, Source, Target};
use gaur_format::extension::LuksPointer;
use gaur_format::header::{CryptMethod, Header};
use gaur_luks::{
    HEADER_BYTES, Header as LuksHeader, KeySlot, Passphrase, SECTOR_BYTES, SectorCipher, VolumeKey,
};

use crate::active::Active;
use crate::align;
use crate::error::{ErrorKind, ImageError};
use crate::layer::LayerReader;
use crate::read::MappedLayer;

/// Encryption of a layer's data.
#[derive(Clone)]
pub(crate) struct LayerCipher {
    sectors: Arc<SectorCipher>,
    /// Sectors are counted along the disk, not along the file.
    along_disk: bool,
}

impl LayerCipher {
    /// For data whose sectors are counted along the disk.
    pub(crate) fn along_disk(sectors: SectorCipher) -> LayerCipher {
        LayerCipher {
            sectors: Arc::new(sectors),
            along_disk: true,
        }
    }

    /// For a run of data at host offset `host` that the guest has at `guest`.
    pub(crate) fn of_run(&self, host: u64, guest: u64) -> RunCipher<'_> {
        RunCipher {
            sectors: &self.sectors,
            shift_sectors: match self.along_disk {
                true => sector_of(guest).wrapping_sub(sector_of(host)),
                false => 0,
            },
        }
    }

    /// For whatever is written: only what is counted along the file is.
    pub(crate) fn of_file(&self) -> RunCipher<'_> {
        self.of_run(0, 0)
    }

    /// Whether compressed clusters, which nobody encrypts, are shown.
    pub(crate) fn allows_compressed(&self) -> bool {
        self.along_disk
    }
}

/// The cipher of data that lies in a row.
#[derive(Clone, Copy)]
pub(crate) struct RunCipher<'a> {
    sectors: &'a SectorCipher,
    /// With it the number of a sector in the file becomes the one by which it is encrypted. It wraps: a block of the
    /// file may begin before the disk does.
    shift_sectors: u64,
}

impl RunCipher<'_> {
    /// Encrypts whole sectors that go to `host`.
    pub(crate) fn encrypt(self, host: u64, bytes: &mut [u8]) {
        self.sectors.encrypt(self.number(host), bytes);
    }

    /// Decrypts whole sectors that lie at `host`.
    pub(crate) fn decrypt(self, host: u64, bytes: &mut [u8]) {
        self.sectors.decrypt(self.number(host), bytes);
    }

    fn number(self, host: u64) -> u64 {
        sector_of(host).wrapping_add(self.shift_sectors)
    }
}

fn sector_of(offset: u64) -> u64 {
    offset / SECTOR_BYTES as u64
}

impl<F: File> LayerReader<'_, F> {
    /// The cipher of the image, which `passphrase` opens; `None` for one that is not encrypted.
    pub(crate) async fn cipher(
        &self,
        header: &Header,
        passphrase: Option<&Passphrase>,
    ) -> Result<Option<LayerCipher>, ImageError> {
        let method = header.crypt_method;
        if method == CryptMethod::None {
            return Ok(None);
        }
        let passphrase = passphrase.ok_or_else(|| {
            let text = format!(
                "image is encrypted ({}), and no key was given for it",
                method.name()
            );
            ImageError::new(ErrorKind::KeyMissing, text)
        })?;
        if method == CryptMethod::Aes {
            return Ok(Some(LayerCipher::along_disk(SectorCipher::legacy(
                passphrase,
            ))));
        }
        let (pointer, luks) = self.luks_header(header).await?;
        let sectors = self.open_luks(&pointer, &luks, passphrase).await?;
        Ok(Some(LayerCipher {
            sectors: Arc::new(sectors),
            along_disk: false,
        }))
    }

    /// The cipher of data under a LUKS header, which `passphrase` opens.
    pub(crate) async fn open_luks(
        &self,
        pointer: &LuksPointer,
        luks: &LuksHeader,
        passphrase: &Passphrase,
    ) -> Result<SectorCipher, ImageError> {
        for slot in luks.active_slots() {
            let key = self.luks_key(pointer, luks, slot, passphrase).await?;
            if let Some(key) = key {
                return Ok(luks.data_cipher(&key));
            }
        }
        let text = "the key does not open the image: no key slot has it";
        Err(ImageError::new(ErrorKind::WrongKey, text))
    }

    /// The LUKS header of an encrypted image, and where it lies. Trying a passphrase on all its slots is no endless work.
    pub(crate) async fn luks_header(
        &self,
        header: &Header,
    ) -> Result<(LuksPointer, LuksHeader), ImageError> {
        let missing = || {
            ImageError::new(
                ErrorKind::Corrupt,
                "image does not say where its luks header is",
            )
        };
        let pointer = header.encryption().ok_or_else(missing)?;
        let luks = self.luks_header_at(&pointer).await?;
        Ok((pointer, luks))
    }

    /// The same for a header at a known place.
    pub(crate) async fn luks_header_at(
        &self,
        pointer: &LuksPointer,
    ) -> Result<LuksHeader, ImageError> {
        let what = "luks header";
        self.check_inside(what, pointer.offset.0, pointer.len_bytes)?;
        let start = (HEADER_BYTES as u64).min(pointer.len_bytes);
        let bytes = self.bytes(what, pointer.offset.0, start).await?;
        let luks = LuksHeader::parse(&bytes).map_err(failed)?;
        luks.check_work().map_err(failed)?;
        Ok(luks)
    }

    /// The key of the data, if the passphrase opens this slot.
    pub(crate) async fn luks_key(
        &self,
        pointer: &LuksPointer,
        luks: &LuksHeader,
        slot: &KeySlot,
        passphrase: &Passphrase,
    ) -> Result<Option<VolumeKey>, ImageError> {
        let range = stripes_inside(pointer, luks, slot)?;
        let len_bytes = range.end.saturating_sub(range.start);
        let mut stripes = self.bytes("luks key slot", range.start, len_bytes).await?;
        Ok(luks.open_slot(slot, &mut stripes, passphrase))
    }
}

/// Where in the image the stripes of a slot lie.
pub(crate) fn stripes_inside(
    pointer: &LuksPointer,
    luks: &LuksHeader,
    slot: &KeySlot,
) -> Result<Range<u64>, ImageError> {
    let range = luks.stripes_of(slot);
    if range.end > pointer.len_bytes {
        let text = format!(
            "luks header is cut off: a key slot ends at {} of {} bytes",
            range.end, pointer.len_bytes
        );
        return Err(ImageError::new(ErrorKind::Corrupt, text));
    }
    let start = pointer.offset.0.saturating_add(range.start);
    Ok(start..pointer.offset.0.saturating_add(range.end))
}

pub(crate) fn failed(error: gaur_luks::Error) -> ImageError {
    let kind = match error.kind() {
        gaur_luks::ErrorKind::Damaged => ErrorKind::Corrupt,
        _ => ErrorKind::Unsupported,
    };
    ImageError::new(kind, error.to_string())
}

impl<F: File> MappedLayer<'_, F> {
    /// Fills `target` with guest data from host offset `host` on, which the guest has at `guest`.
    pub(crate) async fn read_data(
        &self,
        host: u64,
        guest: u64,
        target: Target<'_>,
    ) -> Result<(), Errno> {
        let pool = &self.queue.pool;
        let file = self.queue.data_file_of(self.depth).ok_or(Errno::EIO)?;
        match &self.qcow2.cipher {
            None => align::read(file, pool, host, target).await,
            // On the heap, so that requests to plain images do not carry its state.
            Some(cipher) => {
                let cipher = cipher.of_run(host, guest);
                Box::pin(align::read_encrypted(file, pool, cipher, host, target)).await
            }
        }
    }
}

impl<F: File> Active<'_, F> {
    /// Stores guest data at host offset `host`.
    pub(crate) async fn write_data(&self, host: u64, source: Source<'_>) -> Result<(), Errno> {
        let (file, pool) = (self.queue.data_file(), &self.queue.pool);
        let locks = self.image.data_locks();
        match &self.qcow2.cipher {
            None => align::write(file, pool, locks, host, source).await,
            Some(cipher) => {
                let cipher = cipher.of_file();
                let written = align::write_encrypted(file, pool, locks, cipher, host, source);
                Box::pin(written).await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A container whose disk begins at 505 blocks of 4096 bytes, on a file that takes blocks of 8192: the block around
    /// the first sector of the disk begins before it.
    #[test]
    fn sectors_are_numbered_alike_in_blocks_that_begin_before_the_disk() {
        let passphrase = Passphrase::new(b"correct horse".to_vec());
        let cipher = LayerCipher::along_disk(SectorCipher::legacy(&passphrase));
        let payload = 505 * 4096;
        let run = cipher.of_run(payload + 512, 512);
        let mut block = [7; 8192];
        run.encrypt(payload - 4096, &mut block);
        let mut disk = [7; 4096];
        cipher.sectors.encrypt(0, &mut disk);
        assert_eq!(block[4096..], disk);
        run.decrypt(payload, &mut block[4096..]);
        run.decrypt(payload - 4096, &mut block[..4096]);
        assert_eq!(block, [7; 8192]);
    }
}
