//! The load on a vhost-user device, by a client of our own: fio has none.

use std::path::Path;

use anyhow::{Result, bail};

use super::load::Run;
use super::record::Cell;

/// Runs a cell's load on the device behind a socket.
pub fn run(_cell: &Cell, _socket: &Path, _seconds: u64, _size_bytes: u64) -> Result<Run> {
    bail!("no client yet")
}
