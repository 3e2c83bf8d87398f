//! The server: who is let in ([`control`]), on which thread ([`threads`]), and what happens on a
//! connection ([`client_task`], [`connection`], [`execute`]).
//!
//! Threads: `control` runs on the caller's thread and alone knows which clients there are. Connections run on
//! other threads, each connection on one thread from beginning to end, and share with `control` only
//! their [`client::Client`]. Devices never leave the thread that made them.

mod client;
mod client_task;
mod connection;
mod control;
mod execute;
mod exports;
mod job;
mod listen;
mod options;
mod pieces;
mod pool;
mod recv_buffer;
mod socket_label;
mod thread_exports;
mod threads;

pub use crate::error::ServeError;
pub use crate::serve::StopSwitch as Stop;
pub use exports::Exports;
pub use listen::{Listen, Listener, Uris};
pub use options::{Export, ExportBitmap, Options, Outcome, Place, Tls};
pub use threads::serve_uring;
