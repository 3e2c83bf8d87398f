//! What QEMU writes, Gaur reads byte for byte: by `convert`, by `compare` and over NBD; and what
//! it says about such an image is what QEMU says.

use gaur_interop::builder::{Kind, build, create, noise};
use gaur_interop::compare::{assert_same_bytes, assert_same_view, qemu_view};
use gaur_interop::gaur::{gaur, serve_with};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::qemu_img;
use serde_json::Value;

/// Every way to read an image gives the bytes QEMU reads, and leaves the file as it was.
fn read_back(image: &str, scratch: &Scratch) {
    let before = std::fs::read(image).expect("the image is there");
    let expected = scratch.path("expected.raw");
    qemu_view(image, &expected);

    let converted = scratch.path("converted.raw");
    gaur(&["convert", "-f", "qcow2", "-O", "raw", image, &converted]).ok();
    assert_same_bytes(&expected, &converted);
    gaur(&["compare", "-f", "qcow2", "-F", "raw", image, &expected]).ok();

    let server = serve_with(image, &scratch.path("s"), &["--read-only"]);
    assert_same_view(("raw", &server.uri()), ("raw", &expected));
    server.stop();
    let after = std::fs::read(image).expect("the image is there");
    assert!(before == after, "reading an image changed it");
}

/// `info`, `check` and `map` print QEMU's JSON.
fn same_answers(image: &str) {
    for verb in ["check", "map", "info"] {
        same_answer(verb, image);
    }
}

/// `measure` foresees what QEMU does, whatever the new image is to be.
fn same_sizes(source: &[&str]) {
    for options in [
        "",
        "cluster_size=4k",
        "cluster_size=128k,extended_l2=on",
        "cluster_size=2M,refcount_bits=64",
        "compat=0.10",
        "preallocation=metadata",
        "preallocation=falloc",
    ] {
        let target = ["measure", "--output=json", "-O", "qcow2", "-o", options];
        let count = if options.is_empty() { 4 } else { 6 };
        let arguments = [&target[..count], source].concat();
        let theirs = qemu_img(&arguments).ok().json();
        let ours = gaur(&arguments).ok().json();
        assert_eq!(ours, theirs, "{arguments:?}: ours, then QEMU's");
    }
}

fn same_answer(verb: &str, image: &str) {
    let arguments = [verb, "--output=json", image];
    let theirs = qemu_img(&arguments).ok().json();
    let ours = gaur(&arguments).ok().json();
    assert_same_json(verb, &ours, &theirs);
}

/// Compares two answers; of a map, the first entry that differs is shown.
fn assert_same_json(verb: &str, ours: &Value, theirs: &Value) {
    if let (Value::Array(ours), Value::Array(theirs)) = (ours, theirs) {
        for (index, (our, their)) in ours.iter().zip(theirs).enumerate() {
            assert_eq!(our, their, "{verb}, entry {index}: ours, then QEMU's");
        }
        assert_eq!(
            ours.len(),
            theirs.len(),
            "{verb}, number of entries: ours, then QEMU's"
        );
    }
    assert_eq!(ours, theirs, "{verb}: ours, then QEMU's");
}

fn check(kind: Kind, layout: Layout) {
    let scratch = Scratch::new("reads");
    let image = build(kind, &layout, &scratch);
    read_back(&image, &scratch);
    same_answers(&image);
    same_sizes(&[&image]);
}

fn plain(layout: Layout) {
    check(Kind::Plain, layout);
}

fn chain(layout: Layout) {
    check(Kind::Chain, layout);
}

fn compressed(layout: Layout) {
    check(Kind::Compressed, layout);
}

fn snapshots(layout: Layout) {
    check(Kind::Snapshots, layout);
}

mod plain_images {
    gaur_interop::every_layout!(crate::plain);
    mod width {
        gaur_interop::every_width!(crate::plain);
    }
}

mod chains {
    gaur_interop::every_layout!(crate::chain);
}

mod deflate {
    gaur_interop::every_layout!(crate::compressed);
    mod width {
        gaur_interop::every_width!(crate::compressed);
    }
}

mod zstd {
    use gaur_interop::layout::Layout;
    gaur_interop::every_v3_layout!(crate::compressed, Layout::zstd);
}

mod snapshots_inside {
    gaur_interop::every_layout!(crate::snapshots);
    mod width {
        gaur_interop::every_width_with_snapshots!(crate::snapshots);
    }
}

/// Every state a subcluster can have, one beside the other, in a cluster with a backing file.
#[test]
fn every_state_of_a_subcluster_is_read() {
    let layout = Layout::extended(65536);
    let scratch = Scratch::new("subclusters");
    let base = scratch.zeros("base.raw", layout.size_bytes());
    let everywhere = Op::WriteFile {
        offset: 0,
        len: layout.size_bytes(),
        file: noise(&scratch),
    };
    op::apply("raw", &base, &[everywhere]);
    let image = scratch.path("top.qcow2");
    let options = layout.options();
    qemu_img(&[
        "create", "-q", "-f", "qcow2", "-o", &options, "-b", &base, "-F", "raw", &image,
    ])
    .ok();
    let unit = layout.unit_bytes();
    let mut ops = Vec::new();
    for cluster in 0..8 {
        for subcluster in 0..32 {
            let offset = cluster * layout.cluster_bytes + subcluster * unit;
            let pattern = (cluster * 32 + subcluster) as u8;
            match (subcluster >> (cluster % 4)) % 4 {
                0 => ops.push(Op::Write {
                    offset,
                    len: unit,
                    pattern,
                }),
                1 => ops.push(Op::Zero {
                    offset,
                    len: unit,
                    unmap: cluster % 2 == 0,
                }),
                2 => ops.push(Op::Write {
                    offset: offset + 512,
                    len: 512,
                    pattern,
                }),
                _ => {}
            }
        }
    }
    op::apply("qcow2", &image, &ops);
    read_back(&image, &scratch);
    same_answers(&image);
}

/// Preallocated images have clusters of which no subcluster is allocated, and refcounts beyond
/// what is mapped.
#[test]
fn preallocated_images_are_read() {
    let scratch = Scratch::new("preallocated");
    for (number, layout) in [Layout::v2(65536), Layout::v3(4096), Layout::extended(16384)]
        .iter()
        .enumerate()
    {
        for mode in ["metadata", "falloc", "full"] {
            let image = scratch.path(&format!("{number}-{mode}.qcow2"));
            let options = format!("{},preallocation={mode}", layout.options());
            let size = layout.size_bytes().to_string();
            qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, &image, &size]).ok();
            op::apply(
                "qcow2",
                &image,
                &[Op::Write {
                    offset: 70_000,
                    len: 5000,
                    pattern: 9,
                }],
            );
            let inner = Scratch::new("preallocated");
            read_back(&image, &inner);
            // Not the map: QEMU looks into the file for what a preallocated image has not written.
            same_answer("check", &image);
            same_answer("info", &image);
        }
    }
}

/// An image that QEMU did not close has lazy refcounts that lag behind and the dirty bit set. It may
/// be read, and it may be refused for writing, but it is never written on top of wrong refcounts.
#[test]
fn a_dirty_image_is_read_and_never_made_worse() {
    let layout = Layout::v3(65536);
    let scratch = Scratch::new("dirty");
    let image = scratch.path("dirty.qcow2");
    create(&image, &layout);
    qemu_img(&["amend", "-q", "-o", "lazy_refcounts=on", &image]).ok();
    let write = "write -P 7 0 200k";
    let killed = "qemu-io -c \"$0\" -c flush -c 'sigraise 9' \"$1\" >&2";
    gaur_interop::tool::run("bash", &["-c", killed, write, &image]);
    let info = qemu_img(&["info", "-U", "--output=json", &image])
        .ok()
        .json();
    assert_eq!(
        info["dirty-flag"],
        Value::Bool(true),
        "QEMU left the image dirty"
    );

    let copy = scratch.path("view.raw");
    gaur(&["convert", "-O", "raw", &image, &copy]).ok();
    op::apply(
        "raw",
        &copy,
        &[Op::Expect {
            offset: 0,
            len: 200 << 10,
            pattern: 7,
        }],
    );

    let socket = scratch.path("s");
    let mut command = std::process::Command::new(gaur_interop::gaur::binary());
    command.args(["serve", "--persistent", "--socket", &socket, &image]);
    match gaur_interop::nbd::Server::try_start(command, &socket) {
        Err(refusal) => {
            refusal.refused();
        }
        Ok(server) => {
            op::apply(
                "raw",
                &server.uri(),
                &[Op::Write {
                    offset: 1 << 20,
                    len: 4096,
                    pattern: 8,
                }],
            );
            server.stop();
        }
    }
    let repaired = qemu_img(&["check", "-r", "all", &image]);
    assert!(repaired.code == 0, "{repaired}");
    op::apply(
        "qcow2",
        &image,
        &[Op::Expect {
            offset: 0,
            len: 200 << 10,
            pattern: 7,
        }],
    );
}

#[test]
fn sizes_of_images_that_are_not_there_yet_are_those_of_qemu() {
    for size in ["0", "1", "64k", "1234567", "10G", "3T"] {
        same_sizes(&["--size", size]);
    }
    let scratch = Scratch::new("measure");
    let path = |name: &str| scratch.path(name);
    let (image, raw) = (path("bitmaps.qcow2"), noise(&scratch));
    qemu_img(&["create", "-q", "-f", "qcow2", &image, "700M"]).ok();
    for (name, granularity) in [("one", "512"), ("another-name", "1M")] {
        qemu_img(&["bitmap", "--add", "-g", granularity, &image, name]).ok();
    }
    same_sizes(&[&image]);
    same_sizes(&["-f", "raw", &raw]);
    let over = "backing_file=base,backing_fmt=raw";
    for arguments in [
        &["measure", "-O", "qcow2", "-o", over, &image][..],
        &["measure", "-O", "qcow2", &image],
        &["measure", "-O", "raw", &image],
        &["measure", "--size", "5G"],
    ] {
        let theirs = qemu_img(arguments).ok();
        assert_eq!(gaur(arguments).ok().stdout, theirs.stdout, "{arguments:?}");
    }
    let refused = gaur(&["measure", "-O", "qcow2", "--size", "1G", &image]).refused();
    assert!(refused.stderr.contains("--size"), "{}", refused.stderr);
}
