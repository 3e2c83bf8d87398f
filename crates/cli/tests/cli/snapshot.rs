//! `gaur snapshot` beside `qemu-img snapshot`, and snapshots as disks.

use std::process::{Command, Stdio};

use crate::server::{Server, client};
use crate::workdir::{Answer, GAUR, WorkDir};

/// An image whose disk was 1s, then (snapshot "one") 2s over part of it, then ("two", and larger) 3s.
/// Returns how many MiB the first was.
fn image(dir: &WorkDir, options: &str) -> u64 {
    // QEMU resizes no image of version 2 that has snapshots.
    let first = if options == "compat=0.10" { 12 } else { 8 };
    let size = format!("{first}M");
    dir.qemu_create(&["-o", options, "disk.qcow2", &size]);
    dir.qemu_io("disk.qcow2", &["write -P 1 0 6M"]);
    dir.qemu_img(&["snapshot", "-c", "one", "disk.qcow2"]).ok();
    dir.qemu_io("disk.qcow2", &["write -P 2 1M 1M", "write -z 3M 1M"]);
    if first < 12 {
        dir.qemu_img(&["resize", "-q", "disk.qcow2", "12M"]).ok();
    }
    dir.qemu_img(&["snapshot", "-c", "two", "disk.qcow2"]).ok();
    dir.qemu_io("disk.qcow2", &["write -P 3 2M 9M"]);
    first
}

const SHAPES: [&str; 4] = [
    "compat=1.1",
    "compat=0.10",
    "extended_l2=on",
    "cluster_size=4k,refcount_bits=8",
];

fn names(dir: &WorkDir, image: &str) -> Vec<String> {
    let list = dir
        .gaur(&["snapshot", "list", "--output=json", image])
        .json();
    let name = |one: &serde_json::Value| one["name"].as_str().expect("a name").to_owned();
    list.as_array().expect("a list").iter().map(name).collect()
}

#[test]
fn lists_are_those_of_qemu_img() {
    let dir = WorkDir::new();
    dir.gallery();
    std::fs::write(dir.path("raw"), [0; 512]).expect("a file");
    for image in ["rich.qcow2", "empty.qcow2", "old.qcow2"] {
        dir.same(&["snapshot", "-l", image]).ok();
        dir.same(&["snapshot", image]).ok();
        let info = dir.qemu_img(&["info", "--output=json", image]).json();
        let list = dir
            .gaur(&["snapshot", "list", "--output=json", image])
            .json();
        let theirs = info.get("snapshots").cloned();
        assert_eq!(list, theirs.unwrap_or(serde_json::json!([])));
    }
    dir.same(&["snapshot", "-l", "-f", "raw", "raw"]).ok();
    let detail = dir.gaur(&["snapshot", "info", "rich.qcow2", "before the storm"]);
    let detail = detail.ok();
    assert!(
        detail.contains("id: 1\n") && detail.contains("virtual size: 1 GiB"),
        "{detail}"
    );
}

/// Both tools make, apply and delete in turn, and both see the same after every step.
#[test]
fn both_tools_work_on_one_image_in_turn() {
    for shape in SHAPES {
        let dir = WorkDir::new();
        image(&dir, shape);
        let agree = |step: &str| {
            dir.check_clean("disk.qcow2");
            let same = dir.same(&["snapshot", "-l", "disk.qcow2"]);
            assert_eq!(same.code, 0, "{shape} {step}");
        };
        let run = |words: &[&str]| {
            let answer = dir.gaur(words);
            assert_eq!((answer.out.as_str(), answer.err.as_str()), ("", ""));
            answer.ok();
            agree(words.join(" ").as_str());
        };
        run(&["snapshot", "create", "disk.qcow2", "three"]);
        dir.qemu_img(&["snapshot", "-a", "one", "disk.qcow2"]).ok();
        dir.qemu_io("disk.qcow2", &["read -P 1 0 6M"]);
        run(&["snapshot", "apply", "disk.qcow2", "three"]);
        let disk = ["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 9M"];
        dir.qemu_io("disk.qcow2", &disk);
        dir.qemu_img(&["snapshot", "-d", "two", "disk.qcow2"]).ok();
        run(&["snapshot", "-c", "four", "disk.qcow2"]);
        run(&["snapshot", "rename", "disk.qcow2", "four", "vier"]);
        run(&["snapshot", "-a", "one", "disk.qcow2"]);
        dir.qemu_io("disk.qcow2", &["read -P 1 0 6M", "write -P 5 0 64k"]);
        run(&["snapshot", "delete", "disk.qcow2", "three"]);
        run(&["snapshot", "-d", "one", "disk.qcow2"]);
        dir.qemu_img(&["snapshot", "-a", "vier", "disk.qcow2"]).ok();
        dir.qemu_io("disk.qcow2", &disk);
        assert_eq!(names(&dir, "disk.qcow2"), ["vier"]);
    }
}

#[test]
fn snapshot_metadata_options_are_recorded() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "disk.qcow2", "1M"]).ok();
    let options = [
        "--id=x7",
        "--date=86400",
        "--vm-clock=3723004000000",
        "--icount=5",
    ];
    let make = [&["snapshot", "create"], &options[..], &["disk.qcow2", "s"]].concat();
    dir.gaur(&make).ok();
    dir.same(&["snapshot", "-l", "disk.qcow2"]).ok();
    let one = dir
        .gaur(&["snapshot", "info", "--output=json", "disk.qcow2", "x7"])
        .json();
    for (key, value) in [
        ("date-sec", 86400),
        ("vm-clock-sec", 3723),
        ("vm-clock-nsec", 4_000_000),
        ("icount", 5),
        ("disk-size", 1 << 20),
        ("vm-state-size", 0),
    ] {
        assert_eq!(one[key], value, "{key}");
    }
}

#[test]
fn refused_snapshot_change_leaves_the_image() {
    let dir = WorkDir::new();
    image(&dir, "compat=1.1");
    std::fs::write(dir.path("disk.raw"), [0; 4096]).expect("a file");
    let before = dir.read("disk.qcow2");
    let all = ["\"one\"", "\"two\""];
    dir.gaur(&["snapshot", "delete", "disk.qcow2", "nope"])
        .fails(1, &["disk.qcow2", "\"nope\"", all[0], all[1]]);
    dir.gaur(&["snapshot", "-a", "nope", "disk.qcow2"])
        .fails(1, &["\"nope\""]);
    dir.gaur(&["snapshot", "rename", "disk.qcow2", "nope", "x"])
        .fails(1, &["\"nope\""]);
    dir.gaur(&["snapshot", "info", "disk.qcow2", "nope"])
        .fails(1, &["\"nope\""]);
    dir.gaur(&["snapshot", "create", "disk.qcow2", "one"])
        .fails(1, &["\"one\"", "already"]);
    dir.gaur(&["snapshot", "create", "disk.qcow2", "2"])
        .fails(1, &["\"2\"", "id"]);
    dir.gaur(&["snapshot", "rename", "disk.qcow2", "one", "two"])
        .fails(1, &["\"two\""]);
    dir.gaur(&["snapshot", "create", "disk.qcow2", ""])
        .fails(1, &["name"]);
    dir.gaur(&["snapshot", "create", "missing.qcow2", "x"])
        .fails(1, &["missing.qcow2", "no such file"]);
    dir.gaur(&["snapshot", "create", "-f", "raw", "disk.raw", "x"])
        .fails(1, &["disk.raw"]);
    dir.gaur(&["snapshot", "-l", "-c", "x", "disk.qcow2"])
        .fails(1, &["--list", "--create"]);
    dir.gaur(&["snapshot", "create", "disk.qcow2"])
        .fails(1, &["name is missing"]);
    dir.gaur(&["snapshot"]).fails(1, &["an image is needed"]);
    assert_eq!(dir.read("disk.qcow2"), before);
}

#[test]
fn an_image_that_is_served_says_how_to_reach_its_server() {
    let dir = WorkDir::new();
    image(&dir, "compat=1.1");
    let server = Server::start(&dir, &["-t", "disk.qcow2"]);
    dir.gaur(&["snapshot", "create", "disk.qcow2", "x"])
        .fails(1, &["lock", "--control SOCKET"]);
    dir.gaur(&["snapshot", "list", "disk.qcow2"])
        .fails(1, &["lock", "-U", "--control SOCKET"]);
    dir.gaur(&["snapshot", "list", "-U", "disk.qcow2"]).ok();
    server.stop();
}

#[test]
fn a_snapshot_converts_to_the_disk_it_was() {
    for shape in SHAPES {
        let dir = WorkDir::new();
        let first = image(&dir, shape);
        for which in [
            "two",
            "2",
            "snapshot.name=two",
            "snapshot.id=2,snapshot.name=two",
        ] {
            dir.gaur(&["convert", "-l", which, "disk.qcow2", "ours.raw"])
                .ok();
            dir.qemu_img(&["convert", "-l", which, "disk.qcow2", "theirs.raw"])
                .ok();
            assert_eq!(dir.read("ours.raw"), dir.read("theirs.raw"), "{which}");
        }
        // QEMU shows the first with the size of today.
        dir.gaur(&[
            "convert",
            "-l",
            "one",
            "disk.qcow2",
            "-O",
            "qcow2",
            "one.qcow2",
        ])
        .ok();
        dir.qemu_io("one.qcow2", &["read -P 1 0 6M", "read -P 0 6M 2M"]);
        let info = dir.gaur(&["info", "--output=json", "one.qcow2"]).json();
        assert_eq!(info["virtual-size"], first << 20);
    }
}

#[test]
fn missing_source_snapshot_is_reported() {
    let dir = WorkDir::new();
    image(&dir, "compat=1.1");
    std::fs::write(dir.path("disk.raw"), [0; 4096]).expect("a file");
    let convert = |which: &str, sources: &[&str]| -> Answer {
        dir.gaur(&[&["convert", "-l", which], sources, &["out.raw"]].concat())
    };
    convert("nope", &["disk.qcow2"]).fails(1, &["\"nope\"", "\"one\""]);
    convert("snapshot.name=1", &["disk.qcow2"]).fails(1, &["the name \"1\""]);
    convert("snapshot.id=1,snapshot.name=two", &["disk.qcow2"]).fails(1, &["\"1\"", "\"two\""]);
    convert("snapshot.colour=red", &["disk.qcow2"]).fails(1, &["snapshot.colour"]);
    convert("one", &["disk.qcow2", "disk.qcow2"]).fails(1, &["one source"]);
    convert("one", &["disk.raw"]).fails(1, &["raw"]);
    assert!(!dir.path("out.raw").exists());
}

#[test]
fn a_snapshot_is_served_for_reading() {
    let dir = WorkDir::new();
    image(&dir, "extended_l2=on");
    for host in ["uring", "blocking"] {
        let mut server = Server::start(&dir, &["--host", host, "--snapshot", "one", "disk.qcow2"]);
        let read = [
            "-r",
            "-f",
            "raw",
            "-c",
            "read -P 1 0 6M",
            "-c",
            "read -P 0 6M 2M",
        ];
        client(&dir, "qemu-io", &[&read[..], &[&server.uri]].concat());
        assert_eq!(server.wait(), Some(0));
    }
    dir.gaur(&["serve", "--snapshot", "nope", "disk.qcow2"])
        .fails(1, &["\"nope\"", "\"one\", \"two\""]);
    dir.gaur(&["serve", "--snapshot", "one", "disk.qcow2", "disk.qcow2"])
        .fails(1, &["--snapshot", "one image"]);
}

/// Starts a server whose temporary files go to a directory that is empty again at once.
fn temporary(dir: &WorkDir, args: &[&str]) -> Server {
    let temporary = dir.path("temporary");
    let _ = std::fs::create_dir(&temporary);
    let server = Server::start_with(dir, &[&["-t", "--temporary"], args].concat(), |command| {
        command.env("TMPDIR", &temporary);
    });
    let left = std::fs::read_dir(&temporary).expect("there").count();
    assert_eq!(left, 0, "the overlay has no name any more");
    server
}

#[test]
fn temporary_overlay_lives_as_long_as_the_server() {
    let dir = WorkDir::new();
    image(&dir, "compat=1.1");
    dir.gaur(&["convert", "disk.qcow2", "disk.raw"]).ok();
    for (args, byte) in [
        (&["--snapshot", "one", "disk.qcow2"][..], 1),
        (&["--cache", "none", "disk.qcow2"], 2),
        (&["--host", "blocking", "-f", "raw", "disk.raw"], 2),
    ] {
        let before = (dir.read("disk.qcow2"), dir.read("disk.raw"));
        let server = temporary(&dir, args);
        let run = |commands: &[&str]| {
            let words = commands.iter().flat_map(|command| ["-c", *command]);
            let words: Vec<&str> = ["-f", "raw"].into_iter().chain(words).collect();
            client(&dir, "qemu-io", &[&words[..], &[&server.uri]].concat());
        };
        let old = format!("read -P {byte} 1M 1M");
        run(&[&old, "write -P 9 1500k 12k", "write -z 1600k 4k", "flush"]);
        let rest = format!("read -P {byte} 1612k 100k");
        run(&["read -P 9 1500k 12k", "read -P 0 1600k 4k", &rest]);
        server.stop();
        assert_eq!(before, (dir.read("disk.qcow2"), dir.read("disk.raw")));
    }
    dir.check_clean("disk.qcow2");
}

#[test]
fn temporary_overlay_refuses_contradicting_options() {
    let dir = WorkDir::new();
    image(&dir, "compat=1.1");
    for words in [
        &["-r", "--temporary", "disk.qcow2"][..],
        &["--create", "1M", "--temporary", "new.qcow2"],
        &["--control", "sock", "--temporary", "disk.qcow2"],
        &["--create", "1M", "--snapshot", "x", "new.qcow2"],
    ] {
        dir.gaur(&[&["serve"], words].concat())
            .fails(1, &["cannot be used with"]);
    }
    let missing = dir.path("missing");
    let output = Command::new(GAUR)
        .args(["serve", "--temporary", "disk.qcow2"])
        .current_dir(dir.path("."))
        .env("TMPDIR", &missing)
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        error.contains("missing") && error.contains("TMPDIR"),
        "{error}"
    );
    dir.gaur(&["serve", "--temporary", "--snapshot", "nope", "disk.qcow2"])
        .fails(1, &["\"nope\""]);
}
