//! What a device is, as the driver tells.

use super::features::Features;
use super::uapi::{self, DevInfo};

/// What this program notes with the driver about devices that it makes ("gaur" and a version), to
/// know them again.
const MARK: u64 = 0x6761_7572_0000_0001;

/// Where a device is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not started yet, or stopped: there is no block device.
    Dead,
    /// Served.
    Live,
    /// Its server is gone; requests wait for the next one.
    Quiesced,
    /// Its server is gone; requests fail until there is a next one.
    Failing,
    /// A number that this program does not know.
    Unknown(u16),
}

impl State {
    /// One word for it.
    pub const fn name(self) -> &'static str {
        match self {
            State::Dead => "dead",
            State::Live => "live",
            State::Quiesced => "quiesced",
            State::Failing => "failing",
            State::Unknown(_) => "unknown",
        }
    }

    fn from_raw(state: u16) -> State {
        match state {
            uapi::STATE_DEAD => State::Dead,
            uapi::STATE_LIVE => State::Live,
            uapi::STATE_QUIESCED => State::Quiesced,
            uapi::STATE_FAIL_IO => State::Failing,
            other => State::Unknown(other),
        }
    }
}

/// A ublk device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Its number.
    pub id: u32,
    /// Where it is in its life.
    pub state: State,
    /// Hardware queues.
    pub queues: u16,
    /// Requests of one queue at once.
    pub depth: u16,
    /// Longest request in bytes.
    pub buffer_bytes: u32,
    /// What it was made with.
    pub features: Features,
    /// The process that serves it, as this process sees it.
    pub server: Option<u32>,
    /// Who made it.
    pub owner_uid: u32,
    /// Who made it.
    pub owner_gid: u32,
    /// Made by this program, whichever process.
    pub ours: bool,
    /// Size of the block device in bytes; 0 before it is known.
    pub size_bytes: u64,
    /// The block device takes no writes.
    pub read_only: bool,
}

impl Info {
    pub(super) fn from_raw(raw: &DevInfo) -> Info {
        Info {
            id: raw.id,
            state: State::from_raw(raw.state),
            queues: raw.queues,
            depth: raw.depth,
            buffer_bytes: raw.buffer_bytes,
            features: Features::from_bits(raw.flags),
            server: u32::try_from(raw.server_pid).ok().filter(|pid| *pid > 0),
            owner_uid: raw.owner_uid,
            owner_gid: raw.owner_gid,
            ours: raw.server_flags == MARK,
            size_bytes: 0,
            read_only: false,
        }
    }

    /// Where clients find it.
    pub fn block_path(&self) -> String {
        format!("/dev/ublkb{}", self.id)
    }

    /// Where its server finds it.
    pub fn char_path(&self) -> String {
        char_path(self.id)
    }
}

/// The character device of a number.
pub(super) fn char_path(id: u32) -> String {
    format!("/dev/ublkc{id}")
}

/// What the driver is asked for when it makes a device.
pub(super) fn request(
    id: Option<u32>,
    queues: u16,
    depth: u16,
    buffer_bytes: u32,
    features: Features,
) -> DevInfo {
    DevInfo {
        queues,
        depth,
        buffer_bytes,
        id: id.unwrap_or(u32::MAX),
        flags: features.bits(),
        server_flags: MARK,
        ..DevInfo::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_answer_is_read() {
        let raw = DevInfo {
            state: uapi::STATE_FAIL_IO,
            server_pid: -1,
            ..request(Some(3), 2, 64, 4096, Features::QUIESCE)
        };
        let info = Info::from_raw(&raw);
        assert_eq!(info.state, State::Failing);
        assert_eq!(info.server, None);
        assert!(info.ours);
        assert_eq!(info.block_path(), "/dev/ublkb3");
        assert_eq!(info.char_path(), "/dev/ublkc3");
        let other = DevInfo {
            server_flags: 0,
            server_pid: 12,
            state: 9,
            ..raw
        };
        let info = Info::from_raw(&other);
        assert!(!info.ours);
        assert_eq!(info.server, Some(12));
        assert_eq!(info.state, State::Unknown(9));
    }
}
