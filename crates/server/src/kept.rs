//! Handover logs ([`Handover`](crate::handover::Handover)) that are kept by default: a disk that goes on
//! after its server was killed has to find what it was told is written.
//!
//! Such a log is only good for a user of the disk who has been there all the time. A machine that is gone may have
//! left its image to others, who have changed it since. So each is tied to the machine or kernel that uses the disk:
//!
//! * a machine behind a vhost-user socket has a shared lock on the log of its requests in flight, since
//!   that was handed to it as an open file (`gaur_export::vhost_user`);
//! * a VDUSE device is on the vDPA bus, and is a disk of this machine.

use std::path::{Path, PathBuf};

use gaur_export::{vduse, vhost_user};

use crate::failure::Failure;
use crate::fronts::FrontConfig;
use crate::ublk_state as state;

/// A log that a server keeps by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its file.
    pub log: PathBuf,
    /// Where who uses the disk is.
    front: FrontConfig,
}

impl Kept {
    /// The log for an export through `front`, if that is one that can go on.
    pub fn for_front(front: &FrontConfig) -> Result<Option<Kept>, Failure> {
        let name = match front {
            FrontConfig::VhostUser(config) => vhost_name(&config.socket)?,
            FrontConfig::Vduse(config) => format!("vduse-{}", config.device),
            FrontConfig::Nbd {} | FrontConfig::Ublk(_) | FrontConfig::Fuse(_) => return Ok(None),
        };
        state::make(&directory())?;
        let log = directory().join(format!("{name}.log"));
        let front = front.clone();
        Ok(Some(Kept { log, front }))
    }

    /// Whether who used the disk before still does. Servers before this one have ended.
    pub fn is_used(&self) -> bool {
        match &self.front {
            // The machine has a lock on this file.
            FrontConfig::VhostUser(config) => {
                in_flight(&config.socket).is_ok_and(|file| vhost_user::is_held(&file))
            }
            FrontConfig::Vduse(config) => vduse::is_disk(&config.device),
            _ => false,
        }
    }
}

/// Where the log of requests in flight of the machine behind `socket` lies.
pub fn in_flight(socket: &Path) -> Result<PathBuf, Failure> {
    Ok(directory().join(format!("{}.inflight", vhost_name(socket)?)))
}

fn directory() -> PathBuf {
    state::base().join("handover")
}

/// A name of a file for a socket, another one for each.
fn vhost_name(socket: &Path) -> Result<String, Failure> {
    let whole = std::path::absolute(socket).map_err(|error| Failure::io(socket, &error))?;
    let text = whole.to_string_lossy();
    let name = text.replace('%', "%25").replace('/', "%2f");
    Ok(format!("vhost-user-{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_have_names_of_their_own() {
        let name = |socket: &str| vhost_name(Path::new(socket)).expect("a name");
        assert_eq!(
            name("/run/vm/a%.sock"),
            "vhost-user-%2frun%2fvm%2fa%25.sock"
        );
        assert_ne!(name("/run/a/b"), name("/run/a%2fb"));
        assert!(name("relative").contains("%2f"));
    }
}
