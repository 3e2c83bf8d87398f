//! A disk for a virtual machine monitor, over a Unix socket.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;

use gaur_export::{Front, ServeError, vhost_user};
use serde::{Deserialize, Serialize};

use crate::exporter::Served;
use crate::kept;

/// What a vhost-user device is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<NonZeroU16>,
}

/// Starts to export `image`.
pub fn start(config: &Config, image: Arc<Served>) -> Result<Box<dyn Front>, ServeError> {
    let mut options = vhost_user::Options::new(&config.socket);
    if let Some(queues) = config.queues {
        options.queues = queues.get();
    }
    options.threads = super::threads_for(options.queues);
    options.read_only = image.read_only;
    options.log = image.log.clone();
    if !options.read_only {
        options.inflight_file = kept::in_flight(&config.socket).ok();
    }
    Ok(Box::new(vhost_user::start(options, move |_| {
        Ok(image.device())
    })?))
}
