//! The server: who is let in ([`control`]), on which thread ([`stations`]), and what happens on a
//! connection ([`connection`], [`hub`], [`execute`]).
//!
//! Threads: `control` runs on the caller's thread and alone knows who is there. Connections run on
//! other threads, each connection on one thread from beginning to end, and share with `control` only
//! their [`client::Client`]. Devices never leave the thread that made them.

mod client;
mod connection;
mod control;
mod execute;
mod exports;
mod hub;
mod inflow;
mod job;
mod listen;
mod options;
mod pieces;
mod pool;
mod shelf;
mod stations;
mod stop;

pub use crate::error::ServeError;
pub use exports::Exports;
pub use listen::{Listen, Listener, Uris};
pub use options::{Export, Log, Options, Outcome, Place};
pub use stations::{serve_blocking, serve_uring};
pub use stop::Stop;
