//! Protocol violations, for which a peer is disconnected.

/// What a peer did that ends its connection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Client flags this server did not offer.
    #[error("unknown client flags {0:#x}")]
    ClientFlags(u32),
    /// An option does not start with its magic number.
    #[error("bad option magic {0:#018x}")]
    OptionMagic(u64),
    /// An option longer than anybody would skip.
    #[error("option {option} announces {len_bytes} bytes")]
    OptionLength {
        /// Option number.
        option: u32,
        /// Announced length in bytes.
        len_bytes: u32,
    },
    /// Options without end.
    #[error("too many options")]
    TooManyOptions,
    /// A client without fixed newstyle may only choose an export.
    #[error("option {0} from a client without fixed newstyle negotiation")]
    NotFixedNewstyle(u32),
    /// `EXPORT_NAME` for an export that is not there; the protocol has no other way to say so.
    #[error("no export called {0:?}")]
    UnknownExport(String),
    /// `EXPORT_NAME` for an export that cannot be served, and why.
    #[error("{0}")]
    ExportUnavailable(String),
    /// `EXPORT_NAME` before TLS, where that comes first.
    #[error("client does not use TLS")]
    NoTls,
    /// Bytes behind `STARTTLS` that are not encrypted: whoever put them there would have them taken for the client's.
    #[error("plain text behind the request for TLS")]
    PlainTextBeforeTls,
    /// A request does not start with its magic number.
    #[error("bad request magic {0:#010x}")]
    RequestMagic(u32),
    /// A payload beyond the limit.
    #[error("request with a payload of {0} bytes")]
    PayloadLength(u64),
}
