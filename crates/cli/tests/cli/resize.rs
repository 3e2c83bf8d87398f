//! `gaur resize` against `qemu-img resize`.

use crate::workdir::WorkDir;

#[test]
fn sizes_change_as_by_qemu_img() {
    let dir = WorkDir::new();
    for (change, code) in [
        (&["5M"][..], 0),
        (&["+1G"], 0),
        (&["--shrink", "1M"], 0),
        (&["--", "-1M"], 1),
        (&["--shrink", "--", "-1M"], 0),
        (&["1M"], 1),
        (&["--shrink", "--", "-1G"], 1),
    ] {
        for tool in ["gaur", "qemu"] {
            dir.qemu_img(&["create", "-qf", "qcow2", &format!("{tool}.qcow2"), "4M"])
                .ok();
            dir.qemu_io(
                &format!("{tool}.qcow2"),
                &["write -P 1 0 1M", "write -P 2 3M 1M"],
            );
        }
        let args = |image| {
            // Options come before the image, sizes after it.
            let (options, size) = change.split_at(change.len() - 1);
            let mut args = vec!["resize"];
            args.extend(options.iter().filter(|word| **word != "--"));
            args.push(image);
            args.extend(options.iter().filter(|word| **word == "--"));
            args.extend(size);
            args
        };
        let ours = dir.gaur(&args("gaur.qcow2"));
        let theirs = dir.qemu_img(&args("qemu.qcow2"));
        assert_eq!(
            (ours.code, theirs.code),
            (code, code),
            "{change:?} {ours:?} {theirs:?}"
        );
        assert_eq!(ours.out, theirs.out, "{change:?}");
        dir.check_clean("gaur.qcow2");
        dir.identical("gaur.qcow2", "qemu.qcow2");
        dir.qemu_img(&["compare", "-s", "gaur.qcow2", "qemu.qcow2"])
            .ok();
    }
}

#[test]
fn a_raw_image_grows_and_shrinks() {
    let dir = WorkDir::new();
    std::fs::write(dir.path("disk.raw"), [7; 4096]).expect("a file");
    assert_eq!(
        dir.gaur(&["resize", "-f", "raw", "disk.raw", "1M"]).ok(),
        "Image resized.\n"
    );
    assert_eq!(dir.read("disk.raw").len(), 1 << 20);
    dir.gaur(&["resize", "-q", "-f", "raw", "--shrink", "disk.raw", "1k"])
        .ok();
    assert_eq!(dir.read("disk.raw"), [7; 1024]);
}

#[test]
fn shrinking_needs_the_shrink_option() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "disk.qcow2", "4M"]).ok();
    dir.gaur(&["resize", "disk.qcow2", "1M"])
        .fails(1, &["--shrink"]);
    dir.gaur(&[
        "resize",
        "--shrink",
        "--preallocation=full",
        "disk.qcow2",
        "1M",
    ])
    .fails(1, &["preallocation"]);
    dir.gaur(&["resize", "disk.qcow2", "8E"]).fails(1, &["8E"]);
    dir.gaur(&["resize", "disk.qcow2", "+7E"])
        .fails(1, &["disk.qcow2"]);
    dir.check_clean("disk.qcow2");
}

/// `gaur resize` was the only long verb that did not show how far it is.
#[test]
fn progress_is_shown_when_it_is_asked_for() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "-o", "cluster_size=4k", "disk.qcow2", "64M"])
        .ok();
    dir.qemu_io("disk.qcow2", &["write 0 64M"]);
    let shown = dir.gaur(&["resize", "-p", "--shrink", "disk.qcow2", "1M"]);
    let shown = shown.ok();
    assert!(shown.starts_with("    (0.00/100%)\r"), "{shown:?}");
    assert!(
        shown.ends_with("    (100.00/100%)\r\nImage resized.\n"),
        "{shown:?}"
    );
    dir.check_clean("disk.qcow2");
}
