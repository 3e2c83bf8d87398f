//! What finds chunks that no manifest of a folder names, and removes them.
//!
//! Publishers and collectors exclude each other by marks: each puts its own, then looks for the other's. So one of two that begin at
//! once sees the other. A mark that was left by a process that was killed counts for a time. Without that, a publish could
//! find a chunk that is about to be removed.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt;
use futures_util::stream::iter;
use gaur_block::Errno;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use super::chunk::{self, Digest};
use super::manifest::Parent;
use super::place::{Place, Reading, SUFFIX, path};
use crate::attempt::{self, ANSWER};
use crate::name::Name;
use crate::runtime;
use crate::settings::Settings;
use crate::store::{Fault, fault};

/// What the marks of collectors and of publishers begin with, in the folder of chunks.
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

    /// A mark that no other process has.
    fn own_mark(&self, kind: &str) -> Result<Path, Fault> {
        let number = RandomState::new().hash_one(SystemTime::now());
        let kind = kind.trim_end_matches('-');
        self.mark(&format!("{kind}-{number:016x}"))
    }

    /// The marks of a kind, with the times when they were put.
    async fn marks(&self, kind: &str) -> Result<Vec<(Path, i64)>, Fault> {
        let folder = path(&format!("{}{}", self.key, chunk::FOLDER))?;
        let list = || async {
            let listed = self.store.list_with_delimiter(Some(&folder)).await;
            listed.map_err(|error| fault(&error))
        };
        let found = self.repeat(LIST_TIME, list).await?.objects.into_iter();
        let found = found.filter(|found| {
            let name = found.location.filename().unwrap_or_default();
            name.starts_with(kind)
        });
        Ok(found
            .map(|found| (found.location, found.last_modified.timestamp()))
            .collect())
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
        let mark = self.own_mark(PUBLISHING)?;
        let announced = async {
            let now = self.put_mark(&mark).await?;
            let marks = self.marks(COLLECTING).await?;
            match marks.iter().any(|(_, put)| now - put < MARK_SECONDS) {
                true => Err(Fault::last(
                    "gaur gc removes chunks there just now; try again later",
                )),
                false => Ok(()),
            }
        };
        if let Err(fault) = announced.await {
            // What stays counts for the grace time.
            let _ = self.remove(&mark).await;
            return Err(fault);
        }
        Ok(mark)
    }

    /// An error when the mark of a publish is gone: it took longer than the grace time of a collector, which may have removed
    /// what was found.
    pub(super) async fn check_mark(&self, mark: &Path) -> Result<(), Fault> {
        let look = || async {
            let found = self.store.head(mark).await;
            found.map(drop).map_err(|error| fault(&error))
        };
        match self.repeat(ANSWER, look).await {
            Err(fault) if fault.errno == Errno::ENOENT => Err(Fault::last(
                "gaur gc has taken this publish for a dead one, and may have removed its chunks; publish again",
            )),
            looked => looked,
        }
    }

    /// Removes the marks that count no more: of publishers that are older than the grace time, and of collectors. An error
    /// while a publisher's is younger.
    async fn check_publishers(&self, now: i64, grace: i64) -> Result<(), Fault> {
        for (mark, put) in self.marks(PUBLISHING).await? {
            if now - put < grace {
                let text = format!(
                    "an image is being published there, or a publish was killed: {mark} says so"
                );
                return Err(Fault::last(&text));
            }
            self.remove(&mark).await?;
        }
        for (mark, put) in self.marks(COLLECTING).await? {
            if now - put >= MARK_SECONDS {
                self.remove(&mark).await?;
            }
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
    let mark = folder.own_mark(COLLECTING)?;
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
    let (mut there, mut parents) = (HashMap::new(), Vec::new());
    for name in folder.images().await? {
        let about = |fault: Fault| Fault {
            text: format!("{name}: {}", fault.text),
            ..fault
        };
        let image = place.beside(&name).map_err(about)?;
        let mut reading = Reading::new(folder.patience);
        let manifest = image.read_manifest(&mut reading).await.map_err(about)?;
        used.extend(manifest.objects());
        garbage.images += 1;
        parents.extend(
            manifest
                .parent()
                .map(|parent| (name.clone(), parent.clone())),
        );
        there.insert(name, manifest.digest());
    }
    check_parents(&there, &parents).map_err(|text| Fault::last(&text))?;
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

/// An image whose parent is gone or was replaced may be put right by hand, but not without the parent's chunks.
fn check_parents(
    there: &HashMap<String, Digest>,
    parents: &[(String, Parent)],
) -> Result<(), String> {
    for (name, parent) in parents {
        let Parent {
            name: below,
            digest,
        } = parent;
        match there.get(below) {
            Some(found) if found == digest => {}
            Some(_) => {
                return Err(format!(
                    "{name} stands on another {below} than the one that is there: put that back, or delete {name}"
                ));
            }
            None => {
                return Err(format!(
                    "{name} stands on {below}, which is not there: put it back, or delete {name}"
                ));
            }
        }
    }
    Ok(())
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_that_is_gone_or_another_is_named() {
        let parent = |name: &str, bytes: &[u8]| Parent {
            name: name.to_owned(),
            digest: Digest::of(bytes),
        };
        let there = HashMap::from([("base.gaur".to_owned(), Digest::of(b"1"))]);
        let check = |parent: Parent| check_parents(&there, &[("top.gaur".to_owned(), parent)]);
        assert!(check(parent("base.gaur", b"1")).is_ok());
        for wrong in [parent("base.gaur", b"2"), parent("old.gaur", b"1")] {
            assert!(check(wrong).unwrap_err().starts_with("top.gaur stands on"));
        }
    }
}
