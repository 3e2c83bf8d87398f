//! What a command line says of exports other than NBD's.

use std::num::NonZeroU16;
use std::path::PathBuf;

use crate::failure::Failure;
use crate::fronts::{FrontConfig, fuse, ublk, vduse, vhost_user};

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
    #[arg(long, value_name = "WHEN", requires = "ublk")]
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
    /// What is asked for.
    pub fn configs(&self) -> Result<Vec<FrontConfig>, Failure> {
        let virtio = self.vhost_user.is_some() || self.vduse.is_some();
        if self.queues.is_some() && !virtio {
            let failure = Failure::new("--queues is for --vhost-user and --vduse");
            return Err(failure.hint("a ublk device has --ublk-queues"));
        }
        let mut configs = Vec::new();
        if let Some(id) = self.ublk {
            configs.push(FrontConfig::Ublk(self.ublk_config(id)?));
        }
        if let Some(socket) = &self.vhost_user {
            configs.push(FrontConfig::VhostUser(vhost_user::Config {
                socket: socket.clone(),
                queues: self.queues,
            }));
        }
        if let Some(device) = &self.vduse {
            configs.push(FrontConfig::Vduse(vduse::Config {
                device: device.clone(),
                queues: self.queues,
            }));
        }
        if let Some(path) = &self.fuse {
            configs.push(FrontConfig::Fuse(fuse::Config {
                path: path.clone(),
                growable: self.growable,
            }));
        }
        Ok(configs)
    }

    fn ublk_config(&self, id: i32) -> Result<ublk::Config, Failure> {
        let id = match id {
            -1 => None,
            id => Some(u32::try_from(id).map_err(|_| {
                Failure::new(format!("--ublk={id}: a device's number is 0 or more"))
            })?),
        };
        Ok(ublk::Config {
            id,
            queues: self.ublk_queues,
            depth: self.ublk_depth,
            unprivileged: self.ublk_unprivileged,
            zero_copy: self.ublk_zero_copy.unwrap_or_default(),
            recover: false,
        })
    }
}
