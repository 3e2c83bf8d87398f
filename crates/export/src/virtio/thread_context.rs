//! What the rings of one thread share.

use gaur_block::{Device, Errno, Payload, Request};

use super::wire::ID_BYTES;
use crate::serve::{Geometry, Log, say};

/// The device of a thread, and what is said of it.
pub(super) struct ThreadContext<D> {
    pub(super) device: D,
    /// Longest transfer that goes to the device at once, in bytes.
    pub(super) transfer_max: usize,
    /// What `GET_ID` answers.
    pub(super) serial: [u8; ID_BYTES],
    pub(super) read_only: bool,
    pub(super) log: Option<Log>,
}

impl<D: Device> ThreadContext<D> {
    pub(super) fn new(
        device: D,
        read_only: bool,
        serial: &str,
        log: Option<Log>,
    ) -> ThreadContext<D> {
        let limits = device.limits();
        let mut name = [0; ID_BYTES];
        for (to, from) in name.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
        ThreadContext {
            transfer_max: (limits.max_transfer as usize).clamp(512, 1 << 30) & !511,
            serial: name,
            read_only: read_only || limits.read_only,
            device,
            log,
        }
    }

    pub(super) fn geometry(&self) -> Geometry {
        Geometry::of(&self.device)
    }

    pub(super) async fn flush(&self) -> Result<(), Errno> {
        if self.read_only {
            return Ok(());
        }
        self.device.submit(Request::Flush, Payload::None).await
    }

    pub(super) fn say(&self, line: &str) {
        say(&self.log, line);
    }
}
