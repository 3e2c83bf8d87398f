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
use super::place::{Place, whole};
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
            let manifest = place.read_manifest(patience).await.map_err(about)?;
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

    /// Where a chunk is, and in which form.
    fn find(&self, chunk: u64) -> (&Place, Stored) {
        let mut layers = self.0.layers.iter();
        let found = layers.find_map(|(place, manifest)| Some((place, manifest.find(chunk)?)));
        found.unwrap_or((&self.0.layers[0].0, Stored::Zero))
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
        let (place, digest, packed) = match self.find(chunk) {
            (_, Stored::Zero) => return Ok(vec![0; len].into()),
            (place, Stored::Plain(digest)) => (place, digest, false),
            (place, Stored::Zstd(digest)) => (place, digest, true),
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
                Ok(plain) => return Ok(plain.slice(..len)),
                Err(text) if wrong + 1 == WRONG_MAX => return Err(about(Fault::last(text))),
                Err(_) => wrong += 1,
            }
        }
    }
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
