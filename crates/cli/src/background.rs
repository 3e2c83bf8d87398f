//! `serve --fork` and `ublk add`: the server as a process of its own.
//!
//! The command starts itself again as the server and passes on what it prints until it says that it
//! is ready. So nothing is opened twice, no lock changes hands, and an error still reaches the user.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::command::is_qemu_nbd;
use crate::failure::{EXIT_FAILURE, Failure};
use crate::notice;

/// The last line a server prints before it stands alone.
const READY: &str = "ready";

/// Starts this very command as a server and waits until it is ready or has failed.
pub fn run(out: &mut dyn Write) -> Result<u8, Failure> {
    let args = std::env::args_os().skip(1).collect();
    start(args, None, |line| Ok(writeln!(out, "{line}")?))?;
    Ok(0)
}

/// Whether the server in the background goes on to print to the standard error of who started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepStderr(pub bool);

/// Starts a server with these arguments, the verb first, in a directory if one is told, and waits until it
/// is ready or has failed. `show` gets the lines that it prints. Returns its process id.
pub fn start(
    mut args: Vec<OsString>,
    directory: Option<&Path>,
    mut show: impl FnMut(&str) -> Result<(), Failure>,
) -> Result<u32, Failure> {
    let start = |error: std::io::Error| Failure::io("the background process", &error);
    let program = std::env::current_exe().map_err(start)?;
    // Right after the verb, where no `--` and no value of an option can be in the way. Called by a link, the command
    // has the verb in its name.
    let called_by = std::env::args_os().next().unwrap_or_default();
    let verbs = usize::from(!is_qemu_nbd(&called_by)).min(args.len());
    args.insert(verbs, "--forked".into());
    let mut command = Command::new(program);
    command.arg0(called_by);
    if let Some(directory) = directory {
        command.current_dir(directory);
    }
    let mut child = command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(start)?;
    let Some(stdout) = child.stdout.take() else {
        return Err(Failure::new("the background process has no output"));
    };
    for line in BufReader::new(stdout).lines() {
        let line = line.map_err(start)?;
        if line == READY {
            return Ok(child.id());
        }
        show(&line)?;
    }
    // It ended before it was ready, and said why on standard error, which it shares.
    let code = child.wait().map_err(start)?.code();
    let code = code.and_then(|code| u8::try_from(code).ok());
    Err(Failure::silent(
        code.filter(|code| *code != 0).unwrap_or(EXIT_FAILURE),
    ))
}

/// Says that the server is ready, and lets go of the terminal.
pub fn ready(out: &mut dyn Write, keep: KeepStderr) -> Result<(), Failure> {
    writeln!(out, "{READY}")?;
    out.flush()?;
    let detach = |error: std::io::Error| Failure::io("the terminal", &error);
    // Fails only for the leader of a process group, which a process just started is not, unless a
    // person runs the hidden option by hand.
    let _ = rustix::process::setsid();
    let null = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null");
    let null = null.map_err(detach)?;
    rustix::stdio::dup2_stdout(&null).map_err(|errno| detach(errno.into()))?;
    if !keep.0 {
        rustix::stdio::dup2_stderr(&null).map_err(|errno| detach(errno.into()))?;
        notice::detach();
    }
    Ok(())
}
