//! `gaur compare` against `qemu-img compare`.

use crate::workdir::WorkDir;

#[test]
fn every_pair_has_the_verdict_of_qemu_img() {
    let dir = WorkDir::new();
    let images = dir.gallery();
    for left in &images {
        for right in &images {
            dir.same(&["compare", left, right]);
            assert_eq!(dir.same(&["compare", "-q", left, right]).out, "");
        }
    }
    assert_eq!(dir.same(&["compare", "top.qcow2", "packed.qcow2"]).code, 0);
}

#[test]
fn strict_mode_has_the_verdict_of_qemu_img() {
    let dir = WorkDir::new();
    let images = dir.gallery();
    dir.qemu_img(&["convert", "-O", "raw", "top.qcow2", "top.raw"])
        .ok();
    for left in &images {
        dir.same(&["compare", "-s", left, left]);
        dir.same(&["compare", "-s", left, "base.qcow2"]);
        dir.same(&["compare", "-s", left, "top.raw"]);
    }
}

#[test]
fn sizes_and_positions_of_differences_are_told_as_by_qemu_img() {
    let dir = WorkDir::new();
    let mut bytes = vec![0; 5 << 20];
    bytes[123_456] = 1;
    std::fs::write(dir.path("a"), &bytes).expect("a file");
    bytes.resize(6 << 20, 0);
    std::fs::write(dir.path("b"), &bytes).expect("a file");
    bytes[5_500_000] = 1;
    std::fs::write(dir.path("c"), &bytes).expect("a file");
    bytes[4_000_000] = 1;
    std::fs::write(dir.path("d"), &bytes).expect("a file");
    for (left, right, code) in [
        ("a", "b", 0),
        ("a", "c", 1),
        ("c", "a", 1),
        ("c", "d", 1),
        ("a", "d", 1),
    ] {
        assert_eq!(
            dir.same(&["compare", left, right]).code,
            code,
            "{left} {right}"
        );
        dir.same(&["compare", "-s", left, right]);
    }
}

#[test]
fn compare_errors_have_their_own_exit_codes() {
    let dir = WorkDir::new();
    std::fs::write(dir.path("a"), [0; 512]).expect("a file");
    dir.gaur(&["compare", "a", "missing"])
        .fails(2, &["missing"]);
    dir.gaur(&["compare", "a"]).fails(2, &["compare --help"]);
}
