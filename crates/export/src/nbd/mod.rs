//! Exports over the network block device protocol.
//!
//! [`proto`] is the protocol without input and output. [`serve_uring`] and [`Exports::serve_blocking`] serve
//! devices with it: any number of exports to any number of clients over one listening socket.
//!
//! ```no_run
//! use gaur_export::device::Memory;
//! use gaur_export::nbd::{self, Export, Listen, Listener, Options, Stop};
//!
//! let listener = Listener::bind(&Listen::Unix("/tmp/disk.sock".into()))?;
//! let disk = Memory::new(1 << 30);
//! let options = Options::new(vec![Export::new("")]);
//! nbd::serve_uring(listener, options, &Stop::new(), move |_| Ok(disk.clone()))?;
//! # Ok::<(), nbd::ServeError>(())
//! ```

pub mod proto;
mod server;

pub use server::{
    Export, ExportBitmap, Exports, Listen, Listener, Options, Outcome, Place, ServeError, Stop,
    Tls, Uris, serve_uring,
};
