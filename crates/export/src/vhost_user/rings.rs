//! What a client says about rings, guest memory and the log of requests in flight.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::inflight;
use super::message::{NO_FD, Payload, SLOTS_MAX, TABLE_MAX, request};
use super::session::{Inflight, Reply, Session, one};
use super::settings::{Addresses, Common, event};
use super::table::{DirtyLog, Place, Region, Table, file_len};
use crate::virtio::inflight::{InflightLog, log_bytes};
use crate::virtio::memory::Mapping;
use crate::virtio::ring_command::RingCommand;
use crate::virtio::wire::RING_MAX;

impl Session {
    /// Starts or stops a ring as its settings say.
    pub(super) async fn adjust(&mut self, ring: usize) -> Result<(), String> {
        let settings = &self.settings[ring];
        if settings.running == settings.wants_to_run() {
            return Ok(());
        }
        if settings.running {
            self.halt_ring(ring).await;
            return Ok(());
        }
        let log = self.open_log(ring)?;
        let common = Common {
            table: &self.table,
            features: self.features,
            write_through: &self.write_through,
        };
        let setup = settings
            .setup(&common, log)
            .map_err(|reason| format!("ring {ring} cannot start: {reason}"))?;
        self.rings.start(ring, setup);
        self.settings[ring].running = true;
        Ok(())
    }

    /// Stops a ring, once its requests are done.
    pub(super) async fn halt_ring(&mut self, ring: usize) {
        if !self.settings[ring].running {
            return;
        }
        if let Some(next) = self.rings.stop(ring).await {
            self.settings[ring].base = next;
        }
        self.settings[ring].running = false;
    }

    fn open_log(&self, ring: usize) -> Result<Option<InflightLog>, String> {
        let Some(inflight) = &self.inflight else {
            return Ok(None);
        };
        let size = u32::from(inflight.size);
        if ring >= usize::from(inflight.queues) || self.settings[ring].size > size {
            return Err(format!(
                "the log of requests in flight has no room for ring {ring}"
            ));
        }
        let offset = inflight.offset + (ring * log_bytes(inflight.size)) as u64;
        InflightLog::open(&inflight.mapping, offset, inflight.size).map(Some)
    }

    pub(super) async fn memory(
        &mut self,
        kind: u32,
        mut payload: Payload<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, String> {
        match kind {
            request::GET_MAX_MEM_SLOTS => return Ok(Reply::Number(SLOTS_MAX as u64)),
            request::SET_MEM_TABLE => {
                let count = payload.u32()? as usize;
                payload.u32()?;
                if count > TABLE_MAX || count != fds.len() {
                    let fds = fds.len();
                    return Err(format!("a memory table of {count} regions and {fds} files"));
                }
                let map = |fd| Region::map(Place::parse(&mut payload)?, fd);
                let regions = fds
                    .iter()
                    .map(map)
                    .collect::<Result<Vec<Region>, String>>()?;
                self.replace_memory(regions).await?;
            }
            request::ADD_MEM_REG => {
                payload.u64()?;
                let region = Region::map(Place::parse(&mut payload)?, &one(fds)?)?;
                if self.regions.len() == SLOTS_MAX {
                    return Err(format!("more than {SLOTS_MAX} memory regions"));
                }
                let mut regions = self.regions.clone();
                regions.push(region);
                self.replace_memory(regions).await?;
            }
            request::REM_MEM_REG => {
                payload.u64()?;
                let place = Place::parse(&mut payload)?;
                let mut regions = self.regions.clone();
                regions.retain(|region| !region.place.is_at(&place));
                if regions.len() == self.regions.len() {
                    return Err("a memory region to remove that is not there".to_owned());
                }
                self.replace_memory(regions).await?;
            }
            request::SET_LOG_BASE => {
                let (len, offset) = (payload.u64()?, payload.u64()?);
                let log = DirtyLog::map(&one(fds)?, offset, len)?;
                self.dirty = Some(Arc::new(log));
                self.replace_memory(self.regions.clone()).await?;
                return Ok(Reply::Number(0));
            }
            // A counter to raise when pages were logged, which this server never raises.
            _ => drop(fds),
        }
        Ok(Reply::Done)
    }

    /// Takes other memory for the guest's. Rings that run stop for that.
    async fn replace_memory(&mut self, regions: Vec<Region>) -> Result<(), String> {
        let table = Table::new(regions.clone(), self.dirty.clone())?;
        self.halt().await;
        self.regions = regions;
        self.table = Arc::new(table);
        // While the client describes region by region, a ring may have none to lie in yet.
        for ring in 0..self.settings.len() {
            if let Err(reason) = self.adjust(ring).await {
                self.rings.say(&reason);
            }
        }
        Ok(())
    }

    pub(super) async fn inflight(
        &mut self,
        kind: u32,
        mut payload: Payload<'_>,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, String> {
        let (len, offset) = (payload.u64()?, payload.u64()?);
        let (queues, size) = (payload.u16()?, payload.u16()?);
        if usize::from(queues) > self.settings.len() || size == 0 || size > RING_MAX {
            return Err(format!(
                "a log of requests in flight for {queues} rings of {size} entries"
            ));
        }
        let padding = payload.rest().len();
        let need = usize::from(queues) * log_bytes(size);
        let (fd, offset, reply) = if kind == request::GET_INFLIGHT_FD {
            let fd = inflight::memory(need, self.options.inflight_file.as_deref())?;
            let mut reply = Vec::with_capacity(20 + padding);
            reply.extend_from_slice(&(need as u64).to_ne_bytes());
            reply.extend_from_slice(&0_u64.to_ne_bytes());
            reply.extend_from_slice(&queues.to_ne_bytes());
            reply.extend_from_slice(&size.to_ne_bytes());
            // QEMU's structure has 4 bytes more than the specification's, and wants them back.
            reply.resize(reply.len() + padding, 0);
            (fd, 0, Some(reply))
        } else {
            (one(fds)?, offset, None)
        };
        if reply.is_none() && (len as usize) < need {
            return Err(format!(
                "{len} bytes for a log of requests in flight, not {need}"
            ));
        }
        let mapping = map_log(&fd, offset, need)?;
        self.halt().await;
        self.inflight = Some(Inflight {
            mapping: Arc::new(mapping),
            offset,
            queues,
            size,
        });
        for ring in 0..self.settings.len() {
            self.adjust(ring).await?;
        }
        Ok(match reply {
            Some(bytes) => Reply::File(bytes, fd),
            None => Reply::Done,
        })
    }

    pub(super) async fn ring(
        &mut self,
        kind: u32,
        mut payload: Payload<'_>,
    ) -> Result<Reply, String> {
        let ring = self.index(payload.u32()?)?;
        let value = payload.u32()?;
        match kind {
            request::SET_VRING_NUM => {
                self.halt_ring(ring).await;
                self.settings[ring].size = value;
            }
            request::SET_VRING_BASE => {
                self.halt_ring(ring).await;
                self.settings[ring].base =
                    u16::try_from(value).map_err(|_| format!("ring base {value}"))?;
            }
            request::GET_VRING_BASE => {
                self.halt_ring(ring).await;
                let settings = &mut self.settings[ring];
                // It starts again with the next kick that is set.
                settings.kick = None;
                let mut reply = (ring as u32).to_ne_bytes().to_vec();
                reply.extend_from_slice(&u32::from(settings.base).to_ne_bytes());
                return Ok(Reply::Bytes(reply));
            }
            request::SET_VRING_ENABLE => self.settings[ring].enabled = value != 0,
            _ => {
                let addresses = Some(Addresses {
                    flags: value,
                    descriptors: payload.u64()?,
                    used: payload.u64()?,
                    available: payload.u64()?,
                    log: payload.u64()?,
                });
                if addresses != self.settings[ring].addresses {
                    self.halt_ring(ring).await;
                    self.settings[ring].addresses = addresses;
                }
            }
        }
        self.adjust(ring).await?;
        Ok(Reply::Done)
    }

    pub(super) async fn ring_event(
        &mut self,
        kind: u32,
        number: u64,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, String> {
        let ring = self.index((number & 0xff) as u32)?;
        let fd = match number & NO_FD {
            0 => Some(event(one(fds)?)?),
            _ => None,
        };
        match kind {
            request::SET_VRING_KICK => {
                if fd.is_none() {
                    return Err("a ring that is to be polled".to_owned());
                }
                self.halt_ring(ring).await;
                self.settings[ring].kick = fd;
                self.adjust(ring).await?;
            }
            request::SET_VRING_CALL => {
                self.settings[ring].call = fd;
                if self.settings[ring].running {
                    let call = self.settings[ring].call_notifier()?;
                    self.rings.command(ring, RingCommand::Call(call));
                }
            }
            _ => self.settings[ring].error = fd,
        }
        Ok(Reply::Done)
    }

    fn index(&self, ring: u32) -> Result<usize, String> {
        let count = self.settings.len();
        let index = usize::try_from(ring).ok().filter(|ring| *ring < count);
        index.ok_or_else(|| format!("ring {ring} of {count}"))
    }
}

fn map_log(fd: &OwnedFd, offset: u64, need: usize) -> Result<Mapping, String> {
    let what = "the log of requests in flight";
    let end = usize::try_from(offset)
        .ok()
        .and_then(|offset| offset.checked_add(need));
    let end = end.ok_or_else(|| format!("{what} is beyond all addresses"))?;
    let len = file_len(fd).unwrap_or(0);
    if len < end as u64 {
        return Err(format!("{what} is not in its file"));
    }
    Mapping::new(fd.as_fd(), 0, end, true).map_err(|errno| format!("cannot map {what}: {errno}"))
}
