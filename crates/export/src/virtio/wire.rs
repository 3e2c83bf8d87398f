//! Numbers of the virtio specification, version 1.3: sections 2.7 (split virtqueues) and 5.2 (block).

/// The device is a block device.
pub(crate) const DEVICE_BLOCK: u32 = 2;

/// A sector is 512 bytes, whatever the block size is.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// Descriptors of one request, direct and indirect together.
pub(crate) const DESCRIPTORS_MAX: usize = 1024;

/// Longest ring.
pub(crate) const RING_MAX: u16 = 1024;

/// Ranges of one discard or write-zeroes request.
pub(crate) const RANGES_MAX: usize = 32;

/// Longest range of a discard in sectors.
pub(crate) const DISCARD_MAX_SECTORS: u32 = (2_u32 << 30) / 512;

/// Longest range of a write-zeroes in sectors. Where space must stay allocated this is real work.
pub(crate) const ZEROES_MAX_SECTORS: u32 = (256_u32 << 20) / 512;

/// Feature bits.
pub(crate) mod feature {
    pub(crate) const SEG_MAX: u64 = 1 << 2;
    pub(crate) const RO: u64 = 1 << 5;
    pub(crate) const BLK_SIZE: u64 = 1 << 6;
    pub(crate) const FLUSH: u64 = 1 << 9;
    pub(crate) const TOPOLOGY: u64 = 1 << 10;
    pub(crate) const CONFIG_WCE: u64 = 1 << 11;
    pub(crate) const MQ: u64 = 1 << 12;
    pub(crate) const DISCARD: u64 = 1 << 13;
    pub(crate) const WRITE_ZEROES: u64 = 1 << 14;
    pub(crate) const INDIRECT_DESC: u64 = 1 << 28;
    pub(crate) const EVENT_IDX: u64 = 1 << 29;
    pub(crate) const VERSION_1: u64 = 1 << 32;
    pub(crate) const ACCESS_PLATFORM: u64 = 1 << 33;
}

/// Kinds of request.
pub(crate) mod kind {
    pub(crate) const IN: u32 = 0;
    pub(crate) const OUT: u32 = 1;
    pub(crate) const FLUSH: u32 = 4;
    pub(crate) const GET_ID: u32 = 8;
    pub(crate) const DISCARD: u32 = 11;
    pub(crate) const WRITE_ZEROES: u32 = 13;
}

/// The last byte of a request.
pub(crate) mod status {
    pub(crate) const OK: u8 = 0;
    pub(crate) const IOERR: u8 = 1;
    pub(crate) const UNSUPP: u8 = 2;
}

/// Length of a request's header in bytes: kind, priority, sector.
pub(crate) const HEADER_BYTES: usize = 16;

/// Length of a range of a discard or write-zeroes request: sector, count of sectors, flags.
pub(crate) const RANGE_BYTES: usize = 16;

/// Flag of a range: space may be given back.
pub(crate) const RANGE_UNMAP: u32 = 1;

/// Length of the answer to `GET_ID`.
pub(crate) const ID_BYTES: usize = 20;

/// Descriptor flags.
pub(crate) mod descriptor {
    pub(crate) const NEXT: u16 = 1;
    pub(crate) const WRITE: u16 = 2;
    pub(crate) const INDIRECT: u16 = 4;
    pub(crate) const BYTES: usize = 16;
}

/// Flag of the available ring: the driver wants no interrupts.
pub(crate) const AVAIL_NO_INTERRUPT: u16 = 1;

/// Flag of the used ring: the device wants no kicks.
pub(crate) const USED_NO_NOTIFY: u16 = 1;
