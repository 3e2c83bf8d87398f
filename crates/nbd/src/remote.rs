//! Names of exports: URIs, and QEMU's older form.
//!
//! Source: `doc/uri.md` of the NetworkBlockDevice project; "NBD" in QEMU's "Device URL Syntax". The query of a URI also
//! takes QEMU's options `reconnect-delay` and `open-timeout`, and `request-timeout`, all in seconds, so that one
//! name says all there is to say.

use std::fmt::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;

use crate::wire::STRING_MAX_BYTES;

/// Seconds without a byte after which requests in flight count as lost, unless told otherwise.
const REQUEST_TIMEOUT: u32 = 120;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Server {
    /// A TCP port.
    Inet {
        /// Name or number of the machine.
        host: String,
        /// The port.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

impl Server {
    /// The port that IANA gave to NBD.
    pub const PORT: u16 = 10809;
}

/// How long is waited for a server, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// For how long requests wait for a lost connection to come back; 0 for not at all.
    pub reconnect_delay: u32,
    /// For how long a first connection is tried; 0 for once.
    pub open_timeout: u32,
    /// After how long without a byte from the server requests in flight count as lost; 0 for never.
    pub request_timeout: u32,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            reconnect_delay: 0,
            open_timeout: 0,
            request_timeout: REQUEST_TIMEOUT,
        }
    }
}

/// How a connection is encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Where the certificates are, by QEMU's names.
    pub directory: PathBuf,
    /// The name that the server's certificate has to have; that of its host unless told.
    pub hostname: Option<String>,
    /// Whether the server needs a certificate of an authority in the directory.
    pub verify_peer: bool,
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Where its server is.
    pub server: Server,
    /// What it is called there; the empty name is the server's default.
    pub export: String,
    /// How it is encrypted, if it is.
    pub tls: Option<Tls>,
    /// The metadata context that is asked about in place of `base:allocation`: QEMU's `x-dirty-bitmap`.
    pub context: Option<String>,
    /// How long is waited for it.
    pub patience: Patience,
}

/// What is wrong with the name of an export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadName {
    /// Bytes that are no text.
    #[error("the name of an NBD export is text, and this is not valid UTF-8")]
    NotText,
    /// TLS without certificates.
    #[error("NBD over TLS needs ?tls-certificates=DIRECTORY")]
    NoCertificates,
    /// A form that is neither.
    #[error("an NBD export is nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH")]
    Form,
    /// No socket for `nbd+unix`.
    #[error("nbd+unix needs ?socket=PATH, and no host")]
    NoSocket,
    /// A port that is none.
    #[error("'{0}' is no port")]
    Port(String),
    /// Something in the query that is not known.
    #[error("'{0}' is no parameter of an NBD URI, or has no such value")]
    Parameter(String),
    /// `%` without two digits.
    #[error("a '%' without two hexadecimal digits behind it")]
    Escape,
    /// A name longer than the protocol allows.
    #[error("the name of an NBD export or bitmap has at most {STRING_MAX_BYTES} bytes")]
    TooLong,
}

impl Remote {
    /// Whether a name is of this kind at all, whatever may be wrong with it.
    pub fn is_name(name: &[u8]) -> bool {
        let protocol = name.split(|byte| b":/".contains(byte)).next();
        let protocol = protocol.unwrap_or_default();
        name.get(protocol.len()) == Some(&b':')
            && [&b"nbd"[..], b"nbds"].contains(
                &protocol
                    .split(|byte| *byte == b'+')
                    .next()
                    .unwrap_or_default(),
            )
    }

    /// Reads a name; `None` when it is of another kind, a path for example.
    pub fn parse(name: &[u8]) -> Option<Result<Remote, BadName>> {
        Remote::is_name(name).then(|| {
            let text = std::str::from_utf8(name).map_err(|_| BadName::NotText)?;
            let remote = Remote::read(text)?;
            let longest = [Some(&remote.export), remote.context.as_ref()];
            let longest = longest.into_iter().flatten().map(String::len).max();
            match longest.unwrap_or_default() > STRING_MAX_BYTES {
                true => Err(BadName::TooLong),
                false => Ok(remote),
            }
        })
    }

    fn read(text: &str) -> Result<Remote, BadName> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Remote::read_old(text);
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (scheme, secure) = match scheme.strip_prefix("nbds") {
            Some(rest) => (format!("nbd{rest}"), true),
            None => (scheme.to_owned(), false),
        };
        let mut socket = None;
        let (mut directory, mut hostname, mut verify_peer) = (None, None, true);
        let mut context = None;
        let mut patience = Patience::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match key {
                "socket" => socket = Some(PathBuf::from(unescape(value)?)),
                "tls-certificates" if secure => directory = Some(unescape(value)?.into()),
                "tls-hostname" if secure => hostname = Some(unescape(value)?),
                "tls-verify-peer" if secure => {
                    let bad = || BadName::Parameter(pair.to_owned());
                    verify_peer = value.parse().map_err(|_| bad())?;
                }
                "x-dirty-bitmap" => context = Some(unescape(value)?),
                key => patience.set(key, value)?,
            }
        }
        let server = match (scheme.as_str(), socket) {
            ("nbd" | "nbd+tcp", None) => inet(authority)?,
            ("nbd+unix", Some(path)) if authority.is_empty() => Server::Unix(path),
            ("nbd+unix", _) => return Err(BadName::NoSocket),
            ("nbd" | "nbd+tcp", Some(_)) => return Err(BadName::Parameter("socket".to_owned())),
            _ => return Err(BadName::Form),
        };
        let tls = |directory| Tls {
            directory,
            hostname,
            verify_peer,
        };
        let tls = match secure {
            true => Some(tls(directory.ok_or(BadName::NoCertificates)?)),
            false => None,
        };
        Ok(Remote {
            server,
            export: unescape(path)?,
            tls,
            context,
            patience,
        })
    }

    /// `nbd:HOST:PORT[:exportname=NAME]` and `nbd:unix:PATH[:exportname=NAME]`.
    fn read_old(text: &str) -> Result<Remote, BadName> {
        let rest = text.strip_prefix("nbd:").ok_or(BadName::Form)?;
        let (place, export) = rest.split_once(":exportname=").unwrap_or((rest, ""));
        let server = match place.strip_prefix("unix:") {
            Some("") => return Err(BadName::Form),
            Some(path) => Server::Unix(path.into()),
            None if place.contains(':') => inet(place)?,
            None => return Err(BadName::Form),
        };
        Ok(Remote {
            server,
            export: export.to_owned(),
            tls: None,
            context: None,
            patience: Patience::default(),
        })
    }

    /// Whether a name that the user allowed lets an image refer to this export. One without an export
    /// allows all of its server.
    pub fn is_allowed_by(&self, allowed: &Remote) -> bool {
        let place = self.server == allowed.server && self.tls == allowed.tls;
        place && ["", &self.export].contains(&allowed.export.as_str())
    }
}

impl Patience {
    /// Sets an option by its name.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), BadName> {
        let bad = || BadName::Parameter(format!("{key}={value}"));
        let place = match key {
            "reconnect-delay" => &mut self.reconnect_delay,
            "open-timeout" => &mut self.open_timeout,
            "request-timeout" => &mut self.request_timeout,
            _ => return Err(bad()),
        };
        *place = value.parse().map_err(|_| bad())?;
        Ok(())
    }
}

/// A host and perhaps a port.
fn inet(text: &str) -> Result<Server, BadName> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or(BadName::Form)?;
            (host.to_owned(), rest.strip_prefix(':'))
        }
        None => match text.rsplit_once(':') {
            Some((host, port)) => (unescape(host)?, Some(port)),
            None => (unescape(text)?, None),
        },
    };
    let port = match port {
        None | Some("") => Server::PORT,
        Some(port) => u16::from_str(port).map_err(|_| BadName::Port(port.to_owned()))?,
    };
    match host.is_empty() {
        true => Ok(Server::Inet {
            host: "localhost".to_owned(),
            port,
        }),
        false => Ok(Server::Inet { host, port }),
    }
}

fn unescape(text: &str) -> Result<String, BadName> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2).ok_or(BadName::Escape)?;
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or(BadName::Escape);
        bytes.push((digit(digits[0])? * 16 + digit(digits[1])?) as u8);
        rest = after;
    }
    String::from_utf8(bytes).map_err(|_| BadName::NotText)
}

/// Text of a URI; what would end its part of it is escaped.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '%' | '?' | '#' | '&' | ' ' | '\0'..='\x1f' | '\x7f' => {
                    write!(out, "%{:02X}", u32::from(character))?;
                }
                other => out.write_char(other)?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Server {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Server::Inet { host, port } if host.contains(':') => write!(out, "[{host}]:{port}"),
            Server::Inet { host, port } => write!(out, "{host}:{port}"),
            Server::Unix(path) => write!(out, "{}", path.display()),
        }
    }
}

/// The URI, as QEMU writes it.
impl fmt::Display for Remote {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = '?';
        let secure = if self.tls.is_some() { "s" } else { "" };
        match &self.server {
            Server::Inet { .. } => write!(out, "nbd{secure}://{}", self.server)?,
            Server::Unix(_) => write!(out, "nbd{secure}+unix://")?,
        }
        if !self.export.is_empty() {
            write!(out, "/{}", Escaped(&self.export))?;
        }
        let mut put = |key: &str, value: &dyn fmt::Display| {
            let separator = std::mem::replace(&mut separator, '&');
            write!(out, "{separator}{key}={value}")
        };
        if let Server::Unix(path) = &self.server {
            put("socket", &Escaped(&path.to_string_lossy()))?;
        }
        if let Some(tls) = &self.tls {
            put(
                "tls-certificates",
                &Escaped(&tls.directory.to_string_lossy()),
            )?;
            if let Some(hostname) = &tls.hostname {
                put("tls-hostname", &Escaped(hostname))?;
            }
            if !tls.verify_peer {
                put("tls-verify-peer", &false)?;
            }
        }
        if let Some(context) = &self.context {
            put("x-dirty-bitmap", &Escaped(context))?;
        }
        let (patience, usual) = (self.patience, Patience::default());
        for (key, value, usual) in [
            (
                "reconnect-delay",
                patience.reconnect_delay,
                usual.reconnect_delay,
            ),
            ("open-timeout", patience.open_timeout, usual.open_timeout),
            (
                "request-timeout",
                patience.request_timeout,
                usual.request_timeout,
            ),
        ] {
            if value != usual {
                put(key, &value)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str) -> Remote {
        Remote::parse(name.as_bytes()).unwrap().unwrap()
    }

    fn bad(name: &str) -> BadName {
        Remote::parse(name.as_bytes()).unwrap().unwrap_err()
    }

    #[test]
    fn both_forms_name_exports_and_are_shown_as_uris() {
        for (name, shown) in [
            ("nbd://host/disk", "nbd://host:10809/disk"),
            ("nbd://host:1/a/b", "nbd://host:1/a/b"),
            ("nbd+tcp://[::1]:7", "nbd://[::1]:7"),
            ("nbd://", "nbd://localhost:10809"),
            ("nbd:host:10810", "nbd://host:10810"),
            ("nbd:host:1:exportname=x:y", "nbd://host:1/x:y"),
            ("nbd:unix:/tmp/s", "nbd+unix://?socket=/tmp/s"),
            (
                "nbd:unix:/tmp/s:exportname=x",
                "nbd+unix:///x?socket=/tmp/s",
            ),
            (
                "nbd+unix:///x%20y?socket=/tmp/a%3fb",
                "nbd+unix:///x%20y?socket=/tmp/a%3Fb",
            ),
            (
                "nbd://h/x?reconnect-delay=5&request-timeout=0",
                "nbd://h:10809/x?reconnect-delay=5&request-timeout=0",
            ),
            (
                "nbd://h/x?x-dirty-bitmap=qemu:dirty-bitmap:a%26b",
                "nbd://h:10809/x?x-dirty-bitmap=qemu:dirty-bitmap:a%26b",
            ),
        ] {
            let remote = read(name);
            assert_eq!(remote.to_string(), shown);
            assert_eq!(read(shown), remote, "{name}");
        }
    }

    #[test]
    fn a_secure_export_names_its_certificates_and_is_allowed_with_them_only() {
        let name = "nbds://h:10809/x?tls-certificates=/d&tls-hostname=n&tls-verify-peer=false";
        assert_eq!(read(name).to_string(), name);
        let unix = "nbds+unix:///x?socket=/s&tls-certificates=/d";
        assert_eq!(read(unix).to_string(), unix);
        assert!(read(unix).is_allowed_by(&read(unix)));
        assert!(!read(unix).is_allowed_by(&read("nbd+unix:///x?socket=/s")));
        assert!(!read(unix).is_allowed_by(&read("nbds+unix:///x?socket=/s&tls-certificates=/e")));
    }

    #[test]
    fn what_is_no_name_of_an_export_is_a_path() {
        for path in [
            "disk.img",
            "./nbd:x",
            "/nbd://x",
            "nbdx:y",
            "nbd",
            "",
            "http://x/y",
        ] {
            assert_eq!(Remote::parse(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn bad_names_are_refused() {
        assert_eq!(bad("nbds://host"), BadName::NoCertificates);
        let plain = bad("nbd://h/x?tls-certificates=/d");
        assert_eq!(plain, BadName::Parameter("tls-certificates=/d".to_owned()));
        assert_eq!(bad("nbd:host"), BadName::Form);
        assert_eq!(bad("nbd+ssh://host"), BadName::Form);
        assert_eq!(bad("nbd+unix:///x"), BadName::NoSocket);
        assert_eq!(bad("nbd+unix://host/x?socket=/s"), BadName::NoSocket);
        assert_eq!(bad("nbd://h:99999"), BadName::Port("99999".to_owned()));
        assert_eq!(bad("nbd://h/%4"), BadName::Escape);
        assert_eq!(bad("nbd://h/x?y=1"), BadName::Parameter("y=1".to_owned()));
        assert_eq!(
            bad(&format!("nbd://h/{}", "x".repeat(5000))),
            BadName::TooLong
        );
        assert_eq!(Remote::parse(b"nbd://\xff").unwrap(), Err(BadName::NotText));
    }

    #[test]
    fn an_allowed_server_allows_its_exports_and_an_allowed_export_itself() {
        let allows = |allowed: &str, name: &str| read(name).is_allowed_by(&read(allowed));
        assert!(allows("nbd://h", "nbd://h:10809/x"));
        assert!(allows("nbd://h/x", "nbd:h:10809:exportname=x"));
        assert!(!allows("nbd://h/x", "nbd://h/y") && !allows("nbd://h/x", "nbd://h"));
        assert!(!allows("nbd://h", "nbd://h:1/x") && !allows("nbd://h", "nbd:unix:/s"));
    }
}
