//! What a host has besides files: random bytes, and the processor's clock.

use std::time::Duration;

use gaur_block::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::time::{ClockId, clock_gettime};

/// What this thread has used of its processor.
pub fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Random bytes of the kernel.
#[derive(Debug, Default)]
pub struct RandomBytes {
    failed: Option<Errno>,
}

impl RandomBytes {
    /// Fills memory. A failure shows in [`RandomBytes::check`].
    pub fn fill(&mut self, bytes: &mut [u8]) {
        let mut done = 0;
        while done < bytes.len() && self.failed.is_none() {
            match getrandom(&mut bytes[done..], GetRandomFlags::empty()) {
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => self.failed = Some(Errno::from_raw(errno.raw_os_error())),
            }
        }
    }

    /// Whether all bytes asked for were random.
    pub fn check(&self) -> Result<(), Errno> {
        self.failed.map_or(Ok(()), Err)
    }
}
