//! The program that mounts for users who may not: `fusermount3`, which is installed with their rights
//! extended, looks whether they own the file, and sends the descriptor of the mount back over a
//! socket.

use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use gaur_block::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// The program, newest first.
const PROGRAMS: [&str; 2] = ["fusermount3", "fusermount"];
/// Where it looks for the number of its end of the socket.
const SOCKET_VARIABLE: &str = "_FUSE_COMMFD";

/// Mounts at `path`; `options` are those of `mount(8)`.
///
/// # Errors
/// Why not, in the program's words if it has some.
pub(super) fn mount(path: &Path, options: &str) -> Result<OwnedFd, String> {
    let (ours, theirs) =
        UnixStream::pair().map_err(|error| format!("cannot make a socket: {error}"))?;
    let number = theirs.as_raw_fd();
    let mut said = String::new();
    let made = run(&mut said, |command| {
        command
            .args(["-o", options, "--"])
            .arg(path)
            .env(SOCKET_VARIABLE, number.to_string());
        // SAFETY: between fork and exec the closure makes one system call and touches no memory.
        unsafe {
            command.pre_exec(move || match libc::fcntl(number, libc::F_SETFD, 0) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
    });
    drop(theirs);
    made.map_err(|reason| match said.trim() {
        "" => reason,
        said => said.to_owned(),
    })?;
    receive(&ours).ok_or_else(|| "the program that mounts sent no descriptor".to_owned())
}

/// Unmounts at `path` when no program uses it any more.
pub(super) fn unmount(path: &Path) -> Result<(), Errno> {
    let mut said = String::new();
    let done = run(&mut said, |command| {
        command.args(["-u", "-q", "-z", "--"]).arg(path);
    });
    done.map_err(|_| Errno::EPERM)
}

/// Runs the program to its end.
fn run(said: &mut String, prepare: impl Fn(&mut Command)) -> Result<(), String> {
    for program in PROGRAMS {
        let mut command = Command::new(program);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        prepare(&mut command);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(format!("cannot start {program}: {error}")),
        };
        if let Some(mut words) = child.stderr.take() {
            // What it says is for people; that it ends is what counts.
            let _ = words.read_to_string(said);
        }
        return match child.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("{program}: {status}")),
            Err(error) => Err(format!("{program}: {error}")),
        };
    }
    Err("mounting needs root, or the program fusermount3 (package fuse3)".to_owned())
}

/// Receives a descriptor.
fn receive(socket: &UnixStream) -> Option<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        let parts = &mut [IoSliceMut::new(&mut byte)];
        recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    });
    received.ok().filter(|received| received.bytes > 0)?;
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    })
}
