//! The control socket: what can be done to an image while clients use it. The protocol is described in
//! `docs/control.md`.

mod exports;
pub mod frames;
mod line;
pub mod protocol;
pub mod server;
mod session;
mod state;
