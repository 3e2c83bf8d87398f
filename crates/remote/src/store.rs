//! What answers names: an object store or a web server.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use gaur_block::Errno;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{
    ClientConfigKey, GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig,
};
use parking_lot::Mutex;

use crate::name::{Name, Protocol};
use crate::oci::Disk;
use crate::profile;
use crate::published::PublishedImage;
use crate::web::Page;

/// What is known of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) len_bytes: u64,
    /// Its ETag, or when it was changed; nothing tells versions apart without.
    pub(crate) tag: Option<String>,
}

impl Facts {
    /// The tag as a condition of requests: a weak one is none.
    pub(crate) fn etag(&self) -> Option<&str> {
        let tag = self.tag.as_deref()?;
        tag.starts_with('"').then_some(tag)
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) errno: Errno,
    /// In lower case, without the name.
    pub(crate) text: String,
    /// Whether the next attempt may end otherwise.
    pub(crate) passes: bool,
    /// How long the store wants to be left alone.
    pub(crate) after: Option<Duration>,
    /// What a server wants to hear first (`WWW-Authenticate`).
    pub(crate) challenge: Option<String>,
}

impl Fault {
    pub(crate) fn last(text: &str) -> Fault {
        Fault {
            errno: Errno::EIO,
            text: text.to_owned(),
            passes: false,
            after: None,
            challenge: None,
        }
    }

    pub(crate) fn passing(text: &str) -> Fault {
        Fault {
            passes: true,
            ..Fault::last(text)
        }
    }

    pub(crate) fn changed() -> Fault {
        Fault {
            errno: Errno::from_raw(ESTALE),
            ..Fault::last("it was changed since it was opened; open it again")
        }
    }

    pub(crate) fn of_status(status: u16, more: String) -> Fault {
        let errno = match status {
            401 | 403 => Errno::EACCES,
            404 | 410 => Errno::ENOENT,
            _ => Errno::EIO,
        };
        let what = match status {
            401 | 403 => "access was refused",
            404 | 410 => "there is no such object",
            429 | 503 => "the store is busy",
            500.. => "the store failed",
            _ => "the store refused",
        };
        let more = match more.is_empty() {
            true => String::new(),
            false => format!(": {more}"),
        };
        Fault {
            errno,
            passes: matches!(status, 408 | 425 | 429 | 500..),
            ..Fault::last(&format!("{what} (HTTP {status}{more})"))
        }
    }

    pub(crate) fn after(self, after: Option<Duration>) -> Fault {
        Fault { after, ..self }
    }
}

const ESTALE: i32 = 116;

/// Variables of the environment that say which store a name is in.
const ENDPOINTS: [&str; 7] = [
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
    "GOOGLE_BASE_URL",
];

/// An object, wherever it is.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Store(Arc<dyn ObjectStore>, Path),
    Web(Page),
    Registry(Disk),
    Published(PublishedImage),
}

impl Source {
    /// Finds what answers a name, with the credentials of the environment or without any.
    pub(crate) fn of(name: &Name, credentials: bool) -> Result<Source, Fault> {
        let bad = |text: String| Fault {
            errno: Errno::EINVAL,
            ..Fault::last(&text)
        };
        match name.protocol().map_err(bad)? {
            Protocol::Web => Page::new(name.url().clone()).map(Source::Web),
            Protocol::Registry => Ok(Source::Registry(Disk::new(name, credentials))),
            protocol => {
                let key = name.key().map_err(bad)?;
                let path = Path::parse(&key).map_err(|_| bad("the key is none".to_owned()))?;
                let store = client(protocol, name.host(), credentials)?;
                Ok(Source::Store(store, path))
            }
        }
    }

    /// Which store the environment chose for names like this one.
    pub(crate) fn endpoint(&self) -> String {
        match self {
            Source::Store(store, _) => {
                let chosen = ENDPOINTS.iter();
                let chosen = chosen.filter_map(|name| std::env::var(name).ok());
                let chosen = chosen.chain(profile::endpoint());
                chosen.fold(store.to_string(), |all, one| format!("{all} {one}"))
            }
            Source::Web(_) | Source::Registry(_) | Source::Published(_) => String::new(),
        }
    }

    /// What the cache calls the object of a name.
    pub(crate) fn identity(&self, name: &str) -> String {
        match self {
            Source::Registry(disk) => disk.identity(),
            Source::Published(image) => image.identity(),
            // With the query, which may choose among objects.
            Source::Web(page) => page.url().to_string(),
            Source::Store(..) => name.to_owned(),
        }
    }

    /// Whether a chunk is known to be zeros.
    pub(crate) fn is_zero(&self, chunk: u64) -> bool {
        matches!(self, Source::Published(image) if image.is_zero(chunk))
    }

    /// Asks what the object is.
    pub(crate) async fn look(&self) -> Result<Facts, Fault> {
        match self {
            Source::Web(page) => page.look().await,
            Source::Registry(disk) => disk.look().await,
            Source::Published(image) => Ok(image.facts()),
            Source::Store(store, path) => match store.head(path).await {
                Ok(found) => Ok(facts(&found)),
                Err(error) => Err(fault(&error)),
            },
        }
    }

    /// The bytes of a range of the object, which is as it was.
    pub(crate) async fn range(&self, range: Range<u64>, told: &Facts) -> Result<Bytes, Fault> {
        let (store, path) = match self {
            Source::Web(page) => return page.range(range, told).await,
            Source::Registry(disk) => return disk.range(range).await,
            Source::Published(image) => return image.range(range).await,
            Source::Store(store, path) => (store, path),
        };
        let options = GetOptions {
            range: Some(range.clone().into()),
            if_match: told.etag().map(str::to_owned),
            ..GetOptions::default()
        };
        let answer = store.get_opts(path, options).await;
        let answer = answer.map_err(|error| fault(&error))?;
        if facts(&answer.meta) != *told {
            return Err(Fault::changed());
        }
        if answer.range != range {
            return Err(Fault::last(
                "the store sent another range than it was asked for",
            ));
        }
        let bytes = answer.bytes().await.map_err(|error| fault(&error))?;
        match bytes.len() as u64 == range.end - range.start {
            true => Ok(bytes),
            false => Err(Fault::passing("the answer ended too early")),
        }
    }
}

fn facts(found: &ObjectMeta) -> Facts {
    let modified = || found.last_modified.to_rfc3339();
    Facts {
        len_bytes: found.size,
        tag: Some(found.e_tag.clone().unwrap_or_else(modified)),
    }
}

/// A store's client: which store, the bucket, with credentials.
type ClientKey = (u8, String, bool);

/// Most clients that are kept for the next object of the same bucket.
const CLIENTS_MAX: usize = 64;

fn client(
    protocol: Protocol,
    bucket: &str,
    credentials: bool,
) -> Result<Arc<dyn ObjectStore>, Fault> {
    static CLIENTS: LazyLock<Mutex<HashMap<ClientKey, Arc<dyn ObjectStore>>>> =
        LazyLock::new(Mutex::default);
    let key = (protocol as u8, bucket.to_owned(), credentials);
    let mut clients = CLIENTS.lock();
    if let Some(client) = clients.get(&key) {
        return Ok(client.clone());
    }
    let made = match protocol {
        Protocol::S3 => s3(bucket, credentials),
        Protocol::Google => GoogleCloudStorageBuilder::from_env()
            .with_config(GoogleConfigKey::Client(TIMEOUT), TIMEOUT_NONE)
            .with_bucket_name(bucket)
            .with_skip_signature(!credentials)
            .with_retry(no_retries())
            .build()
            .map(|store| Arc::new(store) as Arc<dyn ObjectStore>),
        Protocol::Azure | Protocol::Web | Protocol::Registry => MicrosoftAzureBuilder::from_env()
            .with_config(AzureConfigKey::Client(TIMEOUT), TIMEOUT_NONE)
            .with_container_name(bucket)
            .with_skip_signature(!credentials)
            .with_retry(no_retries())
            .build()
            .map(|store| Arc::new(store) as Arc<dyn ObjectStore>),
    };
    let made = made.map_err(|error| Fault::last(&one_line(&error.to_string())))?;
    if clients.len() >= CLIENTS_MAX {
        clients.clear();
    }
    clients.insert(key, made.clone());
    Ok(made)
}

fn s3(bucket: &str, credentials: bool) -> object_store::Result<Arc<dyn ObjectStore>> {
    let builder = AmazonS3Builder::from_env()
        .with_config(AmazonS3ConfigKey::Client(TIMEOUT), TIMEOUT_NONE)
        .with_bucket_name(bucket)
        .with_retry(no_retries());
    let mut builder = profile::complete(builder);
    if !credentials {
        builder = builder.with_skip_signature(true);
    }
    builder
        .build()
        .map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
}

/// How long a request may take is said in one place, too, and a manifest may take long. As an option it leaves the others
/// of the environment as they are.
const TIMEOUT: ClientConfigKey = ClientConfigKey::Timeout;
const TIMEOUT_NONE: &str = "1 day";

/// Attempts are counted in one place: `attempt.rs`.
fn no_retries() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// What a store's error means.
pub(crate) fn fault(error: &object_store::Error) -> Fault {
    let text = one_line(&innermost(error));
    let fault = |status: u16| Fault::of_status(status, reason(&text));
    match error {
        object_store::Error::NotFound { .. } => fault(404),
        object_store::Error::PermissionDenied { .. } => fault(403),
        object_store::Error::Unauthenticated { .. } => fault(401),
        object_store::Error::Precondition { .. } => Fault::changed(),
        _ => match status_in(&text) {
            Some(416) => Fault::last("it is empty, or shorter than it was"),
            Some(status) => fault(status),
            None => Fault::passing(&text),
        },
    }
}

/// The deepest cause, which says what happened.
fn innermost(error: &object_store::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

/// The status in `... status code: 503 Service Unavailable: body`.
fn status_in(text: &str) -> Option<u16> {
    let rest = text.split_once("status code: ")?.1;
    rest.get(..3)?.parse().ok()
}

/// What S3 says in its `<Code>`, for people.
fn reason(text: &str) -> String {
    let code = text
        .split_once("<Code>")
        .and_then(|(_, rest)| rest.split_once("</Code>"));
    code.map_or_else(String::new, |(code, _)| code.chars().take(60).collect())
}

const LINE_MAX: usize = 200;

fn one_line(text: &str) -> String {
    let line = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    line.take(LINE_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_no_time_of_the_client_and_its_other_options_stay() {
        let builder = AmazonS3Builder::new()
            .with_allow_http(true)
            .with_config(AmazonS3ConfigKey::Client(TIMEOUT), TIMEOUT_NONE);
        let value = |key| builder.get_config_value(&AmazonS3ConfigKey::Client(key));
        assert_eq!(value(ClientConfigKey::AllowHttp).as_deref(), Some("true"));
        assert_ne!(value(TIMEOUT).as_deref(), Some("30 seconds"));
        let bucket = builder.with_bucket_name("b").with_region("r");
        // It is read as a time.
        let _ = rustls::crypto::ring::default_provider().install_default();
        assert!(bucket.build().is_ok());
    }
}
