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

#[test]
fn unsupported_convert_option_is_refused_by_name() {
    let dir = WorkDir::new();
    dir.gaur(&["convert", "--salvage", "a", "b"])
        .fails(1, &["salvage", "not supported"]);
    dir.gaur(&["convert", "a"]).fails(1, &["target"]);
}
