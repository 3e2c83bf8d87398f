//! Making an image.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use gaur_engine::{ErrorKind, Format, Job, Keys, OpenOptions, Passphrase, References};
use gaur_format::AllocationPolicy;
use gaur_format::plan::{self, LuksArea, Preallocation};
use gaur_luks::Encryption;
use gaur_reactor::{BlockingFile, CreateFile, OpenFile, RandomBytes, block_on, processor_time};

use crate::disk::Disk;
use crate::error::{Error, Result};

/// How a qcow2 image is made. Made from [`Default`] and changed field by field.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// Size of the disk in bytes, rounded up to whole sectors of 512; `None` is that of the backing image.
    pub size_bytes: Option<u64>,
    /// What the new image is an overlay of: what it does not have itself is read from there.
    pub backing: Option<Backing>,
    /// Bytes of a cluster, a power of two from 512 to 2 MiB.
    pub cluster_bytes: u32,
    /// Clusters have 32 parts that are allocated one by one; from 16 KiB.
    pub extended_l2: bool,
    /// What gets space at once.
    pub preallocation: Preallocation,
    /// What is done with the host's space; `None` does not say.
    pub allocation: Option<AllocationPolicy>,
    /// What opens the new image, whose data is encrypted then (LUKS 1).
    pub passphrase: Option<Passphrase>,
    /// How its data is encrypted, if it is, and what trying a passphrase costs.
    pub encryption: Encryption,
    /// What opens the images below, of which the first has number 0.
    pub backing_keys: Keys,
}

/// The image below a new one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Its path as it goes into the image: a relative one counts from the folder of the new image.
    pub path: PathBuf,
    /// Its format, which is never guessed: a guest can make a raw disk look like qcow2.
    pub format: Format,
}

impl Default for CreateOptions {
    /// No backing image, clusters of 64 KiB; the size is still to be told.
    fn default() -> CreateOptions {
        CreateOptions {
            size_bytes: None,
            backing: None,
            cluster_bytes: 64 << 10,
            extended_l2: false,
            preallocation: Preallocation::Off,
            allocation: None,
            passphrase: None,
            encryption: Encryption::default(),
            backing_keys: Keys::default(),
        }
    }
}

impl CreateOptions {
    /// An empty disk of so many bytes.
    pub fn new(size_bytes: u64) -> CreateOptions {
        CreateOptions {
            size_bytes: Some(size_bytes),
            ..CreateOptions::default()
        }
    }

    /// An overlay, which shows what the image at `path` has until it is written to. A relative path counts
    /// from the folder of the new image.
    pub fn overlay(path: impl Into<PathBuf>, format: Format) -> CreateOptions {
        let path = path.into();
        CreateOptions {
            backing: Some(Backing { path, format }),
            ..CreateOptions::default()
        }
    }

    fn plan(&self, path: &Path) -> Result<plan::CreateOptions> {
        let backing = self.backing.as_ref();
        let backing_bytes = match backing {
            Some(backing) => Some(self.backing_bytes(path, backing)?),
            None => None,
        };
        let no_size = || Error::new(ErrorKind::InvalidInput, "a new image needs a size");
        if !self.cluster_bytes.is_power_of_two() {
            let text = "cluster_bytes is no power of two";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        Ok(plan::CreateOptions {
            size_bytes: self.size_bytes.or(backing_bytes).ok_or_else(no_size)?,
            cluster_bits: self.cluster_bytes.trailing_zeros(),
            extended_l2: self.extended_l2,
            preallocation: self.preallocation,
            allocation: self.allocation,
            backing_file: backing.map(|backing| backing.path.as_os_str().as_bytes().to_vec()),
            backing_format: backing.map(|backing| backing.format.name().to_owned()),
            luks: self.luks()?,
            ..plan::CreateOptions::default()
        })
    }
}

impl CreateOptions {
    /// Size of the disk below, which is there and can be opened.
    fn backing_bytes(&self, overlay: &Path, backing: &Backing) -> Result<u64> {
        let name = backing.path.as_os_str().as_bytes();
        let path = gaur_engine::resolve_backing(overlay, name).map_err(|error| {
            let text = format!("backing file {:?}: {error}", backing.path);
            Error::new(ErrorKind::InvalidInput, text)
        })?;
        let options = OpenOptions {
            format: Some(backing.format),
            read_only: true,
            // Its size does not depend on what is below it.
            backing: false,
            keys: self.backing_keys.clone(),
            ..OpenOptions::new(References::Nothing)
        };
        Ok(Disk::open(path, &options)?.size_bytes())
    }

    /// The header and the key of an encrypted image.
    fn luks(&self) -> Result<Option<LuksArea>> {
        let Some(passphrase) = &self.passphrase else {
            return Ok(None);
        };
        let mut random = RandomBytes::default();
        let fill = &mut |bytes: &mut [u8]| random.fill(bytes);
        let made = self.encryption.make(passphrase, fill, &mut processor_time);
        let bytes = made.map_err(|error| Error::new(ErrorKind::InvalidInput, error.to_string()))?;
        random.check().map_err(|errno| {
            let text = format!("no random bytes: {errno}");
            Error::new(ErrorKind::Io, text)
        })?;
        Ok(Some(LuksArea {
            bytes,
            len_bytes: self.encryption.area_bytes(),
        }))
    }
}

impl Disk {
    /// Makes a qcow2 image at `path`, which is durable when this returns. What is on a block device is
    /// overwritten.
    ///
    /// # Errors
    /// When a file is there already, the backing image cannot be opened, or the options are not what the
    /// format allows; then there is no file.
    pub fn create(path: impl AsRef<Path>, options: &CreateOptions) -> Result<()> {
        let path = path.as_ref();
        let about = |error: Error| error.context(path.display());
        let plan = options.plan(path).map_err(about)?;
        let file = CreateFile {
            lock: true,
            ..CreateFile::default()
        };
        let file = OpenFile::create(path, file).map_err(|error| about(error.into()))?;
        let is_new = !file.is_block_device();
        let file = BlockingFile::new(file);
        let made = block_on(gaur_engine::create(&file, &plan, &Job::default()));
        if made.is_err() && is_new {
            // Half an image is of no use; the error is what counts.
            let _ = std::fs::remove_file(path);
        }
        made.map_err(|error| about(error.into()))
    }
}
