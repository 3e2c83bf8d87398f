//! `gaur resize`: what was there stays, what is new is zeros, the image stays clean.

use gaur_interop::builder::{Kind, build, create, noise, snapshot_view};
use gaur_interop::compare::{assert_same_bytes, assert_same_view, qemu_view};
use gaur_interop::gaur::{first_export, gaur, gaur_bounded, serve, serve_with};
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
fn invalid_resize_leaves_the_image() {
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

/// Makes an image of `size` with these creation options.
fn image_of(scratch: &Scratch, size: &str, options: &str) -> String {
    let image = scratch.path("d.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &image, size]).ok();
    image
}

fn len_of(image: &str) -> u64 {
    std::fs::metadata(image).expect("the image is there").len()
}

/// `gaur resize` of a disk of 1 MiB in clusters of 512 bytes to 1 GiB did not end, and its file grew past
/// 11 GB (QEMU: 265 KB): the L1 table needs more clusters in a row than lie between two refcount blocks, and
/// every block that was made for it lay in the middle of its place. Now a place is found at once, and what
/// is added are tables.
#[test]
fn a_resize_costs_what_its_tables_cost() {
    let cases = [
        ("512", "16", "1M", "1G"),
        ("512", "64", "1M", "3G"),
        ("512", "1", "40M", "20G"),
        ("1k", "16", "1M", "16G"),
        ("1k", "64", "1M", "9G"),
        ("2k", "2", "300k", "200G"),
        ("4k", "16", "10G", "3T"),
        ("4k", "64", "10G", "600G"),
        ("16k", "64", "1M", "20T"),
        ("64k", "16", "0", "300T"),
        ("2M", "1", "1G", "2P"),
    ];
    for (cluster, bits, from, to) in cases {
        let scratch = Scratch::new("far");
        let options = format!("cluster_size={cluster},refcount_bits={bits}");
        let image = image_of(&scratch, from, &options);
        let before = len_of(&image);
        gaur_bounded(&["resize", "-q", &image, to]).ok();
        assert_clean(&image);
        let after = len_of(&image);
        let info = qemu_img(&["info", "--output=json", &image]).ok().json();
        let cluster_bytes = info["cluster-size"].as_u64().expect("a cluster has a size");
        let tables = (size_of(&image) / cluster_bytes / (cluster_bytes / 8) + 1) * 8;
        let limit = before + 2 * tables + 8 * cluster_bytes;
        assert!(
            after <= limit,
            "{options} {from} to {to}: {after} bytes, not {limit}"
        );
        // And back, without what the long table took.
        gaur_bounded(&["resize", "-q", "--shrink", &image, "1M"]).ok();
        assert_clean(&image);
    }
}

/// The same place is needed for the tables of a snapshot (its file grew to 101 GB), and by a disk that is
/// resized while it is served.
#[test]
fn l1_growth_with_snapshots_and_while_served() {
    let scratch = Scratch::new("long");
    let image = image_of(&scratch, "2G", "cluster_size=512");
    for arguments in [["-c", "a"], ["-c", "b"], ["-d", "a"], ["-a", "b"]] {
        gaur_bounded(&["snapshot", arguments[0], arguments[1], &image]).ok();
        assert_clean(&image);
    }
    let tables = (2 << 30) / 64 / 512 * 8;
    assert!(len_of(&image) < 20 * tables, "{} bytes", len_of(&image));
    let control = scratch.path("control");
    let socket = scratch.path("socket");
    let server = serve_with(&image, &socket, &["--control", &control]);
    let name = first_export(&control);
    gaur_bounded(&["export", "resize", "--control", &control, &name, "8G"]).ok();
    server.stop();
    assert_eq!(size_of(&image), 8 << 30);
    assert_clean(&image);
    assert!(len_of(&image) < 40 * tables, "{} bytes", len_of(&image));
}

/// The disk holds nothing but zeros from `offset` on.
fn assert_zeros_from(image: &str, offset: u64, scratch: &Scratch) {
    let raw = scratch.path("view.raw");
    qemu_view(image, &raw);
    let bytes = std::fs::read(&raw).expect("it was written");
    let found = bytes[offset as usize..].iter().position(|byte| *byte != 0);
    assert_eq!(found, None, "bytes behind {offset}");
}

/// The state of a machine became disk content: 7 KiB of it were the guest's after
/// `snapshot save`, `snapshot apply` and `resize`. Applying left the state's tables in the active L1 table,
/// where the disk grew over them. QEMU leaves them there too, so a resize makes what it reaches
/// read as zeros, whichever program has left it.
#[test]
fn vm_state_never_becomes_disk_content() {
    for by_qemu in [false, true] {
        let scratch = Scratch::new("state");
        let image = image_of(&scratch, "226304", "cluster_size=512");
        let state = scratch.file("state", &[0x5a; 7000]);
        gaur(&["snapshot", "save", &image, "s1", "--state", &state]).ok();
        match by_qemu {
            true => qemu_img(&["snapshot", "-a", "s1", &image]).ok(),
            false => gaur(&["snapshot", "apply", &image, "s1"]).ok(),
        };
        assert_clean(&image);
        let check = gaur(&["check", "--output=json", &image]).ok().json();
        assert_eq!(check["clusters-behind-end"].as_u64(), by_qemu.then_some(14));
        gaur(&["resize", "-q", &image, "456704"]).ok();
        assert_clean(&image);
        assert_zeros_from(&image, 0, &scratch);
        let map = gaur(&["map", "--output=json", &image]).ok().stdout;
        assert!(!map.contains(r#""data":true"#), "{map}");
        let read = scratch.path("read");
        gaur(&["snapshot", "extract", &image, "s1", "--to", &read]).ok();
        assert_same_bytes(&state, &read);
    }
}

/// Shrinking left what was behind the new end in its last cluster, and when QEMU made the disk grow again
/// the guest found it there.
#[test]
fn shrunk_data_does_not_return_after_growth() {
    for (cluster, extended) in [("512", "off"), ("64k", "off"), ("64k", "on")] {
        for smaller in [70_144, 100_352, 131_072] {
            for grower in ["gaur", "qemu-img"] {
                let scratch = Scratch::new("cut");
                let options = format!("cluster_size={cluster},extended_l2={extended}");
                let image = image_of(&scratch, "256k", &options);
                let all = Op::Write {
                    offset: 0,
                    len: 256 << 10,
                    pattern: 0x77,
                };
                op::apply("qcow2", &image, &[all]);
                let size = smaller.to_string();
                gaur(&["resize", "-q", "--shrink", &image, &size]).ok();
                assert_clean(&image);
                match grower {
                    "gaur" => gaur(&["resize", "-q", &image, "256k"]).ok(),
                    _ => qemu_img(&["resize", "-q", &image, "256k"]).ok(),
                };
                assert_clean(&image);
                assert_zeros_from(&image, smaller, &scratch);
            }
        }
    }
}

/// Bytes that the host has given to a file.
fn taken(path: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).expect("a file").blocks() * 512
}

/// What a disk gains has its place, shows zeros, and is written on by QEMU.
#[test]
fn preallocated_space_reads_as_zeros_and_is_there() {
    for made in [
        "compat=0.10",
        "cluster_size=4k",
        "cluster_size=64k,extended_l2=on",
        "cluster_size=2M",
        "data_file=data,data_file_raw=on",
        "data_file=data",
    ] {
        for mode in ["metadata", "falloc", "full"] {
            let scratch = Scratch::new("preallocated");
            let (image, data) = (scratch.path("a.qcow2"), scratch.path("data"));
            let options = made.replace("data_file=data", &format!("data_file={data}"));
            gaur(&["create", "-q", "-o", &options, &image, "3000k"]).ok();
            let write = ["-f", "qcow2", &image, "-c", "write -P 7 0 3000k"];
            run("qemu-io", &write).ok();
            let how = format!("--preallocation={mode}");
            gaur(&["resize", "-q", &how, &image, "20M"]).ok();
            assert_clean(&image);
            let map = qemu_img(&["map", "--output=json", &image]).ok().json();
            let end = map.as_array().expect("a list").iter().map(|extent| {
                let number = |key: &str| extent[key].as_u64().unwrap_or(0);
                // Subclusters of preallocated clusters may be unallocated.
                let has_place = extent["present"] == true || extent["offset"].is_u64();
                assert!(has_place, "{made} {mode}: {extent}");
                number("start") + number("length")
            });
            assert_eq!(end.max(), Some(20 << 20));
            if mode != "metadata" {
                let file = if made.starts_with("data") {
                    &data
                } else {
                    &image
                };
                assert!(taken(file) >= 20 << 20, "{made} {mode}: {}", taken(file));
            }
            let read = ["-c", "read -P 7 0 3000k", "-c", "read -P 0 3000k 17480k"];
            let write = ["-c", "write -P 8 10M 100k", "-c", "read -P 8 10M 100k"];
            let read = run(
                "qemu-io",
                &[&["-f", "qcow2", &image], &read[..], &write].concat(),
            )
            .ok();
            assert!(!read.stdout.contains("failed"), "{made} {mode}: {read}");
            assert_clean(&image);
        }
    }
}

#[test]
fn preallocated_space_hides_a_longer_backing_file_and_raw_disks_have_it_too() {
    let scratch = Scratch::new("preallocated");
    let (base, top, raw) = (
        scratch.path("b.qcow2"),
        scratch.path("t.qcow2"),
        scratch.path("r.raw"),
    );
    gaur(&["create", "-q", &base, "8M"]).ok();
    run("qemu-io", &["-f", "qcow2", &base, "-c", "write -P 1 0 8M"]).ok();
    gaur(&["create", "-q", "-b", &base, "-F", "qcow2", &top, "2M"]).ok();
    gaur(&["resize", "-q", "--preallocation=falloc", &top, "8M"]).ok();
    let reads = ["-c", "read -P 1 0 2M", "-c", "read -P 0 2M 6M"];
    let read = run("qemu-io", &[&["-f", "qcow2", &top], &reads[..]].concat()).ok();
    assert!(!read.stdout.contains("failed"), "{read}");
    assert_clean(&top);
    run("truncate", &["-s", "1M", &raw]).ok();
    for (mode, size) in [("falloc", "4M"), ("full", "8M")] {
        let how = format!("--preallocation={mode}");
        gaur(&["resize", "-q", "-f", "raw", &how, &raw, size]).ok();
    }
    assert_eq!(std::fs::metadata(&raw).expect("a file").len(), 8 << 20);
    assert!(taken(&raw) >= 7 << 20);
    let refused = gaur(&[
        "resize",
        "-f",
        "raw",
        "--preallocation=metadata",
        &raw,
        "9M",
    ])
    .refused();
    assert!(refused.stderr.contains("no metadata"), "{refused}");
    let shrink = ["resize", "--shrink", "--preallocation=full", &top, "1M"];
    assert!(
        gaur(&shrink)
            .refused()
            .stderr
            .contains("for a disk that grows")
    );
}
