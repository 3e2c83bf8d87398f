//! What the options say of the images of the chain: their keys, and which files the backing files are.

use std::path::PathBuf;

use gaur_engine::{BackingFile, Format};
use gaur_format::header::CryptMethod;
use gaur_format::limit;
use gaur_reactor::nbd::Remote;

use super::{OptionReader, Overrides};
use crate::failure::Failure;
use crate::open;

impl OptionReader {
    /// Takes the options of every level of the chain, named along the way down to it.
    pub(super) fn backing(&mut self, changes: &mut Overrides) -> Result<(), Failure> {
        let mut level = String::new();
        for depth in 0..limit::CHAIN_DEPTH_MAX {
            let more = |key: &str| {
                let rest = key.strip_prefix(&level);
                rest.is_some_and(|rest| {
                    rest.starts_with("encrypt.") || rest.starts_with("backing.")
                })
            };
            if depth > 0 {
                let told = self.backing_file(&level)?;
                changes.backing_files.push(told);
            }
            let is_luks =
                changes.backing_files.last().and_then(|file| file.format) == Some(Format::Luks);
            if depth > 0 && is_luks {
                let secret = self.keys.take_text(&format!("{level}key-secret"))?;
                changes.secrets.extend(secret.map(|name| (depth, name)));
            }
            if self.keys.find_key(more).is_none() {
                break;
            }
            self.encryption(&level, depth, changes)?;
            level.push_str("backing.");
        }
        if changes
            .backing_files
            .iter()
            .all(|file| *file == BackingFile::default())
        {
            changes.backing_files.clear();
        }
        Ok(())
    }

    fn encryption(
        &mut self,
        level: &str,
        depth: usize,
        changes: &mut Overrides,
    ) -> Result<(), Failure> {
        let keys = &mut self.keys;
        let methods = [CryptMethod::Luks, CryptMethod::Aes].map(|one| (one.name(), one));
        let method = keys.take_choice(&format!("{level}encrypt.format"), &methods)?;
        changes.encryption.extend(method.map(|one| (depth, one)));
        let secret = keys.take_text(&format!("{level}encrypt.key-secret"))?;
        changes.secrets.extend(secret.map(|name| (depth, name)));
        Ok(())
    }

    /// Which file a backing file is, and of which format.
    fn backing_file(&mut self, level: &str) -> Result<BackingFile, Failure> {
        let keys = &mut self.keys;
        let driver = keys.take_text(&format!("{level}driver"))?;
        let format = driver.map(|name| {
            Format::from_name(&name).ok_or_else(|| {
                let message = format!("option '{level}driver': '{name}' is not supported");
                Failure::new(message).hint(format!("{} are", open::known_formats()))
            })
        });
        let drivers = ["file", "host_device"].map(|name| (name, ()));
        keys.take_choice(&format!("{level}file.driver"), &drivers)?;
        let path = keys.take_text(&format!("{level}file.filename"))?;
        let path = path.map(|path| match Remote::is_name(path.as_bytes()) {
            true => PathBuf::from(format!("./{path}")),
            false => path.into(),
        });
        Ok(BackingFile {
            format: format.transpose()?,
            path,
        })
    }
}
