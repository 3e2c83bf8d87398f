//! Where a socket listens or connects.

use std::ffi::OsStr;
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use gaur_block::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, getpeername, getsockname};

use crate::syscall::again;

/// The address of a stream socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket file. At most 107 bytes, which is what the kernel takes.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(out, "{}", path.display()),
            Address::Tcp(address) => write!(out, "{address}"),
        }
    }
}

/// Longest path of a Unix socket in bytes: `sun_path` of `unix(7)` less the zero at its end.
pub const SOCKET_PATH_MAX: usize = 107;

impl Address {
    /// What is wrong with a path that is longer than any socket's.
    pub fn too_long(path: &Path) -> Option<String> {
        let len = path.as_os_str().len();
        (len > SOCKET_PATH_MAX).then(|| {
            format!("a socket's path has at most {SOCKET_PATH_MAX} bytes, and this has {len}")
        })
    }
}

/// The address as the kernel takes it.
pub(crate) fn raw(address: &Address) -> Result<SocketAddrAny, Errno> {
    match address {
        Address::Tcp(address) => Ok(SocketAddrAny::from(*address)),
        Address::Unix(path) => match path.as_os_str().len() {
            // The kernel would choose a name.
            0 => Err(Errno::EINVAL),
            1..=SOCKET_PATH_MAX => again(|| SocketAddrUnix::new(path.as_path())).map(Into::into),
            _ => Err(Errno::from_raw(libc::ENAMETOOLONG)),
        },
    }
}

/// The address that a socket is bound to.
pub(crate) fn local_address(fd: BorrowedFd<'_>) -> Result<Address, Errno> {
    from_any(again(|| getsockname(fd))?)
}

/// The address that a socket is connected to.
pub(crate) fn peer_address(fd: BorrowedFd<'_>) -> Result<Address, Errno> {
    // The other end of a Unix socket may have no name.
    let unnamed = || Ok(Address::Unix(PathBuf::new()));
    again(|| getpeername(fd))?.map_or_else(unnamed, from_any)
}

fn from_any(address: SocketAddrAny) -> Result<Address, Errno> {
    if address.address_family() == AddressFamily::UNIX {
        let unix = SocketAddrUnix::try_from(address).map_err(|_| Errno::EINVAL)?;
        let path = unix.path().map_or(PathBuf::new(), |path| {
            PathBuf::from(OsStr::from_bytes(path.to_bytes()))
        });
        return Ok(Address::Unix(path));
    }
    let address = SocketAddr::try_from(address).map_err(|_| Errno::EINVAL)?;
    Ok(Address::Tcp(address))
}
