//! What puts an image into a store: chunks first, each once, and then the manifest.
//!
//! Which chunks are there is asked by folder, when the first of its chunks comes: a list of the folder, or, where that is
//! long, a question for each. Nothing is put that is there, so a publish that was killed goes on where it was.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use gaur_block::Errno;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions};
use parking_lot::Mutex;
use tokio::sync::{OnceCell, watch};

use super::CHUNK_BYTES;
use super::chunk::{self, Digest, Stored};
use super::collector::Folder;
use super::manifest::{Builder, Parent};
use super::place::{Place, Reading, path};
use crate::attempt::{self, ANSWER};
use crate::name::Name;
use crate::runtime;
use crate::settings::Settings;
use crate::store::{Fault, fault};

/// Folders of chunks: one for each first byte of a digest.
const SHELVES: usize = 256;
/// Most objects of a folder that are listed; of a fuller one each chunk is asked for.
const LIST_MAX: usize = 8192;
/// Slowest that a manifest may be put, in bytes a second.
const MANIFEST_PACE: u64 = 256 << 10;

/// How long the end of a publish waits for its mark to go.
const LEAVE: Duration = Duration::from_secs(5);

/// What was found and put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Chunks that were put.
    pub put_chunks: u64,
    /// Bytes of their objects.
    pub put_bytes: u64,
}

/// What became of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is new there.
    Published,
    /// The same was there.
    Unchanged,
}

/// Publishes an image. While it is there, no chunks are collected in its folder.
pub struct Publisher {
    inner: Arc<Inner>,
    /// Says so in the store.
    mark: Option<Path>,
}

struct Inner {
    place: Place,
    store: Arc<dyn ObjectStore>,
    /// The key of the image's folder, with a slash at its end, or empty.
    folder: String,
    patience: Duration,
    shelves: Vec<OnceCell<Shelf>>,
    cancel: watch::Sender<bool>,
    put_chunks: AtomicU64,
    put_bytes: AtomicU64,
}

/// What is known of a folder of chunks.
struct Shelf {
    here: Mutex<HashSet<(Digest, bool)>>,
    /// What is not in the list is not there.
    complete: bool,
}

impl Publisher {
    /// Begins to publish under a name, with the credentials and the patience of the environment.
    ///
    /// # Errors
    /// In words, without the name, when it is none that can be published to.
    pub fn new(name: &str) -> Result<Publisher, String> {
        let patience = Settings::from_environment()?.patience;
        let place = Place::new(Name::parse(name)?, true).map_err(|fault| fault.text)?;
        // The store's client wants its threads.
        runtime::get()?;
        let (store, folder) = place.store().map_err(|fault| fault.text)?;
        let inner = Arc::new(Inner {
            place,
            store,
            folder,
            patience,
            shelves: (0..SHELVES).map(|_| OnceCell::new()).collect(),
            cancel: watch::Sender::new(false),
            put_chunks: AtomicU64::new(0),
            put_bytes: AtomicU64::new(0),
        });
        let mut publisher = Publisher { inner, mark: None };
        let folder = publisher.inner.as_folder();
        publisher.mark = Some(publisher.wait(async move { folder.announce().await })?);
        Ok(publisher)
    }

    /// The published image that a top layer is to stand on, by the name of its manifest, which lies beside this one.
    ///
    /// # Errors
    /// In words, without the name, when there is none or it lies elsewhere.
    pub fn parent(&self, name: &str) -> Result<Parent, String> {
        let parent = Place::new(Name::parse(name)?, true).map_err(|fault| fault.text)?;
        let beside = self.inner.place.beside(parent.file_name());
        if beside.map_err(|fault| fault.text)?.name() != parent.name() {
            return Err("a parent lies in the folder of what stands on it".to_owned());
        }
        if parent.name() == self.inner.place.name() {
            return Err("an image cannot stand on itself".to_owned());
        }
        let name = parent.file_name().to_owned();
        let patience = self.inner.patience;
        let manifest =
            self.wait(async move { parent.read_manifest(&mut Reading::new(patience)).await })?;
        let digest = manifest.digest();
        Ok(Parent { name, digest })
    }

    /// Ends what is under way: calls return with an error.
    pub fn cancel(&self) {
        self.inner.cancel.send_replace(true);
    }

    /// What was put so far.
    pub fn counts(&self) -> Counts {
        Counts {
            put_chunks: self.inner.put_chunks.load(Ordering::Relaxed),
            put_bytes: self.inner.put_bytes.load(Ordering::Relaxed),
        }
    }

    /// Sees to it that a chunk is in the store, and waits for that. The last of a disk is filled up with zeros.
    ///
    /// # Errors
    /// In words, without the name.
    pub fn keep(&self, plain: &[u8]) -> Result<Stored, String> {
        debug_assert_eq!(plain.len() as u64, CHUNK_BYTES);
        let digest = Digest::of(plain);
        let inner = self.inner.clone();
        if let Some(stored) = self.wait(async move { inner.find(digest).await })? {
            return Ok(stored);
        }
        let (packed, bytes) = match chunk::pack(plain) {
            Some(bytes) => (true, Bytes::from(bytes)),
            None => (false, Bytes::copy_from_slice(plain)),
        };
        let inner = self.inner.clone();
        self.wait(async move { inner.put(digest, packed, bytes).await })?;
        Ok(stored(digest, packed))
    }

    /// Puts the manifest, after everything that it names, and waits for that. Another one of the same name is replaced
    /// only by `force`.
    ///
    /// # Errors
    /// In words, without the name.
    pub fn finish(&self, manifest: Builder, force: bool) -> Result<(Digest, Outcome), String> {
        let (bytes, digest) = manifest.finish()?;
        let (inner, mark) = (self.inner.clone(), self.mark.clone());
        let put = async move { inner.put_manifest(bytes, digest, force, mark).await };
        let done = self.wait(put)?;
        Ok((digest, done))
    }

    fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Fault>> + Send + 'static,
    ) -> Result<T, String> {
        let mut cancel = self.inner.cancel.subscribe();
        let done = runtime::run(async move {
            tokio::select! {
                done = work => done,
                _ = cancel.wait_for(|cancelled| *cancelled) => Err(Fault::last("cancelled")),
            }
        })?;
        done.map_err(|fault| fault.text)
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if let Some(mark) = self.mark.take() {
            let folder = self.inner.as_folder();
            // What stays there counts for the grace time, and is removed by a collection.
            let removal = async move { attempt::within(LEAVE, folder.remove(&mark)).await };
            let _ = runtime::run(removal);
        }
    }
}

fn stored(digest: Digest, packed: bool) -> Stored {
    match packed {
        true => Stored::Zstd(digest),
        false => Stored::Plain(digest),
    }
}

impl Inner {
    fn as_folder(&self) -> Folder {
        Folder {
            store: self.store.clone(),
            key: self.folder.clone(),
            patience: self.patience,
        }
    }

    async fn repeat<T, F: Future<Output = Result<T, Fault>>>(
        &self,
        ask: impl Fn() -> F,
    ) -> Result<T, Fault> {
        attempt::repeat(|| attempt::within(ANSWER, ask()), self.patience, |_| {}).await
    }

    async fn shelf(&self, digest: &Digest) -> Result<&Shelf, Fault> {
        let first = digest.0[0];
        let cell = &self.shelves[usize::from(first)];
        let list = || self.repeat(move || self.list(first));
        cell.get_or_try_init(list).await
    }

    /// Lists a folder of chunks, as far as it is short. Objects of an impossible length are not there: they are put again.
    async fn list(&self, first: u8) -> Result<Shelf, Fault> {
        let folder = path(&format!("{}{}", self.folder, chunk::shelf(first)))?;
        let mut listed = self.store.list(Some(&folder)).take(LIST_MAX);
        let (mut here, mut count) = (HashSet::new(), 0);
        while let Some(found) = listed.next().await {
            let found = found.map_err(|error| fault(&error))?;
            count += 1;
            let name = found.location.filename().and_then(chunk::parse_object);
            if let Some((digest, packed)) =
                name.filter(|(_, packed)| chunk::fits(found.size, *packed))
            {
                here.insert((digest, packed));
            }
        }
        Ok(Shelf {
            here: Mutex::new(here),
            complete: count < LIST_MAX,
        })
    }

    /// The chunk's object, if it is there.
    async fn find(&self, digest: Digest) -> Result<Option<Stored>, Fault> {
        let shelf = self.shelf(&digest).await?;
        for packed in [true, false] {
            if shelf.here.lock().contains(&(digest, packed)) {
                return Ok(Some(stored(digest, packed)));
            }
        }
        if shelf.complete {
            return Ok(None);
        }
        for packed in [true, false] {
            let key = self.key(&digest, packed)?;
            match self.len_of(&key).await {
                Ok(len) if chunk::fits(len, packed) => {
                    shelf.here.lock().insert((digest, packed));
                    return Ok(Some(stored(digest, packed)));
                }
                Err(fault) if fault.errno != Errno::ENOENT => return Err(fault),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(None)
    }

    fn key(&self, digest: &Digest, packed: bool) -> Result<Path, Fault> {
        path(&format!("{}{}", self.folder, chunk::object(digest, packed)))
    }

    async fn len_of(&self, key: &Path) -> Result<u64, Fault> {
        let ask = || async { self.store.head(key).await.map_err(|error| fault(&error)) };
        Ok(self.repeat(ask).await?.size)
    }

    async fn put(&self, digest: Digest, packed: bool, bytes: Bytes) -> Result<(), Fault> {
        let (key, len) = (self.key(&digest, packed)?, bytes.len() as u64);
        self.repeat(|| async {
            let put = self.store.put(&key, bytes.clone().into()).await;
            put.map(drop).map_err(|error| fault(&error))
        })
        .await?;
        self.put_chunks.fetch_add(1, Ordering::Relaxed);
        self.put_bytes.fetch_add(len, Ordering::Relaxed);
        self.shelf(&digest)
            .await?
            .here
            .lock()
            .insert((digest, packed));
        Ok(())
    }

    async fn put_manifest(
        &self,
        bytes: Bytes,
        digest: Digest,
        force: bool,
        mark: Option<Path>,
    ) -> Result<Outcome, Fault> {
        let read = || async {
            let mut reading = Reading::new(self.patience);
            self.place.read_manifest(&mut reading).await
        };
        let there = match read().await {
            Ok(found) if found.digest() == digest => return Ok(Outcome::Unchanged),
            Err(fault) if fault.errno == Errno::ENOENT => false,
            Err(fault) if fault.passes => return Err(fault),
            Ok(_) | Err(_) => true,
        };
        let other = "there is another image of this name, which is not replaced without --force";
        if there && !force {
            return Err(Fault::last(other));
        }
        if let Some(mark) = mark {
            self.as_folder().check_mark(&mark).await?;
        }
        let key = path(&format!("{}{}", self.folder, self.place.file_name()))?;
        let mode = if there {
            PutMode::Overwrite
        } else {
            PutMode::Create
        };
        let time = ANSWER + Duration::from_secs(bytes.len() as u64 / MANIFEST_PACE);
        let put = || async {
            let options = PutOptions::from(mode.clone());
            let payload = bytes.clone().into();
            let put = self.store.put_opts(&key, payload, options).await;
            match put {
                Ok(_) => Ok(()),
                // It came in between, or an attempt of ours was answered too late.
                Err(object_store::Error::AlreadyExists { .. }) => {
                    let found = read().await?;
                    let same = found.digest() == digest;
                    same.then_some(()).ok_or_else(|| Fault::last(other))
                }
                Err(error) => Err(fault(&error)),
            }
        };
        let patience = self.patience.max(time);
        attempt::repeat(|| attempt::within(time, put()), patience, |_| {}).await?;
        match self.len_of(&key).await? == bytes.len() as u64 {
            true => Ok(Outcome::Published),
            false => Err(Fault::last("the store has another length of the manifest")),
        }
    }
}
