//! `gaur dd`: the same bytes as `qemu-img dd`, for every part.

use gaur_interop::builder::{Kind, build};
use gaur_interop::compare::{assert_same_bytes, assert_same_view};
use gaur_interop::gaur::gaur;
use gaur_interop::layout::Layout;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img};

const PARTS: [&str; 8] = [
    "bs=1k",
    "bs=1k count=3",
    "bs=64k skip=2",
    "bs=64k count=30 skip=2",
    "bs=1k count=2 skip=5",
    "count=5",
    "bs=3000 skip=7",
    "bs=1M",
];

#[test]
fn parts_of_images_are_those_of_qemu() {
    let scratch = Scratch::new("dd");
    let noise = scratch.file("noise.raw", &Random::new(3).bytes(1_000_000));
    let image = build(Kind::Chain, &Layout::extended(65536), &scratch);
    for (format, input) in [("raw", &noise), ("qcow2", &image)] {
        for part in PARTS {
            let made = |name: &str, target: &str| {
                let output = scratch.path(name);
                let operands = [format!("if={input}"), format!("of={output}")];
                let mut line = vec!["dd", "-f", format, "-O", target];
                line.extend(part.split(' '));
                line.extend(operands.iter().map(String::as_str));
                match name {
                    "theirs" => qemu_img(&line).ok(),
                    _ => gaur(&line).ok(),
                };
                output
            };
            let theirs = made("theirs", "raw");
            assert_same_bytes(&made("ours", "raw"), &theirs);
            let qcow2 = made("ours.qcow2", "qcow2");
            assert_clean(&qcow2);
            assert_same_view(("qcow2", &qcow2), ("raw", &theirs));
        }
    }
}

#[test]
fn bad_operands_are_refused_before_anything_is_made() {
    let scratch = Scratch::new("dd");
    let input = format!("if={}", scratch.zeros("in.raw", 4096));
    let output = scratch.path("out");
    let of = format!("of={output}");
    for bad in ["bs=0", "bs=3G", "count=x", "skip=-1", "conv=sync"] {
        gaur(&["dd", "-f", "raw", bad, &input, &of]).refused();
        assert!(!std::path::Path::new(&output).exists(), "{bad}");
    }
    let same = input.replace("if=", "of=");
    gaur(&["dd", "-f", "raw", &input, &same]).refused();
}
