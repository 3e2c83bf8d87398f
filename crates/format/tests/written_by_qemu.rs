//! Structures that QEMU wrote: parsed, and encoded again to the same bytes.
//!
//! `qemu-img` must be on the PATH; without it these tests fail.

#![allow(clippy::disallowed_methods, reason = "tests look at files")]

mod qemu;

use gaur_format::bitmap::{self, BitmapCluster};
use gaur_format::header::CompressionType;
use gaur_format::snapshot::{self, Progress};
use gaur_format::{Header, Version};
use qemu::Scratch;

/// The header of an image, which must encode to the bytes it was parsed from.
fn header(path: &str) -> Header {
    let mut bytes = std::fs::read(path).unwrap();
    bytes.truncate(2 << 20);
    let size = Header::cluster_size_of(&bytes).unwrap() as usize;
    bytes.truncate(size);
    let header = Header::parse(&bytes).unwrap();
    header.check_features().unwrap();
    let again = header.encode().unwrap();
    assert_eq!(bytes[..again.len()], again, "{path}");
    assert!(bytes[again.len()..].iter().all(|byte| *byte == 0), "{path}");
    header
}

#[test]
fn qemu_headers_round_trip() {
    let scratch = Scratch::new("header");
    let path = scratch.path("disk.qcow2");
    let base = scratch.path("base.raw");
    qemu::img(&["create", "-q", "-f", "raw", &base, "1M"]);
    let create = [
        "create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base, "-o",
    ];

    for cluster_size in ["512", "4k", "64k", "2M"] {
        for (version, compat) in [(Version::V2, "0.10"), (Version::V3, "1.1")] {
            let options = format!("cluster_size={cluster_size},compat={compat}");
            qemu::img(&[&create[..], &[&options, &path, "3M"]].concat());
            let header = header(&path);
            assert_eq!((header.version, header.size_bytes), (version, 3 << 20));
            assert_eq!(header.backing_file(), Some(base.as_bytes()));
            assert_eq!(header.backing_format(), Some("raw"));
        }
    }
    let options = "extended_l2=on,lazy_refcounts=on,compression_type=zstd,refcount_bits=64";
    qemu::img(&[&create[..], &[options, &path, "3M"]].concat());
    let header = header(&path);
    assert!(header.geometry().extended_l2());
    assert_eq!(header.geometry().refcount_bits(), 64);
    assert_eq!(header.compression_type, CompressionType::Zstd);
}

#[test]
fn new_images_have_the_header_that_qemu_gives_them() {
    let scratch = Scratch::new("header");
    let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
    qemu::img(&["create", "-q", "-f", "qcow2", &theirs, "1G"]);
    let options = gaur_format::plan::CreateOptions {
        size_bytes: 1 << 30,
        ..gaur_format::plan::CreateOptions::default()
    };
    qemu::write_plan(&ours, &gaur_format::plan::create(&options).unwrap());
    assert_eq!(header(&ours), header(&theirs));
}

#[test]
fn qemu_snapshot_tables_round_trip() {
    let scratch = Scratch::new("snapshots");
    let path = scratch.path("disk.qcow2");
    qemu::img(&["create", "-q", "-f", "qcow2", &path, "3M"]);
    for name in ["first", "second with a long name", "third"] {
        qemu::img(&["snapshot", "-c", name, &path]);
    }
    let header = header(&path);
    let mut bytes = Vec::new();
    let len = loop {
        match snapshot::table_len(&bytes, header.nb_snapshots).unwrap() {
            Progress::Len(len) => break len,
            Progress::Need(len) => {
                bytes = qemu::peek(&path, header.snapshots_offset.0, len as usize);
            }
        }
    };
    let geometry = header.geometry();
    let (list, used) = snapshot::parse_table(&bytes, header.nb_snapshots, &geometry).unwrap();
    assert_eq!((list.len(), used), (3, len));
    let names: Vec<&[u8]> = list
        .iter()
        .map(|snapshot| snapshot.name.as_slice())
        .collect();
    assert_eq!(
        names,
        [b"first".as_slice(), b"second with a long name", b"third"]
    );
    assert!(
        list.iter()
            .all(|snapshot| snapshot.disk_size == Some(3 << 20))
    );
    assert_eq!(snapshot::encode_table(&list), bytes[..len as usize]);
}

#[test]
fn qemu_bitmap_directories_round_trip() {
    let scratch = Scratch::new("bitmaps");
    let path = scratch.path("disk.qcow2");
    qemu::img(&["create", "-q", "-f", "qcow2", &path, "3M"]);
    qemu::img(&["bitmap", "--add", "-g", "4096", &path, "first"]);
    qemu::img(&["bitmap", "--add", "--disable", &path, "second"]);
    qemu::io(&path, &["write 1M 64k"]);
    let header = header(&path);
    let pointer = header.bitmaps().unwrap();
    let len = pointer.directory_len_bytes as usize;
    let bytes = qemu::peek(&path, pointer.directory_offset.0, len);
    let geometry = header.geometry();
    let list = bitmap::parse_directory(&bytes, pointer.count, &geometry).unwrap();
    assert_eq!(bitmap::encode_directory(&list, &geometry).unwrap(), bytes);
    let first = &list[0];
    assert_eq!(
        (first.name.as_slice(), first.granularity_bits),
        (b"first".as_slice(), 12)
    );
    assert_eq!((first.flags, list[1].flags), (bitmap::AUTO, 0));
    let entry = qemu::peek_u64(&path, first.table_offset.0);
    let entry = bitmap::decode_table_entry(entry, &geometry).unwrap();
    assert!(
        matches!(entry, BitmapCluster::Stored(_)),
        "the write is recorded"
    );
}
