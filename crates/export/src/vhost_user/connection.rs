//! The socket of a client: messages with descriptors.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use gaur_block::Errno;
use gaur_reactor::{Descriptor, timeout};

use super::message::{FDS_MAX, HEADER_BYTES, Header, PAYLOAD_MAX};

/// Room for the descriptors of a message as ancillary data.
const CONTROL_BYTES: usize = 64;
const _: () = assert!(CONTROL_BYTES >= 16 + 4 * FDS_MAX);

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

/// Ancillary data, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

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
        let into = &mut self.bytes[self.have..end];
        let mut part = libc::iovec {
            iov_base: into.as_mut_ptr().cast(),
            iov_len: into.len(),
        };
        let mut control = Control([0; CONTROL_BYTES]);
        // SAFETY: `msghdr` is plain integers and pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = CONTROL_BYTES as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        let fd = self.socket.as_fd().as_raw_fd();
        // SAFETY: the message describes one borrowed slice and a local buffer.
        let count = unsafe { libc::recvmsg(fd, &raw mut message, flags) };
        if count < 0 {
            return Err(last_errno());
        }
        // SAFETY: the kernel has filled in the message, and its descriptors are new and ours.
        unsafe { take_fds(&message, &mut self.fds) };
        if self.fds.len() > FDS_MAX {
            return Err(Errno::EINVAL);
        }
        Ok(count as usize)
    }

    /// Sends a message, with a descriptor or without.
    pub(super) async fn send(
        &self,
        header: [u8; HEADER_BYTES],
        payload: &[u8],
        fd: Option<RawFd>,
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
    fd: Option<RawFd>,
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

fn send_some(socket: &Descriptor, bytes: &[u8], fd: Option<RawFd>) -> Result<usize, Errno> {
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: `msghdr` is plain integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        message.msg_control = (&raw mut control).cast();
        // SAFETY: the buffer has room for one descriptor and is aligned for its header.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as _;
            let first = libc::CMSG_FIRSTHDR(&raw const message);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
            libc::CMSG_DATA(first).cast::<RawFd>().write_unaligned(fd);
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the message describes a borrowed slice and a local buffer.
    let count = unsafe { libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, flags) };
    if count < 0 {
        return Err(last_errno());
    }
    Ok(count as usize)
}

/// Takes over the descriptors that came with a message.
///
/// # Safety
/// The kernel has filled in the message, and its descriptors were not taken yet.
unsafe fn take_fds(message: &libc::msghdr, into: &mut Vec<OwnedFd>) {
    // SAFETY: the headers are walked with the kernel's own macros, inside what it has filled in,
    // and each descriptor becomes owned once.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let is_fds =
                (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS;
            if is_fds {
                let len = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let first = libc::CMSG_DATA(header).cast::<RawFd>();
                for at in 0..len / size_of::<RawFd>() {
                    into.push(OwnedFd::from_raw_fd(first.add(at).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

pub(super) fn last_errno() -> Errno {
    let error = std::io::Error::last_os_error();
    Errno::from_raw(error.raw_os_error().unwrap_or(0))
}
