//! What is known of ublk devices besides what the kernel knows: which image each shows and how. A file
//! a device, in a directory of the user's, from the moment the device is there until it is deleted.
//! A server that dies leaves it, and from it the next one learns what to serve.

use std::fs::DirBuilder;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::failure::Failure;

/// What is known of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct State {
    /// Its number.
    pub device: u32,
    /// The process that serves it, or did.
    pub pid: u32,
    /// The name of the export.
    pub name: String,
    /// The whole path of the image.
    pub image: PathBuf,
    /// Where the server was started: relative paths in `export` count from here.
    pub directory: PathBuf,
    /// The export, as the control socket's `export-add` has it.
    pub export: Map<String, Value>,
}

/// Where the files are.
pub fn directory() -> PathBuf {
    base().join("ublk")
}

/// Where everything is that servers leave to others on this machine, until it is started anew.
pub fn base() -> PathBuf {
    let user = rustix::process::geteuid();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let usable = |path: &PathBuf| path.is_absolute() && path.is_dir();
    match runtime.filter(usable) {
        _ if user.is_root() => PathBuf::from("/run/gaur"),
        Some(runtime) => runtime.join("gaur"),
        None => PathBuf::from(format!("/tmp/gaur-{}", user.as_raw())),
    }
}

impl State {
    /// Writes it: all of it, or nothing.
    pub fn write(&self, directory: &Path) -> Result<(), Failure> {
        let failed = |error: std::io::Error| Failure::io(directory, &error);
        make(directory)?;
        let mut file = tempfile::NamedTempFile::new_in(directory).map_err(failed)?;
        serde_json::to_writer(&mut file, self).map_err(|error| failed(error.into()))?;
        file.write_all(b"\n").map_err(failed)?;
        let kept = file.persist(path(directory, self.device));
        kept.map(drop).map_err(|error| failed(error.error))
    }

    /// What is known of a device, if anything is.
    pub fn read(directory: &Path, device: u32) -> Result<Option<State>, Failure> {
        let path = path(directory, device);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::io(&path, &error)),
        };
        let state = serde_json::from_slice::<State>(&text);
        let state = state.map_err(|error| Failure::about(&path, format!("is damaged: {error}")))?;
        Ok(Some(state))
    }

    /// All that is known, by number. What cannot be read is left out.
    pub fn all(directory: &Path) -> Vec<State> {
        let entries = std::fs::read_dir(directory).into_iter().flatten();
        let numbers = entries.filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            name.strip_suffix(".json")?.parse::<u32>().ok()
        });
        let mut states: Vec<State> = numbers
            .filter_map(|number| State::read(directory, number).ok().flatten())
            .collect();
        states.sort_by_key(|state| state.device);
        states
    }

    /// Whether the process that serves it is there, and not on its way out.
    pub fn is_served(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid));
        stat.is_ok_and(|stat| is_alive(&stat))
    }
}

/// `PF_EXITING` among the flags of a process: it has been killed, and the kernel takes it apart.
const EXITING: u64 = 0x4;

/// What `/proc/PID/stat` says of a process: `PID (NAME) STATE` and numbers, of which the seventh is its
/// flags.
fn is_alive(stat: &str) -> bool {
    // The name may hold anything, also brackets and spaces.
    let Some((_, rest)) = stat.rsplit_once(") ") else {
        return false;
    };
    let mut fields = rest.split(' ');
    let dead = matches!(fields.next(), None | Some("Z" | "X"));
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok());
    !dead && flags.unwrap_or(0) & EXITING == 0
}

/// Makes the directory. What servers leave there is believed, so another user's is refused.
pub fn make(directory: &Path) -> Result<(), Failure> {
    let made = DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory);
    made.map_err(|error| Failure::io(directory, &error))?;
    let user = rustix::process::geteuid();
    for level in directory.ancestors().take(2) {
        let facts = std::fs::symlink_metadata(level);
        let facts = facts.map_err(|error| Failure::io(directory, &error))?;
        if facts.uid() != user.as_raw() || facts.mode() & 0o022 != 0 || !facts.is_dir() {
            return Err(Failure::about(
                level,
                "others may change what is kept there",
            ));
        }
    }
    Ok(())
}

/// Where a process keeps a log of commits.
pub fn log(directory: &Path, pid: u32, number: u32) -> PathBuf {
    directory.join(format!("{pid}-{number}.log"))
}

/// Removes a log of commits, if it is one of those in this directory.
pub fn forget_log(directory: &Path, log: &Path) {
    if log.parent() == Some(directory) {
        // It may be gone already.
        let _ = std::fs::remove_file(log);
    }
}

/// Forgets a device, with what its server left to the next.
pub fn forget(directory: &Path, device: u32) {
    if let Ok(Some(state)) = State::read(directory, device)
        && let Some(log) = state.export.get("handover").and_then(Value::as_str)
    {
        forget_log(directory, Path::new(log));
    }
    // It may be gone already, and nothing depends on it any more.
    let _ = std::fs::remove_file(path(directory, device));
}

fn path(directory: &Path, device: u32) -> PathBuf {
    directory.join(format!("{device}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(device: u32) -> State {
        State {
            device,
            pid: std::process::id(),
            name: "disk".to_owned(),
            image: "/images/disk.qcow2".into(),
            directory: "/images".into(),
            export: Map::new(),
        }
    }

    #[test]
    fn a_process_that_is_being_taken_apart_serves_nothing() {
        let stat = |state: &str, flags: u32| format!("7 (a ) b) {state} 1 2 3 4 5 {flags} 8 9");
        assert!(is_alive(&stat("S", 0x40_4040)));
        assert!(!is_alive(&stat("R", 0x40_4044)));
        assert!(!is_alive(&stat("Z", 0)));
        assert!(!is_alive(""));
    }

    #[test]
    fn states_are_written_read_listed_and_forgotten() {
        let base = tempfile::tempdir().expect("a directory");
        let directory = base.path().join("gaur/ublk");
        assert!(State::all(&directory).is_empty());
        assert_eq!(State::read(&directory, 1).expect("nothing"), None);
        for device in [12, 3] {
            state(device).write(&directory).expect("written");
        }
        let newer = State { pid: 1, ..state(3) };
        newer.write(&directory).expect("written over");
        assert_eq!(State::all(&directory), [newer, state(12)]);
        assert!(state(12).is_served());
        forget(&directory, 3);
        forget(&directory, 3);
        assert_eq!(State::all(&directory), [state(12)]);
        std::fs::write(directory.join("12.json"), "{").expect("damaged");
        assert!(State::read(&directory, 12).is_err());
        assert!(State::all(&directory).is_empty());
    }
}
