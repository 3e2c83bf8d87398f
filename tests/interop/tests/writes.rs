//! What Gaur writes, QEMU reads byte for byte and finds clean: images that Gaur creates and
//! converts, and writes through `gaur serve` to images of every kind.

use gaur_interop::builder::{Kind, build, noise, snapshot_view};
use gaur_interop::compare::{assert_same_bytes, assert_same_view, qemu_view};
use gaur_interop::gaur::{gaur, serve};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img};

/// An image that Gaur creates has the shape that was asked for, and takes writes by QEMU.
fn create(layout: Layout) {
    let scratch = Scratch::new("create");
    let ours = scratch.path("ours.qcow2");
    let theirs = scratch.path("theirs.qcow2");
    let size = layout.size_bytes().to_string();
    for (program, path) in [("gaur", &ours), ("qemu", &theirs)] {
        let options = layout.options();
        let arguments = ["create", "-q", "-f", "qcow2", "-o", &options, path, &size];
        if program == "gaur" {
            gaur(&arguments).ok()
        } else {
            qemu_img(&arguments).ok()
        };
    }
    assert_clean(&ours);
    let info = |path: &str| {
        let mut info = qemu_img(&["info", "--output=json", path]).ok().json();
        let map = info.as_object_mut().expect("info is an object");
        for volatile in ["filename", "actual-size", "children"] {
            map.remove(volatile);
        }
        info
    };
    assert_eq!(info(&ours), info(&theirs));
    let mixed = op::mixed(&layout, &noise(&scratch));
    op::apply("qcow2", &ours, &mixed);
    op::apply("qcow2", &theirs, &mixed);
    assert_clean(&ours);
    assert_same_view(("qcow2", &ours), ("qcow2", &theirs));
}

/// `gaur convert` writes what QEMU reads, in both directions, and keeps holes.
fn convert(layout: Layout) {
    let scratch = Scratch::new("convert");
    let image = build(Kind::Plain, &layout, &scratch);
    let raw = scratch.path("view.raw");
    qemu_view(&image, &raw);
    let ours = scratch.path("ours.qcow2");
    let options = layout.options();
    gaur(&[
        "convert", "-f", "raw", "-O", "qcow2", "-o", &options, &raw, &ours,
    ])
    .ok();
    assert_clean(&ours);
    assert_same_view(("qcow2", &ours), ("raw", &raw));
    let again = scratch.path("again.qcow2");
    gaur(&[
        "convert", "-f", "qcow2", "-O", "qcow2", "-o", &options, &image, &again,
    ])
    .ok();
    assert_clean(&again);
    assert_same_view(("qcow2", &again), ("raw", &raw));

    let holes = scratch.zeros("holes.raw", 1 << 30);
    op::apply(
        "raw",
        &holes,
        &[Op::Write {
            offset: 512 << 20,
            len: 4096,
            pattern: 3,
        }],
    );
    let sparse = scratch.path("sparse.qcow2");
    gaur(&["convert", "-O", "qcow2", &holes, &sparse]).ok();
    let back = scratch.path("back.raw");
    gaur(&["convert", "-O", "raw", &sparse, &back]).ok();
    for path in [&sparse, &back] {
        use std::os::unix::fs::MetadataExt;
        let blocks = std::fs::metadata(path).expect("it was written").blocks();
        assert!(
            blocks < 8192,
            "{path} takes {blocks} blocks of 512 bytes: holes were filled"
        );
    }
    assert_same_bytes(&holes, &back);
}

/// Writes through the server reach the image as they reach a raw file; the image stays clean.
fn write_through(kind: Kind, layout: Layout) {
    let scratch = Scratch::new("writes");
    let image = build(kind, &layout, &scratch);
    let twin = scratch.path("twin.raw");
    qemu_view(&image, &twin);
    let cluster = layout.cluster_bytes;
    let mut ops = op::mixed(&layout, &noise(&scratch));
    ops.push(Op::Flush);
    if kind.discards(&layout) {
        ops.push(Op::Discard {
            offset: 0,
            len: cluster,
        });
        ops.push(Op::Discard {
            offset: 2 * cluster,
            len: 2 * cluster,
        });
    }
    ops.push(Op::Write {
        offset: cluster / 2,
        len: 2 * cluster,
        pattern: 0x77,
    });
    let server = serve(&image, &scratch.path("s"));
    op::apply("raw", &server.uri(), &ops);
    op::apply("raw", &twin, &ops);
    assert_same_view(("raw", &server.uri()), ("raw", &twin));
    server.stop();
    assert_clean(&image);
    gaur(&["check", &image]).ok();
    assert_same_view(("qcow2", &image), ("raw", &twin));
}

/// A snapshot made by QEMU keeps its contents whatever Gaur writes to the active image.
fn snapshots(layout: Layout) {
    let scratch = Scratch::new("snapshots");
    let image = build(Kind::Snapshots, &layout, &scratch);
    let snapshots = ["one", "two"];
    let before = snapshots.map(|name| {
        let raw = scratch.path(&format!("{name}-before.raw"));
        snapshot_view(&image, name, &raw);
        raw
    });
    let twin = scratch.path("twin.raw");
    qemu_view(&image, &twin);
    let mut ops = op::random(&layout, 5, 60, true, &noise(&scratch));
    ops.extend(op::mixed(&layout, &noise(&scratch)));
    let server = serve(&image, &scratch.path("s"));
    op::apply("raw", &server.uri(), &ops);
    server.stop();
    op::apply("raw", &twin, &ops);
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("raw", &twin));
    for (name, before) in snapshots.iter().zip(&before) {
        let after = scratch.path(&format!("{name}-after.raw"));
        snapshot_view(&image, name, &after);
        assert_same_bytes(before, &after);
    }
    // QEMU goes back to the first snapshot and deletes the second: the refcounts bear it.
    qemu_img(&["snapshot", "-a", "one", &image]).ok();
    qemu_img(&["snapshot", "-d", "two", &image]).ok();
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("raw", &before[0]));
}

fn plain(layout: Layout) {
    write_through(Kind::Plain, layout);
}

fn chain(layout: Layout) {
    write_through(Kind::Chain, layout);
}

fn compressed(layout: Layout) {
    write_through(Kind::Compressed, layout);
}

mod created {
    gaur_interop::every_layout!(crate::create);
    mod width {
        gaur_interop::every_width!(crate::create);
    }
}

mod converted {
    gaur_interop::every_layout!(crate::convert);
    mod width {
        gaur_interop::every_width!(crate::convert);
    }
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

/// Unknown header extensions survive a write to the image.
#[test]
fn unknown_header_extensions_survive() {
    let scratch = Scratch::new("extensions");
    let image = scratch.path("extended.qcow2");
    gaur_interop::builder::create(&image, &Layout::v3(65536));
    let end = extension_area(&image).len();
    // In front of the end marker, which is eight zero bytes: an extension with an unknown number.
    let mut bytes = std::fs::read(&image).expect("the image is there");
    let at = 112 + end;
    let unknown = b"\x12\x34\x56\x78\x00\x00\x00\x0bhello there\0\0\0\0\0";
    bytes[at..at + unknown.len()].copy_from_slice(unknown);
    std::fs::write(&image, &bytes).expect("the image is writable");
    let server = serve(&image, &scratch.path("s"));
    op::apply(
        "raw",
        &server.uri(),
        &[Op::Write {
            offset: 0,
            len: 4096,
            pattern: 1,
        }],
    );
    server.stop();
    gaur(&["resize", &image, "20M"]).ok();
    let after = std::fs::read(&image).expect("the image is there");
    assert_eq!(&after[at..at + unknown.len()], unknown);
    assert_clean(&image);
}

/// The header extensions of a new image, without the end marker.
fn extension_area(image: &str) -> Vec<u8> {
    let bytes = std::fs::read(image).expect("the image is there");
    let mut at = 112;
    loop {
        let kind = &bytes[at..at + 4];
        if kind == [0; 4] {
            return bytes[112..at].to_vec();
        }
        let len = u32::from_be_bytes(bytes[at + 4..at + 8].try_into().expect("four bytes"));
        at += 8 + (len as usize).next_multiple_of(8);
    }
}
