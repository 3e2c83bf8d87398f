//! Protocol violations, for which a peer is disconnected.

use core::fmt;

/// What a peer did that ends its connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Client flags this server did not offer.
    ClientFlags(u32),
    /// An option does not start with its magic number.
    OptionMagic(u64),
    /// An option longer than anybody would skip.
    OptionLength {
        /// Option number.
        option: u32,
        /// Announced length in bytes.
        len_bytes: u32,
    },
    /// Options without end.
    TooManyOptions,
    /// A client without fixed newstyle may only choose an export.
    NotFixedNewstyle(u32),
    /// `EXPORT_NAME` for an export that is not there; the protocol has no other way to say so.
    UnknownExport(String),
    /// `EXPORT_NAME` for an export that cannot be served, and why.
    ExportUnavailable(String),
    /// A request does not start with its magic number.
    RequestMagic(u32),
    /// A payload beyond the limit.
    PayloadLength(u64),
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::ClientFlags(flags) => write!(out, "unknown client flags {flags:#x}"),
            Violation::OptionMagic(found) => write!(out, "bad option magic {found:#018x}"),
            Violation::OptionLength { option, len_bytes } => {
                write!(out, "option {option} announces {len_bytes} bytes")
            }
            Violation::TooManyOptions => out.write_str("too many options"),
            Violation::NotFixedNewstyle(option) => {
                write!(
                    out,
                    "option {option} from a client without fixed newstyle negotiation"
                )
            }
            Violation::UnknownExport(name) => write!(out, "no export called {name:?}"),
            Violation::ExportUnavailable(reason) => out.write_str(reason),
            Violation::RequestMagic(found) => write!(out, "bad request magic {found:#010x}"),
            Violation::PayloadLength(len) => write!(out, "request with a payload of {len} bytes"),
        }
    }
}

impl core::error::Error for Violation {}
