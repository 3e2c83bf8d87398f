//! The device as its driver sees it: messages of the kernel, and the rings.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use gaur_block::Errno;
use gaur_reactor::Descriptor;

use super::device::{self, Device};
use super::ioctl::{Request, Response, RingInfo, message, status};
use super::iotlb::Iotlb;
use super::log_file::LogFile;
use crate::virtio::memory::{Access, GuestMemory};
use crate::virtio::ring::RingAddresses;
use crate::virtio::ring_command::{CallNotifier, RingSetup};
use crate::virtio::rings::Rings;

/// A ring.
#[derive(Default)]
struct State {
    running: bool,
    /// The next entry of the available ring, of a ring that has run and stopped.
    next: Option<u16>,
}

/// A device that is served.
pub(super) struct Session {
    device: Arc<Device>,
    rings: Rings,
    log: LogFile,
    iotlb: Arc<Iotlb>,
    states: Vec<State>,
    /// The driver is ready.
    driver_ok: bool,
}

impl Session {
    pub(super) fn new(device: &Arc<Device>, rings: &Rings, log: LogFile) -> Session {
        Session {
            iotlb: Iotlb::new(&device.fd),
            states: (0..rings.count()).map(|_| State::default()).collect(),
            device: device.clone(),
            rings: rings.clone(),
            log,
            driver_ok: false,
        }
    }

    /// Goes on where a killed server ended, if the driver has set up rings.
    pub(super) async fn resume(&mut self) {
        let ready = (0..self.states.len() as u32)
            .filter_map(|ring| self.device.ring(ring).ok())
            .any(|info| info.ready != 0 && info.descriptors != 0);
        let features = self.device.features().unwrap_or(0);
        if ready && features != 0 {
            self.driver_ok = true;
            self.start(false).await;
        }
    }

    /// Answers the messages that are there.
    pub(super) async fn answer(&mut self) -> Result<(), String> {
        loop {
            let request = match self.device.read() {
                Ok(request) => request,
                Err(Errno::EAGAIN | Errno::EINTR) => return Ok(()),
                Err(errno) => return Err(format!("cannot read the kernel's messages: {errno}")),
            };
            let mut response = Response {
                id: request.id,
                ..Response::default()
            };
            if let Err(reason) = self.handle(&request, &mut response).await {
                self.rings.say(&reason);
                response.result = 1;
            }
            match self.device.write(&response) {
                // The kernel does not wait for the answer any more.
                Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
                Err(errno) => return Err(format!("cannot answer the kernel: {errno}")),
            }
        }
    }

    async fn handle(&mut self, request: &Request, response: &mut Response) -> Result<(), String> {
        match request.kind {
            message::GET_RING_STATE => {
                let [ring, ..] = request.content;
                let next = self.position(ring as usize).await?;
                response.content[0] = ring;
                response.content[1] = u32::from(next);
            }
            message::SET_STATUS => {
                let [status, _, _, _] = request.content[0].to_ne_bytes();
                self.set_status(status).await?;
            }
            message::UPDATE_IOTLB => {
                self.halt().await;
                self.iotlb = Iotlb::new(&self.device.fd);
                if self.driver_ok {
                    self.start(false).await;
                }
            }
            unknown => return Err(format!("message {unknown} of the kernel is not known")),
        }
        Ok(())
    }

    async fn set_status(&mut self, status: u8) -> Result<(), String> {
        let ok = status & status::DRIVER_OK != 0;
        if ok && !self.driver_ok {
            self.driver_ok = true;
            self.start(true).await;
        } else if status == 0 {
            self.driver_ok = false;
            self.halt().await;
            for state in &mut self.states {
                state.next = None;
            }
            // What was mapped is the old driver's.
            self.iotlb = Iotlb::new(&self.device.fd);
            self.log.clear()?;
        }
        Ok(())
    }

    /// Starts the rings that are set up. `fresh` when the driver has just done that.
    async fn start(&mut self, fresh: bool) {
        if fresh && let Err(reason) = self.log.clear() {
            self.rings.say(&reason);
        }
        for ring in 0..self.states.len() {
            if self.states[ring].running {
                continue;
            }
            match self.setup(ring, fresh) {
                Ok(None) => {}
                Ok(Some(setup)) => {
                    self.rings.start(ring, setup);
                    self.states[ring].running = true;
                }
                Err(reason) => self
                    .rings
                    .say(&format!("ring {ring} cannot start: {reason}")),
            }
        }
    }

    fn setup(&self, ring: usize, fresh: bool) -> Result<Option<RingSetup>, String> {
        let index = ring as u32;
        let info: RingInfo = self
            .device
            .ring(index)
            .map_err(|errno| format!("the kernel does not describe it: {errno}"))?;
        if info.ready == 0 || info.size == 0 {
            return Ok(None);
        }
        let memory: Arc<dyn GuestMemory> = self.iotlb.clone();
        let parts = [info.descriptors, info.available, info.used];
        let addresses = RingAddresses::find(info.size, parts, |at, len, access: Access| {
            let run = memory.run(at, len, access)?;
            (run.len == len).then_some(run.start)
        })?;
        let features = self.device.features();
        let features = features.map_err(|errno| format!("no features: {errno}"))?;
        let event = || device::event().map_err(|errno| format!("no event counter: {errno}"));
        let kick: OwnedFd = event()?;
        self.device
            .set_kick(index, &kick)
            .map_err(|errno| format!("the kernel takes no event counter: {errno}"))?;
        let next = if fresh {
            Some(info.next)
        } else {
            self.states[ring].next
        };
        Ok(Some(RingSetup {
            addresses,
            memory,
            next,
            features,
            write_through: Arc::default(),
            log: Some(self.log.ring(ring)?),
            used_address: None,
            kick: Descriptor::new(kick),
            call: CallNotifier::Vduse {
                device: self.device.fd.clone(),
                index,
            },
            error: None,
        }))
    }

    /// The next entry of a ring's available ring.
    async fn position(&mut self, ring: usize) -> Result<u16, String> {
        let state = self
            .states
            .get(ring)
            .ok_or_else(|| format!("ring {ring} is asked for"))?;
        if state.running
            && let Some(next) = self.rings.position(ring).await
        {
            return Ok(next);
        }
        Ok(state.next.unwrap_or(0))
    }

    /// Stops every ring, once its requests are done.
    pub(super) async fn halt(&mut self) {
        for ring in 0..self.states.len() {
            if std::mem::take(&mut self.states[ring].running) {
                self.states[ring].next = self.rings.stop(ring).await;
            }
        }
    }

    /// Forgets the log: nothing is in flight and no server is to go on.
    pub(super) fn remove_log(&self) {
        self.log.remove();
    }
}
