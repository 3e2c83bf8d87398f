//! Names become files: who may have what opened, and with whose credentials.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use gaur_block::{Errno, OpenError};
use gaur_reactor::OpenFile;
use gaur_reactor::remote::{self, Asker};
use parking_lot::Mutex;

use crate::attempt;
use crate::cache::Cache;
use crate::layer::Layer;
use crate::name::Name;
use crate::published::{Place, PublishedImage};
use crate::runtime;
use crate::settings::Settings;
use crate::store::{Facts, Fault, Source};

/// How long opening is tried: somebody waits for an answer, and a name may be wrong.
const OPEN_PATIENCE: Duration = Duration::from_secs(10);

/// Has files in stores opened in this process, with the cache and the patience of the environment.
pub fn install() {
    remote::install(Box::new(Opener::default()));
}

#[derive(Default)]
struct Opener {
    /// The cache is made when the first file is opened.
    base: OnceLock<Result<Base, String>>,
    /// What is open: opened again it asks nobody.
    open: Mutex<HashMap<(Name, bool), Weak<Layer>>>,
}

struct Base {
    cache: Arc<Cache>,
    patience: Duration,
}

impl Base {
    fn new() -> Result<Base, String> {
        let settings = Settings::from_environment()?;
        let cache = Cache::open(&settings.cache, settings.cache_bytes).map_err(|error| {
            let folder = settings.cache.display();
            format!("the cache {folder} cannot be used: {error}; GAUR_REMOTE_CACHE names another")
        })?;
        Ok(Base {
            cache: Arc::new(cache),
            patience: settings.patience,
        })
    }
}

impl remote::Opener for Opener {
    fn open(&self, name: &str, asker: Asker<'_>) -> Result<OpenFile, OpenError> {
        let name = Name::parse(name).map_err(|text| refused(Errno::EINVAL, &text))?;
        let credentials = may_ask(&name, asker)?;
        let layer = self.layer(name, credentials)?;
        let failed = |error: std::io::Error| refused(Errno::EIO, &format!("the cache: {error}"));
        let data = layer.entry().open_data().map_err(failed)?;
        OpenFile::remote(OwnedFd::from(data), layer)
    }
}

impl Opener {
    fn layer(&self, name: Name, credentials: bool) -> Result<Arc<Layer>, OpenError> {
        let key = (name, credentials);
        if let Some(layer) = self.open.lock().get(&key).and_then(Weak::upgrade) {
            return Ok(layer);
        }
        let base = self.base.get_or_init(Base::new);
        let base = base.as_ref().map_err(|text| refused(Errno::EIO, text))?;
        let failed = |fault: Fault| refused(fault.errno, &fault.text);
        let started = runtime::get();
        started.map_err(|text| refused(Errno::EIO, &text))?;
        let patience = base.patience.min(OPEN_PATIENCE);
        let name = key.0.clone();
        let found = runtime::run(async move { find(name, credentials, patience).await });
        let (source, facts) = found
            .map_err(|text| refused(Errno::EIO, &text))?
            .map_err(failed)?;
        let shown = key.0.to_string();
        // Another thread may have opened it meanwhile; then there is one layer all the same.
        let mut open = self.open.lock();
        if let Some(layer) = open.get(&key).and_then(Weak::upgrade) {
            return Ok(layer);
        }
        let layer = Layer::open(shown, source, facts, base.cache.clone(), base.patience);
        let layer = layer.map_err(|error| refused(Errno::EIO, &format!("the cache: {error}")))?;
        open.retain(|_, layer| layer.strong_count() > 0);
        open.insert(key, Arc::downgrade(&layer));
        Ok(layer)
    }
}

/// Finds what answers a name, and what it is.
async fn find(name: Name, credentials: bool, patience: Duration) -> Result<(Source, Facts), Fault> {
    let source = match Place::is_one(&name) {
        true => {
            let place = Place::new(name, credentials)?;
            Source::Published(PublishedImage::read(place, patience).await?)
        }
        false => Source::of(&name, credentials)?,
    };
    let facts = attempt::look(&source, patience).await?;
    Ok((source, facts))
}

/// Whether a file may be asked for, and with the credentials of the environment. Those go only to what the user has
/// named: an image that refers to anything it likes gets what anybody gets.
fn may_ask(name: &Name, asker: Asker<'_>) -> Result<bool, OpenError> {
    match asker {
        Asker::User => Ok(true),
        Asker::Image(places) => {
            let places = places.iter().filter_map(|place| place.to_str());
            let mut places = places.filter_map(|place| Name::parse(place).ok());
            match places.any(|place| name.is_within(&place)) {
                true => Ok(true),
                false => {
                    let what = "an image may have no object opened that is not allowed";
                    Err(refused(Errno::EXDEV, what))
                }
            }
        }
        Asker::AnyImage if name.is_link_local() => {
            let what = "an image may not lead to what machines are told about themselves";
            Err(refused(Errno::EXDEV, what))
        }
        Asker::AnyImage => Ok(false),
    }
}

fn refused(errno: Errno, reason: &str) -> OpenError {
    OpenError {
        errno,
        reason: reason.to_owned(),
    }
}
