//! Signals that ask the program to end or to look again, as something to wait for.
//!
//! The handler does the two things a handler may do: it writes the signal's number to a socket that
//! a task reads, or, once [`Signals::exit_on_next`] has been called, it ends the process at once.
//!
//! The same signal twice within [`ECHO_MILLIS`] counts once: `timeout` signals its child and then the
//! child's process group, so a process that it stops gets every signal twice.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use gaur_block::Errno;

use crate::socket::Stream;
use crate::syscall;

/// A signal that can be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// `SIGINT`, from a terminal's control-C.
    Interrupt,
    /// `SIGTERM`.
    Terminate,
    /// `SIGHUP`.
    Hangup,
    /// `SIGUSR1`, which asks for something to be told and never ends the process.
    User1,
}

impl Signal {
    fn number(self) -> libc::c_int {
        match self {
            Signal::Interrupt => libc::SIGINT,
            Signal::Terminate => libc::SIGTERM,
            Signal::Hangup => libc::SIGHUP,
            Signal::User1 => libc::SIGUSR1,
        }
    }

    fn from_number(number: u8) -> Option<Signal> {
        use Signal::{Hangup, Interrupt, Terminate, User1};
        [Interrupt, Terminate, Hangup, User1]
            .into_iter()
            .find(|signal| signal.number() == libc::c_int::from(number))
    }
}

/// Has a write beyond the limit of file sizes (`ulimit -f`) fail with `EFBIG` instead of ending the
/// process with SIGXFSZ, which would be a crash of whatever it serves.
pub fn ignore_file_size_signal() {
    // SAFETY: no handler is set, and no memory is passed.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

static INSTALLED: AtomicBool = AtomicBool::new(false);
/// Where the handler writes; -1 before the installation.
static WRITE_TO: AtomicI32 = AtomicI32::new(-1);
/// The status with which the next signal ends the process; -1 if it does not.
static EXIT_WITH: AtomicI32 = AtomicI32::new(-1);

/// A signal that comes again within this time is the same one.
const ECHO_MILLIS: u64 = 500;
/// The last signal that counted: when it came in milliseconds, and in the lowest byte its number.
static COUNTED: AtomicU64 = AtomicU64::new(0);

/// Milliseconds of a clock that does not jump; may be called from a handler.
fn millis() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the pointer is to a local value; the call may be made from a handler.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Whether the signal is the echo of one that counted.
fn is_echo(number: libc::c_int) -> bool {
    let (now, number) = (millis(), u64::from(number as u8));
    let count = |last: u64| {
        let same = last & 0xff == number;
        let echo = same && now.saturating_sub(last >> 8) < ECHO_MILLIS;
        (!echo).then_some(now << 8 | number)
    };
    let counted = COUNTED.fetch_update(Ordering::SeqCst, Ordering::SeqCst, count);
    counted.is_err()
}

extern "C" fn handle(number: libc::c_int) {
    if is_echo(number) {
        return;
    }
    let status = EXIT_WITH.load(Ordering::SeqCst);
    if status >= 0 && number != libc::SIGUSR1 {
        // SAFETY: `_exit` may be called from a handler and does not return.
        unsafe { libc::_exit(status) }
    }
    let byte = number as u8;
    // SAFETY: the pointer is to one byte; `send` may be called from a handler, and `errno` is put
    // back for the code that was interrupted. A full socket has enough to read already.
    unsafe {
        let errno = *libc::__errno_location();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        libc::send(
            WRITE_TO.load(Ordering::SeqCst),
            (&raw const byte).cast(),
            1,
            flags,
        );
        *libc::__errno_location() = errno;
    }
}

/// The signals of this process. There is one value of this type at most.
#[derive(Debug)]
pub struct Signals {
    stream: Stream,
}

impl Signals {
    /// Takes over these signals, from whichever thread.
    ///
    /// # Errors
    /// What the kernel says.
    ///
    /// # Panics
    /// When called twice in a process.
    pub fn install(signals: &[Signal]) -> Result<Signals, Errno> {
        assert!(
            !INSTALLED.swap(true, Ordering::SeqCst),
            "signals are installed once"
        );
        let (read, write) = Stream::pair()?;
        let write: OwnedFd = write
            .as_fd()
            .try_clone_to_owned()
            .map_err(|error| syscall::errno_of(&error))?;
        // The handler stays for the life of the process, so this end is never closed.
        WRITE_TO.store(write.into_raw_fd(), Ordering::SeqCst);
        for signal in signals {
            // SAFETY: `sigaction` is plain integers, for which zero is a value; the handler does
            // nothing but what a handler may do.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = handle as extern "C" fn(libc::c_int) as libc::sighandler_t;
                action.sa_flags = libc::SA_RESTART;
                libc::sigemptyset(&raw mut action.sa_mask);
                let old = std::ptr::null_mut();
                if libc::sigaction(signal.number(), &raw const action, old) != 0 {
                    return Err(syscall::last_errno());
                }
            }
        }
        Ok(Signals { stream: read })
    }

    /// Waits for the next signal. Those that came meanwhile are not lost, up to a few hundred; one that
    /// came again within half a second is one.
    pub async fn next(&self) -> Signal {
        let mut byte = [0];
        loop {
            match self.stream.recv(&mut byte).await {
                Ok(1) => {
                    if let Some(signal) = Signal::from_number(byte[0]) {
                        return signal;
                    }
                }
                // The other end is never closed, so this is not an end either.
                _ => crate::timer::sleep(std::time::Duration::from_millis(100)).await,
            }
        }
    }

    /// From now on the next signal ends the process with `status` at once, whatever its threads do.
    pub fn exit_on_next(&self, status: u8) {
        EXIT_WITH.store(libc::c_int::from(status), Ordering::SeqCst);
    }

    /// The descriptor that becomes readable with a signal.
    pub fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.stream.as_fd().as_raw_fd()
    }
}
