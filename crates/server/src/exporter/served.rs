//! An image as one export shows it.

use std::sync::Arc;

use gaur_engine::{Format, Job, Queue};
use gaur_export::Log;
use gaur_export::ublk;
use gaur_reactor::ReactorFile;

use super::images::OpenImage;
use crate::cached_device::{CachedDevice, Policy};
use crate::health::Health;
use crate::shared_image::SharedImage;

/// The device that an export's threads serve.
pub type Disk = CachedDevice<Queue<ReactorFile>>;

/// An image as one export shows it; front ends make their devices of it.
pub struct Served {
    pub(super) image: Arc<OpenImage>,
    pub(super) policy: Policy,
    /// Whether clients may not write.
    pub read_only: bool,
    pub(super) health: Arc<Health>,
    /// Where lines about clients go.
    pub log: Option<Log>,
    /// The resizing that clients ask for; given up when the export ends.
    pub resizing: Job,
    /// Who is to know the number of a new ublk device.
    pub added: Option<ublk::Added>,
}

impl Served {
    /// The path of the image.
    pub fn name(&self) -> &str {
        self.shared().name()
    }

    /// The open image.
    pub fn shared(&self) -> &SharedImage {
        self.image.shared()
    }

    /// Size for clients, in bytes.
    pub fn size_bytes(&self) -> u64 {
        let size_bytes = self.shared().size_bytes();
        size_bytes.saturating_sub(self.policy.offset_bytes)
    }

    /// Whether the image itself is raw.
    pub fn is_raw(&self) -> bool {
        self.shared().image().layers().top().format() == Format::Raw
    }

    /// Whether the image may not shrink while it is served: only a qcow2 image waits for requests beyond its new end.
    pub fn is_flat(&self) -> bool {
        self.shared().image().layers().top().header().is_none()
    }

    /// Why it may not.
    pub fn refuses_to_shrink(&self) -> String {
        let format = self.shared().image().layers().top().format();
        format!("a {format} image does not shrink while it is served")
    }

    /// A queue of the image for the calling thread, which runs a reactor.
    pub fn device(&self) -> Disk {
        let queue = self.shared().queue::<ReactorFile>();
        gaur_reactor::keep_trimmed(queue.trimmer());
        CachedDevice::new(queue, self.policy, Some(Arc::clone(&self.health)))
    }
}
