//! Objects on web servers, which send ranges.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use reqwest::dns::{Addrs, Name as HostName, Resolve, Resolving};
use reqwest::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap,
    IF_MATCH, LAST_MODIFIED, RANGE, RETRY_AFTER, WWW_AUTHENTICATE,
};
use reqwest::redirect::{Attempt, Policy};
use reqwest::{Client, Response, StatusCode, Url};

use crate::name::{is_link_local, leads_to_link_local};
use crate::store::{Facts, Fault};

const CONNECT: Duration = Duration::from_secs(10);
const REDIRECTS_MAX: usize = 5;

/// An object that a URL leads to.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    url: Url,
    client: Client,
}

impl Page {
    pub(crate) fn new(url: Url) -> Result<Page, Fault> {
        static CLIENT: OnceLock<Option<Client>> = OnceLock::new();
        let client = CLIENT.get_or_init(|| client().ok()).clone();
        let client = client.ok_or_else(|| Fault::last("cannot start a web client"))?;
        Ok(Page { url, client })
    }

    pub(crate) fn url(&self) -> &Url {
        &self.url
    }

    pub(crate) async fn look(&self) -> Result<Facts, Fault> {
        let answer = self.ask(0..1, None, None).await?;
        let facts = facts(answer.headers())?;
        drop(answer);
        Ok(facts)
    }

    /// The bytes of a range, as many as it has.
    pub(crate) async fn range(&self, range: Range<u64>, told: &Facts) -> Result<Bytes, Fault> {
        let answer = self.ask(range.clone(), told.etag(), None).await?;
        let found = facts(answer.headers())?;
        if found != *told {
            return Err(Fault::changed());
        }
        body(answer, range).await
    }

    /// A range of an object that never changes and is this long, with the right to it.
    pub(crate) async fn part(
        &self,
        range: Range<u64>,
        whole_bytes: u64,
        authorization: Option<String>,
    ) -> Result<Bytes, Fault> {
        let answer = self.ask(range.clone(), None, authorization).await?;
        match facts(answer.headers())?.len_bytes == whole_bytes {
            true => body(answer, range).await,
            false => Err(Fault::last("it has another length than was said")),
        }
    }

    /// A whole small answer.
    pub(crate) async fn small(
        &self,
        accept: &str,
        authorization: Option<String>,
        bytes_max: usize,
    ) -> Result<Vec<u8>, Fault> {
        let mut request = self.client.get(self.url.clone()).header(ACCEPT, accept);
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let mut answer = request.send().await.map_err(|error| broken(&error))?;
        if answer.status() != StatusCode::OK {
            return Err(refused(&answer));
        }
        let mut body = Vec::new();
        while let Some(part) = answer.chunk().await.map_err(|error| broken(&error))? {
            if body.len() + part.len() > bytes_max {
                return Err(Fault::last("the answer is too long"));
            }
            body.extend_from_slice(&part);
        }
        Ok(body)
    }

    async fn ask(
        &self,
        range: Range<u64>,
        etag: Option<&str>,
        authorization: Option<String>,
    ) -> Result<Response, Fault> {
        let bytes = format!("bytes={}-{}", range.start, range.end - 1);
        let mut request = self.client.get(self.url.clone());
        request = request
            .header(RANGE, bytes)
            .header(ACCEPT_ENCODING, "identity");
        if let Some(etag) = etag {
            request = request.header(IF_MATCH, etag);
        }
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let answer = request.send().await.map_err(|error| broken(&error))?;
        let status = answer.status();
        match status {
            StatusCode::PARTIAL_CONTENT if answer.headers().contains_key(CONTENT_ENCODING) => Err(
                Fault::last("the server sends it encoded, and ranges of that say nothing"),
            ),
            StatusCode::PARTIAL_CONTENT => Ok(answer),
            StatusCode::OK => Err(Fault::last("the server sends no ranges, only the whole")),
            StatusCode::RANGE_NOT_SATISFIABLE => {
                Err(Fault::last("it is empty, or shorter than it was"))
            }
            StatusCode::PRECONDITION_FAILED => Err(Fault::changed()),
            _ => Err(refused(&answer)),
        }
    }
}

/// The bytes of an answer with a range.
async fn body(mut answer: Response, range: Range<u64>) -> Result<Bytes, Fault> {
    if started_at(answer.headers()) != Some(range.start) {
        return Err(Fault::last(
            "the server sent another range than it was asked for",
        ));
    }
    let len = (range.end - range.start) as usize;
    let mut body = BytesMut::with_capacity(len);
    while let Some(part) = answer.chunk().await.map_err(|error| broken(&error))? {
        if body.len() + part.len() > len {
            return Err(Fault::last("the server sent more than it was asked for"));
        }
        body.extend_from_slice(&part);
    }
    match body.len() == len {
        true => Ok(body.freeze()),
        false => Err(Fault::passing("the answer ended too early")),
    }
}

/// An answer that is an error.
fn refused(answer: &Response) -> Fault {
    let headers = answer.headers();
    let challenge = text(headers, WWW_AUTHENTICATE).map(str::to_owned);
    let is_asked = answer.status() == StatusCode::UNAUTHORIZED;
    let fault = Fault::of_status(answer.status().as_u16(), String::new());
    Fault {
        challenge: challenge.filter(|_| is_asked),
        ..fault.after(retry_after(headers))
    }
}

fn client() -> reqwest::Result<Client> {
    Client::builder()
        .user_agent(concat!("gaur/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT)
        // A URL may hold a signature.
        .referer(false)
        .redirect(Policy::custom(follow))
        .dns_resolver(std::sync::Arc::new(Elsewhere))
        .http1_only()
        .build()
}

/// Follows a redirect on the same host, and from one encrypted host to another: where else it may lead is nothing that a
/// server should choose for this machine.
fn follow(attempt: Attempt<'_>) -> reqwest::redirect::Action {
    if attempt.previous().len() > REDIRECTS_MAX {
        return attempt.error("too many redirects");
    }
    let allowed = attempt.previous().first().is_some_and(|first| {
        let to = attempt.url();
        let same = first.host() == to.host()
            && first.port_or_known_default() == to.port_or_known_default();
        let encrypted = first.scheme() == "https" && to.scheme() == "https";
        encrypted || (same && first.scheme() == to.scheme())
    });
    if allowed && leads_to_link_local(attempt.url()) {
        return attempt.error("a redirect to what machines are told about themselves");
    }
    match allowed {
        true => attempt.follow(),
        false => attempt.error("a redirect to another host that is not encrypted"),
    }
}

/// Finds addresses of hosts, but no services that tell a machine its secrets.
struct Elsewhere;

impl Resolve for Elsewhere {
    fn resolve(&self, name: HostName) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let found: Vec<SocketAddr> = found
                .filter(|address| !is_link_local(address.ip()))
                .collect();
            if found.is_empty() {
                return Err("the host has no address that may be used".into());
            }
            let found: Addrs = Box::new(found.into_iter());
            Ok(found)
        })
    }
}

/// What a connection broke with, without the URL.
fn broken(error: &reqwest::Error) -> Fault {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    match error.is_redirect() || error.is_builder() {
        true => Fault::last(&cause.to_string()),
        false => Fault::passing(&cause.to_string()),
    }
}

fn text(headers: &HeaderMap, name: reqwest::header::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// Length and identity, as an answer with a range tells them.
fn facts(headers: &HeaderMap) -> Result<Facts, Fault> {
    let range = text(headers, CONTENT_RANGE).unwrap_or_default();
    let len = range.rsplit_once('/').and_then(|(_, len)| len.parse().ok());
    let len_bytes = len.ok_or_else(|| Fault::last("the server does not tell the length"))?;
    let tag = text(headers, ETAG).or_else(|| text(headers, LAST_MODIFIED));
    Ok(Facts {
        len_bytes,
        tag: tag.map(str::to_owned),
    })
}

/// The first byte of the range that was sent.
fn started_at(headers: &HeaderMap) -> Option<u64> {
    let range = text(headers, CONTENT_RANGE)?.strip_prefix("bytes ")?;
    range.split_once('-')?.0.parse().ok()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = text(headers, RETRY_AFTER)?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}
