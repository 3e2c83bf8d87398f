//! What the driver and its server say to each other: numbers and layouts of
//! `include/uapi/linux/ublk_cmd.h`. All integers have the machine's own byte order.

/// Where control commands go.
pub(super) const CONTROL_PATH: &str = "/dev/ublk-control";

/// Bytes of a sector, the unit of the driver whatever the logical block size is.
pub(super) const SECTOR_BYTES: u64 = 512;

/// Most requests of one queue (`UBLK_MAX_QUEUE_DEPTH`).
pub(super) const DEPTH_MAX: u16 = 4096;

/// Most queues of one device (`UBLK_MAX_NR_QUEUES`).
pub(super) const QUEUES_MAX: u16 = 4096;

/// Longest buffer of one request in bytes (`1 << UBLK_IO_BUF_BITS`).
pub(super) const BUFFER_BYTES_MAX: u32 = 32 << 20;

/// Shortest longest request that the driver accepts, in bytes: a page.
pub(super) const BUFFER_BYTES_MIN: u32 = 4096;

/// `_IOC` of the kernel for the type `'u'`: direction, length of the argument, number.
const fn ioctl(direction: u32, argument_bytes: u32, number: u32) -> u32 {
    direction << 30 | argument_bytes << 16 | (b'u' as u32) << 8 | number
}

/// The driver answers.
const READ: u32 = 2;
/// The driver is told and answers.
const READ_WRITE: u32 = 3;

/// Length of `struct ublksrv_ctrl_cmd`.
pub(super) const CONTROL_COMMAND_BYTES: usize = 32;

const fn control_read(number: u32) -> u32 {
    ioctl(READ, CONTROL_COMMAND_BYTES as u32, number)
}

const fn control(number: u32) -> u32 {
    ioctl(READ_WRITE, CONTROL_COMMAND_BYTES as u32, number)
}

/// Which processors the requests of a queue come from.
pub(super) const GET_QUEUE_AFFINITY: u32 = control_read(0x01);
/// What a device is; without a path, so not for unprivileged devices.
pub(super) const GET_DEV_INFO: u32 = control_read(0x02);
/// Makes a device, so far only `/dev/ublkcN`.
pub(super) const ADD_DEV: u32 = control(0x04);
/// Takes a device away and waits until no process uses it.
pub(super) const DEL_DEV: u32 = control(0x05);
/// Shows `/dev/ublkbN` once all requests have been fetched.
pub(super) const START_DEV: u32 = control(0x06);
/// Takes `/dev/ublkbN` away and hands all fetches back.
pub(super) const STOP_DEV: u32 = control(0x07);
/// Says what the block device looks like, before it is started.
pub(super) const SET_PARAMS: u32 = control(0x08);
/// What the block device looks like.
pub(super) const GET_PARAMS: u32 = control_read(0x09);
/// A new server takes over (Linux 6.1).
pub(super) const START_USER_RECOVERY: u32 = control(0x10);
/// The new server has fetched all requests.
pub(super) const END_USER_RECOVERY: u32 = control(0x11);
/// As [`GET_DEV_INFO`], with the path of the character device (Linux 6.3).
pub(super) const GET_DEV_INFO2: u32 = control_read(0x12);
/// What the driver can do (Linux 6.5).
pub(super) const GET_FEATURES: u32 = control_read(0x13);
/// As [`DEL_DEV`], without waiting (Linux 6.7).
pub(super) const DEL_DEV_ASYNC: u32 = control_read(0x14);
/// Changes the size of a running device (Linux 6.16).
pub(super) const UPDATE_SIZE: u32 = control(0x15);
/// Hands fetches back and keeps the block device for the next server (Linux 6.16).
pub(super) const QUIESCE_DEV: u32 = control(0x16);
/// As [`STOP_DEV`], unless a process has the block device open (Linux 7.0).
pub(super) const TRY_STOP_DEV: u32 = control(0x17);

/// Length of `struct ublksrv_io_cmd`.
const IO_COMMAND_BYTES: u32 = 16;

/// Fetches the first request of a tag.
pub(super) const FETCH_REQ: u32 = ioctl(READ_WRITE, IO_COMMAND_BYTES, 0x20);
/// Answers the request of a tag and fetches the next one.
pub(super) const COMMIT_AND_FETCH_REQ: u32 = ioctl(READ_WRITE, IO_COMMAND_BYTES, 0x21);

/// `UBLK_IO_RES_OK`: a request has come.
pub(super) const FETCHED: u32 = 0;
/// `UBLK_IO_RES_ABORT`: this tag is not served any more; the number of `ENODEV`.
pub(super) const ABORTED: i32 = libc::ENODEV;

/// `struct ublksrv_io_cmd`: which tag, the answer to its request, and its memory.
pub(super) fn io_command(queue: u16, tag: u16, result: i32, address: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0..2].copy_from_slice(&queue.to_ne_bytes());
    bytes[2..4].copy_from_slice(&tag.to_ne_bytes());
    bytes[4..8].copy_from_slice(&result.to_ne_bytes());
    bytes[8..16].copy_from_slice(&address.to_ne_bytes());
    bytes
}

/// Register the buffer of the request under this number of the ring; where that fails, say so in
/// the request rather than failing it (`struct ublk_auto_buf_reg` as it travels in an entry's
/// `addr`).
pub(super) fn auto_buffer(index: u16) -> u64 {
    const FALLBACK: u64 = 1 << 16;
    u64::from(index) | FALLBACK
}

/// Length of `struct ublksrv_io_desc`.
pub(super) const DESCRIPTOR_BYTES: usize = 24;

/// Operations of `struct ublksrv_io_desc`.
pub(super) const OP_READ: u8 = 0;
/// The payload goes to the device.
pub(super) const OP_WRITE: u8 = 1;
/// Everything completed becomes durable.
pub(super) const OP_FLUSH: u8 = 2;
/// A range is not needed any more.
pub(super) const OP_DISCARD: u8 = 3;
/// A range becomes zeros.
pub(super) const OP_WRITE_ZEROES: u8 = 5;

/// Durable before it is answered.
pub(super) const FLAG_FUA: u32 = 1 << 13;
/// Space stays allocated.
pub(super) const FLAG_NOUNMAP: u32 = 1 << 15;
/// The buffer could not be registered.
pub(super) const FLAG_NEED_REG_BUF: u32 = 1 << 17;

/// Where in `/dev/ublkcN` the descriptors of a queue are mapped, in bytes; `page_bytes` is the
/// machine's page.
pub(super) fn descriptors_offset(queue: u16, page_bytes: usize) -> u64 {
    u64::from(queue) * descriptors_len(DEPTH_MAX, page_bytes) as u64
}

/// Length of the mapping of a queue's descriptors in bytes.
pub(super) fn descriptors_len(depth: u16, page_bytes: usize) -> usize {
    (usize::from(depth) * DESCRIPTOR_BYTES).next_multiple_of(page_bytes)
}

/// Where in `/dev/ublkcN` the bytes of a request are read and written (user copy).
pub(super) fn request_offset(queue: u16, tag: u16, offset_bytes: u64) -> u64 {
    const BASE: u64 = 0x8000_0000;
    BASE + (u64::from(queue) << 41 | u64::from(tag) << 25 | offset_bytes)
}

/// `struct ublksrv_ctrl_dev_info`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DevInfo {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) buffer_bytes: u32,
    pub(super) id: u32,
    pub(super) server_pid: i32,
    pub(super) flags: u64,
    /// The driver keeps it and does not look at it.
    pub(super) server_flags: u64,
    pub(super) owner_uid: u32,
    pub(super) owner_gid: u32,
}

/// Length of [`DevInfo`] as bytes.
pub(super) const DEV_INFO_BYTES: usize = 64;

impl DevInfo {
    pub(super) fn encode(&self) -> [u8; DEV_INFO_BYTES] {
        let mut bytes = [0; DEV_INFO_BYTES];
        bytes[0..2].copy_from_slice(&self.queues.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.depth.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.state.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.buffer_bytes.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.id.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.server_pid.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.server_flags.to_ne_bytes());
        bytes[40..44].copy_from_slice(&self.owner_uid.to_ne_bytes());
        bytes[44..48].copy_from_slice(&self.owner_gid.to_ne_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; DEV_INFO_BYTES]) -> DevInfo {
        DevInfo {
            queues: u16::from_ne_bytes(take(bytes, 0)),
            depth: u16::from_ne_bytes(take(bytes, 2)),
            state: u16::from_ne_bytes(take(bytes, 4)),
            buffer_bytes: u32::from_ne_bytes(take(bytes, 8)),
            id: u32::from_ne_bytes(take(bytes, 12)),
            server_pid: i32::from_ne_bytes(take(bytes, 16)),
            flags: u64::from_ne_bytes(take(bytes, 24)),
            server_flags: u64::from_ne_bytes(take(bytes, 32)),
            owner_uid: u32::from_ne_bytes(take(bytes, 40)),
            owner_gid: u32::from_ne_bytes(take(bytes, 44)),
        }
    }
}

/// `N` bytes from `at` on; the layouts here lie inside their arrays.
pub(super) fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

/// States of a device: not started or stopped.
pub(super) const STATE_DEAD: u16 = 0;
/// Served.
pub(super) const STATE_LIVE: u16 = 1;
/// Its server is gone, requests wait for the next one.
pub(super) const STATE_QUIESCED: u16 = 2;
/// Its server is gone, requests fail until the next one.
pub(super) const STATE_FAIL_IO: u16 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers as the kernel's header spells them out with its macros.
    #[test]
    fn commands_are_encoded_as_ioctls() {
        assert_eq!(GET_FEATURES, 0x8020_7513);
        assert_eq!(ADD_DEV, 0xc020_7504);
        assert_eq!(FETCH_REQ, 0xc010_7520);
        assert_eq!(COMMIT_AND_FETCH_REQ, 0xc010_7521);
    }

    #[test]
    fn what_a_device_is_survives_the_trip() {
        let info = DevInfo {
            queues: 3,
            depth: 128,
            state: STATE_QUIESCED,
            buffer_bytes: 1 << 19,
            id: 7,
            server_pid: -1,
            flags: 0x1234_5678_9abc,
            server_flags: 5,
            owner_uid: 1000,
            owner_gid: 100,
        };
        assert_eq!(DevInfo::decode(&info.encode()), info);
    }

    #[test]
    fn offsets_in_the_character_device() {
        assert_eq!(descriptors_len(1, 4096), 4096);
        assert_eq!(descriptors_len(128, 4096), 4096);
        assert_eq!(descriptors_len(256, 4096), 8192);
        // 4096 descriptors of 24 bytes.
        assert_eq!(descriptors_offset(2, 4096), 2 * 98304);
        assert_eq!(request_offset(0, 0, 512), 0x8000_0200);
        assert_eq!(request_offset(1, 2, 0), 0x8000_0000 + (1 << 41) + (2 << 25));
    }

    #[test]
    fn a_tags_command_is_sixteen_bytes() {
        let bytes = io_command(0x0102, 0x0304, -5, 0x1122_3344_5566_7788);
        assert_eq!(u16::from_ne_bytes(take(&bytes, 0)), 0x0102);
        assert_eq!(u16::from_ne_bytes(take(&bytes, 2)), 0x0304);
        assert_eq!(i32::from_ne_bytes(take(&bytes, 4)), -5);
        assert_eq!(u64::from_ne_bytes(take(&bytes, 8)), 0x1122_3344_5566_7788);
        assert_eq!(auto_buffer(9), 0x1_0009);
    }
}
