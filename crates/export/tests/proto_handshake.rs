//! The handshake, byte for byte. The bytes are written out from the protocol document, not taken
//! from the encoder, so both sides of a mistake would have to agree to go unseen.

#![cfg(feature = "nbd")]

use gaur_export::nbd::proto::{
    Contexts, ExportInfo, Exports, Handshake, Session, Step, Style, Violation,
};

struct Shelf;

impl Exports for Shelf {
    fn list(&self, show: &mut dyn FnMut(&str, &str)) {
        show("disk", "a disk");
        show("cd", "");
        show("gone", "");
    }
    fn find(&self, name: &[u8]) -> Option<usize> {
        match name {
            b"disk" | b"" => Some(0),
            b"cd" => Some(1),
            b"gone" => Some(2),
            _ => None,
        }
    }
    fn names(&self, export: usize) -> (String, String) {
        let names = [("disk", "a disk"), ("cd", ""), ("gone", "")][export];
        (names.0.to_owned(), names.1.to_owned())
    }
    fn info(&self, export: usize) -> Result<ExportInfo, String> {
        let size_bytes = [0x1_0000_0000, 0x2800, 0][export];
        if size_bytes == 0 {
            return Err("the image is gone".to_owned());
        }
        let read_only = export == 1;
        Ok(ExportInfo {
            size_bytes,
            read_only,
            multi_conn: read_only,
            preferred_block: 65536,
        })
    }
}

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

/// `IHAVEOPT`, option, length, data.
fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = hex("0003e889045565a9");
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// Feeds everything, returns what was sent, the last step and how much was used.
fn run(input: &[u8]) -> (Vec<u8>, Step, usize) {
    let mut handshake = Handshake::new();
    let mut out = Vec::new();
    let mut used = 0;
    loop {
        let (more, step) = handshake.feed(&input[used..], &Shelf, &mut out);
        used += more;
        if step != Step::Again {
            return (out, step, used);
        }
    }
}

/// Flags of a client that knows fixed newstyle and no zeroes, then options.
fn talk(options: &[Vec<u8>]) -> (Vec<u8>, Step) {
    let mut input = hex("00000003");
    input.extend(options.concat());
    let (out, step, used) = run(&input);
    assert_eq!(used, input.len(), "everything was used");
    (out, step)
}

fn session(export: usize, size_bytes: u64) -> Session {
    Session {
        export,
        size_bytes,
        read_only: export == 1,
        style: Style::Simple,
        contexts: Contexts::default(),
    }
}

#[test]
fn greeting_offers_fixed_newstyle_without_zeroes() {
    let expected = hex("4e42444d41474943 49484156454f5054 0003");
    assert_eq!(Handshake::greeting().as_slice(), expected);
}

#[test]
fn export_name_answers_size_and_flags() {
    let (out, step) = talk(&[option(1, b"disk")]);
    // HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, CACHE, FAST_ZERO
    assert_eq!(out, hex("0000000100000000 0c6d"));
    assert_eq!(step, Step::Transmit(session(0, 0x1_0000_0000)));
}

#[test]
fn export_name_sends_the_zeroes_an_old_client_expects() {
    let mut input = hex("00000000");
    input.extend(option(1, b"cd"));
    let (out, step, _) = run(&input);
    // HAS_FLAGS, READ_ONLY, FLUSH, FUA, MULTI_CONN, CACHE
    let mut expected = hex("0000000000002800 050f");
    expected.extend([0; 124]);
    assert_eq!(out, expected);
    assert_eq!(step, Step::Transmit(session(1, 0x2800)));
}

#[test]
fn export_name_has_no_way_to_fail_but_to_hang_up() {
    let (out, step) = talk(&[option(1, b"nothing")]);
    assert!(out.is_empty());
    assert_eq!(
        step,
        Step::Violation(Violation::UnknownExport("nothing".to_owned()))
    );
    let (_, step) = talk(&[option(1, b"gone")]);
    assert_eq!(
        step,
        Step::Violation(Violation::ExportUnavailable("the image is gone".to_owned()))
    );
}

#[test]
fn abort_is_acknowledged() {
    let (out, step) = talk(&[option(2, b"")]);
    assert_eq!(out, reply(2, 1, b""));
    assert_eq!(step, Step::Abort);
}

#[test]
fn list_names_every_export() {
    let (out, step) = talk(&[option(3, b"")]);
    let mut expected = reply(3, 2, b"\0\0\0\x04diska disk");
    expected.extend(reply(3, 2, b"\0\0\0\x02cd"));
    expected.extend(reply(3, 2, b"\0\0\0\x04gone"));
    expected.extend(reply(3, 1, b""));
    assert_eq!(out, expected);
    assert_eq!(step, Step::Need);
    let (out, _) = talk(&[option(3, b"x")]);
    assert_eq!(out[12..16], hex("80000003"));
}

#[test]
fn go_answers_what_was_asked_and_begins() {
    // The name, and two items: name, block size.
    let (out, step) = talk(&[option(7, b"\0\0\0\x04disk\0\x02\0\x01\0\x03")]);
    let mut expected = reply(7, 3, b"\0\x01disk");
    expected.extend(reply(7, 3, &hex("0003 00000001 00010000 02000000")));
    expected.extend(reply(7, 3, &hex("0000 0000000100000000 0c6d")));
    expected.extend(reply(7, 1, b""));
    assert_eq!(out, expected);
    assert_eq!(step, Step::Transmit(session(0, 0x1_0000_0000)));
}

#[test]
fn info_describes_and_goes_on() {
    let (out, step) = talk(&[option(6, b"\0\0\0\0\0\x01\0\x02")]);
    let mut expected = reply(6, 3, b"\0\x02a disk");
    expected.extend(reply(6, 3, &hex("0000 0000000100000000 0c6d")));
    expected.extend(reply(6, 1, b""));
    assert_eq!(out, expected, "the empty name is the default export");
    assert_eq!(step, Step::Need);
}

#[test]
fn go_refuses_unknown_unavailable_and_malformed() {
    let (out, step) = talk(&[option(7, b"\0\0\0\x02no\0\0")]);
    assert_eq!(out, reply(7, 0x8000_0006, b"no export of that name"));
    assert_eq!(step, Step::Need);
    let (out, _) = talk(&[option(7, b"\0\0\0\x04gone\0\0")]);
    assert_eq!(out, reply(7, 0x8000_0006, b"the image is gone"));
    for data in [
        &b""[..],
        b"\0\0\0\x04dis",
        b"\xff\xff\xff\xffdisk\0\0",
        b"\0\0\0\x04disk\0\x01\0",
    ] {
        let (out, step) = talk(&[option(7, data)]);
        assert_eq!(out[12..16], hex("80000003"), "{data:?}");
        assert_eq!(step, Step::Need);
    }
}

#[test]
fn unknown_options_are_unsupported_and_tls_is_against_the_policy() {
    let (out, step) = talk(&[option(5, b"")]);
    assert_eq!(out, reply(5, 0x8000_0002, b"TLS not configured"));
    assert_eq!(step, Step::Need);
    for number in [4, 12, 77, u32::MAX] {
        let (out, step) = talk(&[option(number, b"")]);
        assert_eq!(out[8..12], number.to_be_bytes());
        assert_eq!(out[12..16], hex("80000001"), "option {number}");
        assert_eq!(step, Step::Need);
    }
}

#[test]
fn structured_replies_are_agreed_on_once() {
    let go = option(7, b"\0\0\0\x04disk\0\0");
    let (out, step) = talk(&[option(8, b""), go]);
    let mut expected = reply(8, 1, b"");
    expected.extend(reply(7, 3, &hex("0000 0000000100000000 0ced"))); // and DF
    expected.extend(reply(7, 1, b""));
    assert_eq!(out, expected);
    assert_eq!(
        step,
        Step::Transmit(Session {
            style: Style::Structured,
            ..session(0, 0x1_0000_0000)
        })
    );
    let (out, _) = talk(&[option(8, b""), option(8, b"")]);
    assert_eq!(out[20 + 12..20 + 16], hex("80000003"));
    let (out, _) = talk(&[option(8, b"x")]);
    assert_eq!(out[12..16], hex("80000003"));
}

#[test]
fn extended_headers_include_structured_replies() {
    let go = option(7, b"\0\0\0\x04disk\0\0");
    for before in [vec![], vec![option(8, b"")]] {
        let mut options = before;
        options.extend([option(11, b""), option(10, ALLOCATION_OF_DISK), go.clone()]);
        let (out, step) = talk(&options);
        let acknowledged = out.windows(20).any(|window| window == reply(11, 1, b""));
        assert!(acknowledged);
        let contexts = Contexts::from_iter([1]);
        let style = Style::Extended;
        assert_eq!(
            step,
            Step::Transmit(Session {
                style,
                contexts,
                ..session(0, 1 << 32)
            })
        );
    }
    // Twice, with data, and structured replies when it is too late for them.
    for (second, error) in [
        (option(11, b""), "80000003"),
        (option(11, b"x"), "80000003"),
        (option(8, b""), "8000000a"),
    ] {
        let (out, _) = talk(&[option(11, b""), second]);
        assert_eq!(out[20 + 12..20 + 16], hex(error));
    }
}

const ALLOCATION_OF_DISK: &[u8] = b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation";

#[test]
fn a_metadata_context_is_chosen_for_one_export() {
    let go = |name: &[u8]| {
        option(
            7,
            &[&(name.len() as u32).to_be_bytes(), name, b"\0\0"].concat(),
        )
    };
    let allocation = |step| match step {
        Step::Transmit(session) => (session.export, session.contexts.contains(1)),
        step => panic!("{step:?}"),
    };
    let (out, step) = talk(&[option(8, b""), option(10, ALLOCATION_OF_DISK), go(b"disk")]);
    let expected = [
        reply(8, 1, b""),
        reply(10, 4, b"\0\0\0\x01base:allocation"),
        reply(10, 1, b""),
    ];
    assert_eq!(out[..expected.concat().len()], expected.concat());
    assert_eq!(allocation(step), (0, true));
    // Another export than the one it was chosen for.
    let (_, step) = talk(&[option(8, b""), option(10, ALLOCATION_OF_DISK), go(b"cd")]);
    assert_eq!(allocation(step), (1, false));
    // The default export by its empty name is the same export.
    let (_, step) = talk(&[option(8, b""), option(10, ALLOCATION_OF_DISK), go(b"")]);
    assert_eq!(allocation(step), (0, true));
    // A second choice replaces the first, even when it fails.
    for replaced in [
        &b"\0\0\0\x04disk\0\0\0\0"[..],
        b"\0\0\0\x02no\0\0\0\0",
        b"nonsense",
    ] {
        let options = [
            option(8, b""),
            option(10, ALLOCATION_OF_DISK),
            option(10, replaced),
            go(b"disk"),
        ];
        assert_eq!(allocation(talk(&options).1), (0, false), "{replaced:?}");
    }
}

#[test]
fn metadata_contexts_are_listed_by_wildcard() {
    let listed = b"\0\0\0\0base:allocation";
    for (queries, found) in [
        (&b"\0\0\0\0"[..], true),
        (b"\0\0\0\x01\0\0\0\x05base:", true),
        (b"\0\0\0\x01\0\0\0\x0fbase:allocation", true),
        (b"\0\0\0\x01\0\0\0\x06qemu:x", false),
        (b"\0\0\0\x02\0\0\0\x01x\0\0\0\x05base:", true),
        (b"\0\0\0\x01\0\0\0\0", false),
    ] {
        let (out, _) = talk(&[option(8, b""), option(9, &[b"\0\0\0\0", queries].concat())]);
        let mut expected = reply(8, 1, b"");
        if found {
            expected.extend(reply(9, 4, listed));
        }
        expected.extend(reply(9, 1, b""));
        assert_eq!(out, expected, "{queries:?}");
    }
    // To set, a wildcard chooses nothing.
    let (out, _) = talk(&[
        option(8, b""),
        option(10, b"\0\0\0\0\0\0\0\x01\0\0\0\x05base:"),
    ]);
    assert_eq!(out[20..], reply(10, 1, b""));
}

#[test]
fn metadata_contexts_need_structured_replies_and_sense() {
    let (out, _) = talk(&[option(10, ALLOCATION_OF_DISK)]);
    assert_eq!(out[12..16], hex("80000003"));
    for data in [
        &b"\0\0\0\0\xff\xff\xff\xff"[..],
        b"\0\0\0\0\0\0\0\x01\0\0\0\x09x",
        b"\0",
    ] {
        let (out, _) = talk(&[option(8, b""), option(9, data)]);
        assert_eq!(out[20 + 12..20 + 16], hex("80000003"), "{data:?}");
    }
    let (out, _) = talk(&[option(8, b""), option(9, b"\0\0\0\x02no\0\0\0\0")]);
    assert_eq!(out[20 + 12..20 + 16], hex("80000006"));
}

#[test]
fn strings_longer_than_the_protocol_allows_are_refused() {
    let mut data = 4097_u32.to_be_bytes().to_vec();
    data.extend([b'x'; 4097]);
    data.extend([0; 2]);
    let (out, _) = talk(&[option(7, &data)]);
    assert_eq!(out[12..16], hex("80000003"));
    let mut data = hex("00000000 00000001 00001001");
    data.extend([b'x'; 4097]);
    let (out, _) = talk(&[option(8, b""), option(9, &data)]);
    assert_eq!(out[20 + 12..20 + 16], hex("80000003"));
}

#[test]
fn an_oversized_option_is_skipped_and_the_next_one_is_answered() {
    let big = vec![7; 100_000];
    let (out, step) = talk(&[option(7, &big), option(2, b"")]);
    let mut expected = reply(7, 0x8000_0009, b"option is too long");
    expected.extend(reply(2, 1, b""));
    assert_eq!(out, expected);
    assert_eq!(step, Step::Abort);
}

#[test]
fn protocol_violations_end_the_connection() {
    let ends = |input: Vec<u8>| match run(&input).1 {
        Step::Violation(violation) => violation,
        step => panic!("{step:?}"),
    };
    assert_eq!(ends(hex("00000004")), Violation::ClientFlags(4));
    assert_eq!(
        ends(hex("00000003 4141414141414141")),
        Violation::OptionMagic(0x4141_4141_4141_4141)
    );
    assert_eq!(
        ends(hex("00000003 49484156454f5054 00000007 ffffffff")),
        Violation::OptionLength {
            option: 7,
            len_bytes: u32::MAX
        }
    );
    let mut plain = hex("00000000");
    plain.extend(option(7, b"\0\0\0\x04disk\0\0"));
    assert_eq!(ends(plain), Violation::NotFixedNewstyle(7));
    let mut endless = hex("00000003");
    endless.extend(option(3, b"x").repeat(1 << 17));
    assert_eq!(ends(endless), Violation::TooManyOptions);
}

/// However the bytes are cut up, the answers and the end are the same.
#[test]
fn chunking_of_the_handshake_does_not_matter() {
    let mut input = hex("00000003");
    input.extend(option(8, b""));
    input.extend(option(3, b""));
    input.extend(option(55, &[1; 70_000]));
    input.extend(option(10, ALLOCATION_OF_DISK));
    input.extend(option(7, b"\0\0\0\x04disk\0\x01\0\x03"));
    input.extend(b"the next bytes are requests");
    let whole = run(&input);
    assert!(matches!(whole.1, Step::Transmit(_)));
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..50 {
        let mut handshake = Handshake::new();
        let (mut out, mut used, mut seen) = (Vec::new(), 0, 0);
        let end = loop {
            let (more, step) = handshake.feed(&input[used..seen], &Shelf, &mut out);
            used += more;
            match step {
                Step::Again => {}
                Step::Need => {
                    assert!(seen < input.len(), "it ends");
                    assert!(
                        seen - used < Handshake::BUFFER_BYTES,
                        "the buffer bound holds"
                    );
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    let piece = if round == 0 {
                        1
                    } else {
                        1 + (seed % (1 << (round % 16))) as usize
                    };
                    seen = (seen + piece).min(input.len());
                }
                step => break step,
            }
        };
        assert_eq!((out, end, used), whole);
    }
}

/// Feeds options to a server that wants TLS first; what it said, and the last step.
fn talk_before_tls(options: &[Vec<u8>]) -> (Vec<u8>, Step) {
    let input = [hex("00000003"), options.concat()].concat();
    let (mut handshake, mut out, mut used) = (Handshake::with_tls(), Vec::new(), 0);
    loop {
        let (more, step) = handshake.feed(&input[used..], &Shelf, &mut out);
        used += more;
        if step != Step::Again {
            return (out, step);
        }
    }
}

#[test]
fn nothing_is_talked_about_before_tls() {
    for number in [3, 6, 7, 8, 9, 10, 11, 77] {
        let (out, step) = talk_before_tls(&[option(number, b"")]);
        assert_eq!(out[8..12], u32::to_be_bytes(number));
        assert_eq!(out[12..16], hex("80000005"), "option {number}");
        assert_eq!(step, Step::Need);
        assert!(!out.windows(4).any(|word| word == b"disk"));
    }
    let (out, step) = talk_before_tls(&[option(1, b"disk")]);
    assert_eq!((out, step), (Vec::new(), Step::Violation(Violation::NoTls)));
    let (out, step) = talk_before_tls(&[option(2, b"")]);
    assert_eq!((out, step), (reply(2, 1, b""), Step::Abort));
    let (out, step) = talk_before_tls(&[option(5, b"x")]);
    assert_eq!((&out[12..16], step), (&*hex("80000003"), Step::Need));
    let (out, step) = talk_before_tls(&[option(5, b"")]);
    assert_eq!((out, step), (reply(5, 1, b""), Step::StartTls));
}

#[test]
fn after_the_switch_to_tls_all_options_are_there_but_the_switch() {
    let (mut handshake, mut out) = (Handshake::with_tls(), Vec::new());
    let flags = hex("00000003");
    assert_eq!(handshake.feed(&flags, &Shelf, &mut out), (4, Step::Again));
    let switch = option(5, b"");
    assert_eq!(handshake.feed(&switch, &Shelf, &mut out).1, Step::StartTls);
    out.clear();
    assert_eq!(handshake.feed(&switch, &Shelf, &mut out).1, Step::Again);
    assert_eq!(out[12..16], hex("80000003"));
    let go = option(7, b"\0\0\0\x04disk\0\0");
    let step = handshake.feed(&go, &Shelf, &mut out).1;
    assert_eq!(step, Step::Transmit(session(0, 0x1_0000_0000)));
}
