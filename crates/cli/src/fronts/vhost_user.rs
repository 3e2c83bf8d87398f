//! A disk for a virtual machine monitor, over a Unix socket.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;

use gaur_export::Front;
use serde::{Deserialize, Serialize};

use crate::exporter::Served;
use crate::failure::Failure;

/// What a vhost-user device is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Request {
    /// Path of the socket.
    pub socket: PathBuf,
    /// Queues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<NonZeroU16>,
}

/// Starts to export `image`.
pub fn start(_request: &Request, image: Arc<Served>) -> Result<Box<dyn Front>, Failure> {
    Err(super::not_built(image.name(), "vhost-user"))
}
