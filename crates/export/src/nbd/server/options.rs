//! Options of a server.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gaur_tls::{Authorization, ServerCredentials};

use crate::error::ServeError;
use crate::nbd::proto::wire::PAYLOAD_MAX_BYTES;
use crate::serve::Log;

/// A bitmap of an export's disk, which clients may ask for as `qemu:dirty-bitmap:` and its name.
#[derive(Clone)]
pub struct ExportBitmap {
    /// Its name.
    pub name: String,
    /// The length of the run from an offset on, at most the second number, and whether it is marked.
    pub run_at: Arc<dyn Fn(u64, u64) -> (u64, bool) + Send + Sync>,
}

impl fmt::Debug for ExportBitmap {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("ExportBitmap").field(&self.name).finish()
    }
}

/// One export, as clients see it.
#[derive(Clone, Debug)]
pub struct Export {
    /// What clients call it, at most 4096 bytes; may be empty.
    pub name: String,
    /// A description for people, at most 4096 bytes; empty for none.
    pub description: String,
    /// Writes are refused, whatever the device says.
    pub read_only: bool,
    /// Shown to clients that ask for them, at most 64.
    pub bitmaps: Vec<ExportBitmap>,
    /// Clients that ask for it are shown how deep in the backing chain data lies (`qemu:allocation-depth`).
    pub allocation_depth: bool,
}

/// Encryption of connections.
#[derive(Clone, Debug)]
pub struct Tls {
    /// What clients are shown, and what they have to show.
    pub credentials: ServerCredentials,
    /// Which of them may come in; all that have what they have to show without it.
    pub authorization: Option<Authorization>,
}

impl Export {
    /// A writable export without a description.
    pub fn new(name: impl Into<String>) -> Export {
        Export {
            name: name.into(),
            description: String::new(),
            read_only: false,
            bitmaps: Vec::new(),
            allocation_depth: false,
        }
    }
}

/// How a server behaves.
#[derive(Clone)]
pub struct Options {
    /// What it serves, if that does not change: at least one export, no two of one name.
    pub exports: Vec<Export>,
    /// Index of the one of them that answers to the empty name, unless one is called that.
    pub default_export: Option<usize>,
    /// Clients served at once; further ones wait until one leaves. 0 means any number.
    pub shared: u32,
    /// Stay when the last client has left.
    pub persistent: bool,
    /// Threads that serve connections, at least 1 (with one client at a time one is enough and no
    /// more are started).
    pub threads: usize,
    /// The reactor each of them runs.
    pub reactor: gaur_reactor::Config,
    /// Requests of one connection that run at once, at least 1.
    pub depth: u32,
    /// Most memory for the payloads of one connection in bytes, at least 32 MiB, the longest
    /// payload there is. Requests beyond it wait in the socket.
    pub connection_memory_bytes: usize,
    /// Most memory for the payloads of all connections in bytes; 256 KiB for each come on top. Where
    /// that is short, long requests are served in pieces.
    pub memory_bytes: usize,
    /// A client that has not chosen an export by then is hung up on; zero for no limit.
    pub handshake_timeout: Duration,
    /// How long a stop waits for clients that do not take their replies.
    pub drain_timeout: Duration,
    /// Nothing is talked about with clients before their connections are encrypted in this way.
    pub tls: Option<Tls>,
    /// SELinux label of the listening socket, for [`Listener::bind_labelled`](super::Listener::bind_labelled).
    pub socket_label: Option<String>,
    /// What clients are told to run at full speed, in place of what the device says.
    pub preferred_block: Option<u32>,
    /// Where lines about connections go.
    pub log: Option<Log>,
    /// Where lines about connections go that have failed, one for each.
    pub failures: Option<Log>,
}

impl Options {
    /// One client at a time, one thread, 128 requests of up to 64 MiB together per connection and
    /// 256 MiB for all, 10 s for a handshake, 30 s for a stop, and an end when the client has left.
    pub fn new(exports: Vec<Export>) -> Options {
        Options {
            exports,
            default_export: Some(0),
            shared: 1,
            persistent: false,
            threads: 1,
            reactor: gaur_reactor::Config::default(),
            depth: 128,
            connection_memory_bytes: 64 << 20,
            memory_bytes: 256 << 20,
            handshake_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            tls: None,
            socket_label: None,
            preferred_block: None,
            log: None,
            failures: None,
        }
    }

    pub(super) fn check(&self) -> Result<(), ServeError> {
        let refuse = |reason: String| Err(ServeError::new(reason));
        if self.depth == 0 || self.depth > 1 << 16 {
            return refuse("the queue depth must be 1 to 65536".to_owned());
        }
        if self.connection_memory_bytes < PAYLOAD_MAX_BYTES as usize {
            return refuse("payload memory must be at least 32 MiB".to_owned());
        }
        Ok(())
    }
}

/// For whom a device is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the serving thread; in blocking mode the number of the connection.
    pub thread: usize,
    /// Index of the export.
    pub export: usize,
}

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was not persistent and the last client left. Devices are flushed and gone.
    LastClientLeft,
    /// It was told to stop. Requests under way were finished, devices are flushed and gone.
    Drained,
    /// It was told to stop twice: sockets are shut, but threads may still run with their devices.
    /// Nothing was flushed; end the process.
    Forced,
}
