//! The folder that keeps what was fetched, for all processes of a user.
//!
//! ```text
//! objects/KEY/about    what the object is, for people
//! objects/KEY/data     its bytes at their own offsets, a hole where there are none
//! objects/KEY/state    which chunks are there, their hashes, when each was used
//! ```
//!
//! The key is the hash of name, length and tag: an object that was changed is another one. Nothing is ever made durable: a
//! chunk is served after its hash was found right once by the process, so what a power cut took is fetched again.

mod entry;
mod evict;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use entry::Entry;

use crate::store::Facts;

/// What an object without a tag is called: no other process may take it for the same.
const ONCE: &str = "once-";

/// The cache of this process: the folder is shared, what is counted here is not.
#[derive(Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    bytes_max: u64,
    /// Bytes that were added since room was made last.
    added: AtomicU64,
}

impl Cache {
    pub(crate) fn open(folder: &Path, bytes_max: u64) -> io::Result<Cache> {
        let folder = std::path::absolute(folder)?;
        make_private(&folder)?;
        make_private(&folder.join("objects"))?;
        Ok(Cache {
            folder,
            bytes_max,
            // So that the first chunk has it looked at.
            added: AtomicU64::new(bytes_max),
        })
    }

    /// What is kept of the object of this name, at this endpoint.
    pub(crate) fn entry(&self, name: &str, endpoint: &str, facts: &Facts) -> io::Result<Entry> {
        let tag = facts.tag.as_deref();
        let key = match tag {
            Some(tag) => key(&[name, endpoint, tag, &facts.len_bytes.to_string()]),
            None => {
                let mut once = tempfile::Builder::new();
                let once = once
                    .prefix(ONCE)
                    .rand_bytes(16)
                    .tempdir_in(self.objects())?;
                let folder = once.keep();
                let name = folder.file_name().unwrap_or_default();
                name.to_string_lossy().into_owned()
            }
        };
        let length = facts.len_bytes;
        // What is behind a question mark may be a signature.
        let shown = name.split('?').next().unwrap_or_default();
        let about = format!("{shown}\n{length} bytes\ntag {}\n", tag.unwrap_or("(none)"));
        Entry::open(&self.objects().join(key), length, &about)
    }

    /// Notes that bytes were added.
    pub(crate) fn add(&self, bytes: u64) {
        self.added.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether so much was added that it is time to make room; it is so once.
    pub(crate) fn is_due(&self) -> bool {
        let step = (self.bytes_max / 64).max(crate::CHUNK_BYTES);
        let added = self.added.load(Ordering::Relaxed);
        let taken = || {
            let relaxed = Ordering::Relaxed;
            self.added
                .compare_exchange(added, 0, relaxed, relaxed)
                .is_ok()
        };
        added >= step && taken()
    }

    /// Removes what was not used for longest, where there is more than there may be.
    pub(crate) fn make_room(&self) -> io::Result<()> {
        evict::make_room(&self.folder, self.bytes_max)
    }

    fn objects(&self) -> PathBuf {
        self.folder.join("objects")
    }
}

fn key(parts: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// A folder for this user alone: what is in it may be another machine's secret.
fn make_private(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_tells_objects_apart_and_is_not_written_down() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path(), 1 << 20).unwrap();
        let facts = Facts {
            len_bytes: 1000,
            tag: Some("\"1\"".to_owned()),
        };
        for query in ["?part=1", "?part=2"] {
            let name = format!("https://h/x{query}");
            let entry = cache.entry(&name, "", &facts).unwrap();
            assert_eq!(entry.verify(0), None);
            entry.keep(0, &[query.as_bytes()[6]; 1000]).unwrap();
        }
        let mut count = 0;
        for found in fs::read_dir(cache.objects()).unwrap() {
            let about = fs::read_to_string(found.unwrap().path().join("about")).unwrap();
            assert!(about.starts_with("https://h/x\n"), "{about}");
            count += 1;
        }
        assert_eq!(count, 2);
    }
}
