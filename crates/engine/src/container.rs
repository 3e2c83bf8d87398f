//! A LUKS container as an image: its disk lies in one piece behind the header, encrypted.
//!
//! * Sectors are counted from the start of the disk, not of the file.
//! * What was never written decrypts to noise. Nothing of it reads as zeros without being written, so zeros are
//!   encrypted like other data, and discards do nothing.
//! * A file that ends inside a sector has no more of the disk than its whole sectors.

use gaur_block::{Errno, File, Source};
use gaur_format::extension::LuksPointer;
use gaur_luks::{Passphrase, SECTOR_BYTES};

use crate::align;
use crate::encryption::{LayerCipher, RunCipher};
use crate::error::{ErrorKind, ImageError};
use crate::layer::{LayerParts, LayerReader};
use crate::queue::{Change, Queue};
use crate::range::GuestRange;

/// Zeros that are encrypted and written at once, in bytes.
const ZEROES_BYTES: u64 = 256 << 10;

/// The disk of a LUKS container.
pub(crate) struct Container {
    /// Where it begins in the file.
    pub(crate) payload_bytes: u64,
    cipher: LayerCipher,
}

impl Container {
    /// The host offset of a guest offset.
    pub(crate) fn host(&self, at: u64) -> u64 {
        at.saturating_add(self.payload_bytes)
    }

    /// The cipher of a run of the disk at host offset `host`.
    pub(crate) fn cipher(&self, host: u64) -> RunCipher<'_> {
        self.cipher
            .of_run(host, host.wrapping_sub(self.payload_bytes))
    }
}

impl<F: File> LayerReader<'_, F> {
    /// Where the header of a container is: all of the file may be its.
    pub(crate) fn container_header(&self) -> LuksPointer {
        LuksPointer {
            offset: gaur_format::HostOffset(0),
            len_bytes: self.len_bytes,
        }
    }

    pub(crate) async fn load_container(
        &self,
        parts: &mut LayerParts,
        key: Option<&Passphrase>,
    ) -> Result<(), ImageError> {
        let pointer = self.container_header();
        let luks = self.luks_header_at(&pointer).await?;
        let passphrase = key.ok_or_else(|| {
            let text = "image is encrypted (luks), and no key was given for it";
            ImageError::new(ErrorKind::KeyMissing, text)
        })?;
        let payload_bytes = luks.payload_offset_bytes;
        let disk_bytes = self.len_bytes.checked_sub(payload_bytes).ok_or_else(|| {
            let text = format!(
                "luks header says that the disk begins at {payload_bytes}, but the file ends at {}",
                self.len_bytes
            );
            ImageError::new(ErrorKind::Corrupt, text)
        })?;
        let sectors = self.open_luks(&pointer, &luks, passphrase).await?;
        parts.layer.size_bytes = disk_bytes - disk_bytes % SECTOR_BYTES as u64;
        parts.layer.container = Some(Container {
            payload_bytes,
            cipher: LayerCipher::along_disk(sectors),
        });
        Ok(())
    }
}

impl<F: File> Queue<F> {
    /// Serves a request for a range inside the disk of a container.
    pub(crate) async fn change_container(
        &self,
        container: &Container,
        range: GuestRange,
        change: Change<'_>,
    ) -> Result<(), Errno> {
        match change {
            Change::Write(source) | Change::Packed { plain: source, .. } => {
                self.write_container(container, range.start, source).await
            }
            Change::Zero(_) => {
                let most = ZEROES_BYTES.min(range.len);
                let mut zeros = self.pool.take(self.top_file(), most as usize);
                zeros.fill(0);
                let mut rest = range;
                while rest.len > 0 {
                    // Pieces end on multiples of their length, so that all but the first and last are whole sectors.
                    let len = rest.len.min(most - rest.start % most);
                    let piece = zeros.get(..len as usize).ok_or(Errno::EIO)?;
                    self.write_container(container, rest.start, Source::memory(piece))
                        .await?;
                    rest = rest.after(len);
                }
                Ok(())
            }
            Change::Discard => Ok(()),
        }
    }

    async fn write_container(
        &self,
        container: &Container,
        at: u64,
        source: Source<'_>,
    ) -> Result<(), Errno> {
        let host = container.host(at);
        let (file, locks) = (self.top_file(), &self.image.locks);
        let cipher = container.cipher(host);
        align::write_encrypted(file, &self.pool, locks, cipher, host, source).await
    }
}
