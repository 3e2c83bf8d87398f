//! What a driver must not do.

/// Why a ring was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    /// More requests are said to be available than the ring has room for.
    #[error("available index {seen} is too far from {next}")]
    AvailIndex { seen: u16, next: u16 },
    /// A descriptor number beyond the ring or table.
    #[error("descriptor {index} of {count}")]
    Descriptor { index: u16, count: u16 },
    /// A chain that is longer than its ring allows, or runs in a circle.
    #[error("a chain of descriptors is too long")]
    ChainLength,
    /// Memory that the guest does not have, or may not be used that way.
    #[error(
        "{len} bytes at guest address {address:#x} are no memory of the guest that may be used this way"
    )]
    Address { address: u64, len: u32 },
    /// A part that the device reads after one that it writes.
    #[error("a part to read follows a part to write")]
    Order,
    /// An indirect table where there may be none.
    #[error("an indirect table where none may be")]
    Indirect,
    /// An indirect table whose length is no multiple of 16 bytes, or zero, or too large.
    #[error("an indirect table of {len} bytes")]
    TableLength { len: u32 },
    /// Less than a header to read.
    #[error("a request header of {len} bytes, not 16")]
    Header { len: u64 },
    /// No byte for the status.
    #[error("a request has no room for its status")]
    Status,
    /// A request that is still being worked on.
    #[error("descriptor {head} is offered again before it was used")]
    Twice { head: u16 },
}
