//! What the rings of one thread share.

use gaur_block::{Device, Errno, Payload, Request, Tag};

use super::bounce::{Bounce, PIECE_MAX};
use super::ring_command::Geometry;
use super::wire::ID_BYTES;
use crate::serve::{Log, say};

/// The device of a thread, and the memory its requests may use.
pub(super) struct Station<D> {
    pub(super) device: D,
    pub(super) bounce: Bounce,
    /// Longest transfer that goes to the device at once, in bytes.
    pub(super) piece_max: usize,
    /// What `GET_ID` answers.
    pub(super) serial: [u8; ID_BYTES],
    pub(super) read_only: bool,
    pub(super) log: Option<Log>,
}

impl<D: Device> Station<D> {
    pub(super) fn new(
        device: D,
        read_only: bool,
        serial: &str,
        bounce_bytes: usize,
        log: Option<Log>,
    ) -> Station<D> {
        let limits = device.limits();
        let mut name = [0; ID_BYTES];
        for (to, from) in name.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
        Station {
            bounce: Bounce::new(bounce_bytes),
            piece_max: (limits.max_transfer as usize).clamp(512, 1 << 30) & !511,
            serial: name,
            read_only: read_only || limits.read_only,
            device,
            log,
        }
    }

    pub(super) fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.device.size_bytes(),
            limits: self.device.limits(),
        }
    }

    pub(super) async fn flush(&self) -> Result<(), Errno> {
        if self.read_only {
            return Ok(());
        }
        // No ring has this tag.
        let tag = Tag(u32::MAX);
        self.device.submit(tag, Request::Flush, Payload::None).await
    }

    pub(super) fn say(&self, line: &str) {
        say(&self.log, line);
    }
}

const _: () = assert!(PIECE_MAX >= 512, "a piece holds a sector");
