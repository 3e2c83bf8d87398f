//! Streams that may be encrypted: a socket, and from the TLS handshake on a session.
//!
//! One task sends and one receives, at once if they like; records are encrypted in the order in which they are sent. The
//! session's lock is held while bytes are encrypted or decrypted, never over an await. Beside what the session keeps,
//! each direction has a buffer of [`WIRE_BYTES`]. A future that is dropped before it is done leaves a connection that is of
//! no use any more.

use std::io::IoSlice;
use std::sync::{Arc, OnceLock};

use gaur_block::Errno;
use gaur_tls::{Received, Session};
use parking_lot::Mutex;

use crate::socket::Stream;

/// Encrypted bytes that are received at once.
const WIRE_BYTES: usize = 64 << 10;

/// Error of a connection whose peer broke the protocol of TLS.
const EPROTO: Errno = Errno::from_raw(71);

/// A stream that may be encrypted.
#[derive(Debug)]
pub struct SecureStream {
    stream: Arc<Stream>,
    tls: OnceLock<Tls>,
}

#[derive(Debug)]
struct Tls {
    session: Mutex<Session>,
    arrived: Mutex<Arrived>,
    /// Why the connection cannot be used any more.
    failure: OnceLock<String>,
}

/// Encrypted bytes that were received and not decrypted yet.
#[derive(Debug, Default)]
struct Arrived {
    memory: Vec<u8>,
    start: usize,
    end: usize,
}

impl SecureStream {
    /// Without encryption.
    pub fn plain(stream: Arc<Stream>) -> SecureStream {
        SecureStream {
            stream,
            tls: OnceLock::new(),
        }
    }

    /// The socket.
    pub fn socket(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Whether bytes are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.tls.get().is_some()
    }

    /// The name in the peer's certificate.
    pub fn peer_name(&self) -> Option<String> {
        self.tls.get()?.session.lock().peer_name()
    }

    /// Why the encrypted connection has failed, if that was because of TLS.
    pub fn failure(&self) -> Option<&str> {
        self.tls.get()?.failure.get().map(String::as_str)
    }

    /// Has everything encrypted from now on; returns when both sides trust each other. The peer has been told that the
    /// handshake comes next, and nothing it sent before is left unread.
    ///
    /// # Errors
    /// In one line, for people.
    pub async fn encrypt(&self, session: Session) -> Result<(), String> {
        let tls = self.tls.get_or_init(|| Tls {
            session: Mutex::new(session),
            arrived: Mutex::default(),
            failure: OnceLock::new(),
        });
        loop {
            self.flush(tls).await.map_err(lost)?;
            if !tls.session.lock().is_handshaking() {
                return Ok(());
            }
            match self.receive(tls).await {
                Ok(true) => {}
                Ok(false) => return Err("the peer hung up during the TLS handshake".to_owned()),
                Err(errno) => {
                    // Says why to the peer; it may be gone.
                    let _ = self.flush(tls).await;
                    return Err(match tls.failure.get() {
                        Some(why) => format!("TLS handshake: {why}"),
                        None => lost(errno),
                    });
                }
            }
        }
    }

    /// Receives what is there, at least 1 byte; 0 when the peer has ended the stream (or `into` is empty).
    ///
    /// # Errors
    /// `EPROTO` when the peer breaks the protocol of TLS, else those of the socket.
    pub async fn recv(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let Some(tls) = self.tls.get() else {
            return self.stream.recv(into).await;
        };
        loop {
            let received = tls.session.lock().read(into);
            match received {
                Received::Bytes(count) => return Ok(count),
                Received::End => return Ok(0),
                Received::Need => {
                    if !self.receive(tls).await? {
                        return Ok(0);
                    }
                }
            }
        }
    }

    /// Fills `into`; less only when the peer ended the stream. The count says how much.
    ///
    /// # Errors
    /// As [`SecureStream::recv`].
    pub async fn recv_exact(&self, into: &mut [u8]) -> Result<usize, Errno> {
        if !self.is_encrypted() {
            return self.stream.recv_exact(into).await;
        }
        let mut done = 0;
        while done < into.len() {
            match self.recv(&mut into[done..]).await? {
                0 => break,
                count => done += count,
            }
        }
        Ok(done)
    }

    /// Sends all of `bytes`.
    ///
    /// # Errors
    /// Those of the socket.
    pub async fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        self.send_vectored(&[IoSlice::new(bytes)]).await
    }

    /// Sends all parts, one after the other.
    ///
    /// # Errors
    /// Those of the socket.
    pub async fn send_vectored(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        let Some(tls) = self.tls.get() else {
            return self.stream.send_vectored(parts).await;
        };
        for part in parts {
            let mut rest: &[u8] = part;
            while !rest.is_empty() {
                let taken = tls.session.lock().write(rest);
                rest = &rest[taken..];
                if taken == 0 || !rest.is_empty() {
                    self.flush(tls).await?;
                }
            }
        }
        self.flush(tls).await
    }

    /// Sends what is encrypted already.
    async fn flush(&self, tls: &Tls) -> Result<(), Errno> {
        let mut out = Vec::new();
        tls.session.lock().outgoing(&mut out);
        match out.is_empty() {
            true => Ok(()),
            false => self.stream.send(&out).await,
        }
    }

    /// Decrypts what has arrived, or receives more and decrypts that. `false` when the peer has ended the stream.
    async fn receive(&self, tls: &Tls) -> Result<bool, Errno> {
        // Taken out, since the lock is not held over the await; there is one task that receives.
        let mut arrived = std::mem::take(&mut *tls.arrived.lock());
        if arrived.start == arrived.end {
            arrived.memory.resize(WIRE_BYTES, 0);
            let received = self.stream.recv(&mut arrived.memory).await;
            (arrived.start, arrived.end) = (0, *received.as_ref().unwrap_or(&0));
            if arrived.end == 0 {
                return received.map(|_| false);
            }
        }
        let used = {
            let bytes = &arrived.memory[arrived.start..arrived.end];
            tls.session.lock().receive(bytes)
        };
        match used {
            Ok(used) => {
                arrived.start += used;
                *tls.arrived.lock() = arrived;
                Ok(true)
            }
            Err(error) => {
                let _ = tls.failure.set(error.to_string());
                Err(EPROTO)
            }
        }
    }
}

fn lost(errno: Errno) -> String {
    format!("the connection failed during the TLS handshake: {errno}")
}
