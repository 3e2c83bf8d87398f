//! What a contestant makes of an image: a block device, a file or a socket.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::image::succeed;
use crate::process::Server;

/// What is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A block device or a file, for fio.
    Path(PathBuf),
    /// The socket of a vhost-user device.
    Vhost(PathBuf),
}

/// A server and its log.
pub struct Started {
    server: Server,
    log: PathBuf,
}

impl Started {
    /// Starts it.
    pub fn spawn(command: &mut Command, log: PathBuf) -> Result<Started> {
        let server = Server::spawn(command, Some(&log))?;
        Ok(Started { server, log })
    }

    /// Waits until `look` finds something; an error has what the server printed.
    pub fn wait_for<T>(
        &mut self,
        what: &str,
        look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let found = self.server.wait_for(what, look);
        found.with_context(|| std::fs::read_to_string(&self.log).unwrap_or_default())
    }
}

/// A running contestant; dropping it ends it.
pub struct RunningContestant {
    pub target: Target,
    /// Commands that take the device away, first to last.
    pub undo: Vec<Command>,
    /// It is stopped after the device has gone.
    server: Option<Started>,
}

impl RunningContestant {
    /// A device or file and the server behind it, if there is one.
    pub fn new(target: Target, server: Option<Started>) -> RunningContestant {
        RunningContestant {
            target,
            undo: Vec::new(),
            server,
        }
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
        match self.server.take() {
            Some(started) => outcome.and(started.server.end().map(drop)),
            None => outcome,
        }
    }
}

impl Drop for RunningContestant {
    fn drop(&mut self) {
        // `stop` says what goes wrong.
        let _ = self.take_away();
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
pub fn new(prefix: &str, before: &BTreeSet<String>) -> Result<Option<PathBuf>> {
    for name in block_devices(prefix)?.difference(before) {
        let node = Path::new("/dev").join(name);
        if sectors(name) != 0 && node.exists() {
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
