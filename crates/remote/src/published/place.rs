//! Where the objects of a published image are: its manifest, and a folder of chunks beside it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gaur_block::Errno;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::time::Instant;

use super::chunk::{self, Digest};
use super::manifest::{ENTRIES_MAX, LEN_MAX, Manifest, Parser};
use crate::attempt::{self, Pace};
use crate::name::{Name, Protocol};
use crate::store::{Fault, Source, fault};

/// What names of manifests end in: an object of another name is never taken for one, whatever its bytes are.
pub const SUFFIX: &str = ".gaur";
/// Most bytes of a manifest that are fetched at once.
const PIECE_BYTES: u64 = 8 << 20;
/// Slowest that manifests are read, in bytes a second.
const PACE: u64 = 512 << 10;
const NAME_MAX: usize = 255;

/// Whether a manifest may have this name in its folder.
pub(super) fn is_image_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_graphic() && !b"/\\?#%\"".contains(&byte);
    name.len() <= NAME_MAX
        && name.len() > SUFFIX.len()
        && name.ends_with(SUFFIX)
        && !name.starts_with('.')
        && name.bytes().all(plain)
}

/// How much may be read for one image: its manifest, and those below it.
#[derive(Debug)]
pub(super) struct Reading {
    deadline: Instant,
    bytes_left: u64,
    entries_left: usize,
}

impl Reading {
    /// With the patience for all of it, besides the time that the bytes take.
    pub(super) fn new(patience: Duration) -> Reading {
        Reading {
            deadline: Instant::now() + patience,
            bytes_left: 2 * LEN_MAX,
            entries_left: ENTRIES_MAX,
        }
    }

    fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

/// Where an image is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    name: Name,
    credentials: bool,
}

impl Place {
    /// Whether a name is of a published image.
    pub(crate) fn is_one(name: &Name) -> bool {
        name.url().path().ends_with(SUFFIX) && name.protocol() != Ok(Protocol::Registry)
    }

    pub(crate) fn new(name: Name, credentials: bool) -> Result<Place, Fault> {
        let last = name.url().path().rsplit('/').next();
        if !last.is_some_and(is_image_name) || name.url().query().is_some() {
            let what = format!("the name of a published image is plain and ends in {SUFFIX}");
            return Err(Fault {
                errno: Errno::EINVAL,
                ..Fault::last(&what)
            });
        }
        Ok(Place { name, credentials })
    }

    pub(crate) fn name(&self) -> &Name {
        &self.name
    }

    /// The name of the manifest in its folder.
    pub(super) fn file_name(&self) -> &str {
        self.name
            .url()
            .path()
            .rsplit('/')
            .next()
            .unwrap_or_default()
    }

    pub(super) fn manifest(&self) -> Result<Source, Fault> {
        Source::of(&self.name, self.credentials)
    }

    /// Another manifest beside this one.
    pub(super) fn beside(&self, file_name: &str) -> Result<Place, Fault> {
        Place::new(self.relative(file_name)?, self.credentials)
    }

    pub(super) fn chunk(&self, digest: &Digest, packed: bool) -> Result<Source, Fault> {
        let name = self.relative(&chunk::object(digest, packed))?;
        Source::of(&name, self.credentials)
    }

    fn relative(&self, path: &str) -> Result<Name, Fault> {
        let url = self.name.url().join(&format!("./{path}"));
        let url = url.map_err(|_| Fault::last("the name is none"))?;
        Name::parse(url.as_str()).map_err(|text| Fault::last(&text))
    }

    /// The store, and the key of the folder with a slash at its end, or empty. Web servers are only read.
    pub(super) fn store(&self) -> Result<(Arc<dyn ObjectStore>, String), Fault> {
        match self.manifest()? {
            Source::Store(store, path) => {
                let folder = path.as_ref().rsplit_once('/');
                let folder = folder.map_or_else(String::new, |(folder, _)| format!("{folder}/"));
                Ok((store, folder))
            }
            Source::Web(_) | Source::Registry(_) | Source::Published(_) => Err(Fault::last(
                "what is on a web server or in a registry is only read",
            )),
        }
    }

    /// Fetches the manifest.
    pub(super) async fn read_manifest(&self, reading: &mut Reading) -> Result<Manifest, Fault> {
        let source = self.manifest()?;
        let facts = attempt::look(&source, reading.time_left()).await?;
        if facts.len_bytes > LEN_MAX.min(reading.bytes_left) {
            return Err(Fault::last("it is too long for a manifest"));
        }
        reading.bytes_left -= facts.len_bytes;
        reading.deadline += Duration::from_secs(facts.len_bytes / PACE);
        let (mut parser, pace) = (Parser::new(reading.entries_left), Pace::default());
        let mut at = 0;
        while at < facts.len_bytes {
            let end = facts.len_bytes.min(at + PIECE_BYTES);
            let left = reading.time_left();
            let piece = attempt::range(&source, &facts, at..end, &pace, left, |_| {});
            let piece = piece.await?;
            let fed = tokio::task::block_in_place(|| parser.feed(&piece));
            fed.map_err(|text| Fault::last(&text))?;
            at = end;
        }
        let manifest = parser.finish().map_err(|text| Fault::last(&text))?;
        reading.entries_left = reading.entries_left.saturating_sub(manifest.entries());
        Ok(manifest)
    }
}

/// A whole object that is not longer than so many bytes, asked for once.
pub(super) async fn whole(source: &Source, len_max: u64) -> Result<Bytes, Fault> {
    let too_long = || Fault::last("it is longer than a chunk");
    match source {
        Source::Store(store, path) => {
            let answer = store.get(path).await.map_err(|error| fault(&error))?;
            if answer.meta.size > len_max {
                return Err(too_long());
            }
            answer.bytes().await.map_err(|error| fault(&error))
        }
        Source::Web(page) => {
            let facts = page.look().await?;
            match facts.len_bytes {
                0 => Ok(Bytes::new()),
                len if len > len_max => Err(too_long()),
                len => page.range(0..len, &facts).await,
            }
        }
        Source::Registry(_) | Source::Published(_) => Err(Fault::last("it is no object")),
    }
}

/// The path of an object; what it is made of are names that were checked.
pub(super) fn path(key: &str) -> Result<Path, Fault> {
    Path::parse(key).map_err(|_| Fault::last("the key is none"))
}
