//! What has arrived on a control socket and was not used yet: lines, and then perhaps other bytes.

use gaur_block::Errno;
use gaur_reactor::Stream;

use super::protocol::LINE_BYTES_MAX;

/// Bytes received at once.
const RECEIVE_BYTES: usize = 16 << 10;

/// Why there is no further line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoLine {
    /// The client has closed its side.
    Closed,
    /// The line is longer than any command.
    TooLong,
    /// The socket failed.
    Failed(Errno),
}

/// Bytes that arrived.
#[derive(Default)]
pub struct Inbound {
    bytes: Vec<u8>,
}

impl Inbound {
    /// The next line without its end; empty lines are passed over.
    pub async fn line(&mut self, stream: &Stream) -> Result<Vec<u8>, NoLine> {
        let mut looked = 0;
        loop {
            let rest = self.bytes.get(looked..).unwrap_or_default();
            if let Some(at) = rest.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.bytes.drain(..=looked + at).collect();
                line.pop();
                looked = 0;
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return Ok(line);
            }
            looked = self.bytes.len();
            if looked > LINE_BYTES_MAX {
                return Err(NoLine::TooLong);
            }
            let mut piece = [0; RECEIVE_BYTES];
            match stream.recv(&mut piece).await {
                Ok(0) => return Err(NoLine::Closed),
                Ok(count) => self.bytes.extend(piece.iter().take(count)),
                Err(errno) => return Err(NoLine::Failed(errno)),
            }
        }
    }

    /// Fills `into`; `false` when the client has closed its side before.
    pub async fn exact(&mut self, stream: &Stream, into: &mut [u8]) -> Result<bool, Errno> {
        let arrived = self.bytes.len().min(into.len());
        for (byte, arrived) in into.iter_mut().zip(self.bytes.drain(..arrived)) {
            *byte = arrived;
        }
        let rest = into.get_mut(arrived..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(true);
        }
        Ok(stream.recv_exact(rest).await? == rest.len())
    }
}
