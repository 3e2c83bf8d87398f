//! A published image, for reading: its manifest, and those of the images below it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use super::CHUNK_BYTES;
use super::chunk::{self, Digest, Stored};
use super::manifest::Manifest;
use super::place::{Place, Reading, whole};
use crate::attempt::{self, ANSWER};
use crate::name::Name;
use crate::runtime;
use crate::settings::Settings;
use crate::store::{Facts, Fault};

/// Most manifests below each other.
const DEPTH_MAX: usize = 32;
/// Most chunks that are looked at for a run.
const RUN_MAX: u64 = 1 << 14;
/// How often a chunk is fetched whose bytes are wrong, before that is an error.
const WRONG_MAX: u32 = 3;

/// A published image.
#[derive(Clone)]
pub struct PublishedImage(Arc<Layers>);

struct Layers {
    name: String,
    /// The top first.
    layers: Vec<(Place, Manifest)>,
    patience: Duration,
    cancel: watch::Sender<bool>,
}

impl PublishedImage {
    /// Opens one by its name, with the credentials and the patience of the environment.
    ///
    /// # Errors
    /// In words, without the name.
    pub fn open(name: &str) -> Result<PublishedImage, String> {
        let patience = Settings::from_environment()?.patience;
        let place = Place::new(Name::parse(name)?, true).map_err(|fault| fault.text)?;
        let opened = runtime::run(async move { PublishedImage::read(place, patience).await })?;
        opened.map_err(|fault| fault.text)
    }

    pub(crate) async fn read(place: Place, patience: Duration) -> Result<PublishedImage, Fault> {
        let name = place.name().to_string();
        let mut layers: Vec<(Place, Manifest)> = Vec::new();
        let mut reading = Reading::new(patience);
        let mut next = Some((place, None));
        while let Some((place, wanted)) = next {
            let shown = place.file_name().to_owned();
            let about = |fault: Fault| match layers.is_empty() {
                true => fault,
                false => Fault {
                    text: format!("the image below, {shown}: {}", fault.text),
                    ..fault
                },
            };
            let manifest = place.read_manifest(&mut reading).await;
            let manifest = manifest.map_err(about)?;
            if let Some(wanted) = wanted.filter(|wanted| *wanted != manifest.digest()) {
                let found = manifest.digest();
                let text = format!(
                    "the image below, {shown}, is another: blake3:{found}, and not blake3:{wanted}"
                );
                return Err(Fault::last(&text));
            }
            next = match manifest.parent() {
                Some(_) if layers.len() + 1 >= DEPTH_MAX => {
                    return Err(Fault::last("it stands on too many images"));
                }
                Some(parent) => Some((place.beside(&parent.name)?, Some(parent.digest))),
                None => None,
            };
            layers.push((place, manifest));
        }
        Ok(PublishedImage(Arc::new(Layers {
            name,
            layers,
            patience,
            cancel: watch::Sender::new(false),
        })))
    }

    /// The manifest of the top.
    pub fn manifest(&self) -> &Manifest {
        &self.0.layers[0].1
    }

    /// The chunks of the disk.
    pub fn chunks(&self) -> u64 {
        self.manifest().size_bytes().div_ceil(CHUNK_BYTES)
    }

    /// Where a chunk is, in which form, and how many of its bytes count: beyond the end of an image on the way down all is
    /// zeros, whatever the images below it have there.
    fn find(&self, chunk: u64) -> (&Place, Stored, usize) {
        let mut len = CHUNK_BYTES;
        for (place, manifest) in &self.0.layers {
            let rest = manifest.size_bytes().saturating_sub(chunk * CHUNK_BYTES);
            len = len.min(rest);
            if len == 0 {
                break;
            }
            if let Some(stored) = manifest.find(chunk) {
                return (place, stored, len as usize);
            }
        }
        (&self.0.layers[0].0, Stored::Zero, 0)
    }

    /// Whether a chunk is known to be zeros.
    pub fn is_zero(&self, chunk: u64) -> bool {
        self.find(chunk).1 == Stored::Zero
    }

    /// The bytes of a chunk, up to the end of the disk; all of them right. Waits for them.
    ///
    /// # Errors
    /// In words, with the object, without the image's name.
    pub fn fetch(&self, chunk: u64) -> Result<Bytes, String> {
        let image = self.clone();
        let mut cancel = self.0.cancel.subscribe();
        let fetched = runtime::run(async move {
            tokio::select! {
                fetched = attempt::repeat(|| image.ask(chunk), image.0.patience, |_| {}) => fetched,
                _ = cancel.wait_for(|cancelled| *cancelled) => Err(Fault::last("cancelled")),
            }
        })?;
        fetched.map_err(|fault| fault.text)
    }

    /// What it is as an object: its digest is what tells it apart.
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            len_bytes: self.manifest().size_bytes(),
            tag: Some(self.identity()),
        }
    }

    /// What it is called wherever it is.
    pub(crate) fn identity(&self) -> String {
        format!("blake3:{}", self.manifest().digest())
    }

    /// The bytes of a range, which is one chunk.
    pub(crate) async fn range(&self, range: Range<u64>) -> Result<Bytes, Fault> {
        let bytes = self.ask(range.start / CHUNK_BYTES).await?;
        match bytes.len() as u64 == range.end - range.start {
            true => Ok(bytes),
            false => Err(Fault::last("a chunk was wanted in part")),
        }
    }

    /// The chunks from one on that are alike known to be zeros, or not: whether, and where they end.
    pub(crate) fn run(&self, chunk: u64) -> (bool, u64) {
        let zero = self.is_zero(chunk);
        let most = self.chunks().min(chunk + RUN_MAX);
        let end = (chunk + 1..most).find(|next| self.is_zero(*next) != zero);
        (zero, end.unwrap_or(most))
    }

    /// Ends what is under way: [`PublishedImage::fetch`] returns with an error.
    pub fn cancel(&self) {
        self.0.cancel.send_replace(true);
    }

    /// The same, asked for once, or more often when its bytes are wrong.
    pub(crate) async fn ask(&self, chunk: u64) -> Result<Bytes, Fault> {
        let start = chunk * CHUNK_BYTES;
        let len = self
            .manifest()
            .size_bytes()
            .saturating_sub(start)
            .min(CHUNK_BYTES) as usize;
        let (place, stored, counts) = self.find(chunk);
        let (digest, packed) = match stored {
            Stored::Zero => return Ok(vec![0; len].into()),
            Stored::Plain(digest) => (digest, false),
            Stored::Zstd(digest) => (digest, true),
        };
        let source = place.chunk(&digest, packed)?;
        let object = chunk::object(&digest, packed);
        let about = |fault: Fault| Fault {
            text: format!("{object}: {}", fault.text),
            ..fault
        };
        let mut wrong = 0;
        loop {
            let bytes = attempt::within(ANSWER, whole(&source, CHUNK_BYTES)).await;
            match unpack(bytes.map_err(about)?, digest, packed).await {
                Ok(plain) => return Ok(cut(&plain, counts, len)),
                Err(text) if wrong + 1 == WRONG_MAX => return Err(about(Fault::last(text))),
                Err(_) => wrong += 1,
            }
        }
    }
}

/// The bytes of a chunk of so many, of which those count; the others are zeros.
fn cut(plain: &Bytes, counts: usize, len: usize) -> Bytes {
    if counts >= len {
        return plain.slice(..len);
    }
    let mut bytes = plain[..counts].to_vec();
    bytes.resize(len, 0);
    bytes.into()
}

/// Hashing takes a while: it is done where other requests do not wait for it.
async fn unpack(bytes: Bytes, digest: Digest, packed: bool) -> Result<Bytes, &'static str> {
    let work = move || match packed {
        false if bytes.len() as u64 == CHUNK_BYTES && Digest::of(&bytes) == digest => Ok(bytes),
        packed => chunk::unpack(&bytes, &digest, packed).map(Bytes::from),
    };
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or(Err("cannot be unpacked"))
}

impl fmt::Debug for PublishedImage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "PublishedImage({})", self.0.name)
    }
}

#[cfg(test)]
mod tests {
    use super::super::manifest::Builder;
    use super::*;

    fn layer(
        name: &str,
        size_bytes: u64,
        below: bool,
        chunks: &[(u64, &[u8])],
    ) -> (Place, Manifest) {
        let name = Name::parse(&format!("s3://b/{name}.gaur")).unwrap();
        let parent = below.then(|| super::super::Parent {
            name: "below.gaur".to_owned(),
            digest: Digest::of(b"below"),
        });
        let mut builder = Builder::new(size_bytes, parent).unwrap();
        for (chunk, bytes) in chunks {
            let stored = Stored::Plain(Digest::of(bytes));
            builder.add(*chunk, 1, stored).unwrap();
        }
        let (bytes, _) = builder.finish().unwrap();
        let place = Place::new(name, false).unwrap();
        (place, Manifest::parse(&bytes).unwrap())
    }

    /// A parent that is shorter than both its child and its own parent ends the disk there.
    #[test]
    fn what_is_beyond_a_shorter_parent_is_zeros_and_not_the_grandparents() {
        let bottom: [(u64, &[u8]); 4] = [(0, b"0"), (1, b"1"), (2, b"2"), (3, b"3")];
        let image = PublishedImage(Arc::new(Layers {
            name: String::new(),
            layers: vec![
                layer("top", 4 * CHUNK_BYTES, true, &[(0, b"top")]),
                layer("middle", CHUNK_BYTES + 5, true, &[]),
                layer("bottom", 4 * CHUNK_BYTES, false, &bottom),
            ],
            patience: Duration::ZERO,
            cancel: watch::Sender::new(false),
        }));
        let found = |chunk| {
            let (place, stored, len) = image.find(chunk);
            (place.file_name().to_owned(), stored, len)
        };
        let stored = |bytes: &[u8]| Stored::Plain(Digest::of(bytes));
        let whole = CHUNK_BYTES as usize;
        assert_eq!(found(0), ("top.gaur".to_owned(), stored(b"top"), whole));
        assert_eq!(found(1), ("bottom.gaur".to_owned(), stored(b"1"), 5));
        assert!(image.is_zero(2) && image.is_zero(3) && !image.is_zero(1));
        assert_eq!(cut(&Bytes::from_static(b"abcd"), 2, 3), b"ab\0"[..]);
        assert_eq!(cut(&Bytes::from_static(b"abcd"), 4, 3), b"abc"[..]);
    }
}
