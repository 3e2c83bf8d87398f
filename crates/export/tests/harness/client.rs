//! A client that speaks the protocol by hand.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;
pub const FUA: u16 = 1;

/// A client that speaks the protocol by hand.
pub struct Client {
    pub stream: UnixStream,
}

/// A chunk of a structured reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunk {
    pub done: bool,
    pub kind: u16,
    pub cookie: u64,
    pub content: Vec<u8>,
}

impl Client {
    /// Connects and reads nothing yet.
    pub fn connect(socket: &Path) -> Client {
        let stream = UnixStream::connect(socket).expect("connect");
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .expect("timeout");
        Client { stream }
    }

    /// Connects and chooses an export, with simple replies.
    pub fn simple(socket: &Path, export: &str) -> Client {
        let mut client = Client::connect(socket);
        client.greet();
        client.go(export);
        client
    }

    /// Connects and chooses an export, with structured replies and `base:allocation`.
    pub fn structured(socket: &Path, export: &str) -> Client {
        let mut client = Client::connect(socket);
        client.greet();
        client.option(8, b"");
        assert_eq!(client.option_replies(), [1]);
        let name = [&(export.len() as u32).to_be_bytes(), export.as_bytes()].concat();
        client.option(
            10,
            &[&name, &b"\0\0\0\x01\0\0\0\x0fbase:allocation"[..]].concat(),
        );
        assert_eq!(client.option_replies(), [4, 1]);
        client.go(export);
        client
    }

    /// Connects and chooses an export, with extended headers and `base:allocation`.
    pub fn extended(socket: &Path, export: &str) -> Client {
        let mut client = Client::connect(socket);
        client.greet();
        client.option(11, b"");
        assert_eq!(client.option_replies(), [1]);
        let name = [&(export.len() as u32).to_be_bytes(), export.as_bytes()].concat();
        client.option(
            10,
            &[&name, &b"\0\0\0\x01\0\0\0\x0fbase:allocation"[..]].concat(),
        );
        assert_eq!(client.option_replies(), [4, 1]);
        client.go(export);
        client
    }

    pub fn extended_request(&mut self, flags: u16, kind: u16, offset: u64, len: u64) {
        let mut bytes = request(flags, kind, 55, offset, 0)[..24].to_vec();
        bytes[..4].copy_from_slice(&[0x21, 0xe4, 0x1c, 0x71]);
        bytes.extend(len.to_be_bytes());
        self.send(&bytes);
    }

    /// Type and content of a reply in one extended chunk to a request for `offset`.
    pub fn extended_chunk(&mut self, offset: u64) -> (u16, Vec<u8>) {
        let bytes = self.read(32);
        assert_eq!(bytes[..6], [0x6e, 0x8a, 0x27, 0x8c, 0, 1], "a last chunk");
        assert_eq!(bytes[8..16], 55_u64.to_be_bytes());
        assert_eq!(bytes[16..24], offset.to_be_bytes());
        let len = u64::from_be_bytes(bytes[24..].try_into().unwrap());
        let kind = u16::from_be_bytes(bytes[6..8].try_into().unwrap());
        (kind, self.read(len as usize))
    }

    pub fn greet(&mut self) {
        assert_eq!(self.read(18), b"NBDMAGICIHAVEOPT\0\x03");
        self.send(&[0, 0, 0, 3]);
    }

    pub fn go(&mut self, export: &str) {
        let name = [
            &(export.len() as u32).to_be_bytes(),
            export.as_bytes(),
            b"\0\0",
        ]
        .concat();
        self.option(7, &name);
        assert_eq!(
            self.option_replies().last(),
            Some(&1),
            "the export is there"
        );
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        let len = (data.len() as u32).to_be_bytes();
        self.send(&[b"IHAVEOPT", &option.to_be_bytes()[..], &len, data].concat());
    }

    /// Types of the replies up to an acknowledgement or an error.
    pub fn option_replies(&mut self) -> Vec<u32> {
        let mut types = Vec::new();
        loop {
            let header = self.read(20);
            let field = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            types.push(field(12));
            self.read(field(16) as usize);
            if field(12) == 1 || field(12) & 0x8000_0000 != 0 {
                return types;
            }
        }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("send");
    }

    pub fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("receive");
        bytes
    }

    /// Whether the server has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 1]), Ok(0) | Err(_))
    }

    pub fn request(&mut self, flags: u16, kind: u16, cookie: u64, offset: u64, len: u32) {
        self.send(&request(flags, kind, cookie, offset, len));
    }

    /// Error and cookie of a simple reply.
    pub fn reply(&mut self) -> (u32, u64) {
        let bytes = self.read(16);
        assert_eq!(bytes[..4], [0x67, 0x44, 0x66, 0x98], "a simple reply");
        let error = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
        (error, u64::from_be_bytes(bytes[8..].try_into().unwrap()))
    }

    pub fn chunk(&mut self) -> Chunk {
        let bytes = self.read(20);
        assert_eq!(bytes[..4], [0x66, 0x8e, 0x33, 0xef], "a chunk");
        let len = u32::from_be_bytes(bytes[16..].try_into().unwrap());
        Chunk {
            done: bytes[5] & 1 != 0,
            kind: u16::from_be_bytes(bytes[6..8].try_into().unwrap()),
            cookie: u64::from_be_bytes(bytes[8..16].try_into().unwrap()),
            content: self.read(len as usize),
        }
    }

    /// Reads with simple replies; the error or the data.
    pub fn read_at(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, u32> {
        self.request(0, READ, 77, offset, len);
        match self.reply() {
            (0, 77) => Ok(self.read(len as usize)),
            (error, _) => Err(error),
        }
    }

    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> Result<(), u32> {
        let mut bytes = request(0, WRITE, 78, offset, data.len() as u32).to_vec();
        bytes.extend(data);
        self.send(&bytes);
        match self.reply() {
            (0, 78) => Ok(()),
            (error, _) => Err(error),
        }
    }
}

pub fn request(flags: u16, kind: u16, cookie: u64, offset: u64, len: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&[0x25, 0x60, 0x95, 0x13]);
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}
