//! A device, and transfers to it that are longer than it takes at once.

use std::ops::Deref;

use gaur_block::{Device, Errno, Payload, Request, Segments, SegmentsMut, Source, Target};

/// A device that is served.
pub(crate) struct Disk<D> {
    device: D,
    /// Longest payload that goes to the device at once, in bytes: whole sectors if it takes one.
    max_transfer: usize,
}

impl<D: Device> Disk<D> {
    pub(crate) fn new(device: D) -> Disk<D> {
        let max_transfer = match device.limits().max_transfer as usize {
            short @ ..512 => short.max(1),
            long => long.min(1 << 30) & !511,
        };
        Disk {
            device,
            max_transfer,
        }
    }

    /// Makes a request without a payload.
    pub(crate) async fn ask(&self, request: Request) -> Result<(), Errno> {
        self.device.submit(request, Payload::None).await
    }

    /// Fills `target` with what is there from `offset_bytes` on.
    pub(crate) async fn read(
        &self,
        mut offset_bytes: u64,
        target: SegmentsMut<'_>,
    ) -> Result<(), Errno> {
        let mut rest = target;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(self.max_transfer));
            let payload = Payload::Read(Target::Memory(now));
            let request = Request::Read { offset_bytes };
            self.device.submit(request, payload).await?;
            offset_bytes += now.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Stores `source` at `offset_bytes`; with `fua` it is durable then.
    pub(crate) async fn write(
        &self,
        mut offset_bytes: u64,
        source: Segments<'_>,
        fua: bool,
    ) -> Result<(), Errno> {
        // In several pieces one flush at the end is cheaper than each piece being durable by itself.
        let split = source.len() > self.max_transfer;
        let mut rest = source;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(self.max_transfer));
            let payload = Payload::Write(Source::Memory(now));
            let fua = fua && !split;
            let request = Request::Write { offset_bytes, fua };
            self.device.submit(request, payload).await?;
            offset_bytes += now.len() as u64;
            rest = later;
        }
        match fua && split {
            true => self.ask(Request::Flush).await,
            false => Ok(()),
        }
    }
}

impl<D> Deref for Disk<D> {
    type Target = D;

    fn deref(&self) -> &D {
        &self.device
    }
}
