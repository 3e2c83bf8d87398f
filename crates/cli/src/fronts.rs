//! Exports other than NBD's: what they are told, and how each is started.
//!
//! Every front end is a file of its own, with a request (what it is told, by the command line or by a
//! line of JSON) and a function `start` that makes a running export of an open image.

use std::num::{NonZeroU16, NonZeroUsize};
use std::path::PathBuf;
use std::sync::Arc;

use gaur_export::Front;
use serde_json::{Map, Value};

use crate::exporter::Served;
use crate::failure::Failure;
use crate::json;

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
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
            Request::Ublk(_) => Kind::Ublk,
            Request::VhostUser(_) => Kind::VhostUser,
            Request::Vduse(_) => Kind::Vduse,
            Request::Fuse(_) => Kind::Fuse,
        }
    }

    /// Starts to export `image`; clients can come when this returns.
    pub fn start(&self, image: Arc<Served>) -> Result<Box<dyn Front>, Failure> {
        match self {
            Request::Ublk(request) => ublk::start(request, image),
            Request::VhostUser(request) => vhost_user::start(request, image),
            Request::Vduse(request) => vduse::start(request, image),
            Request::Fuse(request) => fuse::start(request, image),
        }
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

    /// Reads the fields of a JSON object, all of which must be its own.
    pub fn from_fields(kind: Kind, fields: Map<String, Value>) -> Result<Option<Request>, String> {
        let value = Value::Object(fields);
        let read = match kind {
            Kind::Nbd => json::read(value).map(|Nothing {}| None),
            Kind::Ublk => json::read(value).map(|read| Some(Request::Ublk(read))),
            Kind::VhostUser => json::read(value).map(|read| Some(Request::VhostUser(read))),
            Kind::Vduse => json::read(value).map(|read| Some(Request::Vduse(read))),
            Kind::Fuse => json::read(value).map(|read| Some(Request::Fuse(read))),
        };
        read.map_err(|error| format!("{}: {error}", kind.name()))
    }

    /// The JSON object that says the same; a path that is not text has none.
    pub fn to_json(&self) -> serde_json::Result<Value> {
        match self {
            Request::Ublk(request) => serde_json::to_value(request),
            Request::VhostUser(request) => serde_json::to_value(request),
            Request::Vduse(request) => serde_json::to_value(request),
            Request::Fuse(request) => serde_json::to_value(request),
        }
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// The front ends that a command line asks for.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Exports other than NBD")]
pub struct FrontArgs {
    /// The image as the block device /dev/ublkbID; the first that is free without an ID
    #[arg(long, value_name = "ID", num_args = 0..=1, require_equals = true,
          default_missing_value = "-1", allow_negative_numbers = true)]
    pub ublk: Option<i32>,
    /// Queues of the device, each with a thread of its own
    #[arg(long, value_name = "N", requires = "ublk")]
    ublk_queues: Option<NonZeroU16>,
    /// Requests of a queue that run at once, each with 512 KiB of memory (128 with one or two queues, 64
    /// with more)
    #[arg(long, value_name = "N", requires = "ublk")]
    ublk_depth: Option<NonZeroU16>,
    /// The device belongs to the user who makes it, who need not be root
    #[arg(long, requires = "ublk")]
    ublk_unprivileged: bool,
    /// Whether the kernel's pages go to the image's file without a copy
    #[arg(long, value_name = "WHEN", value_enum, requires = "ublk")]
    ublk_zero_copy: Option<ublk::ZeroCopy>,
    /// The image for a virtual machine monitor that connects to this Unix socket (vhost-user-blk)
    #[arg(long, value_name = "SOCKET")]
    vhost_user: Option<PathBuf>,
    /// The image as the VDUSE device NAME
    #[arg(long, value_name = "NAME")]
    vduse: Option<String>,
    /// The image as a raw file in place of this one, which must be there
    #[arg(long, value_name = "FILE")]
    fuse: Option<PathBuf>,
    /// Queues of the virtio device
    #[arg(long, value_name = "N")]
    queues: Option<NonZeroU16>,
    /// Writes beyond the end of the file make the image larger
    #[arg(long, requires = "fuse")]
    growable: bool,
}

impl FrontArgs {
    /// Whether a front end is asked for.
    pub fn any(&self) -> bool {
        self.ublk.is_some()
            || self.vhost_user.is_some()
            || self.vduse.is_some()
            || self.fuse.is_some()
    }

    /// What is asked for.
    pub fn requests(&self) -> Result<Vec<Request>, Failure> {
        let virtio = self.vhost_user.is_some() || self.vduse.is_some();
        if self.queues.is_some() && !virtio {
            let failure = Failure::new("--queues is for --vhost-user and --vduse");
            return Err(failure.hint("a ublk device has --ublk-queues"));
        }
        let mut requests = Vec::new();
        if let Some(id) = self.ublk {
            requests.push(Request::Ublk(self.ublk_request(id)?));
        }
        if let Some(socket) = &self.vhost_user {
            requests.push(Request::VhostUser(vhost_user::Request {
                socket: socket.clone(),
                queues: self.queues,
            }));
        }
        if let Some(device) = &self.vduse {
            requests.push(Request::Vduse(vduse::Request {
                device: device.clone(),
                queues: self.queues,
            }));
        }
        if let Some(path) = &self.fuse {
            requests.push(Request::Fuse(fuse::Request {
                path: path.clone(),
                growable: self.growable,
            }));
        }
        Ok(requests)
    }

    fn ublk_request(&self, id: i32) -> Result<ublk::Request, Failure> {
        let id = match id {
            -1 => None,
            id => Some(u32::try_from(id).map_err(|_| {
                Failure::new(format!("--ublk={id}: a device's number is 0 or more"))
            })?),
        };
        Ok(ublk::Request {
            id,
            queues: self.ublk_queues,
            depth: self.ublk_depth,
            unprivileged: self.ublk_unprivileged,
            zero_copy: self.ublk_zero_copy.unwrap_or_default(),
            recover: false,
        })
    }
}

/// How many threads serve so many queues of a virtio device.
fn threads_for(queues: u16) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    processors.min(usize::from(queues))
}
