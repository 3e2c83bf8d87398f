//! Preallocation of an encrypted image of version 2, which can mark no cluster as zeros: encrypted zeros are written.

use gaur_engine::{Format, Job, OpenOptions, References};
use gaur_format::Version;
use gaur_format::plan::{CreateOptions, Preallocation};
use gaur_reactor::block_on;

use super::NewImage;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;

impl NewImage {
    fn writes_zeros(&self) -> bool {
        let plan = &self.plan;
        // With a backing file it is refused for another reason.
        self.luks.is_some()
            && plan.version == Version::V2
            && plan.preallocation != Preallocation::Off
            && plan.backing_file.is_none()
    }

    /// The plan without what is written later.
    pub(super) fn first_plan(&self) -> CreateOptions {
        let mut plan = self.plan.clone();
        if self.writes_zeros() {
            plan.preallocation = Preallocation::Off;
        }
        plan
    }

    /// The same with no disk yet: it appears when all of it is zeros.
    pub(super) fn made_plan(&self) -> CreateOptions {
        let mut plan = self.first_plan();
        if self.writes_zeros() {
            plan.size_bytes = 0;
        }
        plan
    }

    /// The plan by which its space is measured, which is the same with marks of zeros.
    pub fn measured_plan(&self) -> CreateOptions {
        let mut plan = self.plan.clone();
        if self.writes_zeros() {
            plan.version = Version::V3;
        }
        plan
    }

    /// Writes the zeros to the image that was made.
    pub(super) fn write_zeros(&self, job: &Job) -> Result<(), Failure> {
        if !self.writes_zeros() {
            return Ok(());
        }
        let about = |error| Failure::image(&self.name, &error);
        let image = ImageSpec::plain(self.path.as_os_str(), Some(Format::Qcow2));
        let opened = image.open(&OpenOptions {
            keys: self.open_keys(),
            ..OpenOptions::new(References::Nothing)
        })?;
        let queue = opened.image.queue(opened.files);
        let size = self.plan.size_bytes;
        let full = Preallocation::Full;
        let grown = block_on(queue.resize_preallocated(size, false, full, job)).map_err(about);
        grown.and(block_on(queue.close()).map_err(about))
    }
}
