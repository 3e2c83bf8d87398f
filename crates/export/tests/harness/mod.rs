//! A server in a thread of the test, and a client that speaks the protocol by hand.

#![allow(
    dead_code,
    unused_imports,
    reason = "every test uses another part of it"
)]

mod client;
pub mod counting;
pub mod covered;
pub mod gate;
mod server;
mod tools;

pub use client::*;
pub use server::*;
pub use tools::*;
