use gaur_block::Errno;
use gaur_format::feature::{Autoclear, Compatible, Incompatible};
use gaur_format::header::{CompressionType, CryptMethod, Header};
use gaur_format::snapshot::{self, Snapshot};
use gaur_format::{HostOffset, Version};

use super::*;
use crate::references::References;
use crate::test_file::{Event, TestFile, TestHost, block_on, cached_limits, direct_limits};

pub(super) const CLUSTER: usize = 512;
pub(super) const SIZE: u64 = 64 << 10;
/// Header, refcount table, refcount block, L1 table.
const CLUSTERS: usize = 4;

/// A header for clusters of 512 bytes and two L2 tables.
pub(super) fn header() -> Header {
    Header {
        version: Version::V3,
        cluster_bits: 9,
        size_bytes: SIZE,
        crypt_method: CryptMethod::None,
        l1_size: 2,
        l1_table_offset: HostOffset(3 * CLUSTER as u64),
        refcount_table_offset: HostOffset(CLUSTER as u64),
        refcount_table_clusters: 1,
        nb_snapshots: 0,
        snapshots_offset: HostOffset(0),
        incompatible: Incompatible(0),
        compatible: Compatible(0),
        autoclear: Autoclear(0),
        refcount_order: 4,
        compression_type: CompressionType::Deflate,
        tail: Vec::new(),
        extensions: Vec::new(),
        backing_file_name: None,
    }
}

pub(super) fn over(backing: &str) -> Header {
    Header {
        backing_file_name: Some(backing.as_bytes().to_vec()),
        ..header()
    }
}

pub(super) fn bytes_of(header: &Header) -> Vec<u8> {
    let mut bytes = header.encode().unwrap();
    bytes.resize(CLUSTERS * CLUSTER, 0);
    put(&mut bytes, CLUSTER, 2 * CLUSTER as u64);
    for cluster in 0..CLUSTERS {
        bytes[2 * CLUSTER + 2 * cluster + 1] = 1;
    }
    bytes
}

pub(super) fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

pub(super) fn file(bytes: Vec<u8>) -> TestFile {
    TestFile::new(bytes, cached_limits())
}

pub(super) fn host(files: &[(&str, Vec<u8>)]) -> TestHost {
    let mut host = TestHost::default();
    for (inode, (name, bytes)) in files.iter().enumerate() {
        host.add(name, file(bytes.clone()).with_id(inode as u64));
    }
    host
}

pub(super) fn read_only() -> OpenOptions {
    OpenOptions {
        read_only: true,
        ..OpenOptions::new(References::Any)
    }
}

fn writing() -> Use<'static> {
    Use {
        writable: true,
        ..Use::default()
    }
}

pub(super) fn open_in(
    host: &TestHost,
    name: &str,
    options: &OpenOptions,
) -> Result<Opened<TestFile>, ImageError> {
    block_on(open(host, name, options))
}

/// How many files are open for the image called `top`.
fn file_count(host: &TestHost, options: &OpenOptions) -> usize {
    open_in(host, "top", options).unwrap().files.iter().count()
}

/// The kind and the whole line of a failure.
pub(super) fn failure(host: &TestHost, name: &str, options: &OpenOptions) -> (ErrorKind, String) {
    let error = open_in(host, name, options)
        .map(|_| ())
        .expect_err("this must not open");
    let line = format!("{error:#}");
    assert!(
        !line.contains('\n') && !line.ends_with('.'),
        "not a line for a user: {line}"
    );
    (error.kind(), line)
}

/// What a single image made of these bytes fails with.
fn damage(bytes: Vec<u8>, options: &OpenOptions) -> (ErrorKind, String) {
    failure(&host(&[("top", bytes)]), "top", options)
}

#[test]
fn a_single_image_is_opened_for_writing_with_its_lock() {
    let host = host(&[("dir/top", bytes_of(&header()))]);
    let opened = open_in(&host, "dir/top", &OpenOptions::new(References::Any)).unwrap();
    assert_eq!(opened.image.size_bytes(), SIZE);
    assert_eq!(opened.files.iter().count(), 1);
    let layer = &opened.image.layers()[0];
    assert_eq!((&*layer.name(), layer.format()), ("dir/top", Format::Qcow2));
    let access = Access {
        write: true,
        direct: false,
        lock: true,
        force_share: false,
    };
    assert_eq!(*host.opened.borrow(), [("dir/top".to_owned(), access)]);
}

#[test]
fn three_hundred_layers_open_and_only_the_top_one_for_writing() {
    let mut files = vec![("d/0".to_owned(), bytes_of(&header()))];
    for layer in 1..300 {
        files.push((
            format!("d/{layer}"),
            bytes_of(&over(&(layer - 1).to_string())),
        ));
    }
    let files: Vec<(&str, Vec<u8>)> = files
        .iter()
        .map(|(name, bytes)| (name.as_str(), bytes.clone()))
        .collect();
    let host = host(&files);
    let opened = open_in(&host, "d/299", &OpenOptions::new(References::Any)).unwrap();
    assert_eq!(
        (opened.files.iter().count(), opened.image.layers().len()),
        (300, 300)
    );
    assert_eq!(opened.image.layers()[299].name(), "d/0");
    let written = host
        .opened
        .borrow()
        .iter()
        .filter(|(_, access)| access.write)
        .count();
    assert_eq!(written, 1);
    let reads_only = |file: &TestFile| {
        file.events()
            .iter()
            .all(|event| matches!(event, Event::Read { .. }))
    };
    assert!(
        opened.files.iter().all(reads_only),
        "opening changes nothing"
    );
}

#[test]
fn a_chain_longer_than_the_limit_is_refused() {
    let names: Vec<String> = (0..=limit::CHAIN_DEPTH_MAX)
        .map(|layer| format!("{layer}"))
        .collect();
    let mut host = TestHost::default();
    for (layer, name) in names.iter().enumerate() {
        let below = (layer + 1).to_string();
        host.add(name, file(bytes_of(&over(&below))));
    }
    let (kind, line) = failure(&host, "0", &read_only());
    assert_eq!(kind, ErrorKind::Unsupported);
    assert!(line.contains("backing chain is longer than"), "{line}");
    assert_eq!(host.opened.borrow().len(), limit::CHAIN_DEPTH_MAX);
}

#[test]
fn without_backing_only_the_top_is_opened() {
    let host = host(&[("top", bytes_of(&over("missing")))]);
    let options = OpenOptions {
        backing: false,
        ..OpenOptions::new(References::Any)
    };
    assert_eq!(file_count(&host, &options), 1);
}

#[test]
fn backing_loops_are_found_by_name_link_and_own_lock() {
    let by_name = host(&[("a", bytes_of(&over("b"))), ("b", bytes_of(&over("a")))]);
    let (kind, line) = failure(&by_name, "a", &read_only());
    assert_eq!(kind, ErrorKind::InvalidInput);
    assert!(
        line.contains("\"a\", backing file of \"b\": the backing chain is a loop"),
        "{line}"
    );

    let itself = host(&[("a", bytes_of(&over("a")))]);
    assert!(failure(&itself, "a", &read_only()).1.contains("loop"));

    let bytes = bytes_of(&over("link"));
    let mut by_link = host(&[("a", bytes.clone())]);
    by_link.add("link", file(bytes).with_id(0));
    let (_, line) = failure(&by_link, "a", &read_only());
    assert!(
        line.ends_with("loop, this file is in it already as \"a\""),
        "{line}"
    );

    by_link.lock("link");
    let (kind, line) = failure(&by_link, "a", &OpenOptions::new(References::Any));
    assert_eq!(kind, ErrorKind::InvalidInput, "{line}");
}

#[test]
fn a_backing_file_locked_by_another_process_is_reported_as_locked() {
    let mut host = host(&[
        ("top", bytes_of(&over("base"))),
        ("base", bytes_of(&header())),
    ]);
    host.lock("base");
    let (kind, line) = failure(&host, "top", &read_only());
    assert_eq!(kind, ErrorKind::Locked);
    assert!(line.contains("write lock is held"), "{line}");
}

#[test]
fn a_backing_file_that_cannot_be_opened_is_named_with_its_overlay() {
    let mut host = host(&[("d/top", bytes_of(&over("base")))]);
    let (kind, line) = failure(&host, "d/top", &read_only());
    assert_eq!(kind, ErrorKind::NotFound);
    assert_eq!(
        line,
        "cannot open \"d/base\", backing file of \"d/top\": no such file or directory"
    );
    host.refuse("d/base", Errno::from_raw(21), "is a directory");
    assert!(
        failure(&host, "d/top", &read_only())
            .1
            .ends_with("\"d/top\": is a directory")
    );
    host.refuse("d/base", Errno::EACCES, "permission denied");
    assert_eq!(
        failure(&host, "d/top", &read_only()).0,
        ErrorKind::PermissionDenied
    );
}

#[test]
fn the_format_of_a_backing_file_is_what_the_header_says_else_what_it_looks_like() {
    let image = bytes_of(&header());
    for (given, expected) in [
        (None, Format::Qcow2),
        (Some("qcow2"), Format::Qcow2),
        (Some("raw"), Format::Raw),
    ] {
        let mut top = over("base");
        if let Some(format) = given {
            let data = format.as_bytes().to_vec();
            top.extensions.push(extension::Extension {
                kind: extension::BACKING_FORMAT,
                data,
            });
        }
        let host = host(&[("top", bytes_of(&top)), ("base", image.clone())]);
        let opened = open_in(&host, "top", &read_only()).unwrap();
        assert_eq!(opened.image.layers()[1].format(), expected);
    }
    let host = host(&[("top", bytes_of(&over("base"))), ("base", vec![1; 700])]);
    let opened = open_in(&host, "top", &read_only()).unwrap();
    let base = &opened.image.layers()[1];
    assert_eq!((base.format(), base.size_bytes()), (Format::Raw, 1024));
}

#[test]
fn an_unknown_backing_format_is_refused_by_name_and_never_guessed() {
    for (format, shown) in [(&b"qed"[..], "\"qed\""), (&b"\xff"[..], "\"\u{fffd}\"")] {
        let mut top = over("base");
        let data = format.to_vec();
        top.extensions.push(extension::Extension {
            kind: extension::BACKING_FORMAT,
            data,
        });
        let host = host(&[("top", bytes_of(&top)), ("base", bytes_of(&header()))]);
        let (kind, line) = failure(&host, "top", &read_only());
        assert_eq!(kind, ErrorKind::Unsupported);
        assert!(line.contains(shown), "{line}");
    }
}

/// A user converted a VMware disk: `gaur convert -O qcow2 real.vmdk x.qcow2`. The container was copied
/// as if it were the disk, with exit code 0, and the guest found tables where its file systems were.
#[test]
fn foreign_format_is_refused_by_name_unless_the_format_is_told() {
    let qed = [b"QED\0\0\0\x01\0".to_vec(), vec![0; 2000]].concat();
    let host = host(&[("d/top", qed)]);
    for options in [read_only(), OpenOptions::new(References::Any)] {
        let (kind, line) = failure(&host, "d/top", &options);
        assert_eq!(kind, ErrorKind::ForeignFormat);
        assert_eq!(
            line,
            "d/top: looks like a QED image, which is not supported; \
             'qemu-img convert -f qed -O qcow2' makes one that is"
        );
        // A raw disk whose guest wrote that header stays usable for who says that it is raw.
        let told = OpenOptions {
            format: Some(Format::Raw),
            ..options
        };
        assert_eq!(
            open_in(&host, "d/top", &told).unwrap().image.size_bytes(),
            2048
        );
    }
}

#[test]
fn foreign_backing_file_is_refused_unless_its_overlay_says_raw() {
    let qed = [b"QED\0".to_vec(), vec![0; 900]].concat();
    let mut top = over("base");
    let unsaid = host(&[("top", bytes_of(&top)), ("base", qed.clone())]);
    let (kind, line) = failure(&unsaid, "top", &read_only());
    assert_eq!(kind, ErrorKind::Unsupported);
    assert_eq!(
        line,
        "cannot open \"base\", backing file of \"top\": looks like a QED image, which is not \
         supported; 'qemu-img convert -f qed -O qcow2' makes one that is; if it is a raw disk, \
         'qemu-img rebase -u -F raw' makes its overlay say so"
    );
    top.extensions.push(extension::Extension {
        kind: extension::BACKING_FORMAT,
        data: b"raw".to_vec(),
    });
    let said = host(&[("top", bytes_of(&top)), ("base", qed)]);
    assert!(open_in(&said, "top", &read_only()).is_ok());
}

/// The guest of a raw disk that was opened for writing by a guess can make the next guess: it writes a
/// qcow2 header into its first sector that names a file of the host as backing file, and finds that
/// file on its disk after a restart.
#[test]
fn raw_image_is_written_to_only_when_it_was_called_raw() {
    let host = host(&[("top", vec![0; 4096]), ("image", bytes_of(&header()))]);
    let (kind, line) = failure(&host, "top", &OpenOptions::new(References::Any));
    assert_eq!(kind, ErrorKind::FormatNotTold);
    assert_eq!(
        line,
        "top: looks like a raw image, but its guest could write a qcow2 header into it"
    );
    let told = OpenOptions {
        format: Some(Format::Raw),
        ..OpenOptions::new(References::Any)
    };
    assert!(open_in(&host, "top", &told).is_ok());
    assert!(open_in(&host, "top", &read_only()).is_ok());
    // What looks like qcow2 is written to as qcow2: its guest cannot reach the header.
    assert!(open_in(&host, "image", &OpenOptions::new(References::Any)).is_ok());
}

#[test]
fn a_protocol_as_backing_file_is_refused_by_name() {
    let (kind, line) = damage(bytes_of(&over("ssh://host/x")), &read_only());
    assert_eq!(kind, ErrorKind::Unsupported);
    assert!(line.contains("\"ssh\""), "{line}");
}

#[test]
fn empty_and_tiny_files_are_raw_unless_qcow2_is_asked_for() {
    for len in [0, 3, 511] {
        let host = host(&[("top", vec![0x51; len])]);
        let opened = open_in(&host, "top", &read_only()).unwrap();
        // A disk has whole sectors.
        assert_eq!(opened.image.size_bytes(), len.next_multiple_of(512) as u64);
        let options = OpenOptions {
            format: Some(Format::Qcow2),
            ..read_only()
        };
        let (kind, line) = failure(&host, "top", &options);
        assert_eq!(kind, ErrorKind::InvalidInput, "{line}");
    }
}

#[test]
fn unsupported_features_are_refused_by_name() {
    let with = |change: &dyn Fn(&mut Header)| {
        let mut header = header();
        change(&mut header);
        bytes_of(&header)
    };
    let aes = with(&|header| header.crypt_method = CryptMethod::Aes);
    let unknown = with(&|header| header.incompatible = Incompatible(1 << 40));
    let (kind, line) = damage(aes.clone(), &read_only());
    assert_eq!(kind, ErrorKind::KeyMissing, "{line}");
    let writing = OpenOptions::new(References::Any);
    for (bytes, options, word) in [
        (aes, writing, "gaur convert -o encrypt.format=luks"),
        (unknown, read_only(), "bit 40"),
    ] {
        let (kind, line) = damage(bytes, &options);
        assert_eq!(kind, ErrorKind::Unsupported, "{line}");
        assert!(line.starts_with("top: ") && line.contains(word), "{line}");
    }
}

#[test]
fn corrupt_images_open_for_reading_only_and_say_how_to_repair() {
    for more in [Incompatible(0), Incompatible::DIRTY] {
        let bytes = bytes_of(&Header {
            incompatible: Incompatible::CORRUPT.with(more),
            ..header()
        });
        assert!(open_in(&host(&[("top", bytes.clone())]), "top", &read_only()).is_ok());
        let (found, line) = damage(bytes.clone(), &OpenOptions::new(References::Any));
        assert_eq!(found, ErrorKind::Corrupt);
        assert!(line.contains("gaur check -r all"), "{line}");
        let over = host(&[("top", bytes_of(&over("base"))), ("base", bytes)]);
        assert!(
            open_in(&over, "top", &OpenOptions::new(References::Any)).is_ok(),
            "a base is only read"
        );
    }
}

#[test]
fn tables_beyond_the_end_of_the_file_are_damage_not_zeros() {
    let mut l2_outside = bytes_of(&header());
    put(
        &mut l2_outside,
        3 * CLUSTER,
        1 << 63 | (CLUSTERS * CLUSTER) as u64,
    );
    let (kind, line) = damage(l2_outside, &read_only());
    assert_eq!(kind, ErrorKind::Corrupt);
    assert!(
        line.contains("l2 table 0 takes 512 bytes at 2048, but the file ends at 2048"),
        "{line}"
    );

    let mut no_l1 = bytes_of(&header());
    no_l1.truncate(3 * CLUSTER);
    assert!(
        damage(no_l1, &read_only())
            .1
            .contains("l1 table takes 16 bytes at 1536")
    );

    let mut block_outside = bytes_of(&header());
    put(&mut block_outside, CLUSTER + 8, 1 << 40);
    assert!(
        open_in(
            &host(&[("top", block_outside.clone())]),
            "top",
            &read_only()
        )
        .is_ok()
    );
    let (_, line) = damage(block_outside, &OpenOptions::new(References::Any));
    assert!(line.contains("refcount block 1 takes"), "{line}");

    let snapshots = Header {
        nb_snapshots: 1,
        snapshots_offset: HostOffset(1 << 30),
        ..header()
    };
    let (_, line) = damage(bytes_of(&snapshots), &OpenOptions::new(References::Any));
    assert!(line.contains("snapshot table"), "{line}");
}

fn snapshot(index: u64) -> Snapshot {
    Snapshot {
        l1_table_offset: HostOffset(CLUSTER as u64 * 3),
        l1_size: 2,
        id: index.to_string().into_bytes(),
        name: vec![b'n'; index as usize % 50],
        date_sec: 0,
        date_nsec: 0,
        vm_clock_nsec: 0,
        vm_state_size: 0,
        disk_size: Some(SIZE),
        icount: None,
        unknown_extra: vec![7; 8 * (index as usize % 3)],
    }
}

/// The table's length stands nowhere, so it is read piece by piece; QEMU leaves the padding of the
/// last entry out of the file.
#[test]
fn a_snapshot_table_of_any_length_is_read_whole() {
    for count in [1_u64, 2, 100, 30_000] {
        let snapshots: Vec<Snapshot> = (0..count).map(snapshot).collect();
        let table = snapshot::encode_table(&snapshots);
        let header = Header {
            nb_snapshots: count as u32,
            snapshots_offset: HostOffset((CLUSTERS * CLUSTER) as u64),
            ..header()
        };
        let mut bytes = bytes_of(&header);
        bytes.extend(&table[..table.len() - 1]);
        let file = file(bytes.clone());
        let reader = block_on(LayerReader::new(&file)).unwrap();
        let mut budget = TABLE_BYTES;
        let load = reader.load("top".into(), writing(), &mut budget);
        assert!(block_on(load).unwrap().snapshots == snapshots);
        bytes.truncate(CLUSTERS * CLUSTER + table.len() - 600);
        if count > 20 {
            let (kind, line) = damage(bytes, &OpenOptions::new(References::Any));
            assert_eq!(kind, ErrorKind::Corrupt);
            assert!(line.contains("snapshot table takes"), "{line}");
        }
    }
}

#[test]
fn the_tables_of_a_chain_together_are_bounded() {
    let file = file(bytes_of(&header()));
    let reader = block_on(LayerReader::new(&file)).unwrap();
    for (mut budget, fits) in [(16 + 512, true), (16 + 511, false), (15, false)] {
        let loaded = block_on(reader.load("top".into(), writing(), &mut budget));
        match loaded {
            Ok(_) => assert!(fits && budget == 0),
            Err(error) => assert!(!fits && error.kind() == ErrorKind::Unsupported),
        }
    }
}

#[test]
fn a_damaged_refcount_table_entry_forbids_writing() {
    let mut bytes = bytes_of(&header());
    put(&mut bytes, CLUSTER + 8, 0x123);
    let (kind, line) = damage(bytes, &OpenOptions::new(References::Any));
    assert_eq!(kind, ErrorKind::Corrupt);
    assert!(line.contains("refcount block 1 is damaged"), "{line}");
}

/// Bounded time and memory whatever the header says, and never a panic.
#[test]
fn truncated_files_and_corrupt_headers_never_panic() {
    let whole = bytes_of(&over("base"));
    for len in 0..whole.len() {
        let host = host(&[("top", whole[..len].to_vec()), ("base", vec![0; 512])]);
        let options = OpenOptions {
            format: Some(Format::Qcow2),
            ..OpenOptions::new(References::Any)
        };
        assert!(open_in(&host, "top", &options).is_err() || len > 3 * CLUSTER);
    }
    for at in 0..112 {
        for value in [0, 1, 2, 8, 0x7f, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let host = host(&[("top", bytes), ("base", vec![0; 512])]);
            for options in [read_only(), OpenOptions::new(References::Any)] {
                if let Err(error) = open_in(&host, "top", &options) {
                    assert!(!format!("{error:#}").contains('\n'));
                }
            }
        }
    }
}

#[test]
fn a_file_that_wants_aligned_requests_is_opened_too() {
    let mut bytes = bytes_of(&over("base"));
    bytes.resize(8192, 0);
    let mut host = TestHost::default();
    host.add("top", TestFile::new(bytes, direct_limits(4096)));
    host.add("base", TestFile::new(vec![7; 4096], direct_limits(4096)));
    let options = OpenOptions {
        direct: true,
        ..OpenOptions::new(References::Any)
    };
    assert_eq!(file_count(&host, &options), 2);
    assert!(host.opened.borrow().iter().all(|(_, access)| access.direct));
}

#[test]
fn a_read_error_names_the_table() {
    let host = host(&[("top", bytes_of(&header()))]);
    let top = block_on(host.open(
        "top".as_ref(),
        Access {
            write: false,
            direct: false,
            lock: false,
            force_share: false,
        },
    ));
    top.unwrap().fail_from(3, Errno::EIO);
    let (kind, line) = failure(&host, "top", &read_only());
    assert_eq!(kind, ErrorKind::Io);
    assert_eq!(
        line,
        "top: cannot read 16 bytes of the l1 table at 1536: input/output error"
    );
}

#[test]
fn sharing_with_writers_needs_read_only() {
    let host = host(&[("top", bytes_of(&header()))]);
    let options = OpenOptions {
        force_share: true,
        ..OpenOptions::new(References::Any)
    };
    assert_eq!(failure(&host, "top", &options).0, ErrorKind::InvalidInput);
    assert!(host.opened.borrow().is_empty());
}
