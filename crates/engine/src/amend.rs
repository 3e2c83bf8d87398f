//! Changes of what an image is, while nothing has it open: version, refcount width, features, names, keys.
//!
//! It works on the file and not on an opened image, because the tables that an opened image keeps in memory are what
//! changes. Crash rule (O5): what is new goes to space that nothing refers to, FLUSH, one write of the header's first
//! sector, FLUSH; what only the old header led to is given back after that. Each such step leaves a whole image, so an
//! amendment that was interrupted has made some of its changes.

use gaur_block::{Errno, File, Source};
use gaur_format::extension::{self, Extension};
use gaur_format::feature::{Autoclear, Compatible, Incompatible};
use gaur_format::header::{CompressionType, Header, HeaderChange};
use gaur_format::l2::{self, L2Entry};
use gaur_format::{AllocationPolicy, Geometry, Version, l1, limit};

use crate::align;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::layer::{LayerReader, check_supported};
#[cfg(feature = "broken-order")]
use crate::options::BrokenRule;
use crate::pool::Pool;
use crate::repair::repair_if_dirty;
use crate::sector_locks::SectorLocks;

mod key_slots;
mod refcounts;
mod snapshots;

pub use key_slots::{KeySlots, NewKey};

/// What of an image is to change. The default changes nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amendment {
    /// Version of the format. For version 2 no cluster of the disk may be marked as zeros
    /// ([`Queue::expand_zeros`](crate::Queue::expand_zeros)), and there may be no bitmaps.
    pub version: Option<Version>,
    /// Refcount width as a power of two, 0 to 6.
    pub refcount_order: Option<u32>,
    /// Refcount updates may be postponed.
    pub lazy_refcounts: Option<bool>,
    /// Name of the external data file, which has the same content; only where there is one.
    pub data_file: Option<Vec<u8>>,
    /// What is done with the host's space.
    pub allocation: Option<AllocationPolicy>,
}

/// Amends the qcow2 image in `file`, which must be open for writing, and which nothing else uses. If it fails, or `job` is
/// cancelled, some of the changes may have been made, each of them whole.
///
/// # Errors
/// Those of the host; an image that is damaged; what the format does not allow, before anything has changed.
pub async fn amend<F: File>(file: &F, amendment: &Amendment, job: &Job) -> Result<(), ImageError> {
    repair_if_dirty(file).await?;
    Editor::new(file).await?.amend(amendment, job).await
}

/// Whether [`amend`] would refuse this, marks of zeros and bitmaps aside, which the caller can take away.
///
/// # Errors
/// As [`amend`].
pub async fn check_amendment<F: File>(file: &F, amendment: &Amendment) -> Result<(), ImageError> {
    let editor = Editor::new(file).await?;
    let header = editor.header().await?;
    check_supported(&header, true)?;
    editor.check(amendment, &header).await
}

/// [`amend`] with one rule of the write order broken, for tests of the tests.
///
/// # Errors
/// As [`amend`].
#[cfg(feature = "broken-order")]
pub async fn amend_breaking<F: File>(
    file: &F,
    amendment: &Amendment,
    job: &Job,
    broken: Option<BrokenRule>,
) -> Result<(), ImageError> {
    let mut editor = Editor::new(file).await?;
    editor.broken = broken;
    editor.amend(amendment, job).await
}

impl Amendment {
    /// Changes what one write of the header can change.
    fn apply(&self, header: &mut Header) {
        if let Some(lazy) = self.lazy_refcounts {
            header.compatible = match lazy {
                true => header.compatible.with(Compatible::LAZY_REFCOUNTS),
                false => header.compatible.without(Compatible::LAZY_REFCOUNTS),
            };
        }
        if let Some(name) = &self.data_file {
            put_extension(
                header,
                Extension {
                    kind: extension::DATA_FILE,
                    data: name.clone(),
                },
            );
        }
        if let Some(policy) = self.allocation {
            put_extension(header, policy.encode());
        }
    }
}

/// Puts an extension in the place of the one of its type, or behind the last.
fn put_extension(header: &mut Header, new: Extension) {
    match header
        .extensions
        .iter_mut()
        .find(|old| old.kind == new.kind)
    {
        Some(old) => *old = new,
        None => header.extensions.push(new),
    }
}

fn to_version_2(header: &mut Header) {
    header.version = Version::V2;
    header.incompatible = Incompatible::default();
    header.compatible = Compatible::default();
    header.autoclear = Autoclear::default();
    header.compression_type = CompressionType::Deflate;
    header.tail = Vec::new();
    // The names are those of bits that are not there, and bitmaps are nothing without theirs.
    let useless = [extension::FEATURE_NAMES, extension::BITMAPS];
    let has_use = |extension: &Extension| !useless.contains(&extension.kind);
    header.extensions.retain(has_use);
}

/// An image's file that is changed in place.
pub(crate) struct Editor<'a, F: File> {
    file: &'a F,
    reader: LayerReader<'a, F>,
    pool: Pool<F>,
    locks: SectorLocks,
    #[cfg(feature = "broken-order")]
    broken: Option<BrokenRule>,
}

impl<'a, F: File> Editor<'a, F> {
    /// Everything that a process before this one has written is durable afterwards.
    async fn new(file: &'a F) -> Result<Editor<'a, F>, ImageError> {
        if file.limits().read_only {
            let text = "the file of the image is open read-only";
            return Err(ImageError::new(ErrorKind::ReadOnly, text));
        }
        let editor = Editor {
            file,
            reader: LayerReader::new(file).await?,
            pool: Pool::new(),
            locks: SectorLocks::default(),
            #[cfg(feature = "broken-order")]
            broken: None,
        };
        editor.flush().await?;
        Ok(editor)
    }

    /// The same for the file as it is now, which may have grown.
    async fn again(&self) -> Result<Editor<'a, F>, ImageError> {
        Ok(Editor {
            #[cfg(feature = "broken-order")]
            broken: self.broken,
            ..Editor::new(self.file).await?
        })
    }

    async fn amend(&self, amendment: &Amendment, job: &Job) -> Result<(), ImageError> {
        let old = self.header().await?;
        check_supported(&old, true)?;
        self.check(amendment, &old).await?;
        let goes_down = amendment.version == Some(Version::V2) && old.version == Version::V3;
        if goes_down {
            self.check_emptied(&old).await?;
        }
        let goes_up = amendment.version == Some(Version::V3) && old.version == Version::V2;
        if goes_up {
            self.change_header(|header| {
                header.version = Version::V3;
                // With a byte for the compression type, as new images have it.
                header.tail = vec![0; 7];
            })
            .await?;
        }
        if let Some(order) = amendment.refcount_order {
            self.change_refcounts(order, job).await?;
        }
        self.change_header(|header| amendment.apply(header)).await?;
        if goes_down {
            self.again().await?.unmark_snapshots(job).await?;
            self.change_header(to_version_2).await?;
        }
        Ok(())
    }

    async fn header(&self) -> Result<Header, ImageError> {
        self.reader.header().await
    }

    async fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), ImageError> {
        let source = Source::memory(bytes);
        let written = align::write(self.file, &self.pool, &self.locks, offset, source).await;
        written.map_err(|errno| {
            let text = format!(
                "cannot write {} bytes of the image at {offset}",
                bytes.len()
            );
            ImageError::io(errno, text)
        })
    }

    async fn flush(&self) -> Result<(), ImageError> {
        let flushed = self.file.flush().await;
        flushed.map_err(|errno| ImageError::io(errno, "cannot flush the image"))
    }

    /// The flush before a switch: what it switches to is durable.
    async fn flush_before_switch(&self) -> Result<(), ImageError> {
        #[cfg(feature = "broken-order")]
        if self.broken == Some(BrokenRule::O5) {
            return Ok(());
        }
        self.flush().await
    }

    /// Changes the header in one write of its first sector. What logs and bits of a process that writes said does not
    /// hold any more; that it may have leaked does.
    async fn change_header(&self, change: impl FnOnce(&mut Header)) -> Result<(), ImageError> {
        let mut cluster = self.reader.header_cluster().await?;
        let mut header = Header::parse(&cluster).map_err(ImageError::format)?;
        let before = header.clone();
        change(&mut header);
        if header == before {
            return Ok(());
        }
        if header.version == Version::V3 {
            let kept = Autoclear::BITMAPS
                .with(Autoclear::RAW_DATA_FILE)
                .with(Autoclear::IN_USE);
            header.autoclear = Autoclear(header.autoclear.0 & kept.0);
            let in_use = Autoclear(header.compatible.0 & Compatible::IN_USE.0);
            header.compatible = header.compatible.with_own(in_use);
        }
        cluster.resize(header.geometry().cluster_size() as usize, 0);
        let change = HeaderChange::plan(&cluster, &header).map_err(ImageError::format)?;
        if let Some((at, name)) = &change.name {
            self.write(*at, name).await?;
        }
        self.flush_before_switch().await?;
        self.write(0, &change.sector).await?;
        self.flush().await
    }

    /// Refuses what the format does not have, before anything changes.
    async fn check(&self, amendment: &Amendment, old: &Header) -> Result<(), ImageError> {
        let Amendment {
            version,
            refcount_order,
            lazy_refcounts,
            data_file,
            ..
        } = amendment;
        let refused = |text: &str| Err(ImageError::new(ErrorKind::InvalidInput, text));
        let version = version.unwrap_or(old.version);
        let order = refcount_order.unwrap_or(old.refcount_order);
        if order > limit::REFCOUNT_ORDER_MAX {
            return refused("refcounts have 1 to 64 bits, a power of two");
        }
        if let Some(name) = data_file {
            if !old.incompatible.has(Incompatible::DATA_FILE) {
                return refused("the image has no external data file whose name could change");
            }
            if name.is_empty() {
                return refused("the name of the external data file is empty");
            }
        }
        if version == Version::V3 {
            return Ok(());
        }
        if order != limit::REFCOUNT_ORDER_V2 {
            return refused("refcounts of version 2 have 16 bits (refcount_bits=16)");
        }
        if *lazy_refcounts == Some(true) {
            return refused("version 2 has no lazy refcounts");
        }
        match old.version {
            Version::V2 => Ok(()),
            Version::V3 => self.check_downgrade(old).await,
        }
    }

    async fn check_downgrade(&self, old: &Header) -> Result<(), ImageError> {
        let has = |bits| old.incompatible.has(bits);
        for (there, what) in [
            (has(Incompatible::DATA_FILE), "an external data file"),
            (has(Incompatible::EXTENDED_L2), "extended l2 entries"),
            (
                has(Incompatible::COMPRESSION_TYPE),
                "compression other than zlib",
            ),
        ] {
            if there {
                let text = format!("image has {what}, so it cannot become one of version 2");
                return Err(ImageError::new(ErrorKind::Unsupported, text));
            }
        }
        self.check_snapshots(old).await
    }

    /// Refuses what the caller has to take away before: bitmaps, and marks of zeros.
    async fn check_emptied(&self, old: &Header) -> Result<(), ImageError> {
        if old.bitmaps().is_some() {
            let text = "image has persistent bitmaps, so it cannot become one of version 2 before they are removed";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        self.check_no_zeros(old).await
    }

    /// Looks for clusters that are marked as zeros.
    async fn check_no_zeros(&self, old: &Header) -> Result<(), ImageError> {
        let geometry = old.geometry();
        let size = geometry.cluster_size();
        let table = old.l1_table_offset.0;
        for index in 0..u64::from(old.l1_size) {
            let raw = self.reader.padded(table + index * 8, 8).await?;
            let raw = raw.first_chunk().map_or(0, |raw| u64::from_be_bytes(*raw));
            let found = l1::decode(raw, &geometry).map_err(|corruption| {
                ImageError::corrupt(corruption, format!("l1 entry {index} is damaged"))
            })?;
            let Some(found) = found else { continue };
            let entries = self.reader.padded(found.offset.0, size).await?;
            if let Some(slot) = marks(&entries, &geometry).next() {
                let at = (index * geometry.l2_entries() + slot) * size;
                let text = format!(
                    "cluster at guest offset {at} is marked as zeros, which version 2 does not have"
                );
                return Err(ImageError::new(ErrorKind::Unsupported, text));
            }
        }
        Ok(())
    }
}

/// The entries of an L2 table that are marked as zeros.
fn marks(table: &[u8], geometry: &Geometry) -> impl Iterator<Item = u64> {
    (0..geometry.l2_entries()).filter(|index| {
        l2::raw_at(table, *index, geometry).is_some_and(|(raw, bitmap)| {
            match L2Entry::decode(raw, bitmap, geometry) {
                Ok(L2Entry::Cluster { zero, .. }) => zero != 0,
                _ => false,
            }
        })
    })
}

/// A step of a job that may have been cancelled.
fn step(job: &Job, bytes: u64) -> Result<(), ImageError> {
    let stepped = job.step(bytes);
    stepped.map_err(|errno: Errno| ImageError::io(errno, "the amendment was cancelled"))
}

#[cfg(test)]
mod tests;
