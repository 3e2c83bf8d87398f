//! The receive buffer of a connection: bytes that arrived and were not used yet.

use gaur_block::Errno;
use gaur_reactor::SecureStream;

use crate::nbd::proto::Handshake;

/// Room for many pipelined requests with small payloads in one receive; at least what a handshake
/// needs to see at once.
const CAPACITY_BYTES: usize = 256 << 10;
const _: () = assert!(CAPACITY_BYTES >= Handshake::BUFFER_BYTES);
/// Moving a shorter rest to the front costs nothing worth avoiding.
const SHORT_BYTES: usize = 64;

/// Plain memory: memory registered with the ring is for what goes to files, and pages of this that
/// no traffic has touched cost nothing.
pub(super) struct RecvBuffer {
    memory: Box<[u8]>,
    start: usize,
    end: usize,
}

impl RecvBuffer {
    pub(super) fn new() -> RecvBuffer {
        RecvBuffer {
            memory: vec![0; CAPACITY_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }

    /// What has arrived and was not used yet.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    /// The first `len` of [`RecvBuffer::bytes`] were used.
    pub(super) fn consume(&mut self, len: usize) {
        self.start += len;
        debug_assert!(self.start <= self.end, "what was used had arrived");
    }

    /// Receives more. `false` when the peer has ended its side.
    pub(super) async fn fill(&mut self, stream: &SecureStream) -> Result<bool, Errno> {
        let rest = self.end - self.start;
        if rest <= SHORT_BYTES || self.end == self.memory.len() {
            self.memory.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, rest);
        }
        let received = stream.recv(&mut self.memory[self.end..]).await?;
        self.end += received;
        Ok(received > 0)
    }
}
