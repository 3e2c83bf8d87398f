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
fn raw_images_have_no_checks_and_repair_is_refused_by_name() {
    let dir = WorkDir::new();
    std::fs::write(dir.path("disk.raw"), [1; 512]).expect("a file");
    dir.gaur(&["check", "disk.raw"]).fails(63, &["disk.raw"]);
    assert_eq!(dir.qemu_img(&["check", "disk.raw"]).code, 63);
    dir.gaur(&["check", "-r", "all", "disk.raw"])
        .fails(1, &["-r", "not supported"]);
    dir.gaur(&["check", "missing"]).fails(1, &["no such file"]);
}
