//! The external data file of a new image, which is made before the image.

use std::path::{Path, PathBuf};

use gaur_block::{Access, File};
use gaur_engine::{Format, Job, Keys};
use gaur_format::plan::CreateOptions;
use gaur_reactor::{BlockingFile, OpenFile, block_on};

use super::{NewImage, same_file};
use crate::failure::Failure;

/// The name that goes into the image: from the root, because QEMU looks for a relative one in the working directory,
/// whichever that is, and this engine beside the image.
pub fn stored_name(name: Vec<u8>) -> Vec<u8> {
    let path = gaur_engine::resolve_backing(Path::new(""), &name);
    match path.ok().and_then(|path| std::path::absolute(path).ok()) {
        Some(path) => path.into_os_string().into_encoded_bytes(),
        None => name,
    }
}

impl NewImage {
    /// A raw external data file that is there already keeps what it holds: the disk is there before its image.
    pub fn keep_data_file(&mut self) {
        self.keeps_data = true;
    }

    /// The path of the external data file.
    pub fn data_path(&self) -> Option<PathBuf> {
        let name = self.plan.data_file.as_deref()?;
        gaur_engine::resolve_backing(&self.path, name).ok()
    }

    /// The size of a disk that is there before its image.
    pub(super) fn data_size(&self) -> Option<u64> {
        let path = self.data_path().filter(|_| self.plan.data_file_raw)?;
        let file = BlockingFile::new(OpenFile::open(&path, look()).ok()?);
        block_on(file.len()).ok().filter(|len| *len > 0)
    }

    /// Makes the external data file as long as the disk. What it holds is lost, unless it is to be kept.
    pub(super) fn make_data_file(&self, job: &Job) -> Result<(), Failure> {
        let Some(name) = self.plan.data_file.as_deref() else {
            return Ok(());
        };
        let shown = String::from_utf8_lossy(name);
        let path = gaur_engine::resolve_backing(&self.path, name).map_err(|error| {
            Failure::about(
                &self.name,
                format!("cannot use {shown:?} as a data file: {error}"),
            )
        })?;
        if same_file(&self.path, &path) {
            let message = "the image cannot be its own data file";
            return Err(Failure::about(&self.name, message));
        }
        if self.keeps_data && self.plan.data_file_raw && path.exists() {
            return self.adopt(&path);
        }
        let data = NewImage {
            name: path.to_string_lossy().into_owned(),
            path,
            format: Format::Raw,
            plan: CreateOptions {
                size_bytes: self.rounded_size(),
                preallocation: self.plan.preallocation,
                ..CreateOptions::default()
            },
            compat: None,
            preallocation: None,
            keeps_data: false,
            backing_size: None,
            check_backing: None,
            hints: self.hints,
            luks: None,
            keys: Keys::default(),
            skips_flushes: self.skips_flushes,
        };
        data.make(false, job)
    }

    fn rounded_size(&self) -> u64 {
        self.plan
            .rounded_size_bytes()
            .unwrap_or(self.plan.size_bytes)
    }

    /// Sees to it that a disk which is there has the size of the image.
    fn adopt(&self, path: &Path) -> Result<(), Failure> {
        let access = Access {
            write: true,
            lock: true,
            force_share: false,
            ..look()
        };
        let file = OpenFile::open(path, access);
        let file = file.map_err(|error| Failure::about(path, format!("cannot open: {error}")))?;
        let file = BlockingFile::new(file);
        let fail = |what: &str, errno| Failure::system(&path.to_string_lossy(), what, errno);
        let len = block_on(file.len()).map_err(|errno| fail("cannot tell its size", errno))?;
        let size = self.rounded_size();
        if len > size && file.limits().resizable {
            let message = format!("it has {len} bytes, the disk is to have {size}");
            let hint = "say no size, or take another data file";
            return Err(Failure::about(path, message).hint(hint));
        }
        if len < size {
            block_on(file.set_len(size)).map_err(|errno| fail("cannot set its length", errno))?;
            block_on(file.flush()).map_err(|errno| fail("cannot flush", errno))?;
        }
        Ok(())
    }
}

fn look() -> Access {
    Access {
        write: false,
        direct: false,
        lock: false,
        force_share: true,
    }
}
