//! The socket of a client: messages with descriptors.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use gaur_block::Errno;
use gaur_reactor::{Descriptor, timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::message::{FDS_MAX, HEADER_BYTES, Header, PAYLOAD_MAX};
use crate::error::errno_of;

/// A message of the client.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// A connected client.
pub(super) struct Connection {
    socket: Descriptor,
    bytes: [u8; HEADER_BYTES + PAYLOAD_MAX],
    have: usize,
    fds: Vec<OwnedFd>,
}

impl Connection {
    pub(super) fn new(socket: OwnedFd) -> Connection {
        Connection {
            socket: Descriptor::new(socket),
            bytes: [0; HEADER_BYTES + PAYLOAD_MAX],
            have: 0,
            fds: Vec::new(),
        }
    }

    /// The next message; `None` when the client has gone. Nothing is lost when this is dropped.
    pub(super) async fn next(&mut self) -> Result<Option<Message>, String> {
        loop {
            let wanted = match self.bytes.first_chunk::<HEADER_BYTES>() {
                Some(header) if self.have >= HEADER_BYTES => {
                    let header = Header::parse(*header)?;
                    let end = HEADER_BYTES + header.len;
                    if self.have == end {
                        self.have = 0;
                        return Ok(Some(Message {
                            header,
                            payload: self.bytes[HEADER_BYTES..end].to_vec(),
                            fds: std::mem::take(&mut self.fds),
                        }));
                    }
                    end
                }
                _ => HEADER_BYTES,
            };
            match self.receive(wanted) {
                Ok(0) if self.have == 0 => return Ok(None),
                Ok(0) => return Err("the client left in the middle of a message".to_owned()),
                Ok(count) => self.have += count,
                Err(Errno::EAGAIN) => {
                    let ready = self.socket.readable().await;
                    ready.map_err(|errno| format!("cannot wait for the client: {errno}"))?;
                }
                Err(Errno::EINTR) => {}
                // It died instead of closing.
                Err(errno) if errno.raw() == libc::ECONNRESET => return Ok(None),
                Err(errno) => return Err(format!("cannot receive: {errno}")),
            }
        }
    }

    /// Receives what is there, up to byte `end` of the message.
    fn receive(&mut self, end: usize) -> Result<usize, Errno> {
        let mut parts = [IoSliceMut::new(&mut self.bytes[self.have..end])];
        // One more than a message may have, to see that it has more.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX + 1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.socket, &mut parts, &mut control, flags).map_err(errno_of)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.fds.extend(descriptors);
            }
        }
        if self.fds.len() > FDS_MAX {
            return Err(Errno::EINVAL);
        }
        Ok(received.bytes)
    }

    /// Sends a message, with a descriptor or without.
    pub(super) async fn send(
        &self,
        header: [u8; HEADER_BYTES],
        payload: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Errno> {
        send(&self.socket, header, payload, fd).await
    }
}

/// A client that does not take a message for so long is disconnected.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// Sends a message. A client that does not read is waited for, but not for ever.
pub(super) async fn send(
    socket: &Descriptor,
    header: [u8; HEADER_BYTES],
    payload: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let mut bytes = header.to_vec();
    bytes.extend_from_slice(payload);
    let mut left = &bytes[..];
    let mut fd = fd;
    while !left.is_empty() {
        match send_some(socket, left, fd) {
            Ok(count) => {
                left = &left[count..];
                fd = None;
            }
            Err(Errno::EAGAIN) => {
                let ready = timeout(SEND_LIMIT, socket.writable()).await;
                ready.ok_or(Errno::ETIMEDOUT)??;
            }
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn send_some(
    socket: &Descriptor,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(fd) = &fd {
        let room = control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
        debug_assert!(room, "there is room for one descriptor");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map_err(errno_of)
}
