//! One side of a TLS connection, as a machine: bytes in, bytes out.
//!
//! Memory is bounded: what is to be sent by [`OUT_BYTES`], what has arrived by rustls (a record, or a handshake of
//! 64 KiB), and decrypted bytes are taken before more is.

use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};
use webpki::EndEntityCert;

use crate::credentials::{ClientCredentials, ServerCredentials};
use crate::distinguished_name;
use crate::error::TlsError;

/// Most bytes that one call encrypts.
const OUT_BYTES: usize = 64 << 10;

/// What reading gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes.
    Bytes(usize),
    /// None before more has arrived.
    Need,
    /// The peer has ended its side.
    End,
}

/// A side of a connection.
#[derive(Debug)]
pub struct Session {
    connection: Connection,
}

impl Session {
    /// A server's side.
    ///
    /// # Errors
    /// When the library cannot.
    pub fn server(credentials: &ServerCredentials) -> Result<Session, TlsError> {
        let connection = ServerConnection::new(Arc::clone(&credentials.config))?;
        Ok(Session::new(connection.into()))
    }

    /// A client's side; the server has to be the one called `host`, a name or an address.
    ///
    /// # Errors
    /// When `host` is neither.
    pub fn client(credentials: &ClientCredentials, host: &str) -> Result<Session, TlsError> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| TlsError::new(format!("{host:?} is no host name to check for")))?;
        let connection = ClientConnection::new(Arc::clone(&credentials.config), name)?;
        Ok(Session::new(connection.into()))
    }

    fn new(mut connection: Connection) -> Session {
        connection.set_buffer_limit(Some(OUT_BYTES));
        Session { connection }
    }

    /// Whether the handshake goes on.
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Takes the front of `arrived`, and returns how much of it. None is taken before decrypted bytes are
    /// [read](Session::read).
    ///
    /// # Errors
    /// When the peer breaks the protocol or is not who it has to be. What is [to be sent](Session::outgoing) then says
    /// so to the peer.
    pub fn receive(&mut self, arrived: &[u8]) -> Result<usize, TlsError> {
        if arrived.is_empty() {
            return Ok(0);
        }
        let mut rest = arrived;
        // It fails only while decrypted bytes wait to be read.
        let Ok(taken) = self.connection.read_tls(&mut rest) else {
            return Ok(0);
        };
        self.connection.process_new_packets()?;
        // After the peer's goodbye nothing is taken, and nothing counts.
        Ok(if taken == 0 { arrived.len() } else { taken })
    }

    /// Reads decrypted bytes.
    pub fn read(&mut self, into: &mut [u8]) -> Received {
        match self.connection.reader().read(into) {
            Ok(0) if !into.is_empty() => Received::End,
            Ok(count) => Received::Bytes(count),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Received::Need,
            Err(_) => Received::End,
        }
    }

    /// Encrypts the front of `bytes`, and returns how much of it; less than all when what is to be sent has to be sent
    /// first.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        // A write to memory that is full takes nothing, and has no other way to fail.
        self.connection.writer().write(bytes).unwrap_or_default()
    }

    /// Says goodbye.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
    }

    /// Appends what is to be sent.
    pub fn outgoing(&mut self, out: &mut Vec<u8>) {
        while self.connection.wants_write() {
            if !matches!(self.connection.write_tls(out), Ok(1..)) {
                return;
            }
        }
    }

    /// The name in the peer's certificate, if it has shown one: `O=a,CN=b`.
    pub fn peer_name(&self) -> Option<String> {
        let certificate = self.connection.peer_certificates()?.first()?;
        let parsed = EndEntityCert::try_from(certificate).ok()?;
        distinguished_name::text(parsed.subject())
    }
}
