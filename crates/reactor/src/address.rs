//! Where a socket listens or connects.

use std::ffi::{OsStr, c_int};
use std::fmt;
use std::mem::offset_of;
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
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

/// An address as the kernel takes it. Constant once made; it may be handed to a ring.
pub(crate) struct RawAddress {
    storage: libc::sockaddr_storage,
    len: libc::socklen_t,
}

impl RawAddress {
    pub(crate) fn new(address: &Address) -> Result<RawAddress, Errno> {
        match address {
            Address::Unix(path) => RawAddress::unix(path.as_os_str()),
            Address::Tcp(SocketAddr::V4(address)) => Ok(RawAddress::v4(*address)),
            Address::Tcp(SocketAddr::V6(address)) => Ok(RawAddress::v6(*address)),
        }
    }

    fn unix(path: &OsStr) -> Result<RawAddress, Errno> {
        // SAFETY: `sockaddr_un` is plain integers, for which zero is a value.
        let mut raw: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        let bytes = path.as_bytes();
        // One byte stays zero and ends the name; a first byte of zero would mean another namespace.
        if bytes.is_empty() || bytes.contains(&0) {
            return Err(Errno::EINVAL);
        }
        if bytes.len() >= raw.sun_path.len() {
            return Err(Errno::from_raw(libc::ENAMETOOLONG));
        }
        raw.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in raw.sun_path.iter_mut().zip(bytes) {
            *to = *from as libc::c_char;
        }
        let len = offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
        Ok(RawAddress::from_parts(raw, len))
    }

    fn v4(address: SocketAddrV4) -> RawAddress {
        // SAFETY: `sockaddr_in` is plain integers, for which zero is a value.
        let mut raw: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        raw.sin_family = libc::AF_INET as libc::sa_family_t;
        raw.sin_port = address.port().to_be();
        raw.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
        RawAddress::from_parts(raw, size_of::<libc::sockaddr_in>())
    }

    fn v6(address: SocketAddrV6) -> RawAddress {
        // SAFETY: `sockaddr_in6` is plain integers, for which zero is a value.
        let mut raw: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
        raw.sin6_family = libc::AF_INET6 as libc::sa_family_t;
        raw.sin6_port = address.port().to_be();
        raw.sin6_addr.s6_addr = address.ip().octets();
        raw.sin6_flowinfo = address.flowinfo();
        raw.sin6_scope_id = address.scope_id();
        RawAddress::from_parts(raw, size_of::<libc::sockaddr_in6>())
    }

    /// `T` is one of the kernel's address structures.
    fn from_parts<T>(raw: T, len: usize) -> RawAddress {
        // SAFETY: `sockaddr_storage` is plain integers, is at least as large and as aligned as any
        // address structure, and was made to hold them.
        let storage = unsafe {
            let mut storage: libc::sockaddr_storage = std::mem::zeroed();
            (&raw mut storage).cast::<T>().write(raw);
            storage
        };
        RawAddress {
            storage,
            len: len as libc::socklen_t,
        }
    }

    pub(crate) fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub(crate) fn len(&self) -> libc::socklen_t {
        self.len
    }

    /// `AF_UNIX`, `AF_INET` or `AF_INET6`.
    pub(crate) fn family(&self) -> c_int {
        c_int::from(self.storage.ss_family)
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
