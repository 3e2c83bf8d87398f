//! What has arrived on a control socket and was not used yet: lines, and then perhaps other bytes.

use gaur_reactor::Stream;

use super::protocol::LINE_BYTES_MAX;
use super::session::Gone;

/// Bytes received at once.
const RECEIVE_BYTES: usize = 16 << 10;

/// Bytes that arrived.
#[derive(Default)]
pub struct Inbound {
    bytes: Vec<u8>,
}

impl Inbound {
    /// The next line without its end; empty lines are passed over. `None` when it is longer than any command.
    pub async fn line(&mut self, stream: &Stream) -> Result<Option<Vec<u8>>, Gone> {
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
                return Ok(Some(line));
            }
            looked = self.bytes.len();
            if looked > LINE_BYTES_MAX {
                return Ok(None);
            }
            let mut piece = [0; RECEIVE_BYTES];
            match stream.recv(&mut piece).await {
                Ok(0) | Err(_) => return Err(Gone),
                Ok(count) => self.bytes.extend(piece.iter().take(count)),
            }
        }
    }

    /// Fills `into`.
    pub async fn exact(&mut self, stream: &Stream, into: &mut [u8]) -> Result<(), Gone> {
        let arrived = self.bytes.len().min(into.len());
        for (byte, arrived) in into.iter_mut().zip(self.bytes.drain(..arrived)) {
            *byte = arrived;
        }
        let rest = into.get_mut(arrived..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(());
        }
        match stream.recv_exact(rest).await {
            Ok(count) if count == rest.len() => Ok(()),
            _ => Err(Gone),
        }
    }
}
