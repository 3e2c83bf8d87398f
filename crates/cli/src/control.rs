//! The control socket of `gaur serve`: what can be done to an image while clients use it. The
//! protocol is described in `docs/control.md`.

pub mod client;
mod exports;
pub mod frames;
mod incoming;
mod line;
pub mod protocol;
pub mod server;
mod session;
mod state;
