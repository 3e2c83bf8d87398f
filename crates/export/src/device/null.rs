//! A device that forgets: reads are zeros, writes vanish.

use gaur_block::{Device, DeviceLimits, Errno, Payload, Request, Status, Target};

use super::range;

/// A device of a given size on which every read is zeros and every write is lost.
#[derive(Clone, Debug)]
pub struct Null {
    size_bytes: u64,
}

impl Null {
    /// A device of `size_bytes`.
    pub fn new(size_bytes: u64) -> Null {
        Null { size_bytes }
    }
}

impl Device for Null {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            preferred_block: 4096,
            discard_block: 1,
            max_transfer: u32::MAX,
            read_only: false,
        }
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        range::check(self.size_bytes, request, &payload)?;
        match payload {
            Payload::Read(Target::Memory(memory)) => memory.fill_zeros(),
            // Memory that only the kernel sees cannot be zeroed from here.
            Payload::Read(Target::Registered(_)) => return Err(Errno::EOPNOTSUPP),
            Payload::Write(_) | Payload::None => {}
        }
        Ok(())
    }

    async fn status(&self, _: u64, len_bytes: u64) -> Result<Status, Errno> {
        Ok(Status {
            len_bytes,
            allocated: false,
            zero: true,
        })
    }
}
