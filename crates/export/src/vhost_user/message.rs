//! Messages of the protocol as bytes. Numbers are in the order of this machine.

/// Length of a header: request, flags, payload length.
pub(super) const HEADER_BYTES: usize = 12;

/// Longest payload that is taken. The longest that makes sense is a memory table.
pub(super) const PAYLOAD_MAX: usize = 4096;

/// Most descriptors that come with a message.
pub(super) const FDS_MAX: usize = 8;

/// Regions of a memory table.
pub(super) const TABLE_MAX: usize = FDS_MAX;

/// Regions that may be added one by one.
pub(super) const SLOTS_MAX: usize = 512;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;

/// Requests of the front end.
pub(super) mod request {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const RESET_OWNER: u32 = 4;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_LOG_BASE: u32 = 6;
    pub(crate) const SET_LOG_FD: u32 = 7;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const SET_CONFIG: u32 = 25;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
}

/// A request of ours to the front end: the configuration space has changed.
pub(super) const CONFIG_CHANGE: u32 = 2;

/// Virtio feature bits that are the protocol's.
pub(super) mod feature {
    pub(crate) const LOG_ALL: u64 = 1 << 26;
    pub(crate) const PROTOCOL: u64 = 1 << 30;
}

/// Protocol feature bits.
pub(super) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const LOG_SHMFD: u64 = 1 << 1;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const RESET_DEVICE: u64 = 1 << 13;
    pub(crate) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// What is offered.
    pub(crate) const ALL: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS;
}

/// Flag in the number of a ring: no descriptor comes with the message.
pub(super) const NO_FD: u64 = 1 << 8;

/// Flag of a ring's addresses: its used ring is in the log of dirty pages.
pub(super) const RING_LOGGED: u32 = 1;

/// The first bytes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) request: u32,
    pub(super) flags: u32,
    pub(super) len: usize,
}

impl Header {
    /// A request of the front end.
    pub(super) fn parse(bytes: [u8; HEADER_BYTES]) -> Result<Header, String> {
        let [request, flags, len] = words(bytes);
        if flags & VERSION_MASK != VERSION {
            let version = flags & VERSION_MASK;
            return Err(format!("a message of version {version}, not 1"));
        }
        if flags & REPLY != 0 {
            return Err(format!("a reply to request {request}, which was not made"));
        }
        if len as usize > PAYLOAD_MAX {
            return Err(format!("a message of {len} bytes, {PAYLOAD_MAX} at most"));
        }
        Ok(Header {
            request,
            flags,
            len: len as usize,
        })
    }

    pub(super) fn wants_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }
}

fn words(bytes: [u8; HEADER_BYTES]) -> [u32; 3] {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = bytes;
    [[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(u32::from_ne_bytes)
}

/// The header of a reply to `request`.
pub(super) fn reply_header(request: u32, len: usize) -> [u8; HEADER_BYTES] {
    header(request, VERSION | REPLY, len)
}

/// The header of a request of ours.
pub(super) fn request_header(request: u32, len: usize) -> [u8; HEADER_BYTES] {
    header(request, VERSION, len)
}

fn header(request: u32, flags: u32, len: usize) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&request.to_ne_bytes());
    bytes[4..8].copy_from_slice(&flags.to_ne_bytes());
    bytes[8..].copy_from_slice(&(len as u32).to_ne_bytes());
    bytes
}

/// Reads a payload from front to back.
pub(super) struct Payload<'a>(&'a [u8]);

impl<'a> Payload<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Payload<'a> {
        Payload(bytes)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (first, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or("a message that is too short for its request")?;
        self.0 = rest;
        Ok(*first)
    }

    pub(super) fn u16(&mut self) -> Result<u16, String> {
        self.take().map(u16::from_ne_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, String> {
        self.take().map(u32::from_ne_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, String> {
        self.take().map(u64::from_ne_bytes)
    }

    pub(super) fn rest(self) -> &'a [u8] {
        self.0
    }
}
