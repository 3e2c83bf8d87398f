//! Stream sockets: one set of calls that waits in a ring, in a fallback reactor, or in the kernel.
//!
//! Where a call waits depends on the thread that makes it: with a ring it is an operation of the
//! ring; with the fallback it is tried without waiting and, failing that, sleeps in the reactor;
//! without a reactor it blocks. A socket may move between threads between calls.
//!
//! A stream that the peer has closed gives 0 bytes; sending to it gives `EPIPE`, never `SIGPIPE`.

use std::io::IoSlice;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use gaur_block::Errno;
use io_uring::{opcode, types};
use rustix::event::PollFlags;
use rustix::net::{
    self, AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketAddrAny, SocketFlags,
    SocketType, sockopt,
};

use crate::address::{self, Address};
use crate::context;
use crate::op::Op;
use crate::reactor::{Core, Engine};
use crate::ring::Ring;
use crate::syscall::{self, IOV_MAX, RW_MAX, again};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Up to so many bytes the kernel is asked to move all in one operation. An operation that has to wait
/// more than 128 times in the ring is moved to a kernel thread and blocks there, so a longer one ends
/// with what there is and is asked again.
const WHOLE_MAX: usize = 128 << 10;

/// The flag for a transfer of `len_bytes`.
fn whole(len_bytes: usize) -> libc::c_int {
    match len_bytes <= WHOLE_MAX {
        true => libc::MSG_WAITALL,
        false => 0,
    }
}

fn socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    again(|| net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None))
}

fn ring_of(core: &Option<Rc<Core>>) -> Option<&Ring> {
    core.as_ref().and_then(|core| core.ring())
}

/// Makes a call where there is no ring. In a reactor it must not wait; while it would have to, the reactor
/// waits for `events`.
async fn when_ready<T>(
    core: &Option<Rc<Core>>,
    fd: BorrowedFd<'_>,
    events: PollFlags,
    mut call: impl FnMut() -> rustix::io::Result<T>,
) -> Result<T, Errno> {
    loop {
        match (again(&mut call), core.as_ref().map(|core| core.engine())) {
            (Err(Errno::EAGAIN), Some(Engine::Fallback(readiness))) => {
                readiness.ready(fd.as_raw_fd(), events).await;
            }
            (result, _) => return result,
        }
    }
}

/// How long an address may be taken before that counts.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);

/// A socket that accepts connections.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    /// The socket file that `bind` made, with its inode, to be removed at the end.
    made: Option<(PathBuf, u64)>,
}

impl Listener {
    /// Listens at an address. A socket file without a listener is replaced. Blocks for up to
    /// `PATIENCE` while the address is taken: the ring of a process that was killed holds its sockets
    /// for a moment longer.
    ///
    /// # Errors
    /// What `bind(2)` says: `EADDRINUSE` when another process listens there, or the path is something
    /// other than a socket.
    pub fn bind(address: &Address) -> Result<Listener, Errno> {
        let start = Instant::now();
        // What is there and is no socket stays.
        let hopeless = matches!(address, Address::Unix(path) if path.symlink_metadata().is_ok() && !is_socket(path));
        loop {
            match Listener::try_bind(address) {
                Err(Errno::EADDRINUSE) if !hopeless && start.elapsed() < PATIENCE => {
                    std::thread::sleep(PAUSE);
                }
                bound => return bound,
            }
        }
    }

    fn try_bind(address: &Address) -> Result<Listener, Errno> {
        let raw = address::raw(address)?;
        let fd = socket(raw.address_family())?;
        let bind = || again(|| net::bind(&fd, &raw));
        let mut made = None;
        match address {
            Address::Tcp(_) => {
                again(|| sockopt::set_socket_reuseaddr(&fd, true))?;
                bind()?;
            }
            Address::Unix(path) => {
                match bind() {
                    Err(Errno::EADDRINUSE) => {
                        remove_dead_socket(path, &raw)?;
                        bind()?;
                    }
                    bound => bound?,
                }
                let inode = std::fs::symlink_metadata(path)
                    .map(|facts| std::os::unix::fs::MetadataExt::ino(&facts));
                made = inode.ok().map(|inode| (path.clone(), inode));
            }
        }
        let listener = Listener { fd, made };
        again(|| net::listen(&listener.fd, BACKLOG))?;
        Ok(listener)
    }

    /// A socket that listens already, made by the process that started this program.
    pub fn from_fd(fd: OwnedFd) -> Listener {
        Listener { fd, made: None }
    }

    /// Where it listens: the port that the system chose when 0 was asked for.
    pub fn local_address(&self) -> Result<Address, Errno> {
        address::local_address(self.fd.as_fd())
    }

    /// Waits for a connection. Dropping the future loses none.
    ///
    /// # Errors
    /// What `accept(2)` says. `EMFILE` and the like pass; the caller should wait a little.
    pub async fn accept(&self) -> Result<Stream, Errno> {
        loop {
            match self.accept_once().await {
                // The peer was gone before it was accepted.
                Err(errno) if errno.raw() == libc::ECONNABORTED => {}
                result => return result.map(Stream::from_fd),
            }
        }
    }

    async fn accept_once(&self) -> Result<OwnedFd, Errno> {
        let fd = self.fd.as_fd();
        let core = context::find();
        let ring = ring_of(&core);
        syscall::set_nonblocking(fd, core.is_some() && ring.is_none())?;
        let Some(ring) = ring else {
            let accept = || net::accept_with(fd, SocketFlags::CLOEXEC);
            return when_ready(&core, fd, PollFlags::IN, accept).await;
        };
        let null = std::ptr::null_mut();
        let entry = opcode::Accept::new(types::Fd(fd.as_raw_fd()), null, null.cast())
            .flags(libc::SOCK_CLOEXEC)
            .build();
        // SAFETY: the entry points to nothing.
        let new = unsafe { Op::new(ring, entry) }.makes_fd().await?;
        // SAFETY: the kernel made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(new as RawFd) })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let Some((path, inode)) = self.made.take() else {
            return;
        };
        let still_ours = std::fs::symlink_metadata(&path)
            .is_ok_and(|facts| std::os::unix::fs::MetadataExt::ino(&facts) == inode);
        if still_ours {
            let _ = std::fs::remove_file(&path);
        }
    }
}

fn is_socket(path: &std::path::Path) -> bool {
    path.symlink_metadata()
        .is_ok_and(|facts| facts.file_type().is_socket())
}

/// Removes a socket file without a listener.
fn remove_dead_socket(path: &std::path::Path, raw: &SocketAddrAny) -> Result<(), Errno> {
    let in_use = Err(Errno::from_raw(libc::EADDRINUSE));
    if !is_socket(path) {
        return in_use;
    }
    let probe = socket(raw.address_family())?;
    // A listener with a full queue would make us wait; it is alive.
    syscall::set_nonblocking(probe.as_fd(), true)?;
    if net::connect(&probe, raw) != Err(rustix::io::Errno::CONNREFUSED) {
        return in_use;
    }
    std::fs::remove_file(path).map_err(|error| syscall::errno_of(&error))
}

/// A connected socket.
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
}

impl Stream {
    /// Connects to an address.
    pub async fn connect(address: &Address) -> Result<Stream, Errno> {
        let raw = address::raw(address)?;
        let stream = Stream::from_fd(socket(raw.address_family())?);
        let core = context::find();
        let Some(ring) = ring_of(&core) else {
            // In the fallback too: connecting is not on any path that others wait for.
            net::connect(&stream.fd, &raw)
                .map_err(|errno| Errno::from_raw(errno.raw_os_error()))?;
            return Ok(stream);
        };
        let fd = types::Fd(stream.fd.as_raw_fd());
        let entry = opcode::Connect::new(fd, raw.as_ptr().cast(), raw.addr_len()).build();
        // SAFETY: the address lives in this future, which the operation does not outlive.
        unsafe { Op::new(ring, entry) }.await?;
        Ok(stream)
    }

    /// A socket that is connected already.
    pub fn from_fd(fd: OwnedFd) -> Stream {
        // Replies are sent whole, so waiting for more to send would only cost time. It fails for
        // sockets that are not TCP, which need none of it.
        let _ = sockopt::set_tcp_nodelay(&fd, true);
        // A peer whose machine is gone says nothing; after two minutes of that it counts as gone.
        let _ = sockopt::set_socket_keepalive(&fd, true);
        let _ = sockopt::set_tcp_keepidle(&fd, Duration::from_secs(60));
        let _ = sockopt::set_tcp_keepintvl(&fd, Duration::from_secs(10));
        let _ = sockopt::set_tcp_keepcnt(&fd, 6);
        // A ring does not wait for a descriptor that says O_NONBLOCK.
        let _ = syscall::set_nonblocking(fd.as_fd(), false);
        Stream { fd }
    }

    /// Two sockets that are connected to each other.
    pub fn pair() -> Result<(Stream, Stream), Errno> {
        let (unix, stream) = (AddressFamily::UNIX, SocketType::STREAM);
        let (first, second) = again(|| net::socketpair(unix, stream, SocketFlags::CLOEXEC, None))?;
        Ok((Stream::from_fd(first), Stream::from_fd(second)))
    }

    /// Who is at the other end, for people to read.
    pub fn peer(&self) -> String {
        match address::peer_address(self.fd.as_fd()) {
            Ok(Address::Tcp(address)) => address.to_string(),
            Ok(Address::Unix(path)) if !path.as_os_str().is_empty() => path.display().to_string(),
            _ => "a local client".to_owned(),
        }
    }

    /// Receives what is there, at least 1 byte; 0 when the peer has ended the stream (or `into` is
    /// empty).
    pub async fn recv(&self, into: &mut [u8]) -> Result<usize, Errno> {
        self.recv_flags(into, 0).await
    }

    /// Fills `into`; less only when the peer ended the stream. The count says how much.
    pub async fn recv_exact(&self, into: &mut [u8]) -> Result<usize, Errno> {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            let flags = whole(rest.len());
            match self.recv_flags(rest, flags).await? {
                0 => break,
                count => done += count,
            }
        }
        Ok(done)
    }

    async fn recv_flags(&self, into: &mut [u8], flags: libc::c_int) -> Result<usize, Errno> {
        let len = into.len().min(RW_MAX);
        let into = &mut into[..len];
        let core = context::find();
        if let Some(ring) = ring_of(&core) {
            let fd = types::Fd(self.fd.as_raw_fd());
            let entry = opcode::Recv::new(fd, into.as_mut_ptr(), len as u32);
            // SAFETY: the memory is borrowed while this future exists.
            let count = unsafe { Op::run(ring, entry.flags(flags).build()) };
            return Ok(count.await? as usize);
        }
        let flags = match core {
            Some(_) => RecvFlags::DONTWAIT,
            None => RecvFlags::from_bits_retain(flags as u32),
        };
        let recv = || net::recv(&self.fd, &mut *into, flags).map(|(count, _)| count);
        when_ready(&core, self.fd.as_fd(), PollFlags::IN, recv).await
    }

    /// Sends all of `bytes`.
    pub async fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        self.send_vectored(&[IoSlice::new(bytes)]).await
    }

    /// Sends all parts, one after the other. Parts of different calls mix when the calls overlap.
    pub async fn send_vectored(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        let core = context::find();
        let mut rest = parts;
        // Bytes that went out and are not skipped yet.
        let mut sent = 0;
        loop {
            while let Some(part) = rest.first().filter(|part| part.len() <= sent) {
                sent -= part.len();
                rest = &rest[1..];
            }
            let Some(first) = rest.first() else {
                return Ok(());
            };
            // It stopped inside a part: the remainder of it goes alone.
            let remainder = [IoSlice::new(&first[sent..])];
            let group = match sent {
                0 => &rest[..rest.len().min(IOV_MAX)],
                _ => &remainder,
            };
            sent += self.send_some(&core, group).await?;
        }
    }

    async fn send_some(
        &self,
        core: &Option<Rc<Core>>,
        parts: &[IoSlice<'_>],
    ) -> Result<usize, Errno> {
        if let Some(ring) = ring_of(core) {
            // SAFETY: `msghdr` is plain integers and pointers, for which zero is a value.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            // `IoSlice` has the layout of `iovec`; sending does not write to it.
            message.msg_iov = parts.as_ptr().cast_mut().cast();
            message.msg_iovlen = parts.len() as _;
            let flags = libc::MSG_NOSIGNAL | whole(parts.iter().map(|part| part.len()).sum());
            let fd = types::Fd(self.fd.as_raw_fd());
            let entry = opcode::SendMsg::new(fd, &raw const message).flags(flags as u32);
            // SAFETY: the message lives in this future, which the operation does not outlive, and
            // the parts and their memory are borrowed while it exists.
            return Ok(unsafe { Op::run(ring, entry.build()) }.await? as usize);
        }
        let flags = match core {
            Some(_) => SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            None => SendFlags::NOSIGNAL,
        };
        let send = || net::sendmsg(&self.fd, parts, &mut SendAncillaryBuffer::default(), flags);
        when_ready(core, self.fd.as_fd(), PollFlags::OUT, send).await
    }

    /// Ends one or both directions. Calls that wait on them, on any thread, end.
    pub fn shutdown(&self, how: Shutdown) -> Result<(), Errno> {
        let how = match how {
            Shutdown::Read => net::Shutdown::Read,
            Shutdown::Write => net::Shutdown::Write,
            Shutdown::Both => net::Shutdown::Both,
        };
        again(|| net::shutdown(&self.fd, how))
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
