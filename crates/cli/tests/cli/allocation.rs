//! The policies *compact* and *contiguous*: what an image says about its space.

use serde_json::Value;

use crate::workdir::WorkDir;

/// What `gaur info` says about the space of an image.
fn stored(dir: &WorkDir, image: &str) -> Value {
    let info = dir.gaur(&["info", "--output=json", image]).json();
    info["format-specific"]["data"]["allocation"].clone()
}

/// Everything that changes the header: QEMU does not know the extension and keeps it.
#[test]
fn the_policy_survives_what_qemu_does_to_an_image() {
    for policy in ["compact", "contiguous"] {
        let dir = WorkDir::new();
        dir.gaur(&["create", "-q", "base.qcow2", "1M"]).ok();
        let options = format!("allocation={policy},extended_l2=on");
        let text = dir
            .gaur(&["create", "-o", &options, "disk.qcow2", "64M"])
            .ok();
        let end = format!("refcount_bits=16 allocation={policy}\n");
        assert!(text.ends_with(&end), "{text}");
        dir.check_clean("disk.qcow2");
        assert_eq!(stored(&dir, "disk.qcow2"), policy);

        dir.qemu_io("disk.qcow2", &["write -P 1 0 1M", "discard 0 64k", "flush"]);
        let changes: [&[&str]; 8] = [
            &[
                "amend",
                "-f",
                "qcow2",
                "-o",
                "lazy_refcounts=on",
                "disk.qcow2",
            ],
            &[
                "amend",
                "-f",
                "qcow2",
                "-o",
                "refcount_bits=32",
                "disk.qcow2",
            ],
            &["resize", "-q", "disk.qcow2", "80M"],
            &["snapshot", "-c", "one", "disk.qcow2"],
            &["bitmap", "--add", "disk.qcow2", "days"],
            &["bitmap", "--remove", "disk.qcow2", "days"],
            &[
                "rebase",
                "-u",
                "-b",
                "base.qcow2",
                "-F",
                "qcow2",
                "disk.qcow2",
            ],
            &["check", "-q", "-r", "all", "disk.qcow2"],
        ];
        for change in changes {
            dir.qemu_img(change).ok();
            assert_eq!(stored(&dir, "disk.qcow2"), policy, "{change:?}");
        }
        dir.gaur(&["resize", "-q", "disk.qcow2", "90M"]).ok();
        assert_eq!(stored(&dir, "disk.qcow2"), policy);
        dir.check_clean("disk.qcow2");
    }
}

#[test]
fn info_adds_the_policy_to_qemu_img_output() {
    let dir = WorkDir::new();
    dir.gaur(&[
        "create",
        "-q",
        "-o",
        "allocation=contiguous",
        "disk.qcow2",
        "1G",
    ])
    .ok();
    let args = ["info", "--output=json", "disk.qcow2"];
    let (mut ours, theirs) = (dir.gaur(&args).json(), dir.qemu_img(&args).json());
    let facts = ours["format-specific"]["data"].as_object_mut();
    let policy = facts.expect("facts of the format").remove("allocation");
    assert_eq!(policy, Some(Value::from("contiguous")));
    assert_eq!(ours, theirs);

    let text = dir.gaur(&["info", "disk.qcow2"]).ok();
    assert!(text.contains("\n    allocation: contiguous\n"), "{text}");
}

/// Without being asked for, the extension is not written: images of QEMU's layout are those that QEMU makes.
#[test]
fn new_image_has_no_policy_unless_asked() {
    let dir = WorkDir::new();
    let layout = ["-o", "extended_l2=off"];
    dir.gaur(&[&["create", "-q"], &layout[..], &["disk.qcow2", "1G"]].concat())
        .ok();
    assert_eq!(stored(&dir, "disk.qcow2"), Value::Null);
    dir.same(&["info", "--output=json", "disk.qcow2"]);
    dir.qemu_create(&["theirs.qcow2", "1G"]);
    assert!(dir.read("disk.qcow2")[..65536] == dir.read("theirs.qcow2")[..65536]);
}

/// A policy of a later version is no error: the image says nothing that is understood.
#[test]
fn an_unknown_policy_counts_as_none() {
    let dir = WorkDir::new();
    dir.gaur(&[
        "create",
        "-q",
        "-o",
        "allocation=compact",
        "disk.qcow2",
        "1G",
    ])
    .ok();
    let kind = 0xb5c8_1f6d_u32.to_be_bytes();
    let bytes = dir.read("disk.qcow2");
    let at = bytes.windows(4).position(|word| word == kind);
    let at = at.expect("the extension is in the header");
    assert_eq!(
        bytes[at..at + 16],
        [&kind[..], &[0, 0, 0, 8, 1, 1, 0, 0, 0, 0, 0, 0]].concat()
    );
    dir.patch("disk.qcow2", at + 9, &[77]);
    assert_eq!(stored(&dir, "disk.qcow2"), Value::Null);
    dir.gaur(&["resize", "-q", "disk.qcow2", "2G"]).ok();
    assert_eq!(dir.read("disk.qcow2")[at + 9], 77);
    dir.check_clean("disk.qcow2");
}

/// QEMU zeroes subclusters and keeps their space; the policy would have given it back.
#[test]
fn check_reports_reclaimable_space() {
    let dir = WorkDir::new();
    for (options, expected) in [
        ("extended_l2=on,allocation=compact", Some(28 * 1024)),
        ("extended_l2=on,allocation=contiguous", None),
        ("extended_l2=on", None),
        ("extended_l2=off,allocation=compact", None),
    ] {
        dir.gaur(&["create", "-q", "-o", options, "disk.qcow2", "64M"])
            .ok();
        let zeroes = ["write -P 1 0 128k", "write -z 16k 24k", "write -z 66k 6k"];
        dir.qemu_io("disk.qcow2", &zeroes);
        let args = ["check", "--output=json", "disk.qcow2"];
        let (mut ours, theirs) = (dir.gaur(&args).json(), dir.qemu_img(&args).json());
        let counts = ours.as_object_mut().expect("counts");
        let found = counts.remove("reclaimable-bytes");
        assert_eq!(found, expected.map(Value::from), "{options}");
        assert_eq!(ours, theirs, "{options}");
        let text = dir.gaur(&["check", "disk.qcow2"]).ok();
        let told = text.contains("\n28 KiB (28672 bytes) of its space hold no data");
        assert_eq!(told, expected.is_some(), "{options}: {text}");
    }
}
