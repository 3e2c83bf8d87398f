//! The front ends: what each is told, and how it is started.
//!
//! Every front end is a file of its own, with a request (what it is told, by the command line or by a
//! line of JSON) and a function `start` that makes a running export of an open image. NBD's exports share
//! one listening server (`exporter/nbd.rs`).

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use gaur_export::Front;
use serde::{Deserialize, Serialize};

use crate::exporter::Served;
use crate::failure::Failure;

pub mod fuse;
pub mod ublk;
pub mod vduse;
pub mod vhost_user;

/// Configuration of a front end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum FrontConfig {
    /// An export of the process' NBD server.
    Nbd {},
    /// A block device of this machine.
    Ublk(ublk::Config),
    /// A disk for a virtual machine monitor.
    VhostUser(vhost_user::Config),
    /// A virtio device of this machine.
    Vduse(vduse::Config),
    /// A file.
    Fuse(fuse::Config),
}

impl FrontConfig {
    /// Names of all front ends in JSON.
    pub const NAMES: [&str; 5] = ["nbd", "ublk", "vhost-user", "vduse", "fuse"];

    /// Its name in JSON and messages.
    pub fn name(&self) -> &'static str {
        match self {
            FrontConfig::Nbd {} => "nbd",
            FrontConfig::Ublk(_) => "ublk",
            FrontConfig::VhostUser(_) => "vhost-user",
            FrontConfig::Vduse(_) => "vduse",
            FrontConfig::Fuse(_) => "fuse",
        }
    }

    /// Whether exports of the NBD server are meant, which has no front end for each.
    pub fn is_nbd(&self) -> bool {
        *self == FrontConfig::Nbd {}
    }

    /// Whether it is a block device of this machine.
    pub fn is_device(&self) -> bool {
        matches!(self, FrontConfig::Ublk(_) | FrontConfig::Vduse(_))
    }

    /// Starts to export `image`, if the export has a server of its own; clients can come when this returns.
    pub(crate) fn start(&self, image: Arc<Served>) -> Result<Option<Box<dyn Front>>, Failure> {
        let name = image.name().to_owned();
        let front = match self {
            FrontConfig::Nbd {} => return Ok(None),
            FrontConfig::Ublk(config) => ublk::start(config, image),
            FrontConfig::VhostUser(config) => vhost_user::start(config, image),
            FrontConfig::Vduse(config) => vduse::start(config, image),
            FrontConfig::Fuse(config) => fuse::start(config, image),
        };
        let front = front.map_err(|error| Failure::about(name, error.to_string()));
        front.map(Some)
    }

    /// The same with paths that mean the same in any directory.
    pub fn absolute(self) -> FrontConfig {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        match self {
            FrontConfig::VhostUser(config) => FrontConfig::VhostUser(vhost_user::Config {
                socket: absolute(config.socket),
                ..config
            }),
            FrontConfig::Fuse(config) => FrontConfig::Fuse(fuse::Config {
                path: absolute(config.path),
                ..config
            }),
            other => other,
        }
    }
}

/// How many threads serve so many queues of a virtio device.
fn threads_for(queues: u16) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    processors.min(usize::from(queues))
}
