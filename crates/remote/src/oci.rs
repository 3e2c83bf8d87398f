//! Disks in images of containers: a file in a layer of an image in a registry, read by ranges.
//!
//! What KubeVirt calls a *containerDisk* is an image whose layer, a tar file, has the disk below `disk/`. The layer has to be
//! stored as it is: of a compressed one no range can be read.

mod auth;
mod manifest;
mod tar;

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::name::Name;
use crate::store::{Facts, Fault};
use crate::web::Page;
use auth::Auth;

/// A disk in a layer.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    name: Name,
    credentials: bool,
    found: Arc<tokio::sync::OnceCell<Found>>,
}

/// Where the disk is.
#[derive(Debug)]
struct Found {
    blob: Page,
    auth: Auth,
    blob_bytes: u64,
    /// Where the file lies in the layer.
    file: Range<u64>,
    /// The layer's digest and the file's name.
    tag: String,
}

/// The repository and the tag or digest of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Reference {
    repository: String,
    /// A tag, or `sha256:..`.
    version: String,
}

impl Reference {
    fn parse(key: &str) -> Result<Reference, Fault> {
        let digest = key.split_once('@');
        let (repository, version) = digest.unwrap_or_else(|| {
            let tag = key.rsplit_once(':').filter(|(_, tag)| !tag.contains('/'));
            tag.unwrap_or((key, "latest"))
        });
        let letters = |text: &str, more: &str| {
            let fits = |letter: char| letter.is_ascii_alphanumeric() || more.contains(letter);
            !text.is_empty() && text.chars().all(fits)
        };
        let good = letters(repository, "._-/")
            && !repository
                .split('/')
                .any(|part| part.is_empty() || part == "..")
            && letters(version, "._-:");
        match good {
            true => Ok(Reference {
                repository: repository.to_owned(),
                version: version.to_owned(),
            }),
            false => Err(Fault::last(
                "no name of an image: oci://HOST/NAME:TAG is one",
            )),
        }
    }
}

impl Disk {
    pub(crate) fn new(name: &Name, credentials: bool) -> Disk {
        Disk {
            name: name.clone(),
            credentials,
            found: Arc::default(),
        }
    }

    /// What the cache calls it: a layer is the same under any tag of the registry.
    pub(crate) fn identity(&self) -> String {
        format!("oci://{}", self.name.authority())
    }

    pub(crate) async fn look(&self) -> Result<Facts, Fault> {
        let found = self.found().await?;
        Ok(Facts {
            len_bytes: found.file.end - found.file.start,
            tag: Some(found.tag.clone()),
        })
    }

    pub(crate) async fn range(&self, range: Range<u64>) -> Result<Bytes, Fault> {
        let found = self.found().await?;
        let start = found.file.start;
        found.range(start + range.start..start + range.end).await
    }

    async fn found(&self) -> Result<&Found, Fault> {
        self.found.get_or_try_init(|| self.find()).await
    }

    async fn find(&self) -> Result<Found, Fault> {
        let key = self.name.key().map_err(|text| Fault::last(&text))?;
        let reference = Reference::parse(&key)?;
        let host = self.name.authority();
        // As every tool of containers does: a registry of this machine needs no TLS.
        let scheme = match self.name.is_loopback() {
            true => "http",
            false => "https",
        };
        let base = format!("{scheme}://{host}/v2/{}", reference.repository);
        let auth = Auth::new(&self.name, &reference.repository, self.credentials);
        let layers = manifest::layers(&base, &reference.version, &auth).await?;
        let mut compressed = false;
        for layer in layers.iter().rev() {
            if !layer.is_plain {
                compressed = true;
                continue;
            }
            let blob = auth::page(&format!("{base}/blobs/{}", layer.digest))?;
            let mut found = Found {
                blob,
                auth: auth.clone(),
                blob_bytes: layer.len_bytes,
                file: 0..0,
                tag: String::new(),
            };
            if let Some(file) = tar::find_disk(&found, layer.len_bytes).await? {
                found.tag = format!("{} {}", layer.digest, file.name);
                found.file = file.bytes;
                return Ok(found);
            }
        }
        Err(Fault::last(match compressed {
            true => {
                "its layers are compressed, of which no range can be read: push it with uncompressed ones"
            }
            false => "there is no file below disk/ in its layers",
        }))
    }
}

impl Found {
    /// A range of the layer.
    async fn range(&self, range: Range<u64>) -> Result<Bytes, Fault> {
        let authorization = self.auth.header().await;
        let asked = self
            .blob
            .part(range.clone(), self.blob_bytes, authorization.clone());
        match asked.await {
            // The token's time is over.
            Err(fault) if fault.challenge.is_some() => {
                self.auth.answer(&fault, authorization.as_deref()).await?;
                let authorization = self.auth.header().await;
                self.blob.part(range, self.blob_bytes, authorization).await
            }
            answer => answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_has_a_repository_and_a_tag_or_digest() {
        let parsed = |key: &str| {
            let found = Reference::parse(key).unwrap();
            (found.repository, found.version)
        };
        let expected =
            |repository: &str, version: &str| (repository.to_owned(), version.to_owned());
        assert_eq!(parsed("a/b:1.2"), expected("a/b", "1.2"));
        assert_eq!(parsed("a/b"), expected("a/b", "latest"));
        assert_eq!(parsed("a@sha256:00ff"), expected("a", "sha256:00ff"));
        for bad in ["", "a//b:1", "a/../b:1", "a:b c", "../a", "a@", "a?x:1"] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
    }
}
