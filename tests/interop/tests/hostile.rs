//! Images broken on purpose: every field of every structure set to values it must not have, files
//! that end too early, bytes turned at random. Each ends in a clear error or in the data QEMU reads,
//! within bounded time and memory, and what the damage did not touch is still there afterwards.

use std::fs::OpenOptions;

use gaur_interop::compare::qemu_view;
use gaur_interop::field::{Field, HEADER};
use gaur_interop::hostile::{
    MetadataOffsets, assert_reads_survive, assert_writes_survive, places, victim, word,
};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;

/// The bits of an L1 or refcount table entry that name a place in the file.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// A healthy image, a working copy, and what QEMU reads from the healthy one.
struct Bench {
    scratch: Scratch,
    layout: Layout,
    healthy: String,
    copy: String,
    view: String,
    places: MetadataOffsets,
}

impl Bench {
    fn new(layout: Layout) -> Bench {
        let scratch = Scratch::new("hostile");
        let healthy = victim(&layout, &scratch);
        let view = scratch.path("view.raw");
        qemu_view(&healthy, &view);
        let copy = scratch.path("copy.qcow2");
        let places = places(&healthy);
        Bench {
            scratch,
            layout,
            healthy,
            copy,
            view,
            places,
        }
    }

    fn len(&self) -> u64 {
        std::fs::metadata(&self.healthy).expect("it is there").len()
    }

    fn refresh(&self) {
        std::fs::copy(&self.healthy, &self.copy).expect("scratch is writable");
    }

    /// Sets one field to each of its hostile values, and reads and writes.
    fn attack(&self, field: Field, writes: bool) {
        let truth = field.get(&self.healthy);
        for value in field.hostile_values(truth, self.len()) {
            let what = format!(
                "{} at {}: {value:#x} instead of {truth:#x}",
                field.name, field.offset
            );
            self.refresh();
            field.set(&self.copy, value);
            assert_reads_survive(&self.copy, &self.scratch, &what);
            if writes {
                let leads_into_data = value & OFFSET_MASK != 0
                    && value & OFFSET_MASK < self.len()
                    && (value & OFFSET_MASK).is_multiple_of(self.layout.cluster_bytes);
                self.write_and_look(field, truth, !leads_into_data, &what);
            }
        }
    }

    /// Writes to the broken image; with the field put right again, everything that was not written
    /// is as it was. Not so if the field names a cluster of guest data as metadata, which no writer
    /// can see without looking at the whole image: then `look` is off.
    fn write_and_look(&self, field: Field, truth: u64, look: bool, what: &str) {
        let cluster = self.layout.cluster_bytes;
        let write = |cluster_number: u64, len| Op::Write {
            offset: cluster_number * cluster,
            len,
            pattern: 0x99,
        };
        let ops = [
            write(0, 512),
            write(1, 512),
            write(10, cluster),
            Op::Flush,
            write(12, 512),
        ];
        assert_writes_survive(&self.copy, &self.scratch, &ops, what);
        if look {
            field.set(&self.copy, truth);
            let after = self.scratch.path("after.raw");
            qemu_view(&self.copy, &after);
            self.assert_untouched(&after, what);
        }
    }

    /// The clusters that no operation wrote to hold what they held.
    fn assert_untouched(&self, after: &str, what: &str) {
        let read = |path: &str| std::fs::read(path).expect("a view is there");
        let (before, after) = (read(&self.view), read(after));
        let cluster = self.layout.cluster_bytes as usize;
        for number in [2, 3, 4, 5] {
            let range = number * cluster..(number + 1) * cluster;
            assert!(
                before[range.clone()] == after[range],
                "{what}: cluster {number} was lost"
            );
        }
        for number in [0, 1] {
            let range = number * cluster + 512..(number + 1) * cluster;
            assert!(
                before[range.clone()] == after[range],
                "{what}: cluster {number} was lost"
            );
        }
    }
}

fn header_fields(layout: Layout, names: std::ops::Range<usize>) {
    let bench = Bench::new(layout);
    for field in &HEADER[names] {
        bench.attack(*field, false);
    }
}

#[test]
fn the_header_up_to_the_size() {
    header_fields(Layout::v3(4096), 0..6);
}

#[test]
fn the_header_from_encryption_to_the_refcount_table() {
    header_fields(Layout::v3(4096), 6..11);
}

#[test]
fn the_header_from_the_snapshots_to_the_features() {
    header_fields(Layout::v3(4096), 11..16);
}

#[test]
fn the_header_from_the_refcount_order_on() {
    // With clusters of this size there are extensions behind the header.
    header_fields(Layout::v3(65536), 16..HEADER.len());
}

#[test]
fn the_header_of_version_2() {
    header_fields(Layout::v2(65536), 0..13);
}

#[test]
fn the_header_of_an_image_with_extended_entries() {
    header_fields(Layout::extended(16384), 4..6);
    header_fields(Layout::extended(16384), 13..19);
}

#[test]
fn l1_entries() {
    for layout in [Layout::v3(4096), Layout::extended(16384)] {
        let bench = Bench::new(layout);
        bench.attack(word("L1 entry 0", bench.places.l1), true);
    }
}

/// Entries of a normal cluster, of a compressed one and of one that is not allocated.
fn l2_entries_of(layout: Layout) {
    let bench = Bench::new(layout);
    let step = if layout.extended { 16 } else { 8 };
    for (name, number) in [
        ("L2 entry, normal", 0),
        ("L2 entry, compressed", 5),
        ("L2 entry, free", 9),
    ] {
        bench.attack(word(name, bench.places.l2 + step * number), false);
    }
    if layout.extended {
        for (name, number) in [("L2 bitmap, normal", 0), ("L2 bitmap, free", 9)] {
            bench.attack(word(name, bench.places.l2 + step * number + 8), false);
        }
    }
}

#[test]
fn l2_entries() {
    l2_entries_of(Layout::v3(4096));
}

#[test]
fn l2_entries_of_version_2() {
    l2_entries_of(Layout::v2(4096));
}

#[test]
fn l2_entries_with_subclusters() {
    l2_entries_of(Layout::extended(16384));
}

#[test]
fn l2_entries_with_zstd() {
    l2_entries_of(Layout::v3(4096).zstd());
}

/// A mapping that leads into the metadata is not written through.
#[test]
fn a_guest_write_never_lands_in_the_metadata() {
    for layout in [Layout::v3(4096), Layout::extended(16384)] {
        let bench = Bench::new(layout);
        let MetadataOffsets {
            l1,
            l2,
            refcount_table,
            refcount_block,
            ..
        } = bench.places;
        let step = if layout.extended { 16 } else { 8 };
        let entry = word("L2 entry, normal", l2 + step * 4);
        let truth = entry.get(&bench.healthy);
        for target in [0, l1, l2, refcount_table, refcount_block] {
            let what = format!("a mapping to the metadata at {target}");
            bench.refresh();
            entry.set(&bench.copy, 1 << 63 | target);
            let offset = 4 * layout.cluster_bytes;
            let ops = [
                Op::Write {
                    offset,
                    len: 512,
                    pattern: 0x99,
                },
                Op::Flush,
                Op::Discard {
                    offset,
                    len: layout.cluster_bytes,
                },
                Op::Flush,
            ];
            assert_writes_survive(&bench.copy, &bench.scratch, &ops, &what);
            entry.set(&bench.copy, truth);
            let after = bench.scratch.path("after.raw");
            qemu_view(&bench.copy, &after);
            bench.assert_untouched(&after, &what);
        }
    }
}

#[test]
fn refcount_table_entries() {
    let bench = Bench::new(Layout::v3(4096));
    bench.attack(
        word("refcount table entry", bench.places.refcount_table),
        true,
    );
    bench.attack(
        word("refcount table entry 1", bench.places.refcount_table + 8),
        false,
    );
}

/// Four refcounts of 16 bits at once, those of the clusters that hold the metadata among them: no
/// value makes Gaur write to where the header, the tables or the L2 table are.
#[test]
fn refcounts() {
    let bench = Bench::new(Layout::v3(65536));
    let block = bench.places.refcount_block;
    let field = word("refcounts of the first clusters", block);
    let truth = field.get(&bench.healthy);
    for value in [0, 1, u64::MAX, 0x0001_0001_0001_0000, 0x0001_0000_0000_0000] {
        let what = format!("refcounts {value:#x}");
        bench.refresh();
        field.set(&bench.copy, value);
        assert_reads_survive(&bench.copy, &bench.scratch, &what);
        bench.write_and_look(field, truth, true, &what);
    }
}

#[test]
fn the_snapshot_table() {
    let bench = Bench::new(Layout::v3(4096));
    let at = bench.places.snapshots;
    let field = |name, offset, len| Field {
        name,
        offset: at + offset,
        len,
    };
    for field in [
        field("snapshot: l1_table_offset", 0, 8),
        field("snapshot: l1_size", 8, 4),
        field("snapshot: id length", 12, 2),
        field("snapshot: name length", 14, 2),
        field("snapshot: vm_state_size", 32, 4),
        field("snapshot: extra_data_size", 36, 4),
        field("snapshot: disk_size", 48, 8),
    ] {
        bench.attack(field, false);
    }
}

#[test]
fn the_l1_table_of_a_snapshot() {
    let bench = Bench::new(Layout::v3(4096));
    let l1 = word("snapshot: l1_table_offset", bench.places.snapshots).get(&bench.healthy);
    bench.attack(word("snapshot's L1 entry 0", l1), false);
}

#[test]
fn files_that_end_too_early() {
    for layout in [Layout::v2(4096), Layout::v3(65536), Layout::extended(16384)] {
        let bench = Bench::new(layout);
        let len = bench.len();
        let mut ends = vec![0, 1, 3, 4, 8, 71, 72, 103, 104, 111, 112, 120, 511, 512];
        let cluster = layout.cluster_bytes;
        ends.extend((1..10).map(|number| number * cluster));
        ends.extend([
            cluster - 1,
            cluster + 1,
            len / 2,
            len - cluster,
            len - 512,
            len - 1,
        ]);
        for end in ends.into_iter().filter(|&end| end < len) {
            bench.refresh();
            let file = OpenOptions::new()
                .write(true)
                .open(&bench.copy)
                .expect("it opens");
            file.set_len(end).expect("it can be cut");
            let what = format!("a file of {end} bytes instead of {len}");
            assert_reads_survive(&bench.copy, &bench.scratch, &what);
            let ops = [
                Op::Write {
                    offset: 10 * cluster,
                    len: cluster,
                    pattern: 1,
                },
                Op::Write {
                    offset: 0,
                    len: 512,
                    pattern: 2,
                },
                Op::Flush,
            ];
            assert_writes_survive(&bench.copy, &bench.scratch, &ops, &what);
        }
    }
}

/// Bytes turned at random, all over the metadata and in the compressed data.
fn turned_bytes(layout: Layout, seed: u64) {
    let bench = Bench::new(layout);
    let mut random = Random::new(seed);
    for round in 0..60 {
        bench.refresh();
        let mut bytes = std::fs::read(&bench.copy).expect("it is there");
        let places = bench.places;
        let starts = [
            0,
            places.l1,
            places.l2,
            places.refcount_table,
            places.snapshots,
            places.l2,
        ];
        for _ in 0..=random.below(4) {
            let start = starts[random.below(6) as usize] as usize;
            let at = start + random.below(200) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        if random.one_in(3) {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= random.below(255) as u8 + 1;
        }
        std::fs::write(&bench.copy, &bytes).expect("it is writable");
        let what = format!("seed {seed}, round {round}");
        assert_reads_survive(&bench.copy, &bench.scratch, &what);
    }
}

#[test]
fn turned_bytes_in_version_3() {
    turned_bytes(Layout::v3(4096), 1);
}

#[test]
fn turned_bytes_with_subclusters_and_zstd() {
    turned_bytes(Layout::extended(16384).zstd(), 2);
}

#[test]
fn turned_bytes_in_version_2() {
    turned_bytes(Layout::v2(65536), 3);
}

/// Compressed data that is not: the rest of the image is served, the cluster is an error, and the
/// server lives on.
#[test]
fn broken_compressed_data_costs_only_its_cluster() {
    for layout in [Layout::v3(65536), Layout::v3(65536).zstd()] {
        let bench = Bench::new(layout);
        bench.refresh();
        let entry = word("L2 entry, compressed", bench.places.l2 + 5 * 8).get(&bench.copy);
        let offset = entry & ((1 << 54) - 1);
        for step in 0..4 {
            word("compressed data", offset + 8 * step).set(&bench.copy, u64::MAX - 7);
        }
        let socket = bench.scratch.path("s");
        let server = gaur_interop::gaur::serve(&bench.copy, &socket);
        let cluster = layout.cluster_bytes;
        let read = |number, pattern| Op::Expect {
            offset: number * cluster,
            len: 512,
            pattern,
        };
        let run = op::try_apply("raw", &server.uri(), &[read(5, 0x55)]);
        assert!(run.code != 0, "garbage was unpacked: {run}");
        op::apply(
            "raw",
            &server.uri(),
            &[read(0, 0x11), read(4, 0x44), read(2, 0x22)],
        );
        server.stop();
    }
}
