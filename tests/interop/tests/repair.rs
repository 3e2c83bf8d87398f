//! Repair of what leads to snapshots and bitmaps: QEMU finds the repaired image sound, and reads of it what it read of the
//! whole one.

use gaur_interop::builder::snapshot_view;
use gaur_interop::compare::{assert_same_bytes, qemu_view};
use gaur_interop::field::{Field, header};
use gaur_interop::gaur::gaur;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img};

const NAMES: [&str; 3] = ["one", "two", "three"];

fn write(image: &str, offset: u64, pattern: u8) {
    let len = 128 << 10;
    op::apply(
        "qcow2",
        image,
        &[Op::Write {
            offset,
            len,
            pattern,
        }],
    );
}

/// An image with three snapshots, and what QEMU reads of it and of each of them.
fn image_with_snapshots(scratch: &Scratch, compat: &str) -> (String, Vec<String>) {
    let image = scratch.path("d.qcow2");
    let options = format!("cluster_size=4k,compat={compat}");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, &image, "4M"]).ok();
    for (number, name) in (1..).zip(NAMES) {
        write(&image, u64::from(number) << 16, number);
        qemu_img(&["snapshot", "-c", name, &image]).ok();
    }
    write(&image, 1 << 15, 9);
    let disk = scratch.path("disk.raw");
    qemu_view(&image, &disk);
    let mut views = vec![disk];
    for name in NAMES {
        let view = scratch.path(&format!("{name}.raw"));
        snapshot_view(&image, name, &view);
        views.push(view);
    }
    (image, views)
}

fn field(offset: u64, len: usize) -> Field {
    Field {
        name: "snapshot table",
        offset,
        len,
    }
}

/// Where the entry of snapshot `number` begins.
fn entry(image: &str, number: usize) -> u64 {
    let mut at = header("snapshots_offset").get(image);
    for _ in 0..number {
        let get = |offset, len| field(at + offset, len).get(image);
        at += (40 + get(12, 2) + get(14, 2) + get(36, 4)).next_multiple_of(8);
    }
    at
}

/// Repairs, and compares with what was read before; of the snapshots those named in `left` are there.
fn assert_repaired(scratch: &Scratch, image: &str, views: &[String], left: &[&str]) {
    let damaged = std::fs::read(image).expect("the image is there");
    gaur(&["check", "-r", "all", "--dry-run", image]).code(2);
    assert!(damaged == std::fs::read(image).expect("it is there"));
    gaur(&["check", "-r", "all", image]).ok();
    assert_repaired_disks(scratch, image, views, left);
}

fn assert_repaired_disks(scratch: &Scratch, image: &str, views: &[String], left: &[&str]) {
    gaur(&["check", image]).ok();
    assert_clean(image);
    let now = scratch.path("now.raw");
    qemu_view(image, &now);
    assert_same_bytes(&views[0], &now);
    let list = qemu_img(&["snapshot", "-l", image]).ok().stdout;
    for (name, view) in NAMES.iter().zip(&views[1..]) {
        let named = list.contains(&format!(" {name} "));
        assert_eq!(named, left.contains(name), "{list}");
        if named {
            std::fs::remove_file(&now).expect("scratch is writable");
            snapshot_view(image, name, &now);
            assert_same_bytes(view, &now);
        }
    }
    // A writer finds all that it needs.
    write(image, 2 << 20, 5);
    assert_clean(image);
}

#[test]
fn snapshots_that_cannot_be_read_are_dropped_and_all_others_stay() {
    for compat in ["0.10", "1.1"] {
        let scratch = Scratch::new("repair");
        let (image, views) = image_with_snapshots(&scratch, compat);
        let whole = std::fs::read(&image).expect("the image is there");
        let l1 = field(entry(&image, 1), 8).get(&image);
        let damages: [(u64, usize, u64, &[&str]); 5] = [
            (0, 8, l1 + 512, &["one", "three"]),
            (0, 8, 0, &["one", "three"]),
            (0, 8, 1 << 40, &["one", "three"]),
            (8, 4, 0x7fff_ffff, &["one", "three"]),
            (36, 4, 0xffff_fff0, &["one"]),
        ];
        for (at, len, value, left) in damages {
            std::fs::write(&image, &whole).expect("scratch is writable");
            field(entry(&image, 1) + at, len).set(&image, value);
            let told = gaur(&["check", "-r", "all", "--dry-run", &image]).code(2);
            let line = match left.len() {
                1 => "the last 2 entries",
                _ => "snapshot 2 ('two') is dropped",
            };
            assert!(told.stderr.contains(line), "{told}");
            assert_repaired(&scratch, &image, &views, left);
        }
    }
}

#[test]
fn a_table_with_too_many_entries_keeps_those_that_are_some() {
    for compat in ["0.10", "1.1"] {
        let scratch = Scratch::new("repair");
        let (image, views) = image_with_snapshots(&scratch, compat);
        let whole = std::fs::read(&image).expect("the image is there");
        for count in [5, 70_000] {
            std::fs::write(&image, &whole).expect("scratch is writable");
            header("nb_snapshots").set(&image, count);
            assert_repaired(&scratch, &image, &views, &NAMES);
        }
        std::fs::write(&image, &whole).expect("scratch is writable");
        header("snapshots_offset").set(&image, 1 << 40);
        assert_repaired(&scratch, &image, &views, &[]);
    }
}

/// QEMU 10 gives up on a snapshot that has the active L1 table.
#[test]
fn a_snapshot_with_the_l1_table_of_another_disk_gets_its_own() {
    for compat in ["0.10", "1.1"] {
        let scratch = Scratch::new("repair");
        let (image, mut views) = image_with_snapshots(&scratch, compat);
        let whole = std::fs::read(&image).expect("the image is there");
        let active = header("l1_table_offset").get(&image);
        let first = field(entry(&image, 0), 8).get(&image);
        for (l1, view) in [(active, 0), (first, 1)] {
            std::fs::write(&image, &whole).expect("scratch is writable");
            field(entry(&image, 1), 8).set(&image, l1);
            views[2] = views[view].clone();
            assert_repaired(&scratch, &image, &views, &NAMES);
        }
    }
}

/// Where the data of the extension lie that leads to the bitmaps.
fn bitmaps_extension(image: &str) -> u64 {
    let mut at = header("header_length").get(image);
    while field(at, 4).get(image) != 0x2385_2875 {
        at += 8 + field(at + 4, 4).get(image).next_multiple_of(8);
    }
    at + 8
}

fn bitmap_names(image: &str) -> Vec<String> {
    let info = qemu_img(&["info", "--output=json", image]).ok().json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array();
    let name = |bitmap: &serde_json::Value| bitmap["name"].as_str().unwrap_or("").to_owned();
    bitmaps
        .map(|all| all.iter().map(name).collect())
        .unwrap_or_default()
}

#[test]
fn bitmaps_that_cannot_be_read_are_removed_and_the_disk_stays() {
    let scratch = Scratch::new("repair");
    let (image, views) = image_with_snapshots(&scratch, "1.1");
    for name in ["daily", "hourly"] {
        qemu_img(&["bitmap", "--add", "-g", "512", &image, name]).ok();
    }
    write(&image, 0, 3);
    qemu_view(&image, &views[0]);
    let whole = std::fs::read(&image).expect("the image is there");
    let extension = bitmaps_extension(&image);
    let directory = field(extension + 16, 8).get(&image);
    let table = field(directory, 8).get(&image);
    let daily: (&str, &[&str]) = ("bitmap 'daily' is removed", &["hourly"]);
    let all: (&str, &[&str]) = ("bitmap directory is dropped", &[]);
    let damages = [
        (field(directory, 8), 1 << 40, daily),
        (field(directory, 8), table + 512, daily),
        (field(directory + 8, 4), 0x7fff_ffff, daily),
        (field(directory + 12, 4), 0x80, daily),
        (field(directory + 16, 1), 2, daily),
        (field(directory + 17, 1), 60, daily),
        (field(table, 8), 1 << 60, daily),
        (field(extension, 4), 3, all),
        (field(directory + 18, 2), 0xffff, all),
    ];
    for (field, value, (line, left)) in damages {
        std::fs::write(&image, &whole).expect("scratch is writable");
        field.set(&image, value);
        let told = gaur(&["check", "-r", "all", "--dry-run", &image]).code(2);
        assert!(told.stderr.contains(line), "{told}");
        gaur(&["check", "-q", "-r", "all", &image]).ok();
        assert_eq!(bitmap_names(&image), left, "{line}");
        assert_repaired_disks(&scratch, &image, &views, &NAMES);
    }
}

/// QEMU's repair of two L1 entries with one L2 table leaves it shared, which its checker accepts; it copies the table
/// when it writes.
#[test]
fn l2_tables_that_entries_share_are_written_to_after_a_repair_only() {
    let scratch = Scratch::new("repair");
    let (image, _) = image_with_snapshots(&scratch, "1.1");
    qemu_img(&["resize", "-q", &image, "16M"]).ok();
    let views = |when: &str| {
        NAMES.map(|name| {
            let view = scratch.path(&format!("{name}-{when}.raw"));
            snapshot_view(&image, name, &view);
            view
        })
    };
    let before = views("before");
    let l1 = header("l1_table_offset").get(&image);
    let table = field(l1, 8).get(&image);
    field(l1 + 16, 8).set(&image, table);
    qemu_img(&["check", "-q", "-r", "all", &image]).ok();
    assert_clean(&image);
    let refused = gaur(&["qemu-io", "-c", "write 0 4k", &image]).code(1);
    assert!(
        refused.stderr.contains("gaur check -r all"),
        "{}",
        refused.stderr
    );
    gaur(&["check", "-r", "all", &image]).ok();
    assert_clean(&image);
    let read = |offset: &str, pattern: u8| {
        let read = format!("read -P {pattern} {offset} 64k");
        let read = gaur(&["qemu-io", "-r", "-c", &read, &image]).ok();
        assert!(!read.stdout.contains("failed"), "{}", read.stdout);
    };
    gaur(&["qemu-io", "-c", "write -P 7 192k 64k", &image]).ok();
    for (offset, pattern) in [("192k", 7), ("4288k", 3), ("256k", 3), ("4352k", 3)] {
        read(offset, pattern);
    }
    for (before, after) in before.iter().zip(&views("after")) {
        assert_same_bytes(before, after);
    }
}
