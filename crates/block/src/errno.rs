//! The error of the data path: a Linux error number, because that is what NBD, ublk and virtio
//! all want in the end.

use core::fmt;

/// A Linux error number (`errno(3)`), always positive.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        impl Errno {
            $(#[doc = $text] pub const $name: Errno = Errno($number);)*

            /// The symbolic name, `"EIO"` for example; `None` for a number this crate does not use.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 { $($number => Some(stringify!($name)),)* _ => None }
            }

            /// A short description in lower case.
            pub const fn text(self) -> &'static str {
                match self.0 { $($number => $text,)* _ => "unknown error" }
            }
        }
    };
}

errnos! {
    EPERM = 1, "operation not permitted";
    ENOENT = 2, "no such file or directory";
    EINTR = 4, "interrupted system call";
    EIO = 5, "input/output error";
    ENXIO = 6, "no such device or address";
    EBADF = 9, "bad file descriptor";
    EAGAIN = 11, "resource temporarily unavailable";
    ENOMEM = 12, "out of memory";
    EACCES = 13, "permission denied";
    EBUSY = 16, "device or resource busy";
    EEXIST = 17, "the file exists already";
    EXDEV = 18, "cross-device link";
    ENODEV = 19, "no such device";
    ENOTDIR = 20, "not a directory";
    EISDIR = 21, "is a directory";
    EINVAL = 22, "invalid argument";
    ENFILE = 23, "the system has too many files open";
    EMFILE = 24, "the process has too many files open";
    ENOTTY = 25, "inappropriate call for this device";
    ETXTBSY = 26, "the file is a running program";
    EFBIG = 27, "file too large";
    ENOSPC = 28, "no space left on device";
    ESPIPE = 29, "a pipe has no offsets";
    EROFS = 30, "read-only file system";
    EPIPE = 32, "the other end is closed";
    EDOM = 33, "argument out of domain";
    ENAMETOOLONG = 36, "the name is too long";
    ENOSYS = 38, "the kernel does not have this system call";
    ELOOP = 40, "too many symbolic links, or they form a loop";
    EPROTO = 71, "the other end broke the protocol";
    EOVERFLOW = 75, "value too large";
    ENOTSOCK = 88, "is not a socket";
    EOPNOTSUPP = 95, "operation not supported";
    EADDRINUSE = 98, "the address is in use";
    EADDRNOTAVAIL = 99, "not an address of this machine";
    ECONNRESET = 104, "the other end broke the connection";
    ENOBUFS = 105, "no buffer space";
    ENOTCONN = 107, "not connected";
    ESHUTDOWN = 108, "endpoint has shut down";
    ETIMEDOUT = 110, "timed out";
    ECONNREFUSED = 111, "connection refused, nobody listens there";
    EHOSTUNREACH = 113, "no route to the host";
    ESTALE = 116, "the file is gone on its server";
    EDQUOT = 122, "the disk quota is used up";
    ENOMEDIUM = 123, "no medium in the drive";
    ECANCELED = 125, "operation canceled";
}

impl Errno {
    /// From a raw number; zero and negative numbers become [`Errno::EIO`], so that a value of this
    /// type never reads as success.
    pub const fn from_raw(number: i32) -> Errno {
        if number > 0 {
            Errno(number)
        } else {
            Errno::EIO
        }
    }

    /// The raw number, 1 or more.
    pub const fn raw(self) -> i32 {
        self.0
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => out.write_str(name),
            None => write!(out, "errno {}", self.0),
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(_) => out.write_str(self.text()),
            None => write!(out, "error {}", self.0),
        }
    }
}

impl core::error::Error for Errno {}
