//! Requests and replies, byte for byte, and what hostile bytes do.

#![cfg(feature = "nbd")]

use gaur_block::Errno;
use gaur_export::nbd::proto::reply::Asked;
use gaur_export::nbd::proto::{
    Command, Contexts, Event, ExportInfo, Exports, Handshake, Kind, Parser, Session, Step, Style,
    Violation, reply,
};

const SESSION: Session = Session {
    export: 0,
    size_bytes: 1 << 30,
    read_only: false,
    style: Style::Structured,
    contexts: Contexts::of(&[1]),
};

const ZEROES: Kind = Kind::WriteZeroes {
    may_unmap: true,
    fast: false,
};

const STATUS: Kind = Kind::BlockStatus {
    one: false,
    contexts: SESSION.contexts,
};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .bytes()
        .filter_map(|byte| (byte as char).to_digit(16))
        .map(|digit| digit as u8)
        .collect();
    digits
        .chunks_exact(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}

/// magic, flags, type, cookie 0x1122334455667788, offset, length
fn request(flags: u16, kind: u16, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = hex("25609513");
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(hex("1122334455667788"));
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

fn event(session: Session, flags: u16, kind: u16, offset: u64, len: u32) -> Event {
    let bytes = request(flags, kind, offset, len);
    let (used, event) = Parser::new(session).feed(&bytes);
    assert_eq!(used, 28);
    event
}

fn errno(event: Event) -> Errno {
    match event {
        Event::Refuse(refusal) => {
            assert_eq!(refusal.cookie, 0x1122_3344_5566_7788);
            refusal.errno
        }
        event => panic!("{event:?}"),
    }
}

fn accepted(kind: Kind, offset_bytes: u64, len_bytes: u64, fua: bool) -> Event {
    let cookie = 0x1122_3344_5566_7788;
    Event::Request(Command {
        cookie,
        kind,
        offset_bytes,
        len_bytes,
        fua,
    })
}

#[test]
fn every_command_is_understood() {
    let is = |flags, kind, expected| {
        let event = event(SESSION, flags, kind, 0x1000, 0x200);
        assert_eq!(event, accepted(expected, 0x1000, 0x200, flags & 1 != 0));
    };
    is(
        0,
        0,
        Kind::Read {
            unfragmented: false,
        },
    );
    is(4, 0, Kind::Read { unfragmented: true });
    is(0, 1, Kind::Write);
    is(1, 1, Kind::Write);
    is(0, 4, Kind::Trim);
    is(1, 4, Kind::Trim);
    is(0, 5, Kind::Cache);
    is(0, 6, ZEROES);
    let zeroes = |may_unmap, fast| Kind::WriteZeroes { may_unmap, fast };
    is(3, 6, zeroes(false, false));
    is(16, 6, zeroes(true, true));
    is(19, 6, zeroes(false, true));
    is(0, 7, STATUS);
    let one = Kind::BlockStatus {
        one: true,
        contexts: SESSION.contexts,
    };
    is(8, 7, one);
    // Offset and length of a flush mean nothing; the offset comes back in some replies.
    assert_eq!(
        event(SESSION, 0, 3, u64::MAX, 7),
        accepted(Kind::Flush, u64::MAX, 0, false)
    );
    assert_eq!(event(SESSION, 0, 2, 0, 0), Event::Disconnect);
}

#[test]
fn errors_are_the_protocols() {
    let size = SESSION.size_bytes;
    let read_only = Session {
        read_only: true,
        ..SESSION
    };
    for kind in [1, 4, 6] {
        assert_eq!(
            errno(event(read_only, 0, kind, 0, 512)),
            Errno::EPERM,
            "type {kind}"
        );
    }
    for kind in [1, 6] {
        assert_eq!(
            errno(event(SESSION, 0, kind, size - 1, 2)),
            Errno::ENOSPC,
            "type {kind}"
        );
        assert_eq!(
            errno(event(SESSION, 0, kind, u64::MAX, 2)),
            Errno::ENOSPC,
            "type {kind}"
        );
    }
    for kind in [0, 4, 5, 7] {
        assert_eq!(
            errno(event(SESSION, 0, kind, size - 1, 2)),
            Errno::EINVAL,
            "type {kind}"
        );
        assert_eq!(
            errno(event(SESSION, 0, kind, u64::MAX, 2)),
            Errno::EINVAL,
            "type {kind}"
        );
    }
    let too_long = (32 << 20) + 1;
    assert_eq!(errno(event(SESSION, 0, 0, 0, too_long)), Errno::EINVAL);
    assert_eq!(errno(event(SESSION, 4, 0, 0, too_long)), Errno::EOVERFLOW);
    assert_eq!(errno(event(SESSION, 0, 7, 0, 0)), Errno::EINVAL);
    assert_eq!(errno(event(SESSION, 0, 99, 0, 0)), Errno::EINVAL);
    let plain = Session {
        style: Style::Simple,
        contexts: Contexts::default(),
        ..SESSION
    };
    assert_eq!(errno(event(plain, 0, 7, 0, 512)), Errno::EINVAL);
    assert_eq!(
        errno(event(plain, 4, 0, 0, 512)),
        Errno::EINVAL,
        "DF without structured replies"
    );
    for (flags, kind) in [(2, 0), (8, 0), (2, 1), (4, 1), (16, 1), (0x8000, 3), (4, 7)] {
        assert_eq!(
            errno(event(SESSION, flags, kind, 0, 512)),
            Errno::EINVAL,
            "{flags} {kind}"
        );
    }
}

#[test]
fn ranges_beyond_the_payload_limit_are_fine_where_no_payload_travels() {
    let big = 1 << 29;
    for kind in [4, 5, 6, 7] {
        assert!(
            matches!(event(SESSION, 0, kind, 0, big), Event::Request(_)),
            "type {kind}"
        );
    }
}

#[test]
fn the_payload_of_a_refused_write_is_skipped() {
    let session = Session {
        read_only: true,
        ..SESSION
    };
    let mut bytes = request(0, 1, 0, 5);
    bytes.extend(b"12345");
    bytes.extend(request(0, 2, 0, 0));
    for cut in 0..bytes.len() {
        let mut parser = Parser::new(session);
        let (mut events, mut used) = (Vec::new(), 0);
        for seen in [cut, bytes.len()] {
            loop {
                let (more, event) = parser.feed(&bytes[used..seen]);
                used += more;
                if event == Event::Need {
                    break;
                }
                events.push(event);
            }
        }
        assert_eq!(events.len(), 2, "cut at {cut}");
        assert_eq!(errno(events[0].clone()), Errno::EPERM);
        assert_eq!(events[1], Event::Disconnect);
        assert_eq!(used, bytes.len());
    }
}

#[test]
fn a_payload_belongs_to_the_caller() {
    let mut parser = Parser::new(SESSION);
    let (_, event) = parser.feed(&request(1, 1, 512, 600));
    assert_eq!(event, accepted(Kind::Write, 512, 600, true));
    assert_eq!(parser.payload_left(), 600);
    // What looks like a request is payload.
    assert_eq!(parser.feed(&request(0, 2, 0, 0)), (0, Event::Need));
    parser.take_payload(599);
    assert_eq!(parser.feed(&request(0, 2, 0, 0)), (0, Event::Need));
    parser.take_payload(1);
    assert_eq!(parser.feed(&request(0, 2, 0, 0)), (28, Event::Disconnect));
    assert_eq!(
        parser.feed(&request(0, 0, 0, 0)),
        (0, Event::Need),
        "nothing comes after goodbye"
    );
}

#[test]
fn protocol_violations_end_the_connection() {
    let (_, event) = Parser::new(SESSION).feed(&hex("25609514"));
    assert_eq!(
        event,
        Event::Violation(Violation::RequestMagic(0x2560_9514))
    );
    assert_eq!(Parser::new(SESSION).feed(&hex("256095")), (0, Event::Need));
    let (_, event) = Parser::new(SESSION).feed(&request(0, 1, 0, (32 << 20) + 1));
    assert_eq!(
        event,
        Event::Violation(Violation::PayloadLength((32 << 20) + 1))
    );
}

#[test]
fn replies_are_as_the_protocol_writes_them() {
    let asked = |style| Asked {
        style,
        cookie: 0x0102_0304_0506_0708,
        offset_bytes: 0x1800,
    };
    let (simple, structured) = (asked(Style::Simple), asked(Style::Structured));
    let success = hex("67446698 00000000 0102030405060708");
    assert_eq!(*reply::success(&simple), *success);
    assert_eq!(*reply::success(&structured), *success);
    assert_eq!(*reply::read(&simple, 0x1000), *success);
    assert_eq!(
        *reply::read(&structured, 0),
        *hex("668e33ef 0001 0000 0102030405060708 00000000")
    );
    assert_eq!(
        *reply::read(&structured, 0x1000),
        *hex("668e33ef 0001 0001 0102030405060708 00001008 0000000000001800")
    );
    assert_eq!(
        *reply::data(&structured, 0x2000, 0x1000, false),
        *hex("668e33ef 0000 0001 0102030405060708 00001008 0000000000002000")
    );
    assert_eq!(
        *reply::hole(&structured, 0x2000, 0x1000, false),
        *hex("668e33ef 0000 0002 0102030405060708 0000000c 0000000000002000 00001000")
    );
    let mut status = reply::status(&structured, 1, 2, true).to_vec();
    status.extend(&*reply::extent(
        &structured,
        0x10000,
        reply::state(true, false),
    ));
    status.extend(&*reply::extent(
        &structured,
        0x20000,
        reply::state(false, true),
    ));
    assert_eq!(
        status,
        hex("668e33ef 0001 0005 0102030405060708 00000014 00000001
             00010000 00000000 00020000 00000003")
    );
    let mut error = Vec::new();
    reply::error(&mut error, &structured, Errno::EROFS, "no");
    assert_eq!(
        error,
        hex("668e33ef 0001 8001 0102030405060708 00000008 00000001 0002 6e6f")
    );
    error.clear();
    reply::error(&mut error, &simple, Errno::EBUSY, "no");
    assert_eq!(error, hex("67446698 00000005 0102030405060708"));
}

#[test]
fn extended_replies_repeat_the_offset_and_have_long_lengths() {
    let style = Style::Extended;
    let asked = Asked {
        style,
        cookie: 0x0102_0304_0506_0708,
        offset_bytes: 0x1800,
    };
    let header = |flags_and_kind: &str, len: u64| {
        let mut bytes = hex(&format!(
            "6e8a278c {flags_and_kind} 0102030405060708 0000000000001800"
        ));
        bytes.extend(len.to_be_bytes());
        bytes
    };
    let with = |mut bytes: Vec<u8>, more: &str| {
        bytes.extend(hex(more));
        bytes
    };
    assert_eq!(*reply::success(&asked), *header("0001 0000", 0));
    assert_eq!(*reply::read(&asked, 0), *header("0001 0000", 0));
    assert_eq!(
        *reply::read(&asked, 0x1000),
        *with(header("0001 0001", 0x1008), "0000000000001800")
    );
    assert_eq!(
        *reply::hole(&asked, 0x2000, 0x1000, false),
        *with(header("0000 0002", 12), "0000000000002000 00001000")
    );
    assert_eq!(
        *reply::status(&asked, 1, 3, true),
        *with(header("0001 0006", 56), "00000001 00000003")
    );
    assert_eq!(
        *reply::extent(&asked, 1 << 40, reply::state(false, true)),
        *hex("0000010000000000 0000000000000003")
    );
    let mut error = Vec::new();
    reply::error(&mut error, &asked, Errno::EIO, "no");
    assert_eq!(error, with(header("0001 8001", 8), "00000005 0002 6e6f"));
}

const EXTENDED: Session = Session {
    style: Style::Extended,
    size_bytes: 1 << 45,
    ..SESSION
};

fn extended_request(flags: u16, kind: u16, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = request(flags, kind, offset, 0);
    bytes[..4].copy_from_slice(&hex("21e41c71"));
    bytes.truncate(24);
    bytes.extend(len.to_be_bytes());
    bytes
}

#[test]
fn extended_requests_have_long_lengths() {
    let feed = |flags, kind, offset, len| {
        let bytes = extended_request(flags, kind, offset, len);
        let mut parser = Parser::new(EXTENDED);
        assert_eq!(parser.feed(&bytes[..31]), (0, Event::Need));
        let (used, event) = parser.feed(&bytes);
        assert_eq!(used, 32);
        (event, parser)
    };
    let long = 1 << 44;
    for (kind, expected) in [(4, Kind::Trim), (5, Kind::Cache), (6, ZEROES), (7, STATUS)] {
        assert_eq!(
            feed(0, kind, 512, long).0,
            accepted(expected, 512, long, false)
        );
    }
    assert_eq!(
        errno(feed(0, 0, 0, long).0),
        Errno::EINVAL,
        "a read has a limit"
    );
    assert_eq!(errno(feed(0, 7, 512, u64::MAX).0), Errno::EINVAL);
    // A write has a payload with and without the flag that says so.
    for flags in [0, 1 << 5] {
        let (event, parser) = feed(flags, 1, 512, 600);
        assert_eq!(event, accepted(Kind::Write, 512, 600, false));
        assert_eq!(parser.payload_left(), 600);
    }
    // Elsewhere a payload is refused and skipped.
    let mut bytes = extended_request(1 << 5, 7, 0, 5);
    bytes.extend(b"12345");
    bytes.extend(extended_request(0, 2, 0, 0));
    let mut parser = Parser::new(EXTENDED);
    let (used, event) = parser.feed(&bytes);
    assert_eq!((used, errno(event)), (32 + 5, Errno::EINVAL));
    assert_eq!(parser.feed(&bytes[used..]), (32, Event::Disconnect));
    // A payload beyond the limit ends the connection, a compact request too.
    let (event, _) = feed(1 << 5, 1, 0, 1 << 40);
    assert_eq!(event, Event::Violation(Violation::PayloadLength(1 << 40)));
    let (_, event) = Parser::new(EXTENDED).feed(&request(0, 0, 0, 1));
    assert_eq!(
        event,
        Event::Violation(Violation::RequestMagic(0x2560_9513))
    );
}

#[test]
fn errors_without_a_number_in_the_protocol_get_one() {
    for (errno, number) in [
        (Errno::EPERM, 1),
        (Errno::EROFS, 1),
        (Errno::EIO, 5),
        (Errno::ENOENT, 5),
        (Errno::ENOMEM, 12),
        (Errno::EINVAL, 22),
        (Errno::ENOSPC, 28),
        (Errno::EFBIG, 28),
        (Errno::EOVERFLOW, 75),
        (Errno::EOPNOTSUPP, 95),
        (Errno::ESHUTDOWN, 108),
    ] {
        assert_eq!(reply::error_number(errno), number, "{errno:?}");
    }
}

struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 8) % limit
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 32) as u8).collect()
    }
}

/// Requests with some fields right and some by chance, and payloads that look like requests.
fn hostile_stream(chance: &mut Chance, style: Style) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..chance.below(20) {
        let kind = if chance.below(8) == 0 {
            chance.next() as u16
        } else {
            chance.below(8) as u16
        };
        let flags = if chance.below(3) == 0 {
            chance.next() as u16
        } else {
            chance.below(16) as u16
        };
        let offset = match chance.below(4) {
            0 => chance.next(),
            1 => (1 << 30) - chance.below(1000),
            _ => chance.below(1 << 30),
        };
        let len = if chance.below(8) == 0 {
            chance.next() as u32
        } else {
            chance.below(3000) as u32
        };
        if style == Style::Extended {
            let flags = if chance.below(4) == 0 {
                flags | 1 << 5
            } else {
                flags
            };
            bytes.extend(extended_request(flags, kind, offset, u64::from(len)));
        } else {
            bytes.extend(request(flags, kind, offset, len));
        }
        if kind == 1 {
            bytes.extend(chance.bytes(len.min(5000) as usize));
        }
        if chance.below(12) == 0 {
            let junk = chance.below(40) as usize;
            bytes.extend(chance.bytes(junk));
        }
    }
    bytes
}

fn events(session: Session, bytes: &[u8], mut cut: impl FnMut() -> usize) -> (Vec<Event>, usize) {
    let mut parser = Parser::new(session);
    let (mut events, mut used, mut seen) = (Vec::new(), 0, 0);
    loop {
        let taken = parser.payload_left().min(seen - used);
        parser.take_payload(taken);
        used += taken;
        let (more, event) = parser.feed(&bytes[used..seen]);
        used += more;
        if event != Event::Need {
            if let Event::Request(command) = &event {
                let end = command.offset_bytes.saturating_add(command.len_bytes);
                let inside = command.kind == Kind::Flush || end <= session.size_bytes;
                assert!(inside, "requests lie inside the export");
            }
            events.push(event);
        } else if seen == bytes.len() {
            return (events, used);
        } else {
            seen = (seen + cut()).min(bytes.len());
        }
    }
}

#[test]
fn hostile_requests_never_panic_and_chunking_does_not_matter() {
    let mut chance = Chance(0x5eed_0001);
    for _ in 0..2000 {
        let session = Session {
            read_only: chance.below(4) == 0,
            style: [Style::Simple, Style::Structured, Style::Extended][chance.below(3) as usize],
            contexts: (1..5).filter(|_| chance.below(2) == 0).collect(),
            ..SESSION
        };
        let bytes = hostile_stream(&mut chance, session.style);
        let whole = events(session, &bytes, || usize::MAX >> 1);
        assert_eq!(events(session, &bytes, || 1), whole);
        let pieces = events(session, &bytes, || 1 + chance.below(200) as usize);
        assert_eq!(pieces, whole);
    }
}

struct One;

impl Exports for One {
    fn list(&self, show: &mut dyn FnMut(&str, &str)) {
        show("disk", "");
    }
    fn find(&self, name: &[u8]) -> Option<usize> {
        matches!(name, b"disk" | b"").then_some(0)
    }
    fn names(&self, _: usize) -> (String, String) {
        ("disk".to_owned(), String::new())
    }
    fn info(&self, _: usize) -> Result<ExportInfo, String> {
        Ok(ExportInfo {
            size_bytes: 4096,
            read_only: false,
            multi_conn: false,
            preferred_block: 0,
        })
    }
}

/// Options with some fields right and some by chance.
#[test]
fn hostile_handshakes_never_panic_and_stay_bounded() {
    let mut chance = Chance(0x5eed_0002);
    for _ in 0..5000 {
        let mut bytes = hex("00000003");
        for _ in 0..chance.below(6) {
            let option = chance.below(13) as u32;
            let data = match chance.below(4) {
                0 => b"\0\0\0\x04disk\0\x01\0\x03".to_vec(),
                1 => b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation".to_vec(),
                _ => {
                    let len = chance.below(64) as usize;
                    chance.bytes(len)
                }
            };
            let lie = if chance.below(8) == 0 {
                chance.next() as u32
            } else {
                data.len() as u32
            };
            bytes.extend(b"IHAVEOPT");
            bytes.extend(option.to_be_bytes());
            bytes.extend(lie.to_be_bytes());
            bytes.extend(data);
        }
        let mut handshake = Handshake::new();
        let (mut out, mut used) = (Vec::new(), 0);
        for _ in 0..20 {
            let before = out.len();
            let (more, step) = handshake.feed(&bytes[used..], &One, &mut out);
            assert!(out.len() - before < 4096, "one option has a short answer");
            used += more;
            if !matches!(step, Step::Again) {
                break;
            }
        }
    }
}

/// A request for block status with a payload: the range's length, and contexts.
fn narrowed(len: u64, ids: &[u32]) -> Vec<u8> {
    let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_be_bytes()).collect();
    let payload_len = 8 + ids.len() as u64;
    let mut bytes = extended_request(32, 7, 512, payload_len);
    bytes.extend(len.to_be_bytes());
    bytes.extend(ids);
    bytes
}

#[test]
fn block_status_may_name_some_of_the_chosen_contexts() {
    let session = Session {
        contexts: Contexts::of(&[1, 3, 5]),
        ..EXTENDED
    };
    let feed = |bytes: &[u8]| Parser::new(session).feed(bytes);
    let bytes = narrowed(1 << 40, &[5, 1]);
    for len in 0..bytes.len() {
        assert_eq!(feed(&bytes[..len]), (0, Event::Need), "{len}");
    }
    let kind = Kind::BlockStatus {
        one: false,
        contexts: Contexts::of(&[1, 5]),
    };
    let expected = accepted(kind, 512, 1 << 40, false);
    assert_eq!(feed(&bytes), (bytes.len(), expected));
    for wrong in [
        narrowed(4096, &[]),
        narrowed(4096, &[2]),
        narrowed(4096, &[1, 1]),
        narrowed(4096, &[1, 128]),
        narrowed(0, &[1]),
        narrowed(1 << 50, &[1]),
        // No whole number of contexts, and no length.
        extended_request(32, 7, 512, 11),
        extended_request(32, 7, 512, 4),
    ] {
        let wrong = [wrong, vec![0; 16]].concat();
        let (_, event) = feed(&wrong);
        assert_eq!(errno(event), Errno::EINVAL);
    }
    // Too long to be looked at: skipped, and the next request is found behind it.
    let mut long = extended_request(32, 7, 512, 8192);
    long.extend([0; 8192]);
    long.extend(extended_request(0, 3, 0, 0));
    let mut parser = Parser::new(session);
    let (used, event) = parser.feed(&long);
    assert_eq!(errno(event), Errno::EINVAL);
    let (_, event) = parser.feed(&long[used..]);
    assert_eq!(event, accepted(Kind::Flush, 0, 0, false));
}
