//! What a driver must not do.

use core::fmt;

/// Why a ring was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// More requests are said to be available than the ring has room for.
    AvailIndex { seen: u16, next: u16 },
    /// A descriptor number beyond the ring or table.
    Descriptor { index: u16, count: u16 },
    /// A chain that is longer than its ring allows, or runs in a circle.
    ChainLength,
    /// Memory that the guest does not have, or may not be used that way.
    Address { address: u64, len: u32 },
    /// A part that the device reads after one that it writes.
    Order,
    /// An indirect table where there may be none.
    Indirect,
    /// An indirect table whose length is no multiple of 16 bytes, or zero, or too large.
    TableLength { len: u32 },
    /// Less than a header to read.
    Header { len: u64 },
    /// No byte for the status.
    Status,
    /// A request that is still being worked on.
    Twice { head: u16 },
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Violation::AvailIndex { seen, next } => {
                write!(out, "available index {seen} is too far from {next}")
            }
            Violation::Descriptor { index, count } => {
                write!(out, "descriptor {index} of {count}")
            }
            Violation::ChainLength => out.write_str("a chain of descriptors is too long"),
            Violation::Address { address, len } => {
                write!(
                    out,
                    "{len} bytes at guest address {address:#x} are no memory of the guest that may be used this way"
                )
            }
            Violation::Order => out.write_str("a part to read follows a part to write"),
            Violation::Indirect => out.write_str("an indirect table where none may be"),
            Violation::TableLength { len } => {
                write!(out, "an indirect table of {len} bytes")
            }
            Violation::Header { len } => {
                write!(out, "a request header of {len} bytes, not 16")
            }
            Violation::Status => out.write_str("a request has no room for its status"),
            Violation::Twice { head } => {
                write!(out, "descriptor {head} is offered again before it was used")
            }
        }
    }
}
