//! Sizes mean what they mean to qemu-img.

use crate::workdir::WorkDir;

#[test]
fn sizes_are_read_as_by_qemu_img() {
    let dir = WorkDir::new();
    for size in [
        "0",
        "1",
        "511",
        "512",
        "1025",
        "10b",
        "10B",
        "1k",
        "1K",
        "3M",
        "1.5G",
        ".5k",
        "1.k",
        "0.1k",
        "12.345M",
        "1.00000000001G",
        "0x1000",
        "0X1000",
        "0x",
        "0x10k",
        "0x1.8",
        "",
        " 1k",
        "1k ",
        "1 k",
        "+1k",
        " +1k",
        "+ 1k",
        "1.",
        "1.0b",
        "0x1e",
        "0x1B",
        "1.1e1",
        "0.4b",
        "0.000000000000001E",
        "1e3",
        "1.5",
        "1.5b",
        "1k5",
        "10kb",
        "k",
        ".",
        "..",
        "nan",
        "inf",
        "1_000",
        "0b11",
        "8E",
        "9223372036854775808",
        "99999999999999999999999",
    ] {
        let args = ["create", "-f", "raw", "disk", size];
        let (ours, theirs) = (dir.gaur(&args), dir.qemu_img(&args));
        assert_eq!(ours.code, theirs.code, "'{size}': {ours:?} {theirs:?}");
        assert_eq!(ours.out, theirs.out, "'{size}'");
    }
}
