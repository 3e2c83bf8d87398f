//! One client: its requests, and the rings it has set up.
//!
//! Requests are answered one after the other. A ring runs when it has all it needs and is enabled;
//! whatever changes what a running ring stands on stops it first, which waits for its requests.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_reactor::Descriptor;

use super::connection::{self, Connection, Message};
use super::message::{self, Payload, feature, protocol, request};
use super::options::Options;
use super::settings::Settings;
use super::table::{DirtyLog, Region, Table};
use crate::virtio::config::{BlockConfig, CONFIG_BYTES, WRITE_CACHE_AT};
use crate::virtio::memory::Mapping;
use crate::virtio::rings::Rings;

/// Segments of a request: a ring of 128 entries holds as many, with header and status.
const SEGMENTS: u32 = 126;

/// Longest configuration space that is answered for; behind the end of ours are zeros.
const CONFIG_MAX: usize = 256;

/// What is sent back.
pub(super) enum Reply {
    /// Nothing, or that all went well when the client asks for that.
    Done,
    Number(u64),
    Bytes(Vec<u8>),
    File(Vec<u8>, OwnedFd),
}

/// The log of requests in flight of all rings.
pub(super) struct Inflight {
    pub(super) mapping: Arc<Mapping>,
    pub(super) offset: u64,
    pub(super) queues: u16,
    /// Descriptors of each ring that it has room for.
    pub(super) size: u16,
}

/// A client.
pub(super) struct Session {
    pub(super) rings: Rings,
    pub(super) options: Arc<Options>,
    pub(super) features: u64,
    protocol: u64,
    pub(super) write_through: Arc<AtomicBool>,
    pub(super) regions: Vec<Region>,
    pub(super) table: Arc<Table>,
    pub(super) dirty: Option<Arc<DirtyLog>>,
    pub(super) settings: Vec<Settings>,
    pub(super) inflight: Option<Inflight>,
    /// For requests of ours.
    backend: Option<Descriptor>,
}

impl Session {
    pub(super) fn new(rings: &Rings, options: &Arc<Options>) -> Session {
        Session {
            settings: (0..rings.count()).map(|_| Settings::default()).collect(),
            rings: rings.clone(),
            options: options.clone(),
            features: 0,
            protocol: 0,
            write_through: Arc::default(),
            regions: Vec::new(),
            table: Arc::default(),
            dirty: None,
            inflight: None,
            backend: None,
        }
    }

    /// Answers a message.
    pub(super) async fn answer(
        &mut self,
        connection: &Connection,
        message: Message,
    ) -> Result<(), String> {
        let header = message.header;
        let outcome = self.handle(message).await;
        // Asked afterwards: the request may have been the one that agrees on it.
        let acknowledged = self.protocol & protocol::REPLY_ACK != 0 && header.wants_reply();
        let (reply, outcome) = match outcome {
            Ok(Reply::Done) => (acknowledged.then_some(Reply::Number(0)), Ok(())),
            Ok(reply) => (Some(reply), Ok(())),
            Err(reason) => (acknowledged.then_some(Reply::Number(1)), Err(reason)),
        };
        let (bytes, fd) = match reply {
            None | Some(Reply::Done) => return outcome,
            Some(Reply::Number(number)) => (number.to_ne_bytes().to_vec(), None),
            Some(Reply::Bytes(bytes)) => (bytes, None),
            Some(Reply::File(bytes, fd)) => (bytes, Some(fd)),
        };
        let fd = fd.as_ref().map(AsFd::as_fd);
        let head = message::reply_header(header.request, bytes.len());
        let sent = connection.send(head, &bytes, fd).await;
        outcome.and(sent.map_err(|errno| format!("cannot reply: {errno}")))
    }

    async fn handle(&mut self, message: Message) -> Result<Reply, String> {
        let Message {
            header,
            payload,
            fds,
        } = message;
        let mut payload = Payload::new(&payload);
        match header.request {
            request::GET_FEATURES => Ok(Reply::Number(self.offered().await)),
            request::SET_FEATURES => self.set_features(payload.u64()?).await,
            request::SET_OWNER => Ok(Reply::Done),
            request::RESET_OWNER | request::RESET_DEVICE => self.reset().await,
            request::GET_PROTOCOL_FEATURES => Ok(Reply::Number(protocol::ALL)),
            request::SET_PROTOCOL_FEATURES => self.set_protocol(payload.u64()?),
            request::GET_QUEUE_NUM => Ok(Reply::Number(self.settings.len() as u64)),
            request::GET_CONFIG | request::SET_CONFIG => self.config(header.request, payload).await,
            request::SET_BACKEND_REQ_FD => {
                self.backend = Some(Descriptor::new(one(fds)?));
                Ok(Reply::Done)
            }
            request::SET_MEM_TABLE
            | request::ADD_MEM_REG
            | request::REM_MEM_REG
            | request::GET_MAX_MEM_SLOTS
            | request::SET_LOG_BASE
            | request::SET_LOG_FD => self.memory(header.request, payload, fds).await,
            request::GET_INFLIGHT_FD | request::SET_INFLIGHT_FD => {
                self.inflight(header.request, payload, fds).await
            }
            request::SET_VRING_NUM
            | request::SET_VRING_ADDR
            | request::SET_VRING_BASE
            | request::GET_VRING_BASE
            | request::SET_VRING_ENABLE => self.ring(header.request, payload).await,
            request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR => {
                self.ring_event(header.request, payload.u64()?, fds).await
            }
            unknown => Err(format!("request {unknown} is not known")),
        }
    }

    /// Tells the client that the configuration space has changed; `false` when it cannot be told.
    pub(super) async fn tell_config_change(&self) -> Result<bool, String> {
        let Some(backend) = &self.backend else {
            return Ok(false);
        };
        let head = message::request_header(message::CONFIG_CHANGE, 0);
        let sent = connection::send(backend, head, &[], None).await;
        sent.map_err(|errno| format!("cannot tell the client of the new size: {errno}"))?;
        Ok(true)
    }

    /// Stops every ring, once its requests are done.
    pub(super) async fn halt(&mut self) {
        for ring in 0..self.settings.len() {
            self.halt_ring(ring).await;
        }
    }

    async fn block_config(&self) -> BlockConfig {
        BlockConfig {
            geometry: self.rings.geometry().await,
            read_only: self.options.read_only,
            rings: self.settings.len() as u16,
            segments: SEGMENTS,
            cache_switch: true,
        }
    }

    async fn offered(&self) -> u64 {
        self.block_config().await.features() | feature::PROTOCOL | feature::LOG_ALL
    }

    async fn set_features(&mut self, features: u64) -> Result<Reply, String> {
        let unknown = features & !self.offered().await;
        if unknown != 0 {
            return Err(format!("features {unknown:#x} were not offered"));
        }
        self.features = features;
        if features & feature::PROTOCOL == 0 {
            // Such a client does not know how to enable a ring.
            for ring in 0..self.settings.len() {
                self.settings[ring].enabled = true;
                self.adjust(ring).await?;
            }
        }
        Ok(Reply::Done)
    }

    fn set_protocol(&mut self, features: u64) -> Result<Reply, String> {
        let unknown = features & !protocol::ALL;
        if unknown != 0 {
            return Err(format!("protocol features {unknown:#x} were not offered"));
        }
        self.protocol = features;
        Ok(Reply::Done)
    }

    async fn reset(&mut self) -> Result<Reply, String> {
        self.halt().await;
        for settings in &mut self.settings {
            *settings = Settings::default();
        }
        self.inflight = None;
        self.write_through.store(false, Ordering::Relaxed);
        Ok(Reply::Done)
    }

    async fn config(&mut self, kind: u32, mut payload: Payload<'_>) -> Result<Reply, String> {
        let (offset, len, flags) = (payload.u32()?, payload.u32()?, payload.u32()?);
        let (at, count) = (offset as usize, len as usize);
        let end = at.checked_add(count).filter(|end| *end <= CONFIG_MAX);
        let end =
            end.ok_or_else(|| format!("{count} bytes at {at} are beyond any configuration space"))?;
        if kind == request::SET_CONFIG {
            let given = payload.rest();
            let switch = WRITE_CACHE_AT
                .checked_sub(at)
                .filter(|at| *at < count)
                .and_then(|at| given.get(at));
            if let Some(on) = switch {
                self.write_through.store(*on == 0, Ordering::Relaxed);
            }
            return Ok(Reply::Done);
        }
        let cache = !self.write_through.load(Ordering::Relaxed);
        let mut space = [0; CONFIG_MAX];
        space[..CONFIG_BYTES].copy_from_slice(&self.block_config().await.config(cache));
        let mut reply = Vec::with_capacity(12 + count);
        for word in [offset, len, flags] {
            reply.extend_from_slice(&word.to_ne_bytes());
        }
        reply.extend_from_slice(&space[at..end]);
        Ok(Reply::Bytes(reply))
    }
}

/// The only descriptor of a message.
pub(super) fn one(fds: Vec<OwnedFd>) -> Result<OwnedFd, String> {
    let count = fds.len();
    let mut fds = fds.into_iter();
    match (fds.next(), fds.next()) {
        (Some(fd), None) => Ok(fd),
        _ => Err(format!("a message with {count} descriptors, not one")),
    }
}
