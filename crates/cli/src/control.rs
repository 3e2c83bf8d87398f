//! The client's side of a server's control socket.

pub mod client;
mod incoming;

pub use gaur_server::control::{frames, protocol};
