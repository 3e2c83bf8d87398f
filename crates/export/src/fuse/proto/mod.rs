//! The kernel's FUSE protocol as far as one regular file needs it: bytes in, requests out, replies
//! as bytes; no input, output, clock or thread.
//!
//! The root of the file system is the file itself, node [`wire::ROOT_ID`]; there are no directories
//! and no other nodes. What the kernel sends is checked as if a stranger had: a request whose lengths
//! contradict each other, or that is about another node, is a [`Refusal`], which answers that request
//! and nothing else. Operations that are not for a disk are refused with `ENOSYS`, after which the
//! kernel does without them.

mod attributes;
mod init;
mod reply;
mod request;
pub mod wire;

pub use attributes::{Attributes, Change, Moment};
pub use init::{Offer, Terms, Unusable};
pub use reply::Reply;
pub use request::{Head, Operation, Refusal, Request, Whence, parse};
