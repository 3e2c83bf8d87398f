//! What finds chunks that no manifest of a folder names, and removes them.
//!
//! Publishers and collectors exclude each other by marks: each puts its own, then looks for the other's. So one of two that begin at
//! once sees the other. A mark that was left by a process that was killed counts for a time. Without that, a publish could
//! find a chunk that is about to be removed.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt;
use futures_util::stream::iter;
use gaur_block::Errno;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use super::chunk::{self, Digest};
use super::place::{Place, SUFFIX, path};
use crate::attempt::{self, ANSWER};
use crate::name::Name;
use crate::runtime;
use crate::settings::Settings;
use crate::store::{Fault, fault};

/// The mark of a collector, and what those of publishers begin with, in the folder of chunks.
const COLLECTING: &str = "collecting";
const PUBLISHING: &str = "publishing-";
/// How long a collector may work, and how long its mark counts.
const WORK_MAX: Duration = Duration::from_secs(45 * 60);
const MARK_SECONDS: i64 = 60 * 60;
/// Longest time for the list of a folder.
const LIST_TIME: Duration = Duration::from_secs(300);
/// Requests at once.
const PARALLEL: usize = 16;

/// What a collection found.
#[derive(Clone, Debug, Default)]
pub struct Garbage {
    /// Manifests that were read.
    pub images: usize,
    /// Keys of chunks that no manifest names and that are old enough, with their lengths in bytes.
    pub objects: Vec<(String, u64)>,
    /// Chunks that no manifest names and that are younger.
    pub young: usize,
    /// Whether the objects were removed.
    pub removed: bool,
}

/// A folder of published images.
#[derive(Clone)]
pub(super) struct Folder {
    pub(super) store: Arc<dyn ObjectStore>,
    /// Its key with a slash at its end, or empty.
    pub(super) key: String,
    pub(super) patience: Duration,
}

impl Folder {
    async fn repeat<T, F: Future<Output = Result<T, Fault>>>(
        &self,
        time: Duration,
        ask: impl Fn() -> F,
    ) -> Result<T, Fault> {
        let patience = self.patience.max(time);
        attempt::repeat(|| attempt::within(time, ask()), patience, |_| {}).await
    }

    fn mark(&self, name: &str) -> Result<Path, Fault> {
        path(&format!("{}{}/{name}", self.key, chunk::FOLDER))
    }

    /// Puts a mark; returns when that was, by the store's clock.
    async fn put_mark(&self, mark: &Path) -> Result<i64, Fault> {
        self.repeat(ANSWER, || async {
            // Some stores keep nothing that is empty.
            let put = self.store.put(mark, "gaur\n".into()).await;
            put.map_err(|error| fault(&error))?;
            let found = self.store.head(mark).await;
            Ok(found
                .map_err(|error| fault(&error))?
                .last_modified
                .timestamp())
        })
        .await
    }

    pub(super) async fn remove(&self, object: &Path) -> Result<(), Fault> {
        self.repeat(ANSWER, || async {
            match self.store.delete(object).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(fault(&error)),
            }
        })
        .await
    }

    /// Announces a publish; the mark is to be removed after it.
    pub(super) async fn announce(&self) -> Result<Path, Fault> {
        let number = RandomState::new().hash_one(SystemTime::now());
        let mark = self.mark(&format!("{PUBLISHING}{number:016x}"))?;
        let now = self.put_mark(&mark).await?;
        let collecting = self.mark(COLLECTING)?;
        let look = || async {
            let found = self.store.head(&collecting).await;
            found.map_err(|error| fault(&error))
        };
        match self.repeat(ANSWER, look).await {
            Ok(found) if now - found.last_modified.timestamp() < MARK_SECONDS => {
                self.remove(&mark).await?;
                let what = "gaur gc removes chunks there just now; try again later";
                Err(Fault::last(what))
            }
            Err(fault) if fault.errno != Errno::ENOENT => Err(fault),
            Ok(_) | Err(_) => Ok(mark),
        }
    }

    /// Removes the marks of publishers that are older than the grace time; an error while one is younger.
    async fn check_publishers(&self, now: i64, grace: i64) -> Result<(), Fault> {
        let folder = path(&format!("{}{}", self.key, chunk::FOLDER))?;
        let list = || async {
            let listed = self.store.list_with_delimiter(Some(&folder)).await;
            listed.map_err(|error| fault(&error))
        };
        for found in self.repeat(LIST_TIME, list).await?.objects {
            let name = found.location.filename().unwrap_or_default();
            if !name.starts_with(PUBLISHING) {
                continue;
            }
            if now - found.last_modified.timestamp() < grace {
                let mark = &found.location;
                let text = format!(
                    "an image is being published there, or a publish was killed: {mark} says so"
                );
                return Err(Fault::last(&text));
            }
            self.remove(&found.location).await?;
        }
        Ok(())
    }

    /// The names of the manifests.
    async fn images(&self) -> Result<Vec<String>, Fault> {
        let folder = match self.key.as_str() {
            "" => None,
            key => Some(path(key.trim_end_matches('/'))?),
        };
        let list = || async {
            let listed = self.store.list_with_delimiter(folder.as_ref()).await;
            listed.map_err(|error| fault(&error))
        };
        let listed = self.repeat(LIST_TIME, list).await?;
        let names = listed
            .objects
            .iter()
            .filter_map(|found| found.location.filename());
        Ok(names
            .filter(|name| name.ends_with(SUFFIX))
            .map(str::to_owned)
            .collect())
    }

    /// Chunks of a folder that are not in use: those that are older, and how many are younger than `before`.
    async fn unused(
        &self,
        first: u8,
        used: &HashSet<(Digest, bool)>,
        before: i64,
    ) -> Result<(Vec<(String, u64)>, usize), Fault> {
        let folder = path(&format!("{}{}", self.key, chunk::shelf(first)))?;
        let (folder, used) = (&folder, &used);
        self.repeat(LIST_TIME, || async move {
            let mut listed = self.store.list(Some(folder));
            let (mut old, mut young) = (Vec::new(), 0);
            while let Some(found) = listed.next().await {
                let found = found.map_err(|error| fault(&error))?;
                let object = found.location.filename().and_then(chunk::parse_object);
                match object {
                    Some(object) if !used.contains(&object) => {
                        match found.last_modified.timestamp() <= before {
                            true => old.push((found.location.to_string(), found.size)),
                            false => young += 1,
                        }
                    }
                    Some(_) | None => {}
                }
            }
            Ok((old, young))
        })
        .await
    }
}

/// Finds the chunks in a folder (`s3://BUCKET/PREFIX`) that no manifest there names, and that are older than `grace`. They are
/// removed if `remove`, unless an image is being published there.
///
/// # Errors
/// In words, without the name. What was removed until then is gone; all of it was garbage.
pub fn collect(name: &str, grace: Duration, remove: bool) -> Result<Garbage, String> {
    let patience = Settings::from_environment()?.patience;
    runtime::get()?;
    let name = name.trim_end_matches('/');
    // Any name of a manifest there leads to the folder.
    let place = Name::parse(&format!("{name}/x{SUFFIX}"))?;
    let place = Place::new(place, true).map_err(|fault| fault.text)?;
    let (store, key) = place.store().map_err(|fault| fault.text)?;
    let folder = Folder {
        store,
        key,
        patience,
    };
    let work = async move {
        match remove {
            false => search(&folder, &place, now(), grace).await,
            true => sweep(&folder, &place, grace).await,
        }
    };
    runtime::run(work)?.map_err(|fault| fault.text)
}

async fn sweep(folder: &Folder, place: &Place, grace: Duration) -> Result<Garbage, Fault> {
    let mark = folder.mark(COLLECTING)?;
    let now = folder.put_mark(&mark).await?;
    let work = async {
        folder.check_publishers(now, seconds(grace)).await?;
        let mut garbage = search(folder, place, now, grace).await?;
        let keys: Vec<String> = garbage.objects.iter().map(|(key, _)| key.clone()).collect();
        let removals = iter(keys).map(|key| async move { folder.remove(&path(&key)?).await });
        let mut removals = removals.buffer_unordered(PARALLEL);
        while let Some(removed) = removals.next().await {
            removed?;
        }
        drop(removals);
        garbage.removed = true;
        Ok(garbage)
    };
    let late = || Fault::last("there is more than can be removed at once; run it again");
    let done = tokio::time::timeout(WORK_MAX, work).await;
    let unmarked = folder.remove(&mark).await;
    let garbage = done.unwrap_or_else(|_| Err(late()))?;
    unmarked.map(|()| garbage)
}

async fn search(
    folder: &Folder,
    place: &Place,
    now: i64,
    grace: Duration,
) -> Result<Garbage, Fault> {
    let mut garbage = Garbage::default();
    let mut used = HashSet::new();
    for name in folder.images().await? {
        let about = |fault: Fault| Fault {
            text: format!("{name}: {}", fault.text),
            ..fault
        };
        let image = place.beside(&name).map_err(about)?;
        let manifest = image.read_manifest(folder.patience).await.map_err(about)?;
        used.extend(manifest.objects());
        garbage.images += 1;
    }
    let before = now.saturating_sub(seconds(grace));
    let used = &used;
    let shelves = iter(0..=u8::MAX).map(|first| folder.unused(first, used, before));
    let mut shelves = shelves.buffered(PARALLEL);
    while let Some(found) = shelves.next().await {
        let (old, young) = found?;
        garbage.objects.extend(old);
        garbage.young += young;
    }
    Ok(garbage)
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, seconds)
}
