//! What the thread of a connection and the control thread share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_reactor::{SecureStream, Stream};

/// One client.
pub(super) struct Client {
    /// Counts from 1.
    pub(super) number: u64,
    /// Its socket. Only the connection's thread sends and receives; `control` may shut it down.
    pub(super) stream: SecureStream,
    /// Raised by `control`: finish what is under way and close.
    pub(super) drain: gaur_reactor::Stop,
    /// Raised by the connection: the handshake is over, one way or the other.
    pub(super) settled: gaur_reactor::Stop,
    /// Raised by the connection: it is gone.
    pub(super) ended: gaur_reactor::Stop,
    negotiated: AtomicBool,
}

impl Client {
    pub(super) fn new(number: u64, stream: Stream) -> Client {
        Client {
            number,
            stream: SecureStream::plain(Arc::new(stream)),
            drain: gaur_reactor::Stop::new(),
            settled: gaur_reactor::Stop::new(),
            ended: gaur_reactor::Stop::new(),
            negotiated: AtomicBool::new(false),
        }
    }

    /// Whether it ever chose an export.
    pub(super) fn negotiated(&self) -> bool {
        self.negotiated.load(Ordering::Acquire)
    }

    /// Ends all traffic at once.
    pub(super) fn hang_up(&self) {
        // It fails when the peer was faster.
        let _ = self.stream.socket().shutdown(std::net::Shutdown::Both);
    }
}

/// Held by a connection as long as it is there, so that `control` learns of its end even when it
/// ends by a panic.
pub(super) struct ClientGuard(pub(super) Arc<Client>);

impl ClientGuard {
    /// The client chose an export.
    pub(super) fn negotiated(&self) {
        self.0.negotiated.store(true, Ordering::Release);
        self.0.settled.stop();
    }
}

impl Drop for ClientGuard {
    fn drop(&mut self) {
        // After a panic the peer does not know yet.
        self.0.hang_up();
        // A task that waits for a drain on this connection's thread can stop waiting.
        self.0.drain.stop();
        self.0.settled.stop();
        self.0.ended.stop();
    }
}
