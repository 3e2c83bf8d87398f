//! Properties: what is encoded decodes to itself, and no input panics or runs away.

mod memory;

use gaur_format::addr::HostOffset;
use gaur_format::bitmap::{self, Bitmap};
use gaur_format::check::{Check, Report, Step};
use gaur_format::extension::Extension;
use gaur_format::feature::{Autoclear, Compatible, Incompatible};
use gaur_format::header::{CompressionType, CryptMethod};
use gaur_format::l1::{self, L1Ref};
use gaur_format::plan::{self, CreateOptions, Preallocation};
use gaur_format::snapshot::{self, Snapshot};
use gaur_format::{CompressedDescriptor, Geometry, Header, L2Entry, Version, refcount};
use memory::Image;
use proptest::collection::vec;
use proptest::prelude::*;

fn geometry() -> impl Strategy<Value = Geometry> {
    let any = (any::<bool>(), 9u32..=21, any::<bool>(), 0u32..=6);
    any.prop_filter_map("legal", |(v2, bits, extended, order)| {
        let (version, order) = if v2 {
            (Version::V2, 4)
        } else {
            (Version::V3, order)
        };
        Geometry::new(version, bits, extended, order).ok()
    })
}

fn aligned(geometry: Geometry) -> impl Strategy<Value = HostOffset> {
    let bits = geometry.cluster_bits();
    (1u64..1 << (56 - bits)).prop_map(move |cluster| HostOffset(cluster << bits))
}

fn l2_entry() -> impl Strategy<Value = (Geometry, L2Entry)> {
    geometry().prop_flat_map(|geometry| {
        let mask = geometry.subcluster_mask();
        let last = CompressedDescriptor::max_offset(&geometry).0;
        let most = geometry.cluster_size() * 2 - 512;
        let compressed = (0..=last, 1..=most).prop_filter_map("in reach", move |(offset, len)| {
            CompressedDescriptor::covering(HostOffset(offset), len, &geometry)
                .map(L2Entry::Compressed)
        });
        let with_host = (aligned(geometry), any::<[bool; 2]>(), any::<[u32; 2]>());
        let with_host = with_host.prop_map(move |(host, [copied, zeros], [a, b])| {
            let host = Some(host);
            let zeros = zeros && geometry.version() == Version::V3;
            let (alloc, zero) = match (geometry.extended_l2(), zeros) {
                (true, _) => (a & mask, b & mask & !a),
                (false, true) => (0, 1),
                (false, false) => (1, 0),
            };
            L2Entry::Cluster {
                host,
                copied,
                alloc,
                zero,
            }
        });
        let without = any::<u32>().prop_map(move |zero| {
            let zero = if geometry.version() == Version::V2 {
                0
            } else {
                zero & mask
            };
            L2Entry::Cluster {
                host: None,
                copied: false,
                alloc: 0,
                zero,
            }
        });
        prop_oneof![compressed, with_host, without].prop_map(move |entry| (geometry, entry))
    })
}

fn snapshots() -> impl Strategy<Value = Vec<Snapshot>> {
    let extra = (
        any::<u64>(),
        any::<u64>(),
        any::<u64>(),
        vec(any::<u8>(), 0..900),
    );
    let known = (any::<bool>(), extra).prop_map(|(old, (state, disk, icount, unknown))| {
        let icount = (icount != u64::MAX).then_some(icount);
        if old {
            (state, None, None, vec![])
        } else {
            (state, Some(disk), icount, unknown)
        }
    });
    let text = (vec(any::<u8>(), 0..40), vec(any::<u8>(), 0..300));
    let fixed = (
        1u64..1 << 30,
        0u32..4_194_304,
        any::<u32>(),
        any::<u32>(),
        any::<u64>(),
    );
    let one = (fixed, text, known).prop_map(|(fixed, (id, name), known)| {
        let (cluster, l1_size, date_sec, date_nsec, vm_clock_nsec) = fixed;
        let (vm_state_size, disk_size, icount, unknown_extra) = known;
        let l1_table_offset = HostOffset(cluster << 16);
        Snapshot {
            l1_table_offset,
            l1_size,
            id,
            name,
            date_sec,
            date_nsec,
            vm_clock_nsec,
            vm_state_size,
            disk_size,
            icount,
            unknown_extra,
        }
    });
    vec(one, 0..5)
}

fn bitmaps() -> impl Strategy<Value = Vec<Bitmap>> {
    let text = (vec(any::<u8>(), 1..100), vec(any::<u8>(), 0..30));
    let one = (1u64..1 << 30, 1u32..=0x800_0000, 0u32..8, 9u8..=31, text).prop_map(
        |(cluster, table_entries, flags, granularity_bits, (name, extra))| Bitmap {
            table_offset: HostOffset(cluster << 16),
            table_entries,
            flags,
            granularity_bits,
            name,
            extra,
        },
    );
    vec(one, 0..5)
}

fn header() -> impl Strategy<Value = Header> {
    let unknown = |kind: std::ops::Range<u32>| {
        (kind, vec(any::<u8>(), 0..40)).prop_map(|(kind, data)| Extension { kind, data })
    };
    let name = proptest::option::of(vec(1u8..=255, 1..200));
    let tail = prop_oneof![Just(vec![]), (0usize..4).prop_map(|n| vec![7; n * 8 + 7])];
    let rest = (
        vec(unknown(1..1000), 0..4),
        name,
        tail,
        any::<[u64; 2]>(),
        any::<bool>(),
    );
    (geometry(), 0u64..=1 << 30, rest).prop_map(|(geometry, size_bytes, rest)| {
        let (extensions, backing_file_name, tail, [compatible, autoclear], zstd) = rest;
        let v3 = geometry.version() == Version::V3;
        let zstd = zstd && v3 && !tail.is_empty();
        let mut incompatible = Incompatible(0);
        if geometry.extended_l2() {
            incompatible = incompatible.with(Incompatible::EXTENDED_L2);
        }
        if zstd {
            incompatible = incompatible.with(Incompatible::COMPRESSION_TYPE);
        }
        Header {
            version: geometry.version(),
            cluster_bits: geometry.cluster_bits(),
            size_bytes,
            crypt_method: CryptMethod::None,
            l1_size: geometry.l1_entries_for(size_bytes) as u32,
            l1_table_offset: HostOffset(3 * geometry.cluster_size()),
            refcount_table_offset: HostOffset(geometry.cluster_size()),
            refcount_table_clusters: 1,
            nb_snapshots: 0,
            snapshots_offset: HostOffset(0),
            incompatible,
            compatible: if v3 {
                Compatible(compatible)
            } else {
                Compatible(0)
            },
            autoclear: if v3 {
                Autoclear(autoclear)
            } else {
                Autoclear(0)
            },
            refcount_order: geometry.refcount_order(),
            compression_type: if zstd {
                CompressionType::Zstd
            } else {
                CompressionType::Deflate
            },
            tail: if v3 { tail } else { vec![] },
            extensions,
            backing_file_name,
        }
    })
}

fn options() -> impl Strategy<Value = CreateOptions> {
    let size = prop_oneof![0u64..1 << 20, 0u64..1 << 26, Just(1 << 30)];
    (geometry(), size, any::<bool>()).prop_map(|(geometry, size_bytes, preallocated)| {
        let small = size_bytes >> geometry.cluster_bits() < 1 << 14;
        CreateOptions {
            version: geometry.version(),
            cluster_bits: geometry.cluster_bits(),
            extended_l2: geometry.extended_l2(),
            refcount_order: geometry.refcount_order(),
            size_bytes,
            preallocation: match preallocated && small {
                true => Preallocation::Metadata,
                false => Preallocation::Off,
            },
            ..CreateOptions::default()
        }
    })
}

proptest! {
    #[test]
    fn l2_entries_decode_to_what_was_encoded((geometry, entry) in l2_entry()) {
        let (raw, bitmap) = entry.encode(&geometry);
        prop_assert_eq!(L2Entry::decode(raw, bitmap, &geometry), Ok(entry));
        prop_assert_eq!(L2Entry::lint(raw, bitmap, &geometry), None);
    }

    #[test]
    fn any_l2_entry_decodes_to_a_legal_one_or_is_refused(
        geometry in geometry(), raw in any::<u64>(), bitmap in any::<u64>(),
    ) {
        let _ = L2Entry::lint(raw, bitmap, &geometry);
        match L2Entry::decode(raw, bitmap, &geometry) {
            Ok(L2Entry::Cluster { host, copied, alloc, zero }) => {
                prop_assert_eq!(alloc & zero, 0);
                prop_assert_eq!((alloc | zero) & !geometry.subcluster_mask(), 0);
                prop_assert!(host.is_some() || (alloc == 0 && !copied));
                prop_assert!(host.is_none_or(|offset| geometry.is_aligned(offset)));
            }
            Ok(L2Entry::Compressed(found)) => {
                prop_assert!(found.byte_len() <= 2 * geometry.cluster_size());
                prop_assert!(found.offset + found.byte_len() <= 1 << 56);
                let (_, count) = found.clusters(&geometry);
                prop_assert!((1..=3).contains(&count));
            }
            Err(_) => {}
        }
    }

    #[test]
    fn l1_entries_decode_to_what_was_encoded(
        (geometry, offset) in geometry().prop_flat_map(|g| (Just(g), aligned(g))),
        copied in any::<bool>(), raw in any::<u64>(),
    ) {
        let reference = Some(L1Ref { offset, copied });
        prop_assert_eq!(l1::decode(l1::encode(reference), &geometry), Ok(reference));
        if let Ok(Some(found)) = l1::decode(raw, &geometry) {
            prop_assert!(geometry.is_aligned(found.offset) && found.offset.0 != 0);
        }
    }

    #[test]
    fn a_refcount_is_what_was_set_and_its_neighbours_stay(
        order in 0u32..=6, values in vec(any::<u64>(), 1..40), at in any::<prop::sample::Index>(),
        new in any::<u64>(),
    ) {
        let most = u64::MAX >> (64 - (1 << order));
        let mut block = vec![0; 512];
        for (index, value) in values.iter().enumerate() {
            refcount::set(&mut block, order, index as u64, value & most).unwrap();
        }
        let at = at.index(values.len());
        refcount::set(&mut block, order, at as u64, new & most).unwrap();
        for (index, value) in values.iter().enumerate() {
            let expected = if index == at { new & most } else { value & most };
            prop_assert_eq!(refcount::get(&block, order, index as u64), expected);
        }
    }

    #[test]
    fn headers_decode_to_what_was_encoded(header in header()) {
        if let Ok(bytes) = header.encode() {
            prop_assert_eq!(Header::parse(&bytes).unwrap(), header);
        } else {
            prop_assert!(header.cluster_bits <= 10, "only small clusters have no room for it");
        }
    }

    #[test]
    fn no_header_panics(
        base in header(), edits in vec((0usize..600, any::<u8>()), 0..8), cut in 0usize..4096,
    ) {
        let mut bytes = base.encode().unwrap_or_default();
        for (at, byte) in edits {
            if let Some(place) = bytes.get_mut(at) { *place = byte; }
        }
        bytes.truncate(cut);
        let _ = Header::cluster_size_of(&bytes);
        if let Ok(header) = Header::parse(&bytes) {
            let _ = header.check_features();
            prop_assert_eq!(header.geometry().cluster_bits(), header.cluster_bits);
            let again = header.encode().unwrap_or_default();
            if !again.is_empty() {
                prop_assert_eq!(Header::parse(&again).unwrap(), header);
            }
        }
    }

    #[test]
    fn snapshot_tables_decode_to_what_was_encoded(all in snapshots(), more in vec(any::<u8>(), 0..50)) {
        let geometry = Geometry::new(Version::V3, 16, false, 4).unwrap();
        let mut bytes = snapshot::encode_table(&all);
        let len = bytes.len() as u64;
        bytes.extend(more);
        let count = all.len() as u32;
        let found = snapshot::parse_table(&bytes, count, &geometry).unwrap();
        prop_assert_eq!(found, (all, len));
        prop_assert_eq!(snapshot::table_len(&bytes, count), Ok(snapshot::Progress::Len(len)));
    }

    #[test]
    fn no_snapshot_table_panics(bytes in vec(any::<u8>(), 0..300), count in 0u32..5, zero in any::<bool>()) {
        let geometry = Geometry::new(Version::V3, 16, false, 4).unwrap();
        let mut bytes = bytes;
        if zero && bytes.len() > 38 { bytes[36..38].fill(0); }
        let _ = snapshot::table_len(&bytes, count);
        let _ = snapshot::parse_table(&bytes, count, &geometry);
    }

    #[test]
    fn bitmap_directories_decode_to_what_was_encoded(all in bitmaps(), noise in vec(any::<u8>(), 0..100)) {
        let geometry = Geometry::new(Version::V3, 16, false, 4).unwrap();
        let bytes = bitmap::encode_directory(&all, &geometry).unwrap();
        prop_assert_eq!(bitmap::parse_directory(&bytes, all.len() as u32, &geometry).unwrap(), all);
        let _ = bitmap::parse_directory(&noise, 1, &geometry);
    }

    #[test]
    fn our_own_checker_finds_new_images_clean(options in options()) {
        let image = Image::of_plan(&plan::create(&options).unwrap());
        let report = image.check().unwrap();
        prop_assert!(report.is_clean(), "{:?}", report);
        prop_assert_eq!(report.image_end_offset, image.len());
        let allocated = options.preallocation != Preallocation::Off;
        let expected = if allocated { report.total_clusters } else { 0 };
        prop_assert_eq!(report.allocated_clusters, expected);
        prop_assert_eq!(report.fragmented_clusters, 0);
    }

    #[test]
    fn no_image_panics_the_checker_or_keeps_it_busy(
        options in options(), edits in vec((any::<prop::sample::Index>(), any::<u64>(), 0u32..64), 1..12),
    ) {
        let mut image = Image::of_plan(&plan::create(&options).unwrap());
        for (at, value, shift) in edits {
            image.scribble(at, value >> shift);
        }
        let Ok(mut check) = Check::new(&image.read(0, 2 << 20), image.len()) else { return Ok(()) };
        let mut asked = 0;
        while let Step::Need { offset, len } = check.next() {
            asked += len;
            check.feed(&image.read(offset, len));
        }
        // Nothing is read twice; what lies beyond the end are parts of tables that begin inside.
        prop_assert!(asked <= 4 * image.len() + (256 << 20), "{} of {}", asked, image.len());
    }

    #[test]
    fn parts_find_what_the_whole_finds(
        options in options(), edits in vec((any::<prop::sample::Index>(), any::<u64>(), 0u32..64), 0..40), parts in 2usize..5,
    ) {
        let mut image = Image::of_plan(&plan::create(&options).unwrap());
        for (at, value, shift) in edits {
            image.scribble(at, value >> shift);
        }
        let counters = |report: Report| Report { messages: Vec::new(), ..report };
        let whole = image.check().map(counters);
        prop_assert_eq!(whole, image.check_in_parts(parts).map(counters));
    }

    #[test]
    fn a_read_that_fails_is_a_check_error_and_the_check_ends(
        options in options(), failing in vec(any::<bool>(), 1..20),
    ) {
        let image = Image::of_plan(&plan::create(&options).unwrap());
        let mut check = Check::new(&image.read(0, 2 << 20), image.len()).unwrap();
        let mut failed = 0;
        let mut failing = failing.iter().cycle();
        let report = loop {
            match check.next() {
                Step::Need { .. } if *failing.next().unwrap() => {
                    check.fail();
                    failed += 1;
                }
                Step::Need { offset, len } => check.feed(&image.read(offset, len)),
                Step::Done(report) => break report,
            }
        };
        prop_assert!(report.check_errors >= failed, "{:?}", report);
        prop_assert!(failed > 0 || report.is_clean());
    }

    #[test]
    fn a_lost_refcount_is_a_corruption_and_an_extra_one_a_leak(
        options in options(), at in any::<prop::sample::Index>(), up in any::<bool>(),
    ) {
        prop_assume!(options.refcount_order > 0);
        let mut image = Image::of_plan(&plan::create(&options).unwrap());
        let clusters = image.len() >> options.cluster_bits;
        image.set_refcount(at.index(clusters as usize) as u64, if up { 2 } else { 0 });
        let report = image.check().unwrap();
        prop_assert_eq!(report.leaks, u64::from(up));
        prop_assert!(up || report.corruptions >= 1, "{:?}", report);
        prop_assert!(report.check_errors == 0);
    }
}
