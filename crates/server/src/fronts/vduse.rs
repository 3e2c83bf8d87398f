//! A virtio block device of this machine.

use std::num::NonZeroU16;
use std::sync::Arc;

use gaur_export::{Front, ServeError, vduse};
use serde::{Deserialize, Serialize};

use crate::exporter::Served;

/// Queues that a device gets by itself at most; it has no more than there are processors.
const QUEUES_MAX: u16 = 4;

/// What a vduse device is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// Its name.
    pub device: String,
    /// Queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<NonZeroU16>,
}

/// Starts to export `image`.
pub fn start(config: &Config, image: Arc<Served>) -> Result<Box<dyn Front>, ServeError> {
    let mut options = vduse::Options::new(&config.device);
    options.queues = match config.queues {
        Some(queues) => queues.get(),
        None => super::threads_for(QUEUES_MAX) as u16,
    };
    options.threads = super::threads_for(options.queues);
    options.read_only = image.read_only;
    options.log = image.log.clone();
    Ok(Box::new(vduse::start(
        options,
        move |_| Ok(image.device()),
    )?))
}
