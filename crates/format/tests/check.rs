//! The checker, compared counter by counter with `qemu-img check`.
//!
//! `qemu-img` and `qemu-io` must be on the PATH; without them these tests fail.

#![allow(clippy::disallowed_methods, reason = "tests look at files")]

mod qemu;

use gaur_format::check::Report;
use qemu::Scratch;

/// Checks an image with both checkers; every counter must agree.
fn agree(path: &str, what: &str) -> Report {
    agree_with(&qemu::check(path), path, what)
}

/// Checks an image; every counter must be the one in `theirs`.
fn agree_with(theirs: &qemu::Json, path: &str, what: &str) -> Report {
    let ours = qemu::check_ours(path);
    let pairs = [
        ("corruptions", ours.corruptions),
        ("leaks", ours.leaks),
        ("check-errors", ours.check_errors),
        ("image-end-offset", ours.image_end_offset),
        ("total-clusters", ours.total_clusters),
        ("allocated-clusters", ours.allocated_clusters),
        ("fragmented-clusters", ours.fragmented_clusters),
        ("compressed-clusters", ours.compressed_clusters),
    ];
    for (key, value) in pairs {
        if theirs.number(key) != value {
            let text = qemu::check_text(path);
            panic!("{what}: {key} is {value}, QEMU says {theirs:?}\n{text}\n{ours:#?}");
        }
    }
    ours
}

/// Sets of options that cover versions, cluster sizes, extended entries and refcount widths.
const OPTIONS: [&str; 12] = [
    "compat=0.10,cluster_size=512",
    "compat=0.10,cluster_size=64k",
    "cluster_size=512",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=4k",
    "cluster_size=4k,refcount_bits=2",
    "cluster_size=64k",
    "cluster_size=64k,refcount_bits=8",
    "cluster_size=64k,extended_l2=on",
    "cluster_size=16k,extended_l2=on,refcount_bits=32",
    "cluster_size=2M",
    "cluster_size=64k,compression_type=zstd",
];

fn new_image(scratch: &Scratch, options: &str) -> String {
    let path = scratch.path("disk.qcow2");
    qemu::img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "16M"]);
    path
}

const WRITES: [&str; 6] = [
    "write -P 1 0 300k",
    "write -P 2 8M 1000k",
    "write -P 3 1M 4k",
    "write -z 2M 1M",
    "write -z -u 300k 40k",
    "discard 8M 128k",
];

#[test]
fn counters_agree_on_written_images() {
    for options in OPTIONS {
        let scratch = Scratch::new("check");
        let path = new_image(&scratch, options);
        agree(&path, options);
        qemu::io(&path, &WRITES);
        assert!(agree(&path, options).is_clean(), "{options}");
    }
}

#[test]
fn counters_agree_on_compressed_images() {
    for options in OPTIONS {
        let scratch = Scratch::new("check");
        let path = new_image(&scratch, options);
        qemu::io(&path, &WRITES);
        let packed = scratch.path("packed.qcow2");
        qemu::img(&[
            "convert", "-c", "-O", "qcow2", "-o", options, &path, &packed,
        ]);
        let report = agree(&packed, options);
        assert!(
            report.compressed_clusters > 0 && report.is_clean(),
            "{options}"
        );
        qemu::io(&packed, &["write -P 7 8200k 64k"]);
        assert!(agree(&packed, options).is_clean(), "{options}");
    }
}

#[test]
fn counters_agree_on_images_with_snapshots() {
    for options in OPTIONS {
        let scratch = Scratch::new("check");
        let path = new_image(&scratch, options);
        qemu::io(&path, &WRITES);
        qemu::img(&["snapshot", "-c", "first", &path]);
        qemu::io(&path, &["write -P 9 0 64k", "discard 8M 2M"]);
        qemu::img(&["snapshot", "-c", "second", &path]);
        qemu::io(&path, &["write -P 9 4M 1M"]);
        assert!(agree(&path, options).is_clean(), "{options}");
        qemu::img(&["snapshot", "-d", "first", &path]);
        assert!(agree(&path, options).is_clean(), "{options}");
    }
}

#[test]
fn counters_agree_on_images_with_bitmaps() {
    for options in OPTIONS.iter().filter(|options| !options.contains("0.10")) {
        let scratch = Scratch::new("check");
        let path = new_image(&scratch, options);
        qemu::img(&["bitmap", "--add", "-g", "512", &path, "first"]);
        qemu::img(&["bitmap", "--add", &path, "second"]);
        qemu::io(&path, &WRITES);
        assert!(agree(&path, options).is_clean(), "{options}");
        // A writer without bitmaps clears the autoclear bit: their clusters are leaks then.
        qemu::poke(&path, 95, &[0]);
        let report = agree(&path, options);
        assert!(report.leaks > 0 && report.corruptions == 0, "{options}");
    }
}

#[test]
fn counters_agree_on_preallocated_images_and_overlays() {
    for options in ["cluster_size=4k", "cluster_size=64k,extended_l2=on"] {
        let scratch = Scratch::new("check");
        let path = new_image(&scratch, &format!("{options},preallocation=metadata"));
        assert!(agree(&path, options).is_clean());
        let overlay = scratch.path("overlay.qcow2");
        let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-o", options];
        qemu::img(&[&create[..], &["-b", &path, &overlay, "24M"]].concat());
        qemu::io(&overlay, &["write -P 1 15M 2M", "write -z 3M 65k"]);
        assert!(agree(&overlay, options).is_clean());
    }
}

#[test]
fn counters_agree_on_luks_images_and_data_files() {
    let scratch = Scratch::new("check");
    let path = scratch.path("luks.qcow2");
    let secret = ["--object", "secret,id=s,data=x"];
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let create = ["create", "-q", "-f", "qcow2", "-o", options, &path, "8M"];
    qemu::img(&[&create[..1], &secret, &create[1..]].concat());
    assert!(agree_with(&qemu::check_luks(&path, "x"), &path, "luks").is_clean());

    let path = scratch.path("external.qcow2");
    let options = format!("data_file={}", scratch.path("external.raw"));
    qemu::img(&["create", "-q", "-f", "qcow2", "-o", &options, &path, "8M"]);
    qemu::io(
        &path,
        &["write -P 1 0 1M", "write -P 1 3M 1M", "write -z 64k 64k"],
    );
    assert!(agree(&path, "data file").is_clean());
}

/// Host offset of the refcount block that counts the start of the file.
fn refcount_block(path: &str) -> u64 {
    let table = qemu::peek_u64(path, 48);
    qemu::peek_u64(path, table)
}

/// Host offset of the L2 table for the start of the disk.
fn l2_table(path: &str) -> u64 {
    let l1 = qemu::peek_u64(path, 40);
    qemu::peek_u64(path, l1) & 0x00ff_ffff_ffff_fe00
}

#[test]
fn counters_agree_on_leaks_and_lost_refcounts() {
    // (refcount to set, of which cluster from the end of the file)
    for (value, from_end) in [(0u16, 1u64), (2, 1), (1, 0), (7, 3), (0, 2)] {
        let scratch = Scratch::new("check");
        let path = new_image(&scratch, "cluster_size=64k");
        qemu::io(&path, &WRITES);
        if from_end == 0 {
            // One more cluster in the file, without a reference.
            let len = std::fs::metadata(&path)
                .unwrap()
                .len()
                .next_multiple_of(65536);
            qemu::poke(&path, len + 65535, &[0]);
        }
        let clusters = std::fs::metadata(&path).unwrap().len().div_ceil(65536);
        let index = clusters - from_end.max(1);
        qemu::poke(
            &path,
            refcount_block(&path) + 2 * index,
            &value.to_be_bytes(),
        );
        let report = agree(&path, &format!("refcount {value} for {from_end}"));
        assert!(!report.is_clean());
        assert_eq!(report.corruptions > 0, value == 0 || from_end != 0);
    }
}

/// Overwrites the first L2 entry of an image with `raw` (and `bitmap`), gives our report; says
/// whether QEMU's counters must agree.
fn with_entry(options: &str, edit: impl Fn(u64, u64) -> (u64, u64), same: bool) -> Report {
    let scratch = Scratch::new("check");
    let path = new_image(&scratch, options);
    qemu::io(&path, &["write -P 1 0 256k"]);
    let table = l2_table(&path);
    let extended = options.contains("extended_l2=on");
    let bitmap = if extended {
        qemu::peek_u64(&path, table + 8)
    } else {
        0
    };
    let (raw, bitmap) = edit(qemu::peek_u64(&path, table), bitmap);
    qemu::poke(&path, table, &raw.to_be_bytes());
    if extended {
        qemu::poke(&path, table + 8, &bitmap.to_be_bytes());
    }
    if same {
        agree(&path, options)
    } else {
        qemu::check_ours(&path)
    }
}

type EditEntry = fn(u64) -> u64;
type EditPair = fn(u64, u64) -> (u64, u64);

#[test]
fn counters_agree_on_broken_l2_entries() {
    const EXTENDED: &str = "cluster_size=64k,extended_l2=on";
    let all = u64::MAX;
    let plain: [(&str, EditEntry); 6] = [
        ("copied flag clear", |raw| raw & !(1 << 63)),
        ("reserved bit", |raw| raw | 1 << 57),
        ("unallocated", |_| 0),
        ("beyond the file", |_| 1 << 63 | 1 << 40),
        ("same cluster twice", |raw| raw + 65536),
        ("zero flag on data", |raw| raw | 1),
    ];
    for (what, edit) in plain {
        let report = with_entry("cluster_size=64k", |raw, _| (edit(raw), 0), true);
        assert_eq!(report.is_clean(), what == "zero flag on data", "{what}");
    }
    let extended: [(&str, EditPair); 5] = [
        ("both set", |raw, bitmap| (raw, bitmap | 1 << 32)),
        ("bits without a cluster", |_, bitmap| (0, bitmap)),
        ("zero bits without a cluster", |_, _| (0, 0xff << 32)),
        ("no bits at all", |raw, _| (raw, 0)),
        ("reserved bit", |raw, bitmap| (raw | 1 << 57, bitmap)),
    ];
    for (what, edit) in extended {
        let report = with_entry(EXTENDED, edit, true);
        assert_eq!(report.is_clean(), what == "no bits at all", "{what}");
    }
    let strict = with_entry(EXTENDED, |raw, bitmap| (raw | 1, bitmap & all), false);
    assert_eq!(
        strict.corruptions, 1,
        "bit 0 of an extended entry is reserved"
    );
    let strict = with_entry("compat=0.10", |raw, _| (raw | 1, 0), false);
    assert_eq!(strict.corruptions, 1, "version 2 has no zero flag");
}

#[test]
fn counters_agree_on_broken_tables() {
    type Edit = fn(&str);
    let edits: [(&str, Edit); 7] = [
        ("l1 copied flag", |path| {
            qemu::poke(path, qemu::peek_u64(path, 40), &[0]);
        }),
        ("l1 reserved bit", |path| {
            let l1 = qemu::peek_u64(path, 40);
            let raw = qemu::peek_u64(path, l1) | 1;
            qemu::poke(path, l1, &raw.to_be_bytes());
        }),
        ("l2 table beyond the file", |path| {
            qemu::poke(
                path,
                qemu::peek_u64(path, 40),
                &(1u64 << 63 | 1 << 40).to_be_bytes(),
            );
        }),
        ("l1 entry twice", |path| {
            let l1 = qemu::peek_u64(path, 40);
            let raw = qemu::peek_u64(path, l1);
            qemu::poke(path, l1 + 8, &raw.to_be_bytes());
        }),
        ("refcount block beyond the file", |path| {
            qemu::poke(
                path,
                qemu::peek_u64(path, 48) + 8,
                &(1u64 << 40).to_be_bytes(),
            );
        }),
        ("refcount block twice", |path| {
            let table = qemu::peek_u64(path, 48);
            let raw = qemu::peek_u64(path, table);
            qemu::poke(path, table + 8, &raw.to_be_bytes());
        }),
        ("no refcount block", |path| {
            qemu::poke(path, qemu::peek_u64(path, 48), &[0; 8]);
        }),
    ];
    for (what, edit) in edits {
        let scratch = Scratch::new("check");
        let path = scratch.path("disk.qcow2");
        let options = "cluster_size=4k";
        qemu::img(&["create", "-q", "-f", "qcow2", "-o", options, &path, "16M"]);
        qemu::io(&path, &["write -P 1 0 100k", "write -P 1 9M 64k"]);
        edit(&path);
        assert!(!agree(&path, what).is_clean(), "{what}");
    }
}

/// A small generator, so that a failure comes again.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}

/// Changes one number of the refcount table, a refcount block or an L2 table; says how.
fn scribble(path: &str, cluster_size: u64, random: &mut Random) -> String {
    let table = match random.below(4) {
        0 => qemu::peek_u64(path, 48),
        1 => refcount_block(path),
        _ => l2_table(path),
    };
    // The start of a table is where its entries are in use.
    let entries = if random.below(2) == 0 {
        24
    } else {
        cluster_size / 8
    };
    let at = table + 8 * random.below(entries);
    let old = qemu::peek_u64(path, at);
    let new = match random.below(4) {
        0 => 0,
        1 => old.wrapping_add(cluster_size),
        2 => u64::MAX.wrapping_mul(random.below(u64::MAX)) & !1,
        // Not bit 0, where this checker is stricter.
        _ => old ^ 1 << (1 + random.below(63)),
    };
    qemu::poke(path, at, &new.to_be_bytes());
    format!("{at:#x}: {old:#x} to {new:#x}")
}

#[test]
fn counters_agree_on_scribbled_images() {
    let mut random = Random(1);
    for (options, cluster_size) in [
        ("cluster_size=4k", 4096),
        ("cluster_size=4k,refcount_bits=2", 4096),
        ("cluster_size=64k,extended_l2=on", 65536),
    ] {
        let scratch = Scratch::new("check");
        let path = new_image(&scratch, options);
        qemu::io(&path, &["write -c 2M 64k", "write -c 2112k 64k"]);
        qemu::io(&path, &WRITES);
        qemu::img(&["snapshot", "-c", "first", &path]);
        qemu::io(&path, &["write -P 9 0 64k"]);
        let sound = std::fs::read(&path).unwrap();
        for _ in 0..40 {
            std::fs::write(&path, &sound).unwrap();
            let edits = 1 + random.below(3);
            let edits: Vec<String> = (0..edits)
                .map(|_| scribble(&path, cluster_size, &mut random))
                .collect();
            agree(&path, &format!("{options}, {edits:?}"));
        }
    }
}

#[test]
fn a_finding_says_what_and_where() {
    let report = with_entry("cluster_size=64k", |raw, _| (raw & !(1 << 63), 0), true);
    let text = report.messages[0].to_string();
    let at = "corruption: l2 table at 0x40000, index 0: ";
    assert_eq!(
        text,
        format!("{at}copied flag is clear, refcount is 1 (0x0000000000050000)")
    );
}
