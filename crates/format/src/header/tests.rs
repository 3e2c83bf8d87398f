//! Tests of the header: every field, hostile values, what must survive a rewrite.

use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::plan::{self, CreateOptions};

/// The header of a new image of 1 GiB, a whole cluster.
fn new_header(options: &CreateOptions) -> Vec<u8> {
    let options = CreateOptions {
        size_bytes: 1 << 30,
        ..options.clone()
    };
    let (_, mut bytes) = plan::create(&options).unwrap().writes.pop().unwrap();
    bytes.resize(1 << options.cluster_bits, 0);
    bytes
}

fn v3() -> Vec<u8> {
    new_header(&CreateOptions::default())
}

fn v2() -> Vec<u8> {
    new_header(&CreateOptions {
        version: Version::V2,
        ..CreateOptions::default()
    })
}

fn with(mut bytes: Vec<u8>, at: u64, value: &[u8]) -> Vec<u8> {
    bytes::put(&mut bytes, at as usize, value);
    bytes
}

fn refused(bytes: &[u8]) -> Error {
    Header::parse(bytes).unwrap_err()
}

#[test]
fn hostile_header_field_is_refused_with_its_offset() {
    let of_u32 = |value: u32| value.to_be_bytes().to_vec();
    let of_u64 = |value: u64| value.to_be_bytes().to_vec();
    let cases = [
        (field::VERSION, of_u32(1)),
        (field::VERSION, of_u32(4)),
        (field::VERSION, of_u32(u32::MAX)),
        (field::BACKING_FILE_OFFSET, of_u64(u64::MAX)),
        (field::BACKING_FILE_OFFSET, of_u64(65537)),
        (field::CLUSTER_BITS, of_u32(0)),
        (field::CLUSTER_BITS, of_u32(8)),
        (field::CLUSTER_BITS, of_u32(22)),
        (field::CLUSTER_BITS, of_u32(64)),
        (field::CLUSTER_BITS, of_u32(u32::MAX)),
        (field::SIZE, of_u64(u64::MAX)),
        (field::SIZE, of_u64(1 << 52)),
        (field::CRYPT_METHOD, of_u32(3)),
        (field::CRYPT_METHOD, of_u32(2)),
        (field::L1_SIZE, of_u32(0)),
        (field::L1_SIZE, of_u32(1)),
        (field::L1_SIZE, of_u32(u32::MAX)),
        (field::L1_TABLE_OFFSET, of_u64(0)),
        (field::L1_TABLE_OFFSET, of_u64(0x30200)),
        (field::L1_TABLE_OFFSET, of_u64(u64::MAX << 16)),
        (field::L1_TABLE_OFFSET, of_u64(1 << 56)),
        (field::REFCOUNT_TABLE_OFFSET, of_u64(0)),
        (field::REFCOUNT_TABLE_OFFSET, of_u64(512)),
        (field::REFCOUNT_TABLE_OFFSET, of_u64(u64::MAX << 16)),
        (field::REFCOUNT_TABLE_CLUSTERS, of_u32(0)),
        (field::REFCOUNT_TABLE_CLUSTERS, of_u32(129)),
        (field::REFCOUNT_TABLE_CLUSTERS, of_u32(u32::MAX)),
        (field::NB_SNAPSHOTS, of_u32(65537)),
        (field::NB_SNAPSHOTS, of_u32(u32::MAX)),
        (field::SNAPSHOTS_OFFSET, of_u64(1)),
        (field::SNAPSHOTS_OFFSET, of_u64(u64::MAX << 16)),
        (field::REFCOUNT_ORDER, of_u32(7)),
        (field::REFCOUNT_ORDER, of_u32(u32::MAX)),
        (field::HEADER_LENGTH, of_u32(0)),
        (field::HEADER_LENGTH, of_u32(103)),
        (field::HEADER_LENGTH, of_u32(113)),
        (field::HEADER_LENGTH, of_u32(65544)),
        (field::HEADER_LENGTH, of_u32(u32::MAX)),
        (field::COMPRESSION_TYPE, vec![1]),
        (field::COMPRESSION_TYPE, vec![2]),
    ];
    for (at, value) in cases {
        // Reached from the size: the field that is wrong may be the one it contradicts.
        let error = refused(&with(v3(), at, &value));
        let known = matches!(at, field::SIZE | field::CLUSTER_BITS | field::HEADER_LENGTH);
        let place = error.offset().is_none_or(|offset| offset == at);
        assert!(place || known, "{at}: {error}");
        let text = error.to_string();
        assert!(!text.contains('\n') && !text.ends_with('.'), "{text}");
    }
}

#[test]
fn dependent_field_without_its_feature_is_refused() {
    let name = with(v3(), field::BACKING_FILE_OFFSET, &512u64.to_be_bytes());
    let long = with(
        name.clone(),
        field::BACKING_FILE_SIZE,
        &1024u32.to_be_bytes(),
    );
    assert_eq!(refused(&long).offset(), Some(field::BACKING_FILE_SIZE));
    let nul = with(name, field::BACKING_FILE_SIZE, &4u32.to_be_bytes());
    assert!(refused(&nul).to_string().contains("nul byte"));
    let nowhere = with(v3(), field::NB_SNAPSHOTS, &1u32.to_be_bytes());
    assert_eq!(refused(&nowhere).offset(), Some(field::SNAPSHOTS_OFFSET));
    let bit = Incompatible::COMPRESSION_TYPE.0.to_be_bytes();
    let untyped = with(v3(), field::INCOMPATIBLE, &bit);
    assert_eq!(refused(&untyped).offset(), Some(field::COMPRESSION_TYPE));
    let small = new_header(&CreateOptions {
        cluster_bits: 13,
        ..CreateOptions::default()
    });
    let bit = Incompatible::EXTENDED_L2.0.to_be_bytes();
    assert!(Header::parse(&with(small, field::INCOMPATIBLE, &bit)).is_err());
}

#[test]
fn cut_off_headers_are_refused() {
    for bytes in [v2(), v3()] {
        for len in 0..bytes.len().min(112) {
            let cut = bytes.get(..len).unwrap();
            match Header::parse(cut) {
                Ok(header) => assert!(header.version == Version::V2 && len >= 72),
                Err(error) if len < 4 => assert_eq!(error.kind(), ErrorKind::NotQcow2),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Truncated, "{len}: {error}"),
            }
        }
    }
    assert_eq!(refused(&[0; 512]).kind(), ErrorKind::NotQcow2);
    assert_eq!(refused(b"QFI").kind(), ErrorKind::NotQcow2);
}

#[test]
fn parse_then_encode_gives_the_same_bytes() {
    let mut options = CreateOptions {
        backing_file: Some("base.qcow2".into()),
        backing_format: Some("qcow2".into()),
        lazy_refcounts: true,
        compression_type: CompressionType::Zstd,
        ..CreateOptions::default()
    };
    for extended_l2 in [false, true] {
        options.extended_l2 = extended_l2;
        let bytes = new_header(&options);
        let header = Header::parse(&bytes).unwrap();
        assert_eq!(header.backing_file(), Some(b"base.qcow2".as_slice()));
        assert_eq!(header.backing_format(), Some("qcow2"));
        let again = header.encode().unwrap();
        assert_eq!(bytes.get(..again.len()), Some(again.as_slice()));
        assert!(
            bytes
                .get(again.len()..)
                .unwrap()
                .iter()
                .all(|byte| *byte == 0)
        );
    }
}

#[test]
fn unknown_fields_and_extensions_survive() {
    let mut header = Header::parse(&v3()).unwrap();
    header.tail = (0..23).collect();
    let unknown = Extension {
        kind: 0x1234_5678,
        data: vec![1, 2, 3],
    };
    header.extensions.insert(0, unknown.clone());
    header.extensions.push(unknown);
    header.compatible = Compatible(1 << 13);
    header.autoclear = Autoclear(1 << 12);
    let bytes = header.encode().unwrap();
    assert_eq!(Header::parse(&bytes), Ok(header.clone()));
    assert_eq!(header.header_length(), 128);
    assert_eq!(
        (header.compatible.unknown(), header.autoclear.unknown()),
        (1 << 13, 1 << 12)
    );
}

#[test]
fn a_header_that_does_not_fit_in_its_cluster_is_refused() {
    let small = new_header(&CreateOptions {
        cluster_bits: 9,
        ..CreateOptions::default()
    });
    let mut header = Header::parse(&small).unwrap();
    header.backing_file_name = Some(vec![b'x'; 500]);
    assert_eq!(header.encode().unwrap_err().kind(), ErrorKind::TooLarge);
    header.backing_file_name = Some(vec![b'x'; 300]);
    assert!(header.encode().is_ok());
    for name in [vec![], vec![0], vec![b'x'; 1024]] {
        header.backing_file_name = Some(name);
        assert!(header.encode().is_err());
    }
}

#[test]
fn unknown_incompatible_features_have_the_names_the_image_gives_them() {
    let mut header = Header::parse(&v3()).unwrap();
    assert_eq!(header.check_features(), Ok(()));
    header.incompatible = Incompatible(1 << 17 | 1 << 40);
    let mut table = feature::name_table();
    let mut entry = vec![0, 17];
    entry.extend_from_slice(b"time\x1b travel");
    entry.resize(feature::NAME_ENTRY_BYTES, 0);
    table.extend_from_slice(&entry);
    let names = header
        .extensions
        .iter_mut()
        .find(|e| e.kind == extension::FEATURE_NAMES);
    names.unwrap().data = table;
    let header = Header::parse(&header.encode().unwrap()).unwrap();
    let error = header.check_features().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(
        error.to_string(),
        "header byte 72: image uses features that are not supported \
         (found time? travel, bit 40)"
    );
}

#[test]
fn an_unknown_feature_is_named_before_what_it_may_have_changed() {
    let bits = (1u64 << 60).to_be_bytes();
    let odd = with(v3(), field::INCOMPATIBLE, &bits);
    let odd = with(odd, field::L1_SIZE, &0u32.to_be_bytes());
    let error = refused(&odd);
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("bit 60"));
}

#[test]
fn broken_extension_lists_are_refused() {
    let base = || Header::parse(&v3()).unwrap();
    let mut twice = base();
    let format = Extension {
        kind: extension::BACKING_FORMAT,
        data: b"raw".to_vec(),
    };
    twice.extensions = vec![format.clone(), format];
    assert!(
        refused(&twice.encode().unwrap())
            .to_string()
            .contains("twice")
    );
    let mut long = base();
    long.extensions = vec![Extension {
        kind: 7,
        data: vec![0; 8],
    }];
    let bytes = with(long.encode().unwrap(), 116, &u32::MAX.to_be_bytes());
    assert!(refused(&bytes).to_string().contains("does not fit"));
}

#[test]
fn pointers_to_luks_and_bitmaps_are_checked() {
    let pointer = LuksPointer {
        offset: HostOffset(0x50000),
        len_bytes: 4096,
    };
    let mut header = Header::parse(&v3()).unwrap();
    header.extensions = vec![pointer.encode()];
    assert!(
        header.encode().is_err(),
        "a luks pointer without encryption"
    );
    header.crypt_method = CryptMethod::Luks;
    let header = Header::parse(&header.encode().unwrap()).unwrap();
    assert_eq!(header.encryption(), Some(pointer));

    let bitmaps = BitmapsExtension {
        count: 1,
        directory_len_bytes: 32,
        directory_offset: HostOffset(0x50000),
    };
    let mut header = Header::parse(&v3()).unwrap();
    header.extensions = vec![bitmaps.encode()];
    assert_eq!(header.bitmaps(), None, "the autoclear bit is clear");
    header.autoclear = Autoclear::BITMAPS;
    header.extensions.insert(
        0,
        Extension {
            kind: extension::FEATURE_NAMES,
            data: vec![0; 43],
        },
    );
    let bytes = header.encode().unwrap();
    let mut header = Header::parse(&bytes).unwrap();
    assert_eq!(header.bitmaps(), Some(bitmaps));
    let at = header.extension_at(extension::BITMAPS).unwrap() as usize;
    assert_eq!(bytes[at..at + 4], extension::BITMAPS.to_be_bytes());
    assert_eq!(header.extension_at(extension::LUKS), None);
    for hostile in [
        BitmapsExtension {
            count: 0,
            ..bitmaps
        },
        BitmapsExtension {
            count: 65536,
            ..bitmaps
        },
        BitmapsExtension {
            directory_len_bytes: u64::MAX,
            ..bitmaps
        },
        BitmapsExtension {
            directory_offset: HostOffset(1),
            ..bitmaps
        },
        BitmapsExtension {
            directory_offset: HostOffset(u64::MAX << 16),
            ..bitmaps
        },
    ] {
        header.extensions = vec![hostile.encode()];
        assert!(header.encode().is_err(), "{hostile:?}");
    }
}

#[test]
fn allocation_policy_fits_header_of_every_cluster_size() {
    let allocation =
        |options: &CreateOptions| Header::parse(&new_header(options)).unwrap().allocation();
    for cluster_bits in [9, 12, 21] {
        let mut options = CreateOptions {
            cluster_bits,
            ..CreateOptions::default()
        };
        assert_eq!(allocation(&options), None);
        for policy in [AllocationPolicy::Compact, AllocationPolicy::Contiguous] {
            options.allocation = Some(policy);
            assert_eq!(allocation(&options), Some(policy));
        }
    }
}
