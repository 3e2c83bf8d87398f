//! Listening sockets.

use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_block::Errno;
use gaur_reactor::Address;

use super::socket_label::SocketLabel;
use crate::error::ServeError;

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket at this path. A socket file that no process listens on is replaced.
    Unix(PathBuf),
    /// A TCP port of an address or host name of this machine.
    Tcp {
        /// `"127.0.0.1"`, `"::"`, `"localhost"`.
        bind: String,
        /// Port; 0 for any.
        port: u16,
    },
    /// The one socket handed over by systemd (`LISTEN_FDS`, `LISTEN_PID`).
    Inherited,
}

/// A socket that clients can connect to from now on. The socket file, if any, is removed with it.
pub struct Listener {
    pub(super) socket: gaur_reactor::Listener,
    address: Address,
}

impl Listener {
    /// Starts to listen.
    pub fn bind(listen: &Listen) -> Result<Listener, ServeError> {
        Listener::bind_labelled(listen, None)
    }

    /// The same with a socket that has this SELinux label. Fails where the kernel does not take it, or has no SELinux.
    pub fn bind_labelled(listen: &Listen, label: Option<&str>) -> Result<Listener, ServeError> {
        let _labelled = SocketLabel::set(label)?;
        let socket = match listen {
            Listen::Unix(path) => gaur_reactor::Listener::bind(&Address::Unix(path.clone()))
                .map_err(|errno| unix_failure(path, errno))?,
            Listen::Tcp { bind, port } => bind_tcp(bind, *port)?,
            Listen::Inherited => gaur_reactor::Listener::from_fd(inherited()?),
        };
        let address = socket
            .local_address()
            .map_err(|errno| ServeError::because("cannot tell the address of the socket", errno))?;
        Ok(Listener { socket, address })
    }

    /// The URI under which clients reach an export.
    pub fn uri(&self, export: &str) -> String {
        self.uris().of(export)
    }

    /// The URIs of exports, also after the listener has gone to its server.
    pub fn uris(&self) -> Uris {
        Uris {
            address: self.address.clone(),
            encrypted: false,
        }
    }

    /// The TCP port.
    pub fn port(&self) -> Option<u16> {
        match &self.address {
            Address::Unix(_) => None,
            Address::Tcp(address) => Some(address.port()),
        }
    }
}

/// Under which URIs the exports of a server are reached.
#[derive(Clone, Debug)]
pub struct Uris {
    address: Address,
    encrypted: bool,
}

impl Uris {
    /// The same for clients that use TLS, or do not.
    pub fn encrypted(mut self, encrypted: bool) -> Uris {
        self.encrypted = encrypted;
        self
    }

    /// The URI of an export.
    pub fn of(&self, export: &str) -> String {
        let mut name = String::new();
        escape(&mut name, export.as_bytes());
        let scheme = if self.encrypted { "nbds" } else { "nbd" };
        match &self.address {
            Address::Unix(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                let mut uri = format!("{scheme}+unix:///{name}?socket=");
                escape(&mut uri, path.as_os_str().as_encoded_bytes());
                uri
            }
            Address::Tcp(address) => format!("{scheme}://{}/{name}", reachable(address)),
        }
    }
}

/// An address that listens everywhere is reached by the name of this machine for itself.
fn reachable(address: &SocketAddr) -> String {
    if address.ip().is_unspecified() {
        return format!("localhost:{}", address.port());
    }
    address.to_string()
}

const EADDRINUSE: Errno = Errno::from_raw(98);
const EADDRNOTAVAIL: Errno = Errno::from_raw(99);

fn unix_failure(path: &Path, errno: Errno) -> ServeError {
    let what = format!("cannot listen on unix socket {}", path.display());
    if let Some(reason) = Address::too_long(path) {
        return ServeError::new(format!("{what}: {reason}"));
    }
    if errno != EADDRINUSE {
        return ServeError::because(what, errno);
    }
    let is_socket = path
        .metadata()
        .is_ok_and(|found| found.file_type().is_socket());
    ServeError::new(match is_socket {
        true => format!("{what}: another program is listening there"),
        false => format!("{what}: a file that is no socket is in the way"),
    })
}

fn bind_tcp(bind: &str, port: u16) -> Result<gaur_reactor::Listener, ServeError> {
    let what = format!("cannot listen on {bind}:{port}");
    let addresses = (bind, port)
        .to_socket_addrs()
        .map_err(|_| ServeError::new(format!("{what}: no such address or host name")))?;
    let mut failure = ServeError::new(format!("{what}: the name has no address"));
    for address in addresses {
        match gaur_reactor::Listener::bind(&Address::Tcp(address)) {
            Ok(listener) => return Ok(listener),
            Err(EADDRINUSE) => {
                failure =
                    ServeError::new(format!("{what}: Address already in use by another program"));
            }
            Err(EADDRNOTAVAIL) => {
                failure = ServeError::new(format!("{what}: not an address of this machine"));
            }
            Err(errno) => failure = ServeError::because(&what, errno),
        }
    }
    Err(failure)
}

/// First descriptor that systemd passes.
const FIRST_INHERITED: i32 = 3;

fn inherited() -> Result<OwnedFd, ServeError> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    let refuse = |reason: &str| Err(ServeError::new(reason));
    if number("LISTEN_PID") != Some(std::process::id()) {
        return refuse("no socket was handed over (LISTEN_PID is not this process)");
    }
    if number("LISTEN_FDS") != Some(1) {
        return refuse("exactly one socket can be handed over (LISTEN_FDS=1)");
    }
    if TAKEN.swap(true, Ordering::AcqRel) {
        return refuse("the socket that was handed over is in use already");
    }
    // SAFETY: systemd gave this descriptor to this very process (LISTEN_PID), nothing else in the
    // process knows of it, and TAKEN lets it be taken once.
    Ok(unsafe { OwnedFd::from_raw_fd(FIRST_INHERITED) })
}

/// Appends `bytes` as they may device in a URI.
fn escape(out: &mut String, bytes: &[u8]) {
    use std::fmt::Write;
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_escaped() {
        let mut uri = String::new();
        escape(&mut uri, "a b/ü?.img".as_bytes());
        assert_eq!(uri, "a%20b/%C3%BC%3F.img");
    }

    #[test]
    fn unspecified_addresses_are_shown_as_localhost() {
        assert_eq!(
            reachable(&"0.0.0.0:10809".parse().unwrap()),
            "localhost:10809"
        );
        assert_eq!(reachable(&"[::1]:7".parse().unwrap()), "[::1]:7");
    }
}
