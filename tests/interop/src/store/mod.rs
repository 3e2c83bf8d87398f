//! Object stores and registries for tests, and what goes wrong between them and their clients.
//!
//! Each is a fixture: it listens on loopback at ports that were free, waits until it answers, and is gone
//! with the value, its processes also when the test is killed.

mod acceptor;
mod daemon;
mod fault;
mod faulty;
mod http;
mod ports;
mod proxy;
mod registry;
mod s3;
mod weed;

pub use fault::{Fault, When};
pub use faulty::FaultyStore;
pub use http::{Request, most_fetched};
pub use proxy::{Bytes, Link, Proxy};
pub use registry::{Access, Layer, PASSWORD, PushedImage, Registry, USER};
pub use s3::{Credentials, Object};
pub use weed::{PUBLIC_BUCKET, Weed};
