//! `gaur ublk list`: the kernel's devices, and what the state files add.

use std::io::Write;

use gaur_export::ublk::{self, Info};
use serde::Serialize;

use super::failed;
use super::state::{self, State};
use crate::failure::Failure;
use crate::json;
use crate::open::Output;
use crate::size::human;
use crate::table;

/// A device.
#[derive(Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    device: u32,
    place: String,
    state: &'static str,
    virtual_size: u64,
    read_only: bool,
    queues: u16,
    depth: u16,
    features: Vec<&'static str>,
    pid: Option<u32>,
    owner_uid: Option<u32>,
    name: Option<String>,
    image: Option<String>,
}

/// Prints the devices.
pub fn run(output: Output, out: &mut dyn Write) -> Result<u8, Failure> {
    let devices = ublk::list().map_err(failed)?;
    let rows = join(&devices, State::all(&state::directory()));
    match output {
        Output::Json => json::write(out, &rows)?,
        Output::Human => print(&rows, out)?,
    }
    Ok(0)
}

/// The kernel's devices, and those that only a state file knows.
fn join(devices: &[Info], states: Vec<State>) -> Vec<Row> {
    let mut rows: Vec<Row> = devices.iter().map(of_kernel).collect();
    for state in states {
        let place = rows.iter().position(|row| row.device == state.device);
        let place = place.unwrap_or_else(|| {
            rows.push(gone(state.device));
            rows.len() - 1
        });
        let row = &mut rows[place];
        row.name = Some(state.name);
        row.image = Some(state.image.display().to_string());
    }
    rows.sort_by_key(|row| row.device);
    rows
}

fn of_kernel(info: &Info) -> Row {
    Row {
        device: info.id,
        place: info.block_path(),
        state: info.state.name(),
        virtual_size: info.size_bytes,
        read_only: info.read_only,
        queues: info.queues,
        depth: info.depth,
        features: info.features.names().collect(),
        pid: info.server,
        owner_uid: Some(info.owner_uid),
        ..Row::default()
    }
}

/// A device that the kernel does not have any more.
fn gone(device: u32) -> Row {
    Row {
        device,
        place: format!("/dev/ublkb{device}"),
        state: "gone",
        ..Row::default()
    }
}

fn print(rows: &[Row], out: &mut dyn Write) -> std::io::Result<()> {
    let head = [
        "DEVICE", "STATE", "SIZE", "MODE", "QUEUES", "DEPTH", "PID", "IMAGE",
    ];
    let cells = rows.iter().map(|row| {
        let pid = row
            .pid
            .map_or_else(|| "--".to_owned(), |pid| pid.to_string());
        [
            row.place.clone(),
            row.state.to_owned(),
            human(row.virtual_size),
            if row.read_only { "ro" } else { "rw" }.to_owned(),
            row.queues.to_string(),
            row.depth.to_string(),
            pid,
            row.image.clone().unwrap_or_else(|| "--".to_owned()),
        ]
    });
    table::print(head, cells, out)
}
