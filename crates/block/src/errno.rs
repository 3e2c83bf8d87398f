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
    EAGAIN = 11, "resource temporarily unavailable";
    ENOMEM = 12, "out of memory";
    EACCES = 13, "permission denied";
    EBUSY = 16, "device or resource busy";
    EINVAL = 22, "invalid argument";
    EFBIG = 27, "file too large";
    ENOSPC = 28, "no space left on device";
    EROFS = 30, "read-only file system";
    EDOM = 33, "argument out of domain";
    EOVERFLOW = 75, "value too large";
    EOPNOTSUPP = 95, "operation not supported";
    ESHUTDOWN = 108, "endpoint has shut down";
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
