//! What a contestant makes of an image: a block device, a file or a socket.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::image::succeed;

/// How long a device may take to come or go.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(10);

/// What is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A block device or a file, for fio.
    Path(PathBuf),
    /// The socket of a vhost-user device.
    Vhost(PathBuf),
}

/// A running contestant; dropping it ends it.
pub struct RunningContestant {
    pub target: Target,
    /// Commands that take the device away, first to last.
    undo: Vec<Command>,
    server: Option<Child>,
}

impl RunningContestant {
    /// A device without a server of its own.
    pub fn new(target: Target) -> RunningContestant {
        RunningContestant {
            target,
            undo: Vec::new(),
            server: None,
        }
    }

    /// The server behind it, which is stopped after the device has gone.
    pub fn with_server(mut self, server: Child) -> RunningContestant {
        self.server = Some(server);
        self
    }

    /// A command to run at the end.
    pub fn undone_by(mut self, program: &str, arguments: &[&str]) -> RunningContestant {
        let mut command = Command::new(program);
        command.args(arguments);
        self.undo.push(command);
        self
    }

    /// Takes everything away again.
    pub fn stop(mut self) -> Result<()> {
        self.take_away()
    }

    fn take_away(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for mut command in self.undo.drain(..) {
            outcome = outcome.and(succeed(&mut command));
        }
        let Some(mut server) = self.server.take() else {
            return outcome;
        };
        let _ = Command::new("kill")
            .args(["-TERM", &server.id().to_string()])
            .status();
        let ended = until("the server to end", || Ok(server.try_wait()?.map(|_| ())));
        if ended.is_err() {
            let _ = server.kill();
            let _ = server.wait();
        }
        outcome.and(ended)
    }
}

impl Drop for RunningContestant {
    fn drop(&mut self) {
        // `stop` says what goes wrong.
        let _ = self.take_away();
    }
}

/// Starts a server that stays in the foreground. What it prints goes to `log`.
pub fn spawn(command: &mut Command, log: &Path) -> Result<Child> {
    let file = std::fs::File::create(log)?;
    let program = command.get_program().to_owned();
    command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()
        .with_context(|| format!("cannot start {program:?}"))
}

/// Waits until `look` finds something; an error when the server ends before, with what it printed.
pub fn wait_for<T>(
    what: &str,
    server: &mut Child,
    log: &Path,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let said = || {
        std::fs::read_to_string(log)
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let found = until(what, || {
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        match server.try_wait()? {
            Some(status) => bail!("the server ended with {status}"),
            None => Ok(None),
        }
    });
    found.with_context(said)
}

fn until<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("waited in vain for {what}");
        }
        std::thread::sleep(PAUSE);
    }
}

/// Names of block devices that begin like this.
pub fn block_devices(prefix: &str) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir("/sys/block")? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with(prefix) {
            names.insert(name);
        }
    }
    Ok(names)
}

/// A block device of that kind that was not there before and has a size.
pub fn new_block_device(prefix: &str, before: &BTreeSet<String>) -> Result<Option<PathBuf>> {
    for name in block_devices(prefix)?.difference(before) {
        let size = std::fs::read_to_string(format!("/sys/block/{name}/size")).unwrap_or_default();
        let node = Path::new("/dev").join(name);
        if size.trim() != "0" && !size.is_empty() && node.exists() {
            return Ok(Some(node));
        }
    }
    Ok(None)
}

/// The size of a block device in 512-byte sectors; 0 if it is not there.
pub fn sectors(name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/sys/block/{name}/size")).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}
