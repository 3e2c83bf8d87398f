//! What the kernel is answered.

use gaur_block::Errno;

use super::attributes::{self, Attributes};
use super::init::{self, Terms};
use super::request::Head;
use super::wire::{NOTIFY_INVAL_INODE, OUT_HEADER_LEN, ROOT_ID};

/// How long the kernel may believe what it is told of the file. It is told when the size changes;
/// this is for times, which do not matter much.
const ATTRIBUTES_VALID_S: u64 = 1;
/// Longest answer that is not bytes of the file, in bytes.
const BODY_MAX: usize = 16 + attributes::LEN;
const _: () = assert!(init::LEN <= BODY_MAX);

/// An answer, ready to be sent: all of it, or what stands before the bytes of the file.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    bytes: [u8; OUT_HEADER_LEN + BODY_MAX],
    len: usize,
}

impl Reply {
    fn begin(error: i32, unique: u64) -> Reply {
        let mut reply = Reply {
            bytes: [0; OUT_HEADER_LEN + BODY_MAX],
            len: 0,
        };
        reply.put(&0_u32.to_ne_bytes());
        reply.put(&error.to_ne_bytes());
        reply.put(&unique.to_ne_bytes());
        reply
    }

    fn put(&mut self, field: &[u8]) {
        self.bytes[self.len..][..field.len()].copy_from_slice(field);
        self.len += field.len();
    }

    fn of(head: &Head, fields: &[&[u8]]) -> Reply {
        let mut reply = Reply::begin(0, head.unique);
        for field in fields {
            reply.put(field);
        }
        reply.finish(0)
    }

    /// Writes the length into the header; `more` bytes of payload follow.
    fn finish(mut self, more: usize) -> Reply {
        let len = (self.len + more) as u32;
        self.bytes[..4].copy_from_slice(&len.to_ne_bytes());
        self
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// An error.
    pub fn error(head: &Head, errno: Errno) -> Reply {
        Reply::begin(-errno.raw(), head.unique).finish(0)
    }

    /// It is done, and that is all there is to say.
    pub fn done(head: &Head) -> Reply {
        Reply::of(head, &[])
    }

    /// What stands before `len` bytes of the file, the whole of a read's answer with them.
    pub fn data(head: &Head, len: usize) -> Reply {
        Reply::begin(0, head.unique).finish(len)
    }

    /// What was agreed on.
    pub fn init(head: &Head, terms: &Terms) -> Reply {
        let mut reply = Reply::begin(0, head.unique);
        terms.put(&mut |field| reply.put(field));
        reply.finish(0)
    }

    /// The version that is spoken here, to a kernel that speaks a later one and will ask again.
    pub fn init_again(head: &Head) -> Reply {
        let mut reply = Reply::begin(0, head.unique);
        Terms::put_version_only(&mut |field| reply.put(field));
        reply.finish(0)
    }

    /// What the file is.
    pub fn attributes(head: &Head, attributes: &Attributes) -> Reply {
        let mut reply = Reply::begin(0, head.unique);
        reply.put(&ATTRIBUTES_VALID_S.to_ne_bytes());
        reply.put(&[0; 8]);
        attributes.put(&mut |field| reply.put(field));
        reply.finish(0)
    }

    /// It is open; `flags` are of [`super::wire::open_flag`].
    pub fn open(head: &Head, flags: u32) -> Reply {
        let handle = 0_u64;
        Reply::of(
            head,
            &[&handle.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 4]],
        )
    }

    /// So many bytes were written.
    pub fn written(head: &Head, len_bytes: u32) -> Reply {
        Reply::of(head, &[&len_bytes.to_ne_bytes(), &[0; 4]])
    }

    /// It was found there.
    pub fn found(head: &Head, offset_bytes: u64) -> Reply {
        Reply::of(head, &[&offset_bytes.to_ne_bytes()])
    }

    /// A file system full of one file of this size.
    pub fn file_system(head: &Head, size_bytes: u64) -> Reply {
        const BLOCK_BYTES: u32 = 4096;
        const NAME_MAX: u32 = 255;
        let (free, files) = (0_u64, 1_u64);
        let mut reply = Reply::begin(0, head.unique);
        let blocks = size_bytes.div_ceil(u64::from(BLOCK_BYTES));
        for field in [blocks, free, free, files, free] {
            reply.put(&field.to_ne_bytes());
        }
        for field in [BLOCK_BYTES, NAME_MAX, BLOCK_BYTES] {
            reply.put(&field.to_ne_bytes());
        }
        reply.put(&[0; 28]);
        reply.finish(0)
    }

    /// Not an answer: the kernel is to forget what it knows of the file except its bytes.
    pub fn forget_attributes() -> Reply {
        let mut reply = Reply::begin(NOTIFY_INVAL_INODE, 0);
        let (no_bytes, len) = (-1_i64, 0_i64);
        reply.put(&ROOT_ID.to_ne_bytes());
        reply.put(&no_bytes.to_ne_bytes());
        reply.put(&len.to_ne_bytes());
        reply.finish(0)
    }
}
