//! `gaur convert`, judged by QEMU's tools.

use std::os::unix::fs::MetadataExt;

use crate::workdir::WorkDir;

#[test]
fn every_image_becomes_raw_and_back() {
    let dir = WorkDir::new();
    for image in dir.gallery() {
        dir.gaur(&["convert", "-O", "raw", image, "out.raw"]).ok();
        dir.identical(image, "out.raw");
        dir.qemu_img(&["convert", "-O", "raw", image, "theirs.raw"])
            .ok();
        assert_eq!(dir.read("out.raw").len(), dir.read("theirs.raw").len());
        dir.gaur(&[
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "out.raw",
            "out.qcow2",
        ])
        .ok();
        dir.identical(image, "out.qcow2");
        dir.check_clean("out.qcow2");
    }
}

#[test]
fn targets_of_every_kind_hold_the_same_bytes() {
    let dir = WorkDir::new();
    dir.gallery();
    for options in [
        "compat=v2",
        "cluster_size=512",
        "cluster_size=2M",
        "extended_l2=on,cluster_size=16k",
        "extended_l2=on,refcount_bits=64",
        "refcount_bits=1",
        "preallocation=metadata",
        "preallocation=full",
    ] {
        dir.gaur(&[
            "convert",
            "-O",
            "qcow2",
            "-o",
            options,
            "top.qcow2",
            "out.qcow2",
        ])
        .ok();
        dir.identical("top.qcow2", "out.qcow2");
        dir.check_clean("out.qcow2");
    }
    for switches in [
        &["-W", "-m", "16"][..],
        &["-m", "1"],
        &["-S", "0"],
        &["-S", "64k"],
        &["-t", "none"],
    ] {
        let args = [
            &["convert", "-O", "qcow2"],
            switches,
            &["top.qcow2", "out.qcow2"],
        ]
        .concat();
        dir.gaur(&args).ok();
        dir.identical("top.qcow2", "out.qcow2");
        dir.check_clean("out.qcow2");
    }
}

fn space(dir: &WorkDir, name: &str) -> u64 {
    dir.path(name).metadata().expect("a file").blocks() * 512
}

#[test]
fn holes_and_zeros_stay_holes() {
    let dir = WorkDir::new();
    let mut bytes = vec![0; 8 << 20];
    bytes[5 << 20] = 1;
    std::fs::write(dir.path("full.raw"), &bytes).expect("a file");
    assert!(space(&dir, "full.raw") >= 8 << 20);
    dir.gaur(&["convert", "-f", "raw", "-O", "raw", "full.raw", "thin.raw"])
        .ok();
    assert!(space(&dir, "thin.raw") <= 64 << 10);
    dir.gaur(&[
        "convert",
        "-f",
        "raw",
        "-O",
        "qcow2",
        "full.raw",
        "thin.qcow2",
    ])
    .ok();
    assert!(space(&dir, "thin.qcow2") <= 1 << 20);
    dir.gaur(&[
        "convert", "-S", "0", "-f", "raw", "-O", "raw", "full.raw", "fat.raw",
    ])
    .ok();
    assert!(space(&dir, "fat.raw") >= 8 << 20);
    for target in ["thin.raw", "thin.qcow2", "fat.raw"] {
        dir.identical("full.raw", target);
    }
}

#[test]
fn several_sources_follow_each_other() {
    let dir = WorkDir::new();
    dir.gallery();
    dir.gaur(&[
        "convert",
        "-O",
        "raw",
        "old.qcow2",
        "top.qcow2",
        "base.qcow2",
        "ours.raw",
    ])
    .ok();
    dir.qemu_img(&[
        "convert",
        "-O",
        "raw",
        "old.qcow2",
        "top.qcow2",
        "base.qcow2",
        "theirs.raw",
    ])
    .ok();
    assert!(dir.read("ours.raw") == dir.read("theirs.raw"));
}

#[test]
fn convert_skips_data_of_the_backing_file() {
    let dir = WorkDir::new();
    dir.gallery();
    let args = [
        "convert",
        "-O",
        "qcow2",
        "-B",
        "base.qcow2",
        "-F",
        "qcow2",
        "top.qcow2",
        "out.qcow2",
    ];
    dir.gaur(&args).ok();
    dir.identical("top.qcow2", "out.qcow2");
    dir.check_clean("out.qcow2");
    let info = dir.gaur(&["info", "--output=json", "out.qcow2"]).json();
    assert_eq!(info["backing-filename"], "base.qcow2");
    assert!(space(&dir, "out.qcow2") < space(&dir, "base.qcow2"));
}

#[test]
fn an_existing_target_is_overwritten_throughout() {
    let dir = WorkDir::new();
    dir.gallery();
    dir.qemu_img(&["create", "-qf", "qcow2", "there.qcow2", "100M"])
        .ok();
    dir.qemu_io("there.qcow2", &["write -P 99 0 100M"]);
    dir.gaur(&["convert", "-n", "-O", "qcow2", "top.qcow2", "there.qcow2"])
        .ok();
    dir.identical("top.qcow2", "there.qcow2");
    dir.check_clean("there.qcow2");
    dir.qemu_img(&["create", "-qf", "qcow2", "small.qcow2", "1M"])
        .ok();
    dir.gaur(&["convert", "-n", "-O", "qcow2", "top.qcow2", "small.qcow2"])
        .fails(1, &["small.qcow2", "bytes"]);
}

#[test]
fn a_target_that_is_a_source_is_not_touched() {
    let dir = WorkDir::new();
    dir.gallery();
    let before = dir.read("base.qcow2");
    // The backing file of the source is a source too.
    for source in ["base.qcow2", "top.qcow2"] {
        dir.gaur(&["convert", source, "-O", "qcow2", "base.qcow2"])
            .fails(
                1,
                &["base.qcow2", "a source, or a backing file of one", source],
            );
        assert!(dir.read("base.qcow2") == before);
    }
    // By another name, too: that is no "other program" that has the lock.
    std::fs::hard_link(dir.path("base.qcow2"), dir.path("hard.qcow2")).expect("a link");
    for switches in [&[][..], &["-n"]] {
        dir.gaur(&[&["convert"], switches, &["base.qcow2", "hard.qcow2"]].concat())
            .fails(1, &["hard.qcow2", "a source"]);
    }
}

#[test]
fn a_read_error_stops_the_work_and_says_that_the_target_is_incomplete() {
    let dir = WorkDir::new();
    dir.qemu_img(&["create", "-qf", "qcow2", "disk.qcow2", "8M"])
        .ok();
    dir.qemu_io("disk.qcow2", &["write -P 1 0 8M"]);
    // The first entry of the L2 table points to no cluster boundary.
    dir.patch("disk.qcow2", 0x40007, &[0x01]);
    let bytes = dir.read("disk.qcow2");
    assert_eq!(
        bytes[0x40000] & 0xf0,
        0x80,
        "an L2 entry is where it is expected"
    );
    dir.patch("disk.qcow2", 0x40006, &[0x02]);
    dir.gaur(&["convert", "-O", "raw", "disk.qcow2", "out.raw"])
        .fails(1, &["disk.qcow2", "out.raw is incomplete"]);
}

#[test]
fn progress_is_told_in_the_form_of_qemu_img() {
    let dir = WorkDir::new();
    dir.gallery();
    let text = dir
        .gaur(&["convert", "-p", "-O", "raw", "top.qcow2", "out.raw"])
        .ok();
    assert!(
        text.starts_with("    (0.00/100%)\r") && text.ends_with("    (100.00/100%)\r\n"),
        "{text:?}"
    );
    assert_eq!(
        dir.gaur(&["convert", "-O", "raw", "top.qcow2", "out.raw"])
            .ok(),
        ""
    );
}

/// Where the L2 table of the first 512 MiB is.
fn l2_table(image: &[u8]) -> usize {
    let number = |at: usize| {
        let bytes = image[at..at + 8].try_into().expect("eight bytes");
        u64::from_be_bytes(bytes)
    };
    let table = number(number(40) as usize) & 0x00ff_ffff_ffff_fe00;
    table as usize
}

/// A cluster that cannot lie where its entry says, and a compressed one whose stream is damaged.
#[test]
fn salvage_copies_what_can_be_read_and_says_what_cannot() {
    let dir = WorkDir::new();
    let disk: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 512) as u8 | 1).collect();
    std::fs::write(dir.path("disk.raw"), &disk).expect("written");
    for compress in [&[][..], &["-c"]] {
        let to = ["-f", "raw", "-O", "qcow2", "disk.raw", "bad.qcow2"];
        dir.qemu_img(&[&["convert"], compress, &to].concat()).ok();
        let entry = l2_table(&dir.read("bad.qcow2")) + 3 * 8;
        let bad = if compress.is_empty() {
            vec![0x80, 0, 0, 0, 0, 0x12, 0x34, 0]
        } else {
            let image = dir.read("bad.qcow2");
            let mut bytes = image[entry..entry + 8].to_vec();
            // Some other place of the stream.
            bytes[7] ^= 0x0f;
            bytes
        };
        dir.patch("bad.qcow2", entry, &bad);
        dir.gaur(&["convert", "-O", "raw", "bad.qcow2", "ours.raw"])
            .fails(1, &["incomplete"]);
        for more in [&["-O", "raw"][..], &["-c", "-O", "qcow2"]] {
            let salvage = ["convert", "--salvage", "bad.qcow2", "ours.img"];
            let answer = dir.gaur(&[&salvage[..2], more, &salvage[2..]].concat());
            assert!(
                answer.err.contains("cannot read 65536 bytes at 196608"),
                "{}",
                answer.err
            );
            answer.ok();
            dir.gaur(&["convert", "-O", "raw", "ours.img", "ours.raw"])
                .ok();
            let seen = dir.read("ours.raw");
            let lost = 3 << 16..4 << 16;
            assert!(seen[lost.clone()].iter().all(|byte| *byte == 0));
            assert!(seen[..lost.start] == disk[..lost.start]);
            assert!(seen[lost.end..] == disk[lost.end..]);
        }
    }
}

#[test]
fn rates_of_convert_and_commit_are_kept() {
    let dir = WorkDir::new();
    let disk: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 512) as u8 | 1).collect();
    std::fs::write(dir.path("disk.raw"), &disk).expect("written");
    // Pieces of a disk, of which each waits for those before it.
    std::fs::write(dir.path("long.raw"), [&disk[..], &disk, &disk].concat()).expect("written");
    dir.gaur(&["create", "-q", "base.qcow2", "3M"]).ok();
    let over = "backing_file=base.qcow2,backing_fmt=qcow2";
    let to = ["-O", "qcow2", "-o", over, "long.raw", "top.qcow2"];
    dir.gaur(&[&["convert", "-f", "raw"], &to[..]].concat())
        .ok();
    let timed = |args: &[&str]| {
        let start = std::time::Instant::now();
        dir.gaur(args).ok();
        start.elapsed().as_millis()
    };
    for args in [
        &["convert", "-r", "4M", "-f", "raw", "long.raw", "copy.raw"][..],
        &["commit", "-q", "--rate", "4M", "top.qcow2"],
    ] {
        let limited = timed(args);
        assert!((300..30_000).contains(&limited), "{args:?}: {limited} ms");
    }
    assert!(dir.read("copy.raw")[2 << 20..] == disk);
    dir.identical("base.qcow2", "long.raw");
    dir.gaur(&["convert", "-r", "0", "disk.raw", "copy.raw"])
        .fails(1, &["one byte a second"]);
}

#[test]
fn convert_without_a_target_is_refused() {
    let dir = WorkDir::new();
    dir.gaur(&["convert", "a"]).fails(1, &["target"]);
}
