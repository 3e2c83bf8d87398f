//! `gaur resize`: what was there stays, what is new is zeros, the image stays clean.

use gaur_interop::builder::{Kind, build, create, noise, snapshot_view};
use gaur_interop::compare::{assert_same_bytes, assert_same_view, qemu_view};
use gaur_interop::gaur::{gaur, gaur_bounded, serve};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

fn size_of(image: &str) -> u64 {
    let info = qemu_img(&["info", "--output=json", image]).ok().json();
    info["virtual-size"].as_u64().expect("an image has a size")
}

fn truncate(path: &str, len_bytes: u64) {
    run("truncate", &["-s", &len_bytes.to_string(), path]).ok();
}

/// Grows, shrinks and grows again, beside a raw twin that is cut and extended alike.
fn there_and_back(layout: Layout) {
    let scratch = Scratch::new("resize");
    let image = build(Kind::Plain, &layout, &scratch);
    let twin = scratch.path("twin.raw");
    qemu_view(&image, &twin);
    let size = layout.size_bytes();
    let smaller = (size / 3).next_multiple_of(512);
    let sizes = [size + 512, size * 3, smaller, smaller + 512, size * 2];
    for (number, new_size) in sizes.into_iter().enumerate() {
        let text = new_size.to_string();
        if new_size < size_of(&image) {
            gaur(&["resize", &image, &text]).refused();
            gaur(&["resize", "--shrink", &image, &text]).ok();
        } else {
            gaur(&["resize", &image, &text]).ok();
        }
        truncate(&twin, new_size);
        assert_eq!(size_of(&image), new_size);
        assert_clean(&image);
        assert_same_view(("qcow2", &image), ("raw", &twin));
        let offset = new_size - 512;
        let ops = [Op::Write {
            offset,
            len: 512,
            pattern: number as u8 + 1,
        }];
        let server = serve(&image, &scratch.path(&format!("s{number}")));
        op::apply("raw", &server.uri(), &ops);
        server.stop();
        op::apply("raw", &twin, &ops);
    }
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("raw", &twin));
}

mod sizes {
    gaur_interop::every_layout!(crate::there_and_back);
    mod width {
        gaur_interop::every_width!(crate::there_and_back);
    }
}

#[test]
fn sizes_may_be_relative() {
    let scratch = Scratch::new("relative");
    let image = scratch.path("a.qcow2");
    create(&image, &Layout::v3(65536));
    let size = size_of(&image);
    gaur(&["resize", &image, "+1M"]).ok();
    assert_eq!(size_of(&image), size + (1 << 20));
    gaur(&["resize", "--shrink", &image, "-512k"]).ok();
    assert_eq!(size_of(&image), size + (512 << 10));
}

/// The L1 table of a disk of 64 MiB does not hold one of 8 TiB: it moves.
#[test]
fn the_l1_table_grows_and_the_far_end_is_usable() {
    for layout in [
        Layout::v2(65536),
        Layout::v3(65536),
        Layout::extended(65536),
    ] {
        let scratch = Scratch::new("far");
        let image = build(Kind::Plain, &layout, &scratch);
        gaur(&["resize", &image, "8T"]).ok();
        assert_clean(&image);
        let far = (8 << 40) - 65536;
        let server = serve(&image, &scratch.path("s"));
        op::apply(
            "raw",
            &server.uri(),
            &[
                Op::Expect {
                    offset: far,
                    len: 65536,
                    pattern: 0,
                },
                Op::Write {
                    offset: far,
                    len: 65536,
                    pattern: 9,
                },
            ],
        );
        server.stop();
        assert_clean(&image);
        op::apply(
            "qcow2",
            &image,
            &[Op::Expect {
                offset: far,
                len: 65536,
                pattern: 9,
            }],
        );
    }
}

#[test]
fn snapshots_of_another_size_keep_their_contents() {
    let layout = Layout::v3(65536);
    let scratch = Scratch::new("snapshot");
    let image = build(Kind::Snapshots, &layout, &scratch);
    let before = scratch.path("before.raw");
    snapshot_view(&image, "one", &before);
    for size in ["64M", "512k"] {
        gaur(&["resize", "--shrink", &image, size]).ok();
        assert_clean(&image);
        let after = scratch.path("after.raw");
        snapshot_view(&image, "one", &after);
        // The format keeps the size a snapshot had; the tool that reads it keeps to today's.
        let len = std::fs::metadata(&before).expect("it was written").len();
        truncate(&after, len);
        if size == "64M" {
            assert_same_bytes(&before, &after);
        }
    }
    qemu_img(&["snapshot", "-a", "one", &image]).ok();
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("raw", &before));
}

/// A version 2 image does not record how large the disk was at a snapshot.
#[test]
fn a_version_2_image_with_snapshots_is_not_resized() {
    let scratch = Scratch::new("old");
    let image = build(Kind::Snapshots, &Layout::v2(65536), &scratch);
    let before = std::fs::read(&image).expect("the image is there");
    gaur(&["resize", &image, "64M"]).refused();
    assert!(before == std::fs::read(&image).expect("the image is there"));
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let scratch = Scratch::new("refused");
    let image = scratch.path("a.qcow2");
    create(&image, &Layout::v3(512));
    op::apply(
        "qcow2",
        &image,
        &[Op::WriteFile {
            offset: 0,
            len: 1 << 20,
            file: noise(&scratch),
        }],
    );
    let before = std::fs::read(&image).expect("the image is there");
    // An L1 table of 32 MiB maps 128 GiB in clusters of 512 bytes.
    for size in ["1E", "200G", "-100M", "x", "0x", "9223372036854775807"] {
        gaur_bounded(&["resize", &image, size]).refused();
    }
    assert!(before == std::fs::read(&image).expect("the image is there"));
}

#[test]
fn a_raw_image_is_resized_like_any_other() {
    let scratch = Scratch::new("raw");
    let image = scratch.file("a.raw", &[7; 4096]);
    gaur(&["resize", "-f", "raw", &image, "1M"]).ok();
    assert_eq!(
        std::fs::metadata(&image).expect("it is there").len(),
        1 << 20
    );
    gaur(&["resize", "-f", "raw", &image, "4k"]).refused();
    gaur(&["resize", "-f", "raw", "--shrink", &image, "4k"]).ok();
    assert_eq!(std::fs::read(&image).expect("it is there"), [7; 4096]);
}
