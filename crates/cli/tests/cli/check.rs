//! `gaur check` against `qemu-img check`.

use crate::workdir::WorkDir;

#[test]
fn every_clean_image_has_the_counts_of_qemu_img() {
    let dir = WorkDir::new();
    for image in dir.gallery() {
        dir.same(&["check", image]);
        dir.same(&["check", "--output=json", image]);
        assert_eq!(dir.same(&["check", "-q", image]).out, "");
    }
}

/// Where the first refcount block is.
fn refcount_block(dir: &WorkDir, image: &str) -> usize {
    let bytes = dir.read(image);
    let number = |at: usize| {
        let bytes: [u8; 8] = bytes[at..at + 8].try_into().expect("eight bytes");
        usize::try_from(u64::from_be_bytes(bytes)).expect("a small offset")
    };
    number(number(48))
}

#[test]
fn leaks_are_counted_and_exit_with_3() {
    let dir = WorkDir::new();
    dir.qemu_img(&["create", "-qf", "qcow2", "disk.qcow2", "10M"])
        .ok();
    dir.qemu_io("disk.qcow2", &["write 0 256k"]);
    // Clusters that nothing refers to, at the end of the file.
    let file = std::fs::File::options()
        .write(true)
        .open(dir.path("disk.qcow2"));
    let file = file.expect("the image");
    file.set_len(22 << 16).expect("a longer file");
    let block = refcount_block(&dir, "disk.qcow2");
    dir.patch("disk.qcow2", block + 2 * 21, &[0, 3]);
    dir.patch("disk.qcow2", block + 2 * 20, &[0, 1]);
    let answer = dir.same(&["check", "disk.qcow2"]);
    assert_eq!(answer.code, 3);
    assert!(answer.err.contains("leak"), "{answer:?}");
    dir.same(&["check", "--output=json", "disk.qcow2"]);
    dir.same(&["check", "-q", "disk.qcow2"]);
}

#[test]
fn corruption_is_counted_and_exits_with_2() {
    let dir = WorkDir::new();
    dir.qemu_img(&["create", "-qf", "qcow2", "disk.qcow2", "10M"])
        .ok();
    dir.qemu_io("disk.qcow2", &["write 0 256k"]);
    let block = refcount_block(&dir, "disk.qcow2");
    dir.patch("disk.qcow2", block + 2 * 5, &[0, 0]);
    assert_eq!(dir.same(&["check", "disk.qcow2"]).code, 2);
    dir.same(&["check", "--output=json", "disk.qcow2"]);
}

#[test]
fn raw_images_have_no_checks() {
    let dir = WorkDir::new();
    std::fs::write(dir.path("disk.raw"), [1; 512]).expect("a file");
    dir.gaur(&["check", "disk.raw"]).fails(63, &["disk.raw"]);
    dir.gaur(&["check", "-r", "all", "disk.raw"])
        .fails(63, &["disk.raw"]);
    assert_eq!(dir.qemu_img(&["check", "disk.raw"]).code, 63);
    dir.gaur(&["check", "missing"]).fails(1, &["no such file"]);
    dir.gaur(&["check", "--dry-run", "disk.raw"])
        .fails(1, &["--repair"]);
}

/// An image with clusters counted too high and, when asked for, one counted too low; and a copy of it.
fn damaged(dir: &WorkDir, low: bool) {
    dir.qemu_img(&["create", "-qf", "qcow2", "disk.qcow2", "10M"])
        .ok();
    dir.qemu_io("disk.qcow2", &["write -P 7 0 256k"]);
    let block = refcount_block(dir, "disk.qcow2");
    dir.patch("disk.qcow2", block + 2 * 7, &[0, 3]);
    if low {
        dir.patch("disk.qcow2", block + 2 * 5, &[0, 0]);
    }
    std::fs::copy(dir.path("disk.qcow2"), dir.path("copy.qcow2")).expect("a copy");
}

#[test]
fn repaired_images_have_the_code_the_data_and_the_json_of_qemu_img() {
    let dir = WorkDir::new();
    for (what, low, left) in [
        ("leaks", false, 0),
        ("all", false, 0),
        ("all", true, 0),
        ("leaks", true, 2),
    ] {
        damaged(&dir, low);
        dir.gaur(&["check", "-r", what, "--dry-run", "disk.qcow2"]);
        assert_eq!(dir.read("disk.qcow2"), dir.read("copy.qcow2"));
        let ours = dir.gaur(&["check", "-r", what, "--output=json", "disk.qcow2"]);
        assert_eq!(ours.code, left, "{what}: {ours:?}");
        assert!(ours.out.contains("\"leaks-fixed\": 1"), "{ours:?}");
        assert_eq!(
            ours.out.contains("corruptions-fixed"),
            low && what == "all",
            "{ours:?}"
        );
        let theirs = dir.qemu_img(&["check", "-r", "all", "copy.qcow2"]);
        assert_eq!(theirs.code, 0);
        dir.identical("disk.qcow2", "copy.qcow2");
        if left == 0 {
            dir.check_clean("disk.qcow2");
            assert_eq!(dir.gaur(&["check", "disk.qcow2"]).code, 0);
            dir.qemu_io("disk.qcow2", &["read -P 7 0 256k", "write -P 8 1M 1M"]);
            dir.check_clean("disk.qcow2");
        }
    }
}

#[test]
fn repair_tells_what_it_does_and_checks_again() {
    let dir = WorkDir::new();
    damaged(&dir, true);
    let dry = dir.gaur(&["check", "-r", "all", "--dry-run", "disk.qcow2"]);
    assert_eq!(dry.code, 2, "the image is as it was");
    assert!(dry.err.contains("would repair: cluster 5"), "{dry:?}");
    assert!(dry.out.starts_with("A repair would change:\n"), "{dry:?}");
    let done = dir.gaur(&["check", "-r", "all", "disk.qcow2"]);
    assert_eq!(done.code, 0);
    assert!(
        done.err
            .contains("repaired: cluster 5 at 0x50000: refcount 0 becomes 1"),
        "{done:?}"
    );
    let head = "The following inconsistencies were found and repaired:\n\n    1 leaked clusters\n";
    assert!(done.out.starts_with(head), "{done:?}");
    let tail = "Double checking the fixed image now...\nNo errors were found on the image.\n";
    assert!(done.out.contains(tail), "{done:?}");
    assert_eq!(dir.gaur(&["check", "-qr", "all", "disk.qcow2"]).out, "");
}

#[test]
fn a_dirty_image_with_lazy_refcounts_is_repaired_when_it_is_opened() {
    let dir = WorkDir::new();
    let create = [
        "create",
        "-qf",
        "qcow2",
        "-o",
        "lazy_refcounts=on",
        "disk.qcow2",
        "10M",
    ];
    dir.qemu_img(&create).ok();
    // Killed by its own command: what was written is not counted.
    dir.qemu_io_killed("disk.qcow2", &["write -P 5 0 1M", "flush", "abort"]);
    let info = dir.gaur(&["info", "disk.qcow2"]);
    assert!(info.out.contains("cleanly shut down: no"), "{info:?}");
    dir.gaur(&["resize", "disk.qcow2", "20M"]).ok();
    dir.check_clean("disk.qcow2");
    dir.qemu_io("disk.qcow2", &["read -P 5 0 1M"]);
    let info = dir.gaur(&["info", "--output=json", "disk.qcow2"]);
    assert!(info.out.contains("\"dirty-flag\": false"), "{info:?}");
    assert!(info.out.contains("\"lazy-refcounts\": true"), "{info:?}");
}
