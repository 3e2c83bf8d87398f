//! The NBD protocol without input or output.
//!
//! [`wire`] is what server and client share. The rest is a client's: names of exports ([`Remote`]), what is said
//! and heard before the first request ([`options`]), requests, and [`Replies`], which cuts what a server sends into
//! events. A server is as hostile as a client: nothing that it says is used before it is checked, and
//! what breaks the protocol is a [`Violation`], which ends the connection.

#![forbid(unsafe_code)]

pub mod options;
mod remote;
mod replies;
mod request;
mod violation;
pub mod wire;

pub use remote::{BadName, Patience, Remote, Server, Tls};
pub use replies::{Asked, Event, Replies};
pub use request::{Headers, REQUEST_BYTES_MAX, RequestHeader, request};
pub use violation::Violation;
