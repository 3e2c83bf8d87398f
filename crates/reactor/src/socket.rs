//! Stream sockets: one set of calls that waits in a ring, in a fallback reactor, or in the kernel.
//!
//! Where a call waits depends on the thread that makes it: with a ring it is an operation of the
//! ring; with the fallback it is tried without waiting and, failing that, sleeps in the reactor;
//! without a reactor it blocks. A socket may move between threads between calls.
//!
//! A stream that the peer has closed gives 0 bytes; sending to it gives `EPIPE`, never `SIGPIPE`.

use std::io::IoSlice;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use gaur_block::Errno;
use io_uring::{opcode, types};

use crate::address::{self, Address, RawAddress};
use crate::context;
use crate::op::Op;
use crate::reactor::{Core, Engine};
use crate::syscall::{self, IOV_MAX, RW_MAX};

/// Connections that wait to be accepted.
const BACKLOG: libc::c_int = 128;

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

fn socket(family: libc::c_int) -> Result<OwnedFd, Errno> {
    // SAFETY: no memory is passed; a descriptor that comes back is new and ours alone.
    unsafe {
        let fd = libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            Err(syscall::last_errno())
        } else {
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

fn set_option(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> Result<(), Errno> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option is an `int`, which the kernel reads.
    let result =
        unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if result == 0 {
        Ok(())
    } else {
        Err(syscall::last_errno())
    }
}

fn set_nonblocking(fd: BorrowedFd<'_>, nonblocking: bool) -> Result<(), Errno> {
    // SAFETY: neither command takes memory.
    unsafe {
        let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFL);
        let wanted = match nonblocking {
            true => flags | libc::O_NONBLOCK,
            false => flags & !libc::O_NONBLOCK,
        };
        if flags < 0 || (flags != wanted && libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, wanted) < 0)
        {
            return Err(syscall::last_errno());
        }
    }
    Ok(())
}

/// Makes a call that must not wait; while it would have to, waits in the reactor for `events`.
async fn when_ready(
    core: &Core,
    fd: BorrowedFd<'_>,
    events: libc::c_short,
    mut call: impl FnMut() -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    loop {
        match call() {
            Err(Errno::EAGAIN) => {}
            Err(Errno::EINTR) => continue,
            result => return result,
        }
        if let Engine::Fallback(readiness) = core.engine() {
            readiness.ready(fd.as_raw_fd(), events).await;
        }
    }
}

fn returned(count: isize) -> Result<usize, Errno> {
    usize::try_from(count).map_err(|_| syscall::last_errno())
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
        let in_the_way = |path: &PathBuf| {
            let found = std::fs::symlink_metadata(path);
            found.is_ok_and(|found| !FileTypeExt::is_socket(&found.file_type()))
        };
        let hopeless = matches!(address, Address::Unix(path) if in_the_way(path));
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
        let raw = RawAddress::new(address)?;
        let fd = socket(raw.family())?;
        let bind = || {
            // SAFETY: the address and its length belong together.
            let result = unsafe { libc::bind(fd.as_raw_fd(), raw.as_ptr(), raw.len()) };
            if result == 0 {
                Ok(())
            } else {
                Err(syscall::last_errno())
            }
        };
        let mut made = None;
        match address {
            Address::Tcp(_) => {
                set_option(fd.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
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
        // SAFETY: no memory is passed.
        if unsafe { libc::listen(listener.fd.as_raw_fd(), BACKLOG) } != 0 {
            return Err(syscall::last_errno());
        }
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
        let fd = self.fd.as_raw_fd();
        let null = std::ptr::null_mut();
        let accept = || {
            // SAFETY: the kernel is asked for no address.
            returned(unsafe { libc::accept4(fd, null, null.cast(), libc::SOCK_CLOEXEC) } as isize)
        };
        let new = match context::find() {
            Some(core) => match core.engine() {
                Engine::Ring(ring) => {
                    set_nonblocking(self.fd.as_fd(), false)?;
                    let entry = opcode::Accept::new(types::Fd(fd), null, null.cast())
                        .flags(libc::SOCK_CLOEXEC)
                        .build();
                    // SAFETY: the entry points to nothing.
                    let op = unsafe { Op::new(ring, entry) }.makes_fd();
                    op.await? as libc::c_int
                }
                Engine::Fallback(_) => {
                    set_nonblocking(self.fd.as_fd(), true)?;
                    when_ready(&core, self.fd.as_fd(), libc::POLLIN, accept).await? as libc::c_int
                }
            },
            None => {
                set_nonblocking(self.fd.as_fd(), false)?;
                accept()? as libc::c_int
            }
        };
        // SAFETY: the kernel made this descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(new) })
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

/// Removes a socket file without a listener.
fn remove_dead_socket(path: &std::path::Path, raw: &RawAddress) -> Result<(), Errno> {
    let in_use = Err(Errno::from_raw(libc::EADDRINUSE));
    let is_socket = std::fs::symlink_metadata(path)
        .is_ok_and(|facts| std::os::unix::fs::FileTypeExt::is_socket(&facts.file_type()));
    if !is_socket {
        return in_use;
    }
    let probe = socket(raw.family())?;
    // A listener with a full queue would make us wait; it is alive.
    set_nonblocking(probe.as_fd(), true)?;
    // SAFETY: the address and its length belong together.
    let result = unsafe { libc::connect(probe.as_raw_fd(), raw.as_ptr(), raw.len()) };
    if result == 0 || syscall::last_errno().raw() != libc::ECONNREFUSED {
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
        let raw = RawAddress::new(address)?;
        let stream = Stream::from_fd(socket(raw.family())?);
        let fd = stream.fd.as_raw_fd();
        let core = context::find();
        if let Some(ring) = core.as_ref().and_then(|core| core.ring()) {
            let entry = opcode::Connect::new(types::Fd(fd), raw.as_ptr(), raw.len()).build();
            // SAFETY: the address lives in this future, which the operation does not outlive.
            unsafe { Op::new(ring, entry) }.await?;
        } else {
            // In the fallback too: connecting is not on any path that others wait for.
            // SAFETY: the address and its length belong together.
            let result = unsafe { libc::connect(fd, raw.as_ptr(), raw.len()) };
            if result != 0 {
                return Err(syscall::last_errno());
            }
        }
        Ok(stream)
    }

    /// A socket that is connected already.
    pub fn from_fd(fd: OwnedFd) -> Stream {
        // Replies are sent whole, so waiting for more to send would only cost time. It fails for
        // sockets that are not TCP, which need none of it.
        let _ = set_option(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
        // A peer whose machine is gone says nothing; after two minutes of that it counts as gone.
        let _ = set_option(fd.as_fd(), libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
        let _ = set_option(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 60);
        let _ = set_option(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 10);
        let _ = set_option(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 6);
        // A ring does not wait for a descriptor that says O_NONBLOCK.
        let _ = set_nonblocking(fd.as_fd(), false);
        Stream { fd }
    }

    /// Two sockets that are connected to each other.
    pub fn pair() -> Result<(Stream, Stream), Errno> {
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        let mut fds = [-1; 2];
        // SAFETY: there is room for two descriptors; those that come back are new and ours alone.
        unsafe {
            if libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) != 0 {
                return Err(syscall::last_errno());
            }
            let [first, second] = fds.map(|fd| Stream::from_fd(OwnedFd::from_raw_fd(fd)));
            Ok((first, second))
        }
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
        let fd = self.fd.as_raw_fd();
        let len = into.len().min(RW_MAX);
        let start = into.as_mut_ptr();
        let recv = |flags| {
            // SAFETY: the memory is a borrowed slice.
            returned(unsafe { libc::recv(fd, start.cast(), len, flags) })
        };
        let Some(core) = context::find() else {
            return uninterrupted(|| recv(flags));
        };
        match core.engine() {
            Engine::Ring(ring) => loop {
                let entry = opcode::Recv::new(types::Fd(fd), start, len as u32)
                    .flags(flags)
                    .build();
                // SAFETY: the memory is borrowed while this future exists.
                match unsafe { Op::new(ring, entry) }.await {
                    Err(Errno::EINTR) => {}
                    result => return result.map(|count| count as usize),
                }
            },
            Engine::Fallback(_) => {
                let recv = || recv(libc::MSG_DONTWAIT);
                when_ready(&core, self.fd.as_fd(), libc::POLLIN, recv).await
            }
        }
    }

    /// Sends all of `bytes`.
    pub async fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        let core = context::find();
        let mut done = 0;
        while done < bytes.len() {
            done += self.send_some(core.as_ref(), &bytes[done..]).await?;
        }
        Ok(())
    }

    /// Sends all parts, one after the other. Parts of different calls mix when the calls overlap.
    pub async fn send_vectored(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        let core = context::find();
        let mut rest = parts;
        while let Some(first) = rest.first() {
            if first.is_empty() {
                rest = &rest[1..];
                continue;
            }
            let group = &rest[..rest.len().min(IOV_MAX)];
            let mut count = self.send_parts(core.as_ref(), group).await?;
            while let Some(part) = rest.first().filter(|part| part.len() <= count) {
                count -= part.len();
                rest = &rest[1..];
            }
            if count > 0 {
                // It stopped inside a part: the remainder of it goes alone.
                self.send(&rest[0][count..]).await?;
                rest = &rest[1..];
            }
        }
        Ok(())
    }

    async fn send_some(&self, core: Option<&Rc<Core>>, bytes: &[u8]) -> Result<usize, Errno> {
        let fd = self.fd.as_raw_fd();
        let len = bytes.len().min(RW_MAX);
        let send = |flags| {
            // SAFETY: the memory is a borrowed slice.
            let count = unsafe { libc::send(fd, bytes.as_ptr().cast(), len, flags) };
            returned(count)
        };
        let Some(core) = core else {
            return uninterrupted(|| send(libc::MSG_NOSIGNAL));
        };
        match core.engine() {
            Engine::Ring(ring) => loop {
                let entry = opcode::Send::new(types::Fd(fd), bytes.as_ptr(), len as u32)
                    .flags(libc::MSG_NOSIGNAL | whole(len))
                    .build();
                // SAFETY: the memory is borrowed while this future exists.
                match unsafe { Op::new(ring, entry) }.await {
                    Err(Errno::EINTR) => {}
                    result => return result.map(|count| count as usize),
                }
            },
            Engine::Fallback(_) => {
                let send = || send(libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
                when_ready(core, self.fd.as_fd(), libc::POLLOUT, send).await
            }
        }
    }

    async fn send_parts(
        &self,
        core: Option<&Rc<Core>>,
        parts: &[IoSlice<'_>],
    ) -> Result<usize, Errno> {
        let fd = self.fd.as_raw_fd();
        // SAFETY: `msghdr` is plain integers and pointers, for which zero is a value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        // `IoSlice` has the layout of `iovec`; sending does not write to it.
        message.msg_iov = parts.as_ptr().cast_mut().cast();
        message.msg_iovlen = parts.len() as _;
        let message = Message(message);
        let send = |flags| {
            // SAFETY: the message points to borrowed parts.
            returned(unsafe { libc::sendmsg(fd, &raw const message.0, flags) })
        };
        let Some(core) = core else {
            return uninterrupted(|| send(libc::MSG_NOSIGNAL));
        };
        match core.engine() {
            Engine::Ring(ring) => loop {
                let flags = libc::MSG_NOSIGNAL | whole(parts.iter().map(|part| part.len()).sum());
                let entry = opcode::SendMsg::new(types::Fd(fd), &raw const message.0)
                    .flags(flags as u32)
                    .build();
                // SAFETY: the message lives in this future, which the operation does not outlive,
                // and the parts and their memory are borrowed while it exists.
                match unsafe { Op::new(ring, entry) }.await {
                    Err(Errno::EINTR) => {}
                    result => return result.map(|count| count as usize),
                }
            },
            Engine::Fallback(_) => {
                let send = || send(libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
                when_ready(core, self.fd.as_fd(), libc::POLLOUT, send).await
            }
        }
    }

    /// Ends one or both directions. Calls that wait on them, on any thread, end.
    pub fn shutdown(&self, how: Shutdown) -> Result<(), Errno> {
        let how = match how {
            Shutdown::Read => libc::SHUT_RD,
            Shutdown::Write => libc::SHUT_WR,
            Shutdown::Both => libc::SHUT_RDWR,
        };
        // SAFETY: no memory is passed.
        let result = unsafe { libc::shutdown(self.fd.as_raw_fd(), how) };
        if result == 0 {
            Ok(())
        } else {
            Err(syscall::last_errno())
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A message header on its way to the kernel. Its pointers are into borrowed memory.
struct Message(libc::msghdr);

fn uninterrupted(mut call: impl FnMut() -> Result<usize, Errno>) -> Result<usize, Errno> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
}
