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

/// What speaks to the clients of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Network block device.
    Nbd,
    /// A block device of this machine.
    Ublk,
    /// A disk for a virtual machine monitor, over a Unix socket.
    VhostUser,
    /// A virtio device of this machine.
    Vduse,
    /// A file.
    Fuse,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 5] = [
        Kind::Nbd,
        Kind::Ublk,
        Kind::VhostUser,
        Kind::Vduse,
        Kind::Fuse,
    ];

    /// Its name in JSON and messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Nbd => "nbd",
            Kind::Ublk => "ublk",
            Kind::VhostUser => "vhost-user",
            Kind::Vduse => "vduse",
            Kind::Fuse => "fuse",
        }
    }

    /// Whether it is a block device of this machine.
    pub fn is_device(self) -> bool {
        matches!(self, Kind::Ublk | Kind::Vduse)
    }

    /// The kind of that name.
    pub fn from_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A front end and what it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// An export of the process' NBD server.
    Nbd {},
    /// A block device of this machine.
    Ublk(ublk::Request),
    /// A disk for a virtual machine monitor.
    VhostUser(vhost_user::Request),
    /// A virtio device of this machine.
    Vduse(vduse::Request),
    /// A file.
    Fuse(fuse::Request),
}

impl Request {
    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            Request::Nbd {} => Kind::Nbd,
            Request::Ublk(_) => Kind::Ublk,
            Request::VhostUser(_) => Kind::VhostUser,
            Request::Vduse(_) => Kind::Vduse,
            Request::Fuse(_) => Kind::Fuse,
        }
    }

    /// Starts to export `image`, if the export has a server of its own; clients can come when this returns.
    pub(crate) fn start(&self, image: Arc<Served>) -> Result<Option<Box<dyn Front>>, Failure> {
        let front = match self {
            Request::Nbd {} => return Ok(None),
            Request::Ublk(request) => ublk::start(request, image),
            Request::VhostUser(request) => vhost_user::start(request, image),
            Request::Vduse(request) => vduse::start(request, image),
            Request::Fuse(request) => fuse::start(request, image),
        };
        front.map(Some)
    }

    /// The same with paths that mean the same in any directory.
    pub fn absolute(self) -> Request {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        match self {
            Request::VhostUser(request) => Request::VhostUser(vhost_user::Request {
                socket: absolute(request.socket),
                ..request
            }),
            Request::Fuse(request) => Request::Fuse(fuse::Request {
                path: absolute(request.path),
                ..request
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
