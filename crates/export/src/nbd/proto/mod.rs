//! The NBD protocol as a pure machine: bytes in, events out; no input, output, clock or thread.
//!
//! A connection is a [`Handshake`] until that says [`Step::Transmit`], then a [`Parser`]. Both take
//! what has arrived so far and say how much of it they used, so the way the bytes were cut up on
//! their way does not matter. Replies are written by [`reply`]. Everything a peer sends is hostile:
//! memory is bounded by [`wire::OPTION_MAX_BYTES`] and the session's payload limit, and a peer that
//! breaks the protocol gets a [`Violation`], which ends its connection and nothing else.

mod command;
mod handshake;
mod option;
pub mod reply;
mod session;
mod violation;
pub use gaur_nbd::wire;

pub use command::{Command, Event, Kind, Parser, Refusal};
pub use handshake::{Exports, Handshake, Step};
pub use session::{Contexts, ExportInfo, Session, Style};
pub use violation::Violation;
