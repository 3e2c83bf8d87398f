//! What the environment says about the cache and the patience with stores.

use std::path::PathBuf;
use std::time::Duration;

/// Where the cache is, how large it may become, and how long a read waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The folder of the cache.
    pub cache: PathBuf,
    /// Most bytes that it keeps: what is in use and was read last stays.
    pub cache_bytes: u64,
    /// How long a read is tried before it fails.
    pub patience: Duration,
}

const CACHE_BYTES: u64 = 16 << 30;
const PATIENCE: Duration = Duration::from_secs(60);
/// A year.
const PATIENCE_MAX_SECONDS: u64 = 365 * 24 * 3600;

impl Settings {
    /// Those of the environment: `GAUR_REMOTE_CACHE` is the folder (else `/var/cache/gaur` for root, and `gaur/remote` in the
    /// user's cache), `GAUR_REMOTE_CACHE_BYTES` its size (16 GiB), `GAUR_REMOTE_TIMEOUT` the seconds (60).
    ///
    /// # Errors
    /// One line, when a value is none or there is no folder.
    pub fn from_environment() -> Result<Settings, String> {
        let cache = match named("GAUR_REMOTE_CACHE") {
            Some(folder) => PathBuf::from(folder),
            None if rustix::process::geteuid().is_root() => PathBuf::from("/var/cache/gaur"),
            None => of_user().ok_or("GAUR_REMOTE_CACHE is to name a folder: there is no home")?,
        };
        Ok(Settings {
            cache,
            cache_bytes: number("GAUR_REMOTE_CACHE_BYTES")?.unwrap_or(CACHE_BYTES),
            patience: number("GAUR_REMOTE_TIMEOUT")?.map_or(PATIENCE, seconds),
        })
    }
}

/// So many that they can be added to any time.
fn seconds(number: u64) -> Duration {
    Duration::from_secs(number.min(PATIENCE_MAX_SECONDS))
}

fn named(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn of_user() -> Option<PathBuf> {
    let cache = named("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(named("HOME")?).join(".cache")));
    Some(cache?.join("gaur/remote"))
}

fn number(name: &str) -> Result<Option<u64>, String> {
    let Some(value) = named(name) else {
        return Ok(None);
    };
    let number = value.to_str().and_then(|text| text.parse().ok());
    let number = number.filter(|number| *number > 0);
    number
        .map(Some)
        .ok_or_else(|| format!("{name} is to be a number above 0"))
}
