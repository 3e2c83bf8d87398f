//! `gaur create` against `qemu-img create`.

use std::io::Read;

use crate::workdir::WorkDir;

/// Option lists that make images.
const OPTIONS: [&str; 11] = [
    "compat=0.10",
    "compat=v3,lazy_refcounts=on",
    "cluster_size=512",
    "cluster_size=2M,extended_l2=on",
    "extended_l2=on,cluster_size=16k",
    "refcount_bits=1",
    "refcount_bits=64,cluster_size=4k",
    "compression_type=zstd",
    "preallocation=metadata",
    "preallocation=falloc",
    "preallocation=full,cluster_size=4k",
];

#[test]
fn create_output_matches_qemu_img() {
    let dir = WorkDir::new();
    for options in OPTIONS {
        let args = ["create", "-f", "qcow2", "-o", options, "disk.qcow2", "20M"];
        let theirs = dir.qemu_img(&args).ok();
        let described = dir
            .qemu_img(&["info", "--output=json", "disk.qcow2"])
            .json();
        let ours = dir.gaur(&[&["qemu-img"], &args[..]].concat()).ok();
        assert_eq!(ours, theirs, "{options}");
        dir.check_clean("disk.qcow2");
        let ours = dir
            .qemu_img(&["info", "--output=json", "disk.qcow2"])
            .json();
        for key in ["virtual-size", "cluster-size", "format", "format-specific"] {
            assert_eq!(ours[key], described[key], "{options} {key}");
        }
        dir.same(&["check", "disk.qcow2"]);
    }
}

#[test]
fn an_overlay_takes_its_size_from_the_backing_file() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "base.qcow2", "123M"]).ok();
    let args = [
        "create",
        "-f",
        "qcow2",
        "-b",
        "base.qcow2",
        "-F",
        "qcow2",
        "top.qcow2",
    ];
    let create = |args: &[&str]| dir.gaur(&[&["qemu-img"], args].concat()).ok();
    let ours = create(&args);
    dir.same(&["info", "--backing-chain", "--output=json", "top.qcow2"]);
    assert_eq!(dir.qemu_img(&args).ok(), ours);
    // A relative name counts from the overlay.
    std::fs::create_dir(dir.path("sub")).expect("a directory");
    let args = [
        "create",
        "-f",
        "qcow2",
        "-b",
        "../base.qcow2",
        "-F",
        "qcow2",
        "sub/top.qcow2",
    ];
    assert_eq!(create(&args), dir.qemu_img(&args).ok());
}

/// docs/decisions/15: subclusters of 4 KiB, which QEMU reads since 5.2, unless something is said of clusters; as QEMU has it
/// under the name of its program. With the same words for both, the headers are the same.
#[test]
fn layout_is_extended_unless_told_otherwise() {
    let dir = WorkDir::new();
    dir.qemu_create(&["base.qcow2", "8M"]);
    let choice =
        "QEMU reads extended_l2=on since version 5.2; -o extended_l2=off is for older programs";
    for (given, chosen) in [
        (&[][..], true),
        (&["-b", "base.qcow2", "-F", "qcow2"], true),
        (&["-o", "compat=v3,lazy_refcounts=on"], true),
        (&["-o", "preallocation=metadata"], true),
        (&["-o", "extended_l2=off"], false),
        (&["-o", "cluster_size=64k"], false),
        (&["-o", "compat=0.10"], false),
        (&["-o", "compat=v2,refcount_bits=16"], false),
    ] {
        let image = ["-f", "qcow2", "disk.qcow2", "20M"];
        let text = dir.gaur(&[&["create"], given, &image[..]].concat()).ok();
        assert_eq!(text.ends_with(&format!("{choice}\n")), chosen, "{text}");
        let shown = text.contains(" cluster_size=131072 extended_l2=on ");
        assert_eq!(shown, chosen, "{text}");
        dir.check_clean("disk.qcow2");
        dir.qemu_io("disk.qcow2", &["write -P 7 4k 4k", "read -P 7 4k 4k"]);
        dir.same(&["info", "--output=json", "disk.qcow2"]);
        dir.gaur(&[&["create"], given, &image[..]].concat()).ok();
        let ours = dir.read("disk.qcow2");
        let words: &[&str] = match chosen {
            true => &["-o", "extended_l2=on,cluster_size=128k"],
            false => &[],
        };
        let qemu = [&["create"], given, words, &image[..]].concat();
        let theirs = dir.qemu_img(&qemu).ok();
        assert_eq!(text.lines().next(), theirs.lines().next(), "{given:?}");
        assert!(
            ours[..65536] == dir.read("disk.qcow2")[..65536],
            "{given:?}"
        );
    }
    let text = dir.gaur(&["qemu-img", "create", "-fqcow2", "a", "1M"]).ok();
    assert!(text.contains("cluster_size=65536") && !text.contains(choice));
    assert_eq!(dir.gaur(&["create", "-q", "disk.qcow2", "1M"]).ok(), "");
}

#[test]
fn backing_file_is_checked_unless_unsafe() {
    let dir = WorkDir::new();
    let fails = |args: &[&str], words: &[&str]| {
        dir.gaur(&[&["create", "-q", "-f", "qcow2"], args].concat())
            .fails(1, words);
        assert!(!dir.path("top.qcow2").exists(), "{args:?} leaves nothing");
    };
    fails(
        &["-b", "gone", "-F", "raw", "top.qcow2"],
        &["gone", "no such file"],
    );
    fails(&["-b", "gone", "-F", "raw", "top.qcow2", "1M"], &["-u"]);
    fails(&["-b", "gone", "top.qcow2", "1M"], &["-F"]);
    fails(&["-u", "-b", "gone", "-F", "raw", "top.qcow2"], &["size"]);
    fails(&["-F", "raw", "top.qcow2", "1M"], &["backing"]);
    fails(
        &["-b", "top.qcow2", "-F", "qcow2", "top.qcow2", "1M"],
        &["its own backing file"],
    );
    dir.gaur(&[
        "create",
        "-qf",
        "qcow2",
        "-u",
        "-b",
        "gone",
        "-F",
        "raw",
        "top.qcow2",
        "1M",
    ])
    .ok();
    dir.same(&["info", "top.qcow2"]);
}

#[test]
fn create_with_wrong_option_keeps_the_existing_image() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "disk.qcow2", "1M"]).ok();
    dir.qemu_io("disk.qcow2", &["write -P 1 0 64k"]);
    let before = dir.read("disk.qcow2");
    for options in [
        "cluster_size=3000",
        "cluster_size=4k,extended_l2=on",
        "compat=v2,extended_l2=on",
        "compat=v2,refcount_bits=1",
        "compat=v2,lazy_refcounts=on",
        "compat=v2,compression_type=zstd",
        "encryption=on",
        "compat=v2,data_file=x",
        "data_file_raw=on",
        "colour=red",
    ] {
        dir.gaur(&["create", "-f", "qcow2", "-o", options, "disk.qcow2", "1M"])
            .fails(1, &["disk.qcow2"]);
        let theirs = dir.qemu_img(&["create", "-qf", "qcow2", "-o", options, "other", "1M"]);
        if options != "encryption=on" {
            assert_eq!(theirs.code, 1, "{options}");
        }
        assert!(
            dir.read("disk.qcow2") == before,
            "{options} changed the image"
        );
    }
}

/// QEMU looks for a relative name in the working directory, wherever the image is.
#[test]
fn a_relative_data_file_is_found_from_anywhere() {
    let dir = WorkDir::new();
    dir.gaur(&[
        "create",
        "-q",
        "-o",
        "data_file=data.raw",
        "disk.qcow2",
        "1M",
    ])
    .ok();
    assert_eq!(dir.read("data.raw").len(), 1 << 20);
    let info = dir.gaur(&["info", "--output=json", "disk.qcow2"]).json();
    let name = &info["format-specific"]["data"]["data-file"];
    let name = name.as_str().expect("it is named");
    assert!(
        name.starts_with('/') && name.ends_with("/data.raw"),
        "{name}"
    );
    dir.qemu_io("disk.qcow2", &["write -P 1 0 64k"]);
    dir.gaur(&["check", "disk.qcow2"]).ok();
    assert_eq!(dir.read("data.raw")[..65536], [1; 65536]);
}

#[test]
fn raw_images_have_their_length_and_space() {
    let dir = WorkDir::new();
    for options in [
        "preallocation=off",
        "preallocation=falloc",
        "preallocation=full",
    ] {
        let args = ["create", "-f", "raw", "-o", options, "disk.raw", "3M"];
        let theirs = dir.qemu_img(&args).ok();
        let described = dir.qemu_img(&["info", "--output=json", "disk.raw"]).json();
        assert_eq!(dir.gaur(&args).ok(), theirs);
        let ours = dir.qemu_img(&["info", "--output=json", "disk.raw"]).json();
        assert_eq!(ours["virtual-size"], described["virtual-size"]);
        if options != "preallocation=off" {
            assert_eq!(ours["actual-size"], described["actual-size"], "{options}");
        }
    }
    dir.gaur(&["create", "-f", "raw", "disk.raw"])
        .fails(1, &["size"]);
}

#[test]
fn an_image_in_use_is_not_overwritten() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "disk.qcow2", "1M"]).ok();
    let mut user = dir.command("qemu-io", &["-f", "qcow2", "disk.qcow2"]);
    let mut user = user
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("qemu-io runs");
    let before = dir.read("disk.qcow2");
    // It has its locks when it prompts. To try meanwhile would take them away from it.
    let prompt = user
        .stdout
        .as_mut()
        .expect("its output")
        .read_exact(&mut [0; 8]);
    prompt.expect("a prompt");
    dir.gaur(&["info", "disk.qcow2"]).fails(1, &["lock", "-U"]);
    dir.gaur(&["info", "-U", "disk.qcow2"]).ok();
    dir.gaur(&["create", "-f", "qcow2", "disk.qcow2", "1M"])
        .fails(1, &["lock"]);
    dir.gaur(&["resize", "disk.qcow2", "2M"])
        .fails(1, &["lock"]);
    assert!(dir.read("disk.qcow2") == before);
    drop(user.stdin.take());
    user.wait().expect("qemu-io ends");
    dir.gaur(&["resize", "disk.qcow2", "2M"]).ok();
}

#[test]
fn help_lists_the_options_without_an_image() {
    let dir = WorkDir::new();
    let text = dir.gaur(&["create", "-f", "qcow2", "-o", "help"]).ok();
    for option in ["cluster_size", "extended_l2", "compat", "preallocation"] {
        assert!(text.contains(option), "{text}");
    }
}
