//! Opening foreign layers: headers, and the files that a VMDK names.

use gaur_block::{Access, File, Host};
use gaur_foreign::vmdk::descriptor::{Descriptor, Layout};
use gaur_foreign::{Disk, Error, Format, limit, vdi, vhd, vhdx, vmdk};

use crate::backing_name;
use crate::chain::{Seen, TABLE_BYTES};
use crate::error::{ErrorKind, ImageError};
use crate::foreign::Foreign;
use crate::layer::{LayerParts, LayerReader, Use};

/// What a foreign image says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForeignInfo {
    /// Length for the guest, in bytes.
    pub size_bytes: u64,
    /// Bytes that are allocated together; `None` where the disk lies in one piece, or in several files.
    pub block_bytes: Option<u64>,
    /// The descriptor of a VMDK that has one.
    pub descriptor: Option<Descriptor>,
}

/// Reads what the image in `file` says of itself, and no other file.
///
/// # Errors
/// When it cannot be read, is damaged, or has something that is not supported.
pub async fn foreign_info<F: File>(file: &F, format: Format) -> Result<ForeignInfo, ImageError> {
    let reader = LayerReader::new(file).await?;
    if format == Format::Vmdk {
        let (disk, descriptor) = reader.vmdk(&mut { TABLE_BYTES }).await?;
        let of_parts = descriptor.as_ref().map(Descriptor::size_bytes);
        return Ok(ForeignInfo {
            size_bytes: disk
                .as_ref()
                .map(|disk| disk.size_bytes)
                .or(of_parts)
                .unwrap_or_default(),
            block_bytes: disk.and_then(|disk| disk.block_bytes),
            descriptor,
        });
    }
    let disk = reader.foreign_disk(format).await?;
    Ok(ForeignInfo {
        size_bytes: disk.size_bytes,
        block_bytes: disk.block_bytes,
        descriptor: None,
    })
}

/// A header that was refused.
fn refused(error: Error) -> ImageError {
    let kind = match error {
        Error::Damaged(_) => ErrorKind::Corrupt,
        Error::Unsupported(_) => ErrorKind::Unsupported,
    };
    ImageError::new(kind, error.to_string())
}

impl<F: File> LayerReader<'_, F> {
    /// Reads what is needed to use the file as a layer of a foreign format. What it names is opened by
    /// [`open_extents`].
    pub(crate) async fn load_foreign(
        &self,
        parts: &mut LayerParts,
        format: Format,
        purpose: Use<'_>,
        table_budget: &mut u64,
    ) -> Result<(), ImageError> {
        if purpose.writable {
            let (kind, word) = match purpose.format {
                Some(_) => (ErrorKind::Unsupported, "is"),
                // A raw disk may look like it.
                None => (ErrorKind::ForeignFormat, "looks like"),
            };
            let text = format!(
                "{word} a {} image, which can only be read; 'gaur convert -O qcow2' makes one that \
                 can be written",
                format.shown()
            );
            return Err(ImageError::new(kind, text));
        }
        let disk = match format {
            Format::Vmdk => {
                let (disk, descriptor) = self.vmdk(table_budget).await?;
                parts.extents = descriptor
                    .filter(|_| disk.is_none())
                    .unwrap_or_default()
                    .extents;
                disk
            }
            other => Some(self.foreign_disk(other).await?),
        };
        if let Some(disk) = disk {
            parts.layer.size_bytes = disk.size_bytes;
            parts.layer.foreign = Some(Foreign::of(disk));
        }
        Ok(())
    }

    /// The disk in a file of a foreign format other than VMDK.
    async fn foreign_disk(&self, format: Format) -> Result<Disk, ImageError> {
        match format {
            Format::Vhd => self.vhd_disk().await,
            Format::Vhdx => self.vhdx_disk().await,
            Format::Vdi | Format::Vmdk => {
                let header = self.head(vdi::HEADER_BYTES).await?;
                vdi::parse(&header, self.len_bytes).map_err(refused)
            }
        }
    }

    async fn vhd_disk(&self) -> Result<Disk, ImageError> {
        let first = self.head(vhd::FOOTER_BYTES).await?;
        let end = self.len_bytes.saturating_sub(vhd::FOOTER_BYTES);
        let last = self.padded(end, vhd::FOOTER_BYTES).await?;
        let footer = vhd::Footer::find(&first, &last).map_err(refused)?;
        let header = match footer.dynamic_header() {
            None => None,
            Some(at) => Some(self.bytes("header", at, vhd::DYNAMIC_BYTES).await?),
        };
        footer
            .disk(header.as_deref(), self.len_bytes)
            .map_err(refused)
    }

    async fn vhdx_disk(&self) -> Result<Disk, ImageError> {
        let headers = self
            .pair("header", vhdx::HEADERS, vhdx::HEADER_BYTES)
            .await?;
        let header = vhdx::find_header(headers.each_ref().map(Vec::as_slice)).map_err(refused)?;
        let patches = match header.log().map_err(refused)? {
            None => None,
            Some(log) => {
                let bytes = self.bytes("log", log.offset, log.len).await?;
                Some(header.replay(&bytes, self.len_bytes).map_err(refused)?)
            }
        };
        let patch = |at: u64, bytes: &mut [u8]| {
            if let Some(patches) = &patches {
                patches.apply(at, bytes);
            }
        };
        let len = vhdx::REGION_TABLE_BYTES;
        let mut tables = self.pair("region table", vhdx::REGION_TABLES, len).await?;
        for (at, table) in vhdx::REGION_TABLES.into_iter().zip(&mut tables) {
            patch(at, table);
        }
        let regions = vhdx::find_regions(tables.each_ref().map(Vec::as_slice)).map_err(refused)?;
        let (at, len) = (regions.metadata.offset, regions.metadata_bytes());
        let mut metadata = self.bytes("metadata", at, len).await?;
        patch(at, &mut metadata);
        regions
            .disk(&metadata, self.len_bytes, patches)
            .map_err(refused)
    }

    /// The disk in a sparse VMDK, and the descriptor that is in it, if there is one; or a descriptor alone.
    async fn vmdk(
        &self,
        table_budget: &mut u64,
    ) -> Result<(Option<Disk>, Option<Descriptor>), ImageError> {
        let head = self.head(vmdk::HEADER_BYTES).await?;
        if !vmdk::is_sparse(&head) {
            let text = self.head(limit::DESCRIPTOR_BYTES_MAX).await?;
            let descriptor = Descriptor::parse(&text).map_err(refused)?;
            if descriptor.extents.is_empty() {
                let text =
                    "not a VMDK image: it has no signature, and is no descriptor with extents";
                return Err(ImageError::new(ErrorKind::Corrupt, text));
            }
            return Ok((None, Some(descriptor)));
        }
        let end = self.len_bytes.saturating_sub(vmdk::FOOTER_BYTES);
        let end = self.padded(end, vmdk::FOOTER_BYTES).await?;
        let header = vmdk::Header::parse(&head, &end).map_err(refused)?;
        let descriptor = match header.descriptor() {
            None => None,
            Some((at, len)) => {
                let text = self.bytes("descriptor", at, len).await?;
                Some(Descriptor::parse(&text).map_err(refused)?)
            }
        };
        let (at, len) = header.directory();
        *table_budget = table_budget.checked_sub(len).ok_or_else(|| {
            let text = format!("directory of {len} bytes is more than a chain may still have");
            ImageError::new(ErrorKind::Unsupported, text)
        })?;
        let directory = self.bytes("directory", at, len).await?;
        let disk = header.disk(&directory, self.len_bytes);
        Ok((Some(disk), descriptor))
    }

    /// A structure that is there twice.
    async fn pair(
        &self,
        what: &str,
        offsets: [u64; 2],
        len_bytes: u64,
    ) -> Result<[Vec<u8>; 2], ImageError> {
        let [first, second] = offsets;
        let first = self.bytes(what, first, len_bytes).await?;
        Ok([first, self.bytes(what, second, len_bytes).await?])
    }

    /// The first bytes of the file; fewer if it is shorter.
    async fn head(&self, len_bytes: u64) -> Result<Vec<u8>, ImageError> {
        self.bytes("header", 0, len_bytes.min(self.len_bytes)).await
    }
}

/// Opens the files that a VMDK's descriptor names, where the files of a chain may be; none for other layers.
pub(crate) async fn open_extents<H: Host>(
    host: &H,
    parts: &mut LayerParts,
    access: Access,
    seen: &mut Seen,
    table_budget: &mut u64,
) -> Result<Vec<H::File>, ImageError> {
    let extents = std::mem::take(&mut parts.extents);
    if extents.is_empty() {
        return Ok(Vec::new());
    }
    let mut foreign = Foreign::default();
    let mut files: Vec<H::File> = Vec::new();
    let mut names: Vec<&[u8]> = Vec::new();
    for extent in &extents {
        let (name, flat_start) = match &extent.layout {
            Layout::Zero => {
                foreign.add(extent.size_bytes, None, 0);
                continue;
            }
            Layout::Flat(name, start) => (name, Some(*start)),
            Layout::Sparse(name) => (name, None),
        };
        let within = |error: ImageError| {
            let name = String::from_utf8_lossy(name);
            let descriptor = &parts.layer.path;
            error.within(format!("cannot open {name:?}, extent of {descriptor:?}"))
        };
        // A file may hold several parts, one behind the other.
        let number = match names.iter().position(|known| known == name) {
            Some(known) => known,
            None => {
                let path = backing_name::resolve(&parts.layer.path, name).map_err(|error| {
                    within(ImageError::new(ErrorKind::Unsupported, error.to_string()))
                })?;
                seen.add_path(&path).map_err(within)?;
                let opened = seen.open(host, &path, access).await;
                let file = opened.map_err(|error| within(ImageError::open(error)))?;
                seen.add_id(file.id(), &path).map_err(within)?;
                foreign.files.push(path);
                names.push(name);
                files.push(file);
                names.len() - 1
            }
        };
        let Some(file) = files.get(number) else {
            continue;
        };
        let disk = extent_disk(file, extent.size_bytes, flat_start, table_budget).await;
        let disk = disk.map_err(within)?;
        foreign.add(extent.size_bytes, Some(disk), number + 1);
    }
    parts.layer.size_bytes = extents.iter().map(|extent| extent.size_bytes).sum();
    if parts.layer.size_bytes > limit::DISK_BYTES_MAX {
        let text = format!(
            "a disk of {} bytes is more than is supported",
            parts.layer.size_bytes
        );
        return Err(ImageError::new(ErrorKind::Unsupported, text));
    }
    parts.layer.foreign = Some(foreign);
    Ok(files)
}

/// The part of a disk that is in a file of its own.
async fn extent_disk<F: File>(
    file: &F,
    size_bytes: u64,
    flat_start: Option<u64>,
    table_budget: &mut u64,
) -> Result<Disk, ImageError> {
    let reader = LayerReader::new(file).await?;
    let len = reader.len_bytes;
    let (disk, what) = match flat_start {
        Some(start) => (Some(Disk::flat(start, size_bytes, len)), "flat"),
        None => (reader.vmdk(table_budget).await?.0, "sparse"),
    };
    let disk = disk.filter(|disk| disk.size_bytes >= size_bytes);
    let disk = disk.ok_or_else(|| {
        let text = format!(
            "{what} file of {len} bytes does not hold the {size_bytes} bytes that the descriptor says; it \
             was truncated or is another"
        );
        ImageError::new(ErrorKind::Corrupt, text)
    })?;
    if disk.is_compressed() {
        let text = "compressed extents in files of their own are not supported";
        return Err(ImageError::new(ErrorKind::Unsupported, text));
    }
    Ok(disk)
}
