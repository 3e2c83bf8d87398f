//! A snapshot as the disk: alone, and below an overlay.

use gaur_block::{Device, Errno, Payload, Request, Source, Target};

use super::tests::*;
use super::*;
use crate::references::References;
use crate::test_file::{TestFile, TestHost, block_on};
use gaur_format::HostOffset;
use gaur_format::header::Header;
use gaur_format::snapshot::{self, Snapshot};

/// Guest bytes behind one L2 table: 64 entries of 512 bytes.
const TABLE_SPAN: u64 = 32 << 10;

/// An image of 64 KiB whose disk of today has 0x11 at 0. Snapshot "monday" (id 1) keeps a disk of 40 KiB
/// with 0x22 at 0 and 0x33 at 32 KiB, and a table of machine state behind it.
fn image(change: impl Fn(&mut Snapshot)) -> Vec<u8> {
    let cluster = |number: usize| (number * CLUSTER) as u64;
    let header = Header {
        nb_snapshots: 1,
        snapshots_offset: HostOffset(cluster(4)),
        ..header()
    };
    let mut bytes = bytes_of(&header);
    bytes.resize(14 * CLUSTER, 0);
    let mut snapshot = Snapshot {
        l1_table_offset: HostOffset(cluster(5)),
        l1_size: 3,
        id: b"1".to_vec(),
        name: b"monday".to_vec(),
        date_sec: 0,
        date_nsec: 0,
        vm_clock_nsec: 0,
        vm_state_size: 512,
        disk_size: Some(40 << 10),
        icount: None,
        unknown_extra: Vec::new(),
    };
    change(&mut snapshot);
    let table = snapshot::encode_table(&[snapshot]);
    bytes[4 * CLUSTER..][..table.len()].copy_from_slice(&table);
    // The disk of today, then the snapshot's two tables and its state's.
    for (entry, at) in [
        (6, 3 * CLUSTER),
        (8, 5 * CLUSTER),
        (10, 5 * CLUSTER + 8),
        (12, 5 * CLUSTER + 16),
    ] {
        put(&mut bytes, at, cluster(entry));
        put(&mut bytes, entry * CLUSTER, cluster(entry + 1));
    }
    for (cluster, byte) in [(7, 0x11), (9, 0x22), (11, 0x33), (13, 0x44)] {
        bytes[cluster * CLUSTER..][..CLUSTER].fill(byte);
    }
    bytes
}

fn showing(which: &str) -> OpenOptions {
    OpenOptions {
        snapshot: Some(which.to_owned()),
        ..read_only()
    }
}

fn read(opened: &Opened<TestFile>, offset_bytes: u64) -> Result<u8, Errno> {
    let queue = opened.image.queue(opened.files.clone());
    let mut bytes = [0xee; CLUSTER];
    let payload = Payload::Read(Target::memory(&mut bytes));
    block_on(queue.submit(Request::Read { offset_bytes }, payload))?;
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    Ok(bytes[0])
}

#[test]
fn a_snapshot_is_the_disk_as_it_was_by_name_and_by_id() {
    let host = host(&[("top", image(|_| {}))]);
    let today = open_in(&host, "top", &read_only()).unwrap();
    assert_eq!(
        (today.image.size_bytes(), read(&today, 0)),
        (SIZE, Ok(0x11))
    );
    for which in ["monday", "1"] {
        let opened = open_in(&host, "top", &showing(which)).unwrap();
        assert_eq!(opened.image.size_bytes(), 40 << 10);
        assert_eq!(read(&opened, 0), Ok(0x22));
        assert_eq!(read(&opened, 512), Ok(0));
        assert_eq!(read(&opened, TABLE_SPAN), Ok(0x33));
        // The state behind the disk is no part of it.
        assert_eq!(read(&opened, 40 << 10), Err(Errno::EINVAL));
        assert!(opened.image.is_read_only());
    }
}

#[test]
fn a_snapshot_without_a_size_has_the_current_disk_size() {
    let host = host(&[(
        "top",
        image(|snapshot| (snapshot.disk_size, snapshot.l1_size) = (None, 1)),
    )]);
    let opened = open_in(&host, "top", &showing("monday")).unwrap();
    assert_eq!(opened.image.size_bytes(), SIZE);
    assert_eq!(read(&opened, 0), Ok(0x22));
    assert_eq!(read(&opened, TABLE_SPAN), Ok(0));
}

#[test]
fn a_snapshot_has_the_backing_file_of_its_image() {
    let mut top = image(|_| {});
    let over = bytes_of(&Header {
        nb_snapshots: 1,
        snapshots_offset: HostOffset(4 * CLUSTER as u64),
        ..over("base")
    });
    top[..CLUSTER].copy_from_slice(&over[..CLUSTER]);
    let host = host(&[("top", top), ("base", vec![0x55; SIZE as usize])]);
    let opened = open_in(&host, "top", &showing("monday")).unwrap();
    assert_eq!(read(&opened, 0), Ok(0x22));
    assert_eq!(read(&opened, 512), Ok(0x55));
}

#[test]
fn an_overlay_over_a_snapshot_is_written_to_and_the_image_is_not() {
    let mut over = bytes_of(&over("image"));
    over.resize(1 << 16, 0);
    let host = host(&[("over", over), ("image", image(|_| {}))]);
    let options = OpenOptions {
        backing_snapshot: Some("monday".to_owned()),
        ..OpenOptions::new(References::Any)
    };
    let opened = open_in(&host, "over", &options).unwrap();
    assert_eq!(
        (opened.image.size_bytes(), read(&opened, 0)),
        (SIZE, Ok(0x22))
    );
    let queue = opened.image.queue(opened.files.clone());
    let request = Request::Write {
        offset_bytes: 0,
        fua: false,
    };
    let payload = Payload::Write(Source::memory(&[0x66; CLUSTER]));
    block_on(queue.submit(request, payload)).unwrap();
    assert_eq!(read(&opened, 0), Ok(0x66));
    assert_eq!(read(&opened, TABLE_SPAN), Ok(0x33));
    // Beyond the end of the snapshot's disk there is nothing, whatever the image has today.
    assert_eq!(read(&opened, 40 << 10), Ok(0));
    let today = open_in(&host, "image", &read_only()).unwrap();
    assert_eq!(read(&today, 0), Ok(0x11));
}

fn refused(host: &TestHost, name: &str, options: &OpenOptions, words: &[&str]) -> ErrorKind {
    let (kind, line) = failure(host, name, options);
    for word in words {
        assert!(line.contains(word), "'{word}' in {line}");
    }
    kind
}

#[test]
fn a_snapshot_that_cannot_be_shown_is_told_why() {
    let host = host(&[
        ("top", image(|_| {})),
        ("plain", bytes_of(&header())),
        ("over", bytes_of(&over("plain"))),
        ("raw", vec![0; 4096]),
        ("short", image(|snapshot| snapshot.l1_size = 1)),
        (
            "huge",
            image(|snapshot| snapshot.disk_size = Some(u64::MAX)),
        ),
        (
            "far",
            image(|snapshot| snapshot.l1_table_offset = HostOffset(1 << 30)),
        ),
    ]);
    let words = ["top: ", "\"tuesday\"", "the image has \"monday\""];
    let kind = refused(&host, "top", &showing("tuesday"), &words);
    assert_eq!(kind, ErrorKind::NotFound);
    let words = ["plain: ", "the image has none"];
    let kind = refused(&host, "plain", &showing("monday"), &words);
    assert_eq!(kind, ErrorKind::NotFound);
    let kind = refused(&host, "raw", &showing("monday"), &["raw: a raw image"]);
    assert_eq!(kind, ErrorKind::InvalidInput);
    for (name, word) in [
        ("short", "has 1 entries"),
        ("huge", "its disk needs"),
        ("far", "l1 table of snapshot 0"),
    ] {
        let kind = refused(&host, name, &showing("monday"), &[word]);
        assert_eq!(kind, ErrorKind::Corrupt);
    }
    let writing = OpenOptions {
        read_only: false,
        ..showing("monday")
    };
    let kind = refused(&host, "top", &writing, &["read-only"]);
    assert_eq!(kind, ErrorKind::InvalidInput);
    let below = OpenOptions {
        backing_snapshot: Some("monday".to_owned()),
        ..OpenOptions::new(References::Any)
    };
    let kind = refused(&host, "plain", &below, &["no backing file"]);
    assert_eq!(kind, ErrorKind::InvalidInput);
    let kind = refused(&host, "over", &below, &["plain", "the image has none"]);
    assert_eq!(kind, ErrorKind::NotFound);
}

/// Bounded time and memory whatever the entry says, and never a panic.
#[test]
fn corrupt_snapshot_entries_never_panic() {
    let whole = image(|_| {});
    for at in 4 * CLUSTER..4 * CLUSTER + 72 {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let host = host(&[("top", bytes)]);
            match open_in(&host, "top", &showing("monday")) {
                Ok(opened) => drop(read(&opened, 0)),
                Err(error) => assert!(!format!("{error:#}").contains('\n')),
            }
        }
    }
}
