//! Log lines: on standard error, or in the system's log once a server is in the background. They never
//! stop the work: lines are dropped when the terminal is gone or a pipe is full.
//!
//! A line is one write, so that those of several threads and processes never mix, and one line,
//! whatever names of files and words of clients stand in it.

use std::fmt;
use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

pub use gaur_server::notice::one_line;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long a line waits for its reader; after one that was dropped the next do not wait.
const PATIENCE: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};
static STUCK: AtomicBool = AtomicBool::new(false);

/// Where the system's log is, and a line's place in it: of a daemon, a warning.
const SYSTEM_LOG: &str = "/dev/log";
const PRIORITY: &str = "<28>";
static DETACHED: AtomicBool = AtomicBool::new(false);

/// From now on lines go to the system's log.
pub fn detach() {
    DETACHED.store(true, Ordering::Relaxed);
}

/// What the command is called, if not [`OWN_NAME`]. Set once, at its start.
static PROGRAM: OnceLock<String> = OnceLock::new();

/// The name of the command when it is not called as a program of QEMU.
pub const OWN_NAME: &str = "gaur";

/// From now on lines are said under this name.
pub fn speak_as(program: &str) {
    // Tests run several commands in a process.
    let _ = PROGRAM.set(program.to_owned());
}

/// What the command is called.
pub fn program() -> &'static str {
    PROGRAM.get().map_or(OWN_NAME, String::as_str)
}

/// Whether the command was called as a program of QEMU, which says less.
pub fn is_qemu() -> bool {
    program() != OWN_NAME
}

/// Says `line` under the name of the command.
pub fn say(line: impl fmt::Display) {
    let program = program();
    let line = one_line(&line.to_string());
    if DETACHED.load(Ordering::Relaxed) {
        let line = format!("{PRIORITY}{program}[{}]: {line}", std::process::id());
        // Without a log there is nothing to write to.
        let _ = log(&line);
        return;
    }
    print(&format!("{program}: {line}\n"));
}

/// Says `line` without the name of the command, as programs of QEMU do in places. Not for a server.
pub fn say_bare(line: impl fmt::Display) {
    print(&format!("{}\n", one_line(&line.to_string())));
}

fn print(line: &str) {
    if is_read() {
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// QEMU's warning of a raw image that no option calls raw: three lines, which scripts know.
pub fn warn_of_raw(file: &str) {
    let file = one_line(file);
    let text = format!(
        "WARNING: Image format was not specified for '{file}' and probing guessed raw.\n         \
         Automatically detecting the format is dangerous for raw images, write operations on block 0 will be \
         restricted.\n         Specify the 'raw' format explicitly to remove the restrictions.\n"
    );
    if is_read() {
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

fn log(line: &str) -> std::io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to(line.as_bytes(), SYSTEM_LOG)?;
    Ok(())
}

/// Whether standard error takes a line.
fn is_read() -> bool {
    let stderr = rustix::stdio::stderr();
    let patience = match STUCK.load(Ordering::Relaxed) {
        true => Timespec::default(),
        false => PATIENCE,
    };
    let mut wanted = [PollFd::from_borrowed_fd(stderr, PollFlags::OUT)];
    // An error of the log itself concerns no user.
    let stuck = poll(&mut wanted, Some(&patience)) == Ok(0);
    STUCK.store(stuck, Ordering::Relaxed);
    !stuck
}
