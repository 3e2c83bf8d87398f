//! What one file of a backing chain says about itself: format, header, tables.
//!
//! Everything read here is hostile. The header is read first and alone; its fields were checked
//! against the limits of the format when it was parsed, and here they are checked against the file:
//! a table must lie inside it. That matters for more than the table itself, because bytes past the
//! end of a file read as zeros, and a refcount table or an L2 table of zeros says that everything is
//! free. Reads are of at most [`PIECE_BYTES`], and memory grows as they arrive.

use std::path::PathBuf;

use gaur_block::{File, FileLimits, Target};
use gaur_foreign::vmdk::descriptor::Part;
use gaur_format::feature::{Autoclear, Incompatible};
use gaur_format::header::{CryptMethod, Header};
use gaur_format::probe::{self, ImageFormat};
use gaur_format::snapshot::{self, Snapshot};
use gaur_format::{Geometry, HostOffset, l1, limit, refcount};
use gaur_luks::Passphrase;

use crate::align;
use crate::bitmaps::{BitmapList, LostBitmaps};
use crate::encryption::LayerCipher;
use crate::error::{ErrorKind, ImageError};
use crate::image::Layer;
use crate::options::Format;
use crate::pool::Pool;
use crate::snapshot::find_snapshot;

/// Longest single read in bytes.
const PIECE_BYTES: u64 = 1 << 20;
/// How much of a header is read at first; its fixed part fits.
const HEADER_START_BYTES: u64 = 512;

/// Looks at both ends of a file to see of which format it is.
///
/// # Errors
/// When the file cannot be read.
pub async fn probe<F: File>(file: &F) -> Result<ImageFormat, ImageError> {
    LayerReader::new(file).await?.probe().await
}

/// One image of a chain, as read when it was opened.
pub(crate) struct LayerParts {
    /// As the image keeps it, still without its mapping.
    pub(crate) layer: Layer,
    pub(crate) file_len_bytes: u64,
    pub(crate) limits: FileLimits,
    /// Entries of the active L1 table as they stand.
    pub(crate) l1: Vec<u64>,
    /// Entries of the refcount table, all sound: host offsets of blocks, 0 for none. Only when the layer is
    /// to be written.
    pub(crate) refcount_table: Vec<u64>,
    /// Only when the layer is to be written.
    pub(crate) snapshots: Vec<Snapshot>,
    /// Length of their table.
    pub(crate) snapshot_table_bytes: u64,
    /// Only when the layer is to be written, and they are kept.
    pub(crate) bitmaps: BitmapList,
    /// Only when the layer is to be written, and they are not kept.
    pub(crate) lost_bitmaps: Option<LostBitmaps>,
    /// Of an encrypted layer.
    pub(crate) cipher: Option<LayerCipher>,
    /// Of a VMDK in files of its own, which are still to be opened.
    pub(crate) extents: Vec<Part>,
}

/// What a file is to be used for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Use<'a> {
    /// How its bytes are read; looked up in the content when it is not given.
    pub(crate) format: Option<Format>,
    /// It will be written to.
    pub(crate) writable: bool,
    /// What it has of persistent bitmaps is removed then.
    pub(crate) drop_bitmaps: bool,
    /// The disk is the one that this internal snapshot keeps; not together with `writable`.
    pub(crate) snapshot: Option<&'a str>,
    /// What opens it if it is encrypted.
    pub(crate) key: Option<&'a Passphrase>,
}

/// Reads one file of a chain.
pub(crate) struct LayerReader<'a, F: File> {
    file: &'a F,
    pool: Pool<F>,
    pub(crate) len_bytes: u64,
}

impl<'a, F: File> LayerReader<'a, F> {
    pub(crate) async fn new(file: &'a F) -> Result<LayerReader<'a, F>, ImageError> {
        let len_bytes = file
            .len()
            .await
            .map_err(|errno| ImageError::io(errno, "cannot tell the length of the file"))?;
        Ok(LayerReader {
            file,
            pool: Pool::new(),
            len_bytes,
        })
    }

    /// Reads what is needed to use the file at `path` as a layer. `table_budget` is how many bytes
    /// of tables may still be read for the chain.
    pub(crate) async fn load(
        &self,
        path: PathBuf,
        purpose: Use<'_>,
        table_budget: &mut u64,
    ) -> Result<LayerParts, ImageError> {
        let format = match purpose.format {
            Some(format) => format,
            None => self.guess(purpose.writable).await?,
        };
        let mut parts = LayerParts {
            layer: Layer {
                path,
                format,
                id: self.file.id(),
                // A disk has whole sectors; what the file lacks of the last one reads as zeros.
                size_bytes: self.len_bytes.next_multiple_of(512),
                header: None,
                qcow2: None,
                foreign: None,
                container: None,
                data_file: None,
            },
            file_len_bytes: self.len_bytes,
            limits: self.file.limits(),
            l1: Vec::new(),
            refcount_table: Vec::new(),
            snapshots: Vec::new(),
            snapshot_table_bytes: 0,
            bitmaps: BitmapList::default(),
            lost_bitmaps: None,
            cipher: None,
            extents: Vec::new(),
        };
        match (format, purpose.snapshot) {
            (Format::Qcow2, _) => self.load_qcow2(&mut parts, purpose, table_budget).await?,
            (Format::Raw, None) => {}
            (Format::Luks, None) => self.load_container(&mut parts, purpose.key).await?,
            (Format::Foreign(format), None) => {
                self.load_foreign(&mut parts, format, purpose, table_budget)
                    .await?;
            }
            (other, Some(which)) => {
                let text =
                    format!("a {other} image has no internal snapshots, and so no {which:?}");
                return Err(ImageError::new(ErrorKind::InvalidInput, text));
            }
        }
        Ok(parts)
    }

    async fn load_qcow2(
        &self,
        parts: &mut LayerParts,
        purpose: Use<'_>,
        table_budget: &mut u64,
    ) -> Result<(), ImageError> {
        let header = self.header().await?;
        check_supported(&header, purpose.writable)?;
        parts.cipher = self.cipher(&header, purpose.key).await?;
        let geometry = header.geometry();
        let (size_bytes, l1_offset, l1_size) = match purpose.snapshot {
            None => (header.size_bytes, header.l1_table_offset, header.l1_size),
            Some(which) => {
                let (snapshots, _) = self.snapshots(&header, &geometry).await?;
                kept_disk(&header, find_snapshot(&snapshots, which)?)?
            }
        };
        parts.layer.size_bytes = size_bytes;
        let l1_bytes = u64::from(l1_size) * 8;
        parts.l1 = self
            .table("l1 table", l1_offset, l1_bytes, table_budget)
            .await?;
        self.check_l2_tables(&parts.l1, &geometry)?;
        if purpose.writable {
            let offset = header.refcount_table_offset;
            let len_bytes = u64::from(header.refcount_table_clusters) * geometry.cluster_size();
            parts.refcount_table = self
                .table("refcount table", offset, len_bytes, table_budget)
                .await?;
            self.check_refcount_blocks(&parts.refcount_table, &geometry)?;
            (parts.snapshots, parts.snapshot_table_bytes) =
                self.snapshots(&header, &geometry).await?;
            if !purpose.drop_bitmaps && header.bitmaps().is_some() {
                parts.bitmaps = self.kept_bitmaps(&header).await?;
            } else {
                parts.lost_bitmaps = self.lost_bitmaps(&header).await?;
            }
        }
        parts.layer.header = Some(header);
        Ok(())
    }

    /// The format that its content shows. What the guest of a raw disk writes would be a header to the
    /// next who guesses, so that a guess is not enough to write to one (`docs/decisions/04`).
    async fn guess(&self, writable: bool) -> Result<Format, ImageError> {
        let format = Format::supported(self.probe().await?)?;
        if format == Format::Raw && writable {
            let text = "looks like a raw image, but its guest could write a qcow2 header into it";
            return Err(ImageError::new(ErrorKind::FormatNotTold, text));
        }
        Ok(format)
    }

    async fn probe(&self) -> Result<ImageFormat, ImageError> {
        if self.file.is_disk() {
            return Ok(ImageFormat::Raw);
        }
        let len_bytes = probe::END_BYTES.min(self.len_bytes);
        let head = self.bytes("first sector", 0, len_bytes).await?;
        if let Some(format) = probe::by_head(&head) {
            return Ok(format);
        }
        let end = self.len_bytes - len_bytes;
        let tail = self.bytes("last sector", end, len_bytes).await?;
        Ok(probe::by_tail(&tail).unwrap_or(ImageFormat::Raw))
    }

    /// Whether it is to be read as a qcow2 image.
    pub(crate) async fn is_qcow2(&self, told: Option<Format>) -> Result<bool, ImageError> {
        match told {
            Some(format) => Ok(format == Format::Qcow2),
            None => Ok(self.probe().await? == ImageFormat::Qcow2),
        }
    }

    pub(crate) async fn header(&self) -> Result<Header, ImageError> {
        Header::parse(&self.header_cluster().await?).map_err(ImageError::format)
    }

    /// The first cluster, which has the header; less when the file ends in it.
    pub(crate) async fn header_cluster(&self) -> Result<Vec<u8>, ImageError> {
        let start = self
            .bytes("header", 0, HEADER_START_BYTES.min(self.len_bytes))
            .await?;
        let cluster_size = Header::cluster_size_of(&start).map_err(ImageError::format)?;
        self.bytes("header", 0, cluster_size.min(self.len_bytes))
            .await
    }

    /// Reads `len_bytes` at `offset`; what the file lacks is zeros.
    pub(crate) async fn padded(&self, offset: u64, len_bytes: u64) -> Result<Vec<u8>, ImageError> {
        let mut bytes = Vec::new();
        self.read_on("image", offset, len_bytes, &mut bytes).await?;
        Ok(bytes)
    }

    /// Reads `len_bytes` at `offset`, all of which the file must have.
    pub(crate) async fn bytes(
        &self,
        what: &str,
        offset: u64,
        len_bytes: u64,
    ) -> Result<Vec<u8>, ImageError> {
        self.check_inside(what, offset, len_bytes)?;
        let mut bytes = Vec::new();
        self.read_on(what, offset, len_bytes, &mut bytes).await?;
        Ok(bytes)
    }

    /// Reads on at `offset` after what is in `bytes`, until those are `len_bytes`.
    async fn read_on(
        &self,
        what: &str,
        offset: u64,
        len_bytes: u64,
        bytes: &mut Vec<u8>,
    ) -> Result<(), ImageError> {
        while (bytes.len() as u64) < len_bytes {
            let done = bytes.len();
            let at = offset + done as u64;
            let piece = (len_bytes - done as u64).min(PIECE_BYTES) as usize;
            bytes.resize(done + piece, 0);
            let target = Target::memory(&mut bytes[done..]);
            align::read(self.file, &self.pool, at, target)
                .await
                .map_err(|errno| {
                    ImageError::io(
                        errno,
                        format!("cannot read {piece} bytes of the {what} at {at}"),
                    )
                })?;
        }
        Ok(())
    }

    /// Whether the file has all of the cluster at host offset `at`.
    pub(crate) fn has_cluster(&self, at: u64, geometry: &Geometry) -> bool {
        let end = at.checked_add(geometry.cluster_size());
        end.is_some_and(|end| end <= self.len_bytes.next_multiple_of(512))
    }

    /// A file may end inside the sector of its last structure: QEMU does not write the padding
    /// behind the last entry of a snapshot table.
    pub(crate) fn check_inside(
        &self,
        what: &str,
        offset: u64,
        len_bytes: u64,
    ) -> Result<(), ImageError> {
        let file_end = self.len_bytes.next_multiple_of(512);
        match offset.checked_add(len_bytes) {
            Some(end) if end <= file_end => Ok(()),
            _ => {
                let file_end = self.len_bytes;
                let text = format!(
                    "{what} takes {len_bytes} bytes at {offset}, but the file ends at {file_end}; \
                     it is damaged or was truncated"
                );
                Err(ImageError::new(ErrorKind::Corrupt, text))
            }
        }
    }

    async fn table(
        &self,
        what: &str,
        offset: HostOffset,
        len_bytes: u64,
        table_budget: &mut u64,
    ) -> Result<Vec<u64>, ImageError> {
        let left = table_budget.checked_sub(len_bytes).ok_or_else(|| {
            let text = format!("{what} of {len_bytes} bytes is more than a chain may still have");
            ImageError::new(ErrorKind::Unsupported, text)
        })?;
        *table_budget = left;
        self.check_inside(what, offset.0, len_bytes)?;
        let mut entries = Vec::new();
        let mut piece = Vec::new();
        let mut done = 0;
        while done < len_bytes {
            piece.clear();
            let count = (len_bytes - done).min(PIECE_BYTES);
            self.read_on(what, offset.0 + done, count, &mut piece)
                .await?;
            entries.extend(
                piece
                    .as_chunks()
                    .0
                    .iter()
                    .map(|raw| u64::from_be_bytes(*raw)),
            );
            done += count;
        }
        Ok(entries)
    }

    /// Entries that cannot be decoded are left to the request that meets them; they fail it.
    fn check_l2_tables(&self, entries: &[u64], geometry: &Geometry) -> Result<(), ImageError> {
        for (index, raw) in entries.iter().enumerate() {
            if let Ok(Some(table)) = l1::decode(*raw, geometry) {
                let what = || format!("l2 table {index}");
                self.check_cluster(what, table.offset, geometry)?;
            }
        }
        Ok(())
    }

    /// A block that cannot be trusted would have its clusters taken for free ones.
    fn check_refcount_blocks(
        &self,
        entries: &[u64],
        geometry: &Geometry,
    ) -> Result<(), ImageError> {
        for (index, raw) in entries.iter().enumerate() {
            let block = refcount::decode_table_entry(*raw, geometry).map_err(|corruption| {
                let text = format!("cannot write to the image: refcount block {index} is damaged");
                ImageError::corrupt(corruption, text)
            })?;
            if let Some(offset) = block {
                self.check_cluster(|| format!("refcount block {index}"), offset, geometry)?;
            }
        }
        Ok(())
    }

    fn check_cluster(
        &self,
        what: impl Fn() -> String,
        offset: HostOffset,
        geometry: &Geometry,
    ) -> Result<(), ImageError> {
        let size = geometry.cluster_size();
        if offset
            .0
            .checked_add(size)
            .is_some_and(|end| end <= self.len_bytes)
        {
            return Ok(());
        }
        self.check_inside(&what(), offset.0, size)
    }

    /// The internal snapshots and the length of their table in bytes. That stands nowhere, so the table
    /// is read until all its entries are there.
    pub(crate) async fn snapshots(
        &self,
        header: &Header,
        geometry: &Geometry,
    ) -> Result<(Vec<Snapshot>, u64), ImageError> {
        if header.nb_snapshots == 0 {
            return Ok((Vec::new(), 0));
        }
        let what = "snapshot table";
        let offset = header.snapshots_offset.0;
        let count = header.nb_snapshots;
        let file_end = self.len_bytes.next_multiple_of(512);
        let longest = limit::SNAPSHOT_TABLE_BYTES_MAX.min(file_end.saturating_sub(offset));
        let mut bytes = Vec::new();
        loop {
            match snapshot::table_len(&bytes, count).map_err(ImageError::format)? {
                snapshot::Progress::Len(_) => break,
                snapshot::Progress::Need(needed) => {
                    self.check_inside(what, offset, needed)?;
                    let next = needed.max(bytes.len() as u64 + PIECE_BYTES).min(longest);
                    self.read_on(what, offset, next, &mut bytes).await?;
                }
            }
        }
        let (snapshots, table_bytes) =
            snapshot::parse_table(&bytes, count, geometry).map_err(ImageError::format)?;
        for (index, snapshot) in snapshots.iter().enumerate() {
            let len_bytes = u64::from(snapshot.l1_size) * 8;
            let what = format!("l1 table of snapshot {index}");
            self.check_inside(&what, snapshot.l1_table_offset.0, len_bytes)?;
        }
        Ok((snapshots, table_bytes))
    }
}

/// The disk that a snapshot keeps: size, place and entries of its L1 table. Snapshots from before they had
/// a size of their own show that of today: what their L1 tables lack was not there.
fn kept_disk(header: &Header, snapshot: &Snapshot) -> Result<(u64, HostOffset, u32), ImageError> {
    if let Some(size_bytes) = snapshot.disk_size {
        let needed = header.geometry().l1_entries_for(size_bytes);
        if u64::from(snapshot.l1_size) < needed {
            let text = format!(
                "snapshot {:?} is damaged: its l1 table has {} entries, its disk needs {needed}",
                String::from_utf8_lossy(&snapshot.name),
                snapshot.l1_size
            );
            return Err(ImageError::new(ErrorKind::Corrupt, text));
        }
    }
    let size_bytes = snapshot.disk_size.unwrap_or(header.size_bytes);
    Ok((size_bytes, snapshot.l1_table_offset, snapshot.l1_size))
}

/// Refuses by name what this engine would misread or damage.
pub(crate) fn check_supported(header: &Header, writable: bool) -> Result<(), ImageError> {
    header.check_features().map_err(ImageError::format)?;
    let unsupported = |text: &str| Err(ImageError::new(ErrorKind::Unsupported, text));
    if writable && header.crypt_method == CryptMethod::Aes {
        return unsupported(
            "image is encrypted as old images are (aes), and can only be opened read-only; \
             'gaur convert -o encrypt.format=luks' makes one that can be written",
        );
    }
    if writable && header.incompatible.has(Incompatible::DATA_FILE) {
        if header.nb_snapshots > 0 {
            return unsupported(
                "image has an external data file and internal snapshots, which would share it; \
                 it can only be opened read-only",
            );
        }
        if header.autoclear.has(Autoclear::RAW_DATA_FILE) && header.backing_file().is_some() {
            return unsupported(
                "image has a raw external data file and a backing file; \
                 it can only be opened read-only",
            );
        }
    }
    if writable && header.incompatible.has(Incompatible::CORRUPT) {
        let text = "image is marked corrupt; open it read-only, or repair it first \
                    (gaur check -r all)";
        return Err(ImageError::new(ErrorKind::Corrupt, text));
    }
    Ok(())
}
