//! The FUSE protocol without a kernel: what is taken for a request, what is refused, and the bytes of
//! answers.

use std::time::Duration;

use gaur_block::Errno;
use gaur_export::fuse::proto::wire::{self, init_flag, opcode};
use gaur_export::fuse::proto::{
    Attributes, Change, Head, Moment, Offer, Operation, Refusal, Reply, Request, Terms, Whence,
    parse,
};

const UNIQUE: u64 = 0x1122_3344_5566_7788;

/// A request of the kernel; fields are of 4 or 8 bytes.
struct Message(Vec<u8>);

impl Message {
    fn new(opcode: u32, node: u64) -> Message {
        let message = Message(Vec::new());
        let message = message.u32(0).u32(opcode).u64(UNIQUE).u64(node);
        message.u32(0).u32(0).u32(1).u32(0)
    }

    fn u32(mut self, field: u32) -> Message {
        self.0.extend(field.to_ne_bytes());
        self
    }

    fn u64(mut self, field: u64) -> Message {
        self.0.extend(field.to_ne_bytes());
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Message {
        self.0.extend(bytes);
        self
    }

    /// With its length in the header.
    fn done(mut self) -> Vec<u8> {
        let len = self.0.len() as u32;
        self.0[..4].copy_from_slice(&len.to_ne_bytes());
        self.0
    }

    fn parse(self) -> Result<Operation, Refusal> {
        parse(&self.done()).map(|request| request.operation)
    }
}

fn error(opcode: u32, number: i32) -> Result<Operation, Refusal> {
    let head = Head {
        unique: UNIQUE,
        opcode,
    };
    Err(Refusal::Error(head, Errno::from_raw(number)))
}

fn read(node: u64, offset: u64, len: u32) -> Message {
    let message = Message::new(opcode::READ, node).u64(0).u64(offset);
    message.u32(len).u32(0).u64(0).u32(0).u32(0)
}

fn write(offset: u64, len: u32, flags: u32, payload: &[u8]) -> Message {
    let message = Message::new(opcode::WRITE, 1).u64(0).u64(offset);
    let message = message.u32(len).u32(0).u64(0).u32(flags).u32(0);
    message.bytes(payload)
}

#[test]
fn reads_and_writes_are_understood() {
    let (offset_bytes, len_bytes) = (4096, 512);
    let expected = Operation::Read {
        offset_bytes,
        len_bytes,
    };
    assert_eq!(read(1, 4096, 512).parse(), Ok(expected));
    for (flags, fua) in [
        (0, false),
        (libc::O_DSYNC, true),
        (libc::O_SYNC, true),
        (libc::O_RDWR, false),
    ] {
        let expected = Operation::Write {
            offset_bytes: 9,
            len_bytes: 3,
            fua,
        };
        assert_eq!(write(9, 3, flags as u32, b"abc").parse(), Ok(expected));
    }
}

#[test]
fn lengths_that_contradict_each_other_are_refused() {
    assert_eq!(
        write(0, 4, 0, b"abc").parse(),
        error(opcode::WRITE, libc::EIO)
    );
    assert_eq!(
        write(0, 2, 0, b"abc").parse(),
        error(opcode::WRITE, libc::EIO)
    );
    let mut bytes = read(1, 0, 512).done();
    bytes.push(0);
    assert_eq!(
        parse(&bytes).map(|request| request.operation),
        error(opcode::READ, libc::EIO)
    );
    let whole = read(1, 0, 512).done();
    for len in 0..wire::IN_HEADER_LEN {
        assert_eq!(parse(&whole[..len]), Err(Refusal::Garbage));
    }
}

/// Every request that is cut short, with the length in its header set to match.
#[test]
fn a_short_body_is_no_request() {
    let messages = [
        read(1, 0, 512),
        write(0, 0, 0, b""),
        Message::new(opcode::OPEN, 1).u32(2),
        Message::new(opcode::SETATTR, 1).bytes(&[0xff; 88]),
        Message::new(opcode::FALLOCATE, 1)
            .u64(0)
            .u64(0)
            .u64(1)
            .u32(0),
        Message::new(opcode::LSEEK, 1).u64(0).u64(0).u32(3),
        Message::new(opcode::INIT, 0).u32(7).u32(46),
    ];
    for message in messages {
        let whole = message.done();
        assert!(parse(&whole).is_ok(), "{whole:?}");
        for len in wire::IN_HEADER_LEN..whole.len() {
            let cut = Message(whole[..len].to_vec()).done();
            let refused = matches!(parse(&cut), Err(Refusal::Error(..)));
            assert!(refused, "{len} of {}: {:?}", whole.len(), parse(&cut));
        }
    }
}

#[test]
fn ranges_beyond_what_a_file_can_have_are_refused() {
    let too_far = i64::MAX as u64;
    assert_eq!(
        read(1, too_far, 1).parse(),
        error(opcode::READ, libc::EINVAL)
    );
    assert_eq!(
        read(1, u64::MAX, 1).parse(),
        error(opcode::READ, libc::EINVAL)
    );
    let too_long = wire::PAYLOAD_MAX as u32 + 1;
    assert_eq!(
        read(1, 0, too_long).parse(),
        error(opcode::READ, libc::EINVAL)
    );
    assert_eq!(
        write(u64::MAX, 1, 0, b"a").parse(),
        error(opcode::WRITE, libc::EINVAL)
    );
    let message = Message::new(opcode::FALLOCATE, 1).u64(0).u64(1);
    assert_eq!(
        message.u64(u64::MAX).u32(0).u32(0).parse(),
        error(opcode::FALLOCATE, libc::EINVAL)
    );
}

#[test]
fn there_is_one_node() {
    assert_eq!(read(2, 0, 512).parse(), error(opcode::READ, libc::ENOENT));
    let message = Message::new(opcode::GETATTR, 0).u64(0).u64(0);
    assert_eq!(message.parse(), error(opcode::GETATTR, libc::ENOENT));
    let message = Message::new(opcode::LOOKUP, 1).bytes(b"name\0");
    assert_eq!(message.parse(), error(opcode::LOOKUP, libc::ENOENT));
}

#[test]
fn unsupported_requests_answer_enosys() {
    const COPY_FILE_RANGE: u32 = 47;
    const GETXATTR: u32 = 22;
    const POLL: u32 = 40;
    const STATX: u32 = 52;
    for opcode in [
        COPY_FILE_RANGE,
        GETXATTR,
        POLL,
        STATX,
        opcode::INTERRUPT,
        0,
        9999,
        u32::MAX,
    ] {
        let message = Message::new(opcode, 1).bytes(&[0; 64]);
        assert_eq!(message.parse(), error(opcode, libc::ENOSYS));
    }
    let message = Message::new(opcode::IOCTL, 1).bytes(&[0; 32]);
    assert_eq!(message.parse(), error(opcode::IOCTL, libc::ENOTTY));
    for opcode in [opcode::FORGET, opcode::BATCH_FORGET] {
        let message = Message::new(opcode, 1).bytes(&[0; 8]);
        assert_eq!(message.parse(), Err(Refusal::Silent));
    }
}

#[test]
fn seeks_are_for_data_and_holes() {
    for (number, whence) in [(3, Whence::Data), (4, Whence::Hole)] {
        let message = Message::new(opcode::LSEEK, 1).u64(0).u64(7);
        let offset_bytes = 7;
        let expected = Operation::Seek {
            offset_bytes,
            whence,
        };
        assert_eq!(message.u32(number).u32(0).parse(), Ok(expected));
    }
    let message = Message::new(opcode::LSEEK, 1).u64(0).u64(7);
    assert_eq!(
        message.u32(2).u32(0).parse(),
        error(opcode::LSEEK, libc::EINVAL)
    );
}

#[test]
fn changes_of_attributes_are_those_that_count() {
    const SIZE_AND_MTIME_AND_NOW: u32 = 1 << 3 | 1 << 5 | 1 << 7;
    let message = Message::new(opcode::SETATTR, 1);
    let message = message.u32(SIZE_AND_MTIME_AND_NOW).u32(0).u64(0);
    let (size, owner, accessed, modified, changed) = (1234, 5, 6, 7, 8);
    let message = message.u64(size).u64(owner);
    let message = message.u64(accessed).u64(modified).u64(changed);
    let message = message.u32(60).u32(70).u32(80).u32(0o644).u32(0);
    let message = message.u32(10).u32(11).u32(0);
    let expected = Change {
        size_bytes: Some(1234),
        accessed: Some(Moment::Now),
        modified: Some(Moment::At(Duration::new(7, 70))),
        ..Change::default()
    };
    assert_eq!(message.parse(), Ok(Operation::SetAttributes(expected)));
}

fn offer(major: u32, minor: u32, flags: u64) -> Offer {
    let high = (flags >> 32) as u32;
    let message = Message::new(opcode::INIT, 0).u32(major).u32(minor);
    let message = message.u32(131_072).u32(flags as u32).u32(high);
    let parsed = message.bytes(&[0; 44]).parse();
    let Ok(Operation::Init(offer)) = parsed else {
        panic!("{parsed:?}");
    };
    offer
}

#[test]
fn terms_are_what_both_can_do() {
    let everything = offer(7, 99, u64::MAX);
    let terms = Terms::agree(&everything, 64).expect("usable").expect("now");
    assert_eq!(terms.minor, wire::MINOR);
    assert_ne!(terms.flags & init_flag::DIRECT_IO_ALLOW_MMAP, 0);
    const WRITEBACK_CACHE: u64 = 1 << 16;
    assert_eq!(terms.flags & WRITEBACK_CACHE, 0);
    // Without the flag that says so the second field is something else.
    let least = init_flag::BIG_WRITES | init_flag::MAX_PAGES;
    let little = offer(7, 31, least | init_flag::DIRECT_IO_ALLOW_MMAP);
    let terms = Terms::agree(&little, 64).expect("usable").expect("now");
    assert_eq!((terms.minor, terms.flags), (31, least));
}

#[test]
fn a_kernel_that_is_too_old_is_refused_and_a_newer_one_asked_again() {
    for (major, minor) in [(7, 30), (6, 99), (0, 0)] {
        let refused = Terms::agree(&offer(major, minor, u64::MAX), 64);
        let told = refused.expect_err("too old").to_string();
        assert!(told.contains(&format!("{major}.{minor}")), "{told}");
    }
    assert!(Terms::agree(&offer(7, 31, 0), 64).is_err());
    assert_eq!(Terms::agree(&offer(8, 0, 0), 64), Ok(None));
}

fn head() -> Head {
    Head {
        unique: UNIQUE,
        opcode: opcode::READ,
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[test]
fn answers_have_their_length_their_request_and_their_error() {
    let attributes = attributes();
    let terms = Terms::agree(&offer(7, 46, u64::MAX), 64)
        .expect("usable")
        .expect("now");
    for (reply, len) in [
        (Reply::done(&head()), 16),
        (Reply::open(&head(), 1), 32),
        (Reply::written(&head(), 7), 24),
        (Reply::found(&head(), 7), 24),
        (Reply::attributes(&head(), &attributes), 120),
        (Reply::file_system(&head(), 1 << 30), 96),
        (Reply::init(&head(), &terms), 80),
        (Reply::init_again(&head()), 80),
    ] {
        assert_eq!(reply.bytes().len(), len);
        assert_eq!(u32_at(reply.bytes(), 0), len as u32);
        assert_eq!(u32_at(reply.bytes(), 4), 0);
        assert_eq!(u64_at(reply.bytes(), 8), UNIQUE);
    }
    let error = Reply::error(&head(), Errno::ENOSPC);
    assert_eq!(u32_at(error.bytes(), 4) as i32, -libc::ENOSPC);
    let data = Reply::data(&head(), 4096);
    assert_eq!((data.bytes().len(), u32_at(data.bytes(), 0)), (16, 4112));
}

fn attributes() -> Attributes {
    Attributes {
        size_bytes: 1 << 30,
        allocated_bytes: 513,
        mode: 0o600,
        uid: 1000,
        gid: 100,
        block_bytes: 4096,
        accessed: Duration::new(1, 2),
        modified: Duration::new(3, 4),
        changed: Duration::new(5, 6),
    }
}

#[test]
fn attributes_lie_where_the_kernel_looks() {
    let reply = Reply::attributes(&head(), &attributes());
    let attributes = &reply.bytes()[32..];
    let numbers: Vec<u64> = (0..6).map(|field| u64_at(attributes, field * 8)).collect();
    assert_eq!(numbers, [1, 1 << 30, 2, 1, 3, 5]);
    let numbers: Vec<u32> = (0..10).map(|at| u32_at(attributes, 48 + at * 4)).collect();
    assert_eq!(numbers, [2, 4, 6, 0o100_600, 1, 1000, 100, 0, 4096, 0]);
}

#[test]
fn terms_lie_where_the_kernel_looks() {
    let terms = Terms {
        minor: 46,
        flags: init_flag::INIT_EXT | init_flag::DIRECT_IO_ALLOW_MMAP,
        max_readahead: 4096,
        max_background: 100,
    };
    let reply = Reply::init(&head(), &terms);
    let body = &reply.bytes()[16..];
    assert_eq!((u32_at(body, 0), u32_at(body, 4)), (7, 46));
    assert_eq!((u32_at(body, 8), u32_at(body, 12)), (4096, 1 << 30));
    assert_eq!(u32_at(body, 16), 75 << 16 | 100);
    assert_eq!((u32_at(body, 20), u32_at(body, 24)), (1 << 20, 1));
    assert_eq!((u32_at(body, 28), u32_at(body, 32)), (256, 1 << 4));
}

/// Whatever the kernel sends, the answer is a request or a refusal.
#[test]
fn noise_is_no_danger() {
    let mut state = 1_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..200_000 {
        let mut bytes = [0_u8; 128];
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&next().to_ne_bytes());
        }
        let len = next() as usize % 129;
        bytes[..4].copy_from_slice(&(len as u32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&(next() as u32 % 56).to_ne_bytes());
        if next() % 4 > 0 {
            bytes[16..24].copy_from_slice(&1_u64.to_ne_bytes());
        }
        if let Ok(Request {
            operation:
                Operation::Write {
                    offset_bytes,
                    len_bytes,
                    ..
                },
            ..
        }) = parse(&bytes[..len])
        {
            assert!(offset_bytes.checked_add(u64::from(len_bytes)).is_some());
            assert_eq!(len, wire::WRITE_PAYLOAD_AT + len_bytes as usize);
        }
    }
}
