//! By whose right a registry is asked: none, a password, or a token from where the registry says.

use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tokio::sync::Mutex;
use url::Url;

use crate::name::{Name, leads_to_link_local, leads_to_loopback};
use crate::store::Fault;
use crate::web::Page;

/// Most bytes of a token's answer.
const TOKEN_BYTES: usize = 1 << 20;

/// The right to pull from a repository.
#[derive(Clone, Debug)]
pub(super) struct Auth {
    host: String,
    /// Whether the registry is on this machine.
    loopback: bool,
    repository: String,
    /// `user:password` in base64.
    user: Option<String>,
    /// What is sent as `Authorization`.
    header: Arc<Mutex<Option<String>>>,
}

impl Auth {
    pub(super) fn new(name: &Name, repository: &str, credentials: bool) -> Auth {
        let host = name.authority();
        Auth {
            loopback: name.is_loopback(),
            repository: repository.to_owned(),
            user: credentials.then(|| user_of(&host)).flatten(),
            host,
            header: Arc::default(),
        }
    }

    pub(super) async fn header(&self) -> Option<String> {
        self.header.lock().await.clone()
    }

    /// Does what the registry asks for, which refused a request with this header.
    pub(super) async fn answer(&self, refused: &Fault, sent: Option<&str>) -> Result<(), Fault> {
        // Who else was refused waits here, and then has the new header.
        let mut known = self.header.lock().await;
        if known.as_deref() != sent {
            return Ok(());
        }
        let challenge = refused.challenge.as_deref().unwrap_or_default();
        let (scheme, rest) = challenge.split_once(' ').unwrap_or((challenge, ""));
        let header = match scheme.to_ascii_lowercase().as_str() {
            "bearer" => Some(format!("Bearer {}", self.token(rest).await?)),
            "basic" => self.user.as_ref().map(|user| format!("Basic {user}")),
            _ => None,
        };
        // The same again would be refused again; a new token is another.
        if header.is_none() || *known == header {
            let host = &self.host;
            let hint = format!(
                "access was refused; the credentials for {host} are those of docker or podman login"
            );
            return Err(Fault {
                errno: refused.errno,
                ..Fault::last(&hint)
            });
        }
        *known = header;
        Ok(())
    }

    /// Fetches a token from where the challenge says.
    async fn token(&self, challenge: &str) -> Result<String, Fault> {
        let bad = || Fault::last("the registry asks for a token in words that are not understood");
        let realm = parameter(challenge, "realm").ok_or_else(bad)?;
        let mut url = Url::parse(&realm).map_err(|_| bad())?;
        may_fetch(&url, self.loopback)?;
        let scope = format!("repository:{}:pull", self.repository);
        url.query_pairs_mut().append_pair("scope", &scope);
        if let Some(service) = parameter(challenge, "service") {
            url.query_pairs_mut().append_pair("service", &service);
        }
        let user = self.user.as_ref().map(|user| format!("Basic {user}"));
        let answer = page(url.as_str())?.small("*/*", user, TOKEN_BYTES).await?;
        let answer: Value = serde_json::from_slice(&answer).map_err(|_| bad())?;
        let token = answer.get("token").or_else(|| answer.get("access_token"));
        let token = token.and_then(Value::as_str).ok_or_else(bad)?;
        Ok(token.to_owned())
    }
}

/// Whether a registry may have tokens fetched there.
fn may_fetch(realm: &Url, registry_is_loopback: bool) -> Result<(), Fault> {
    if leads_to_link_local(realm) || (leads_to_loopback(realm) && !registry_is_loopback) {
        let what = "the registry has tokens fetched from where it may lead nobody";
        return Err(Fault::last(what));
    }
    // A password goes nowhere in the clear.
    match realm.scheme() == "https" || registry_is_loopback {
        true => Ok(()),
        false => Err(Fault::last("the registry has tokens fetched without TLS")),
    }
}

pub(super) fn page(url: &str) -> Result<Page, Fault> {
    let url = Url::parse(url).map_err(|_| Fault::last("no name of a registry"))?;
    Page::new(url)
}

/// A parameter of a challenge: `realm="https://..",service=".."`.
fn parameter(challenge: &str, name: &str) -> Option<String> {
    let mut rest = challenge;
    while let Some((key, value)) = rest.split_once("=\"") {
        let (value, behind) = value.split_once('"')?;
        if key.trim_matches([',', ' ']).eq_ignore_ascii_case(name) {
            return Some(value.to_owned());
        }
        rest = behind;
    }
    None
}

/// What `docker login` or `podman login` has stored for a host.
fn user_of(host: &str) -> Option<String> {
    let from = |name: &str, more: &str| {
        let folder = std::env::var_os(name).filter(|value| !value.is_empty());
        folder.map(|folder| PathBuf::from(folder).join(more))
    };
    let files = [
        from("REGISTRY_AUTH_FILE", ""),
        from("DOCKER_CONFIG", "config.json"),
        from("XDG_RUNTIME_DIR", "containers/auth.json"),
        from("HOME", ".docker/config.json"),
    ];
    files.into_iter().flatten().find_map(|file| {
        // `join("")` adds a slash, which no file has.
        let file = file.to_str()?.trim_end_matches('/').to_owned();
        let text = std::fs::read(file).ok()?;
        let config: Value = serde_json::from_slice(&text).ok()?;
        let entry = config.get("auths")?.get(host)?;
        let auth = entry.get("auth")?.as_str()?;
        STANDARD.decode(auth).ok()?;
        Some(auth.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_leads_to_no_address_of_this_machine_or_link() {
        let allowed = |realm: &str, registry_is_loopback| {
            may_fetch(&Url::parse(realm).unwrap(), registry_is_loopback).is_ok()
        };
        assert!(allowed("https://auth.example/token", false));
        for realm in [
            "http://auth.example/token",
            "https://127.0.0.1/token",
            "https://[::1]/token",
            "https://[::ffff:127.0.0.1]/token",
            "https://localhost./token",
            "https://a.localhost/token",
            "https://0/token",
        ] {
            assert!(!allowed(realm, false), "{realm}");
            assert!(allowed(realm, true), "{realm}");
        }
        assert!(!allowed("https://169.254.169.254/token", true));
        assert!(!allowed("https://[fe80::1]/token", false));
        let is_loopback = |host: &str| {
            let name = Name::parse(&format!("oci://{host}/a:1")).unwrap();
            Auth::new(&name, "a", false).loopback
        };
        assert!(is_loopback("127.0.0.1:5000") && is_loopback("localhost:5000"));
        assert!(!is_loopback("127.example") && !is_loopback("localhost.example"));
    }

    #[test]
    fn a_challenge_is_read() {
        let challenge =
            r#"realm="https://auth.example/token?x=1,2", service="registry.example",scope="s""#;
        let found = |name: &str| parameter(challenge, name);
        assert_eq!(found("realm").unwrap(), "https://auth.example/token?x=1,2");
        assert_eq!(found("service").unwrap(), "registry.example");
        assert_eq!(found("none"), None);
        assert_eq!(parameter("realm=\"open", "realm"), None);
    }
}
