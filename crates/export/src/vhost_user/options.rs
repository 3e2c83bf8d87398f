//! Options of a server.

use std::path::PathBuf;

use crate::serve::Log;

/// How a server behaves.
#[derive(Clone)]
pub struct Options {
    /// Where it listens. A socket that no process listens on is replaced.
    pub socket: PathBuf,
    /// Most rings of a client, 1 to 256.
    pub queues: u16,
    /// Threads that serve them, at least 1; there are no more than rings.
    pub threads: usize,
    /// Writes are refused, whatever the device says.
    pub read_only: bool,
    /// Where the log of requests in flight lies, instead of in memory without a name. Its client keeps a
    /// lock on the file for as long as it lives ([`is_held`](super::is_held)). A file that is there is
    /// replaced; the server removes its own at the end. The folder should be in memory, and nobody
    /// else's. Without the folder, there is no file.
    pub inflight_file: Option<PathBuf>,
    /// Where lines about clients go.
    pub log: Option<Log>,
}

impl Options {
    /// 16 rings on one thread, writable.
    pub fn new(socket: impl Into<PathBuf>) -> Options {
        Options {
            socket: socket.into(),
            queues: 16,
            threads: 1,
            read_only: false,
            inflight_file: None,
            log: None,
        }
    }
}
