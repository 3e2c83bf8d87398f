//! TLS for NBD, without input or output: bytes in, bytes out.
//!
//! [`ServerCredentials`] and [`ClientCredentials`] come from a directory whose files are named as QEMU's
//! `tls-creds-x509` has them. A [`Session`] is one side of a connection: it takes what arrived, gives what is to be
//! sent, and bounds the memory of both. Who the peer is says its [name](Session::peer_name); [`Authorization`] decides
//! by it who may come in.
//!
//! TLS 1.3 and 1.2 by rustls. Sessions are never resumed, so every connection shows its certificate. There are no
//! pre-shared keys: rustls has none but those of resumed sessions.

mod authorization;
mod credentials;
mod distinguished_name;
mod error;
mod session;
mod verifier;

pub use authorization::{Authorization, Decision, Pattern, Rule};
pub use credentials::{ClientCredentials, ServerCredentials, file};
pub use error::TlsError;
pub use session::{Received, Session};
