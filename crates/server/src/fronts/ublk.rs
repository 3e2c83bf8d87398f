//! A block device of this machine.

use std::num::NonZeroU16;
use std::sync::Arc;

use gaur_export::ublk::{self, Options};
use gaur_export::{Front, ServeError};
use serde::{Deserialize, Serialize};

use crate::exporter::Served;

/// Whether the kernel's pages go to the image's file without a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum ZeroCopy {
    /// Where the kernel can do it
    #[default]
    Auto,
    /// Or fail
    On,
    /// Never
    Off,
}

/// What a ublk device is told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct Config {
    /// Number of the device (the first that is free)
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub id: Option<u32>,
    /// Queues of the device, each with a thread of its own
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub queues: Option<NonZeroU16>,
    /// Requests of a queue that run at once, each with 512 KiB of memory (128 with one or two queues, 64
    /// with more)
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub depth: Option<NonZeroU16>,
    /// The device belongs to the user who makes it, who need not be root
    #[cfg_attr(feature = "clap", arg(long))]
    pub unprivileged: bool,
    /// Whether the kernel's pages go to the image's file without a copy
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "WHEN", default_value = "auto")
    )]
    pub zero_copy: ZeroCopy,
    /// Take over device `id` from a server that died. Not for the control socket.
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub recover: bool,
}

/// Starts to export `image`.
pub fn start(config: &Config, image: Arc<Served>) -> Result<Box<dyn Front>, ServeError> {
    let options = options(config, &image);
    let devices = move |_| Ok(image.device());
    Ok(Box::new(match config.id.filter(|_| config.recover) {
        Some(id) => ublk::recover(id, options, devices)?,
        None => ublk::start(options, devices)?,
    }))
}

fn options(config: &Config, image: &Served) -> Options {
    let mut options = Options::new();
    options.id = config.id;
    if let Some(queues) = config.queues {
        options.queues = usize::from(queues.get());
    }
    if let Some(depth) = config.depth {
        options.depth = Some(depth.get());
    }
    options.unprivileged = config.unprivileged;
    options.zero_copy = match config.zero_copy {
        ZeroCopy::Auto => ublk::ZeroCopy::Auto,
        ZeroCopy::On => ublk::ZeroCopy::On,
        ZeroCopy::Off => ublk::ZeroCopy::Off,
    };
    options.direct = image.shared().is_direct();
    options.read_only = image.read_only;
    options.log = image.log.clone();
    options.added = image.added.clone();
    options
}
