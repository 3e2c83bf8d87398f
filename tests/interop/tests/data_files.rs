//! External data files: what QEMU and Gaur make, each reads, checks and writes on.

use gaur_interop::builder::noise;
use gaur_interop::compare::{assert_same_bytes, assert_same_view};
use gaur_interop::gaur::{gaur, serve};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img};

/// What follows `-o` for a data file.
fn options(layout: &Layout, data: &str, raw: bool) -> String {
    let raw = if raw { "on" } else { "off" };
    let options = layout.options();
    format!("{options},data_file={data},data_file_raw={raw}")
}

/// An image that QEMU made and wrote to, its raw twin, and its data file.
fn made_by_qemu(layout: &Layout, raw: bool, scratch: &Scratch) -> (String, String, String) {
    let (image, data) = (scratch.path("image.qcow2"), scratch.path("data.raw"));
    let size = layout.size_bytes();
    let options = options(layout, &data, raw);
    let size_text = size.to_string();
    let arguments = ["create", "-q", "-f", "qcow2", "-o", &options];
    qemu_img(&[&arguments[..], &[&image, &size_text]].concat()).ok();
    let twin = scratch.zeros("twin.raw", size);
    let mixed = op::mixed(layout, &noise(scratch));
    op::apply("qcow2", &image, &mixed);
    op::apply("raw", &twin, &mixed);
    (image, twin, data)
}

/// What Gaur makes has the shape that QEMU gives it; QEMU writes to it, and Gaur on that.
fn made(layout: Layout) {
    for raw in [false, true] {
        let scratch = Scratch::new("data-file-made");
        let (_theirs, twin, _) = made_by_qemu(&layout, raw, &scratch);
        let (image, data) = (scratch.path("ours.qcow2"), scratch.path("ours.raw"));
        let size = layout.size_bytes().to_string();
        let options = options(&layout, &data, raw);
        let arguments = ["create", "-q", "-f", "qcow2", "-o", &options];
        gaur(&[&arguments[..], &[&image, &size]].concat()).ok();
        assert_clean(&image);
        let length = std::fs::metadata(&data).expect("it was made").len();
        assert_eq!(length, layout.size_bytes());
        let format = |image: &str| {
            let info = qemu_img(&["info", "--output=json", image]).ok().json();
            let mut format = info["format-specific"]["data"].clone();
            format["data-file"].take();
            format
        };
        assert_eq!(format(&image), format(&scratch.path("image.qcow2")));
        op::apply("qcow2", &image, &op::mixed(&layout, &noise(&scratch)));
        assert_clean(&image);
        gaur(&["compare", "-F", "raw", &image, &twin]).ok();
        let copy = scratch.path("copy.qcow2");
        let options = format!("data_file={},data_file_raw=on", scratch.path("copy.raw"));
        let arguments = ["convert", "-O", "qcow2", "-o", &options, &image, &copy];
        gaur(&arguments).ok();
        assert_clean(&copy);
        assert_same_view(("qcow2", &copy), ("raw", &twin));
        assert_same_view(("raw", &scratch.path("copy.raw")), ("raw", &twin));
    }
}

/// A disk that has no image gets one, for its bitmaps say: it keeps every byte.
#[test]
fn an_image_over_a_raw_disk_that_is_there_shows_it() {
    let scratch = Scratch::new("data-file-adopted");
    let layout = Layout::extended(65536);
    let (_, disk, _) = made_by_qemu(&layout, false, &scratch);
    let kept = scratch.path("kept.raw");
    std::fs::copy(&disk, &kept).expect("scratch is writable");
    let image = scratch.path("thin.qcow2");
    let options = options(&layout, &disk, true);
    gaur(&["create", "-q", "-o", &options, &image]).ok();
    assert_same_bytes(&disk, &kept);
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("raw", &kept));
    gaur(&["compare", "-F", "raw", &image, &kept]).ok();
    let short = gaur(&["create", "-q", "-o", &options, &image, "1M"]).refused();
    assert!(short.stderr.contains("twin.raw"), "{short}");
    assert_same_bytes(&disk, &kept);
    gaur(&["bitmap", "--add", &image, "all"]).ok();
    let server = serve(&image, &scratch.path("s"));
    let ops = op::random(&layout, 3, 40, true, &noise(&scratch));
    op::apply("raw", &server.uri(), &ops);
    op::apply("raw", &kept, &ops);
    server.stop();
    assert_clean(&image);
    assert_same_view(("raw", &disk), ("raw", &kept));
    assert_same_view(("qcow2", &image), ("raw", &kept));
    let info = qemu_img(&["info", "--output=json", &image]).ok().json();
    let bitmap = &info["format-specific"]["data"]["bitmaps"][0];
    assert_eq!(bitmap["name"], "all", "{info}");
    assert_eq!(bitmap["flags"], serde_json::json!(["auto"]), "{info}");
}

#[test]
fn a_data_file_is_never_a_file_that_is_needed() {
    let scratch = Scratch::new("data-file-needed");
    let layout = Layout::v3(65536);
    let (base, twin, data) = made_by_qemu(&layout, false, &scratch);
    let kept = scratch.path("kept.raw");
    std::fs::copy(&twin, &kept).expect("scratch is writable");
    let new = scratch.path("new.qcow2");
    let onto = |file: &str| format!("data_file={file}");
    let own = gaur(&["create", "-o", &onto(&new), &new, "1M"]).refused();
    assert!(own.stderr.contains("its own data file"), "{own}");
    for file in [&base, &data] {
        let options = onto(file);
        let arguments = ["create", "-b", &base, "-F", "qcow2", "-o", &options, &new];
        let below = gaur(&arguments).refused();
        assert!(below.stderr.contains("backing file"), "{below}");
    }
    let options = onto(&twin);
    let arguments = [
        "convert", "-f", "raw", "-O", "qcow2", "-o", &options, &twin, &new,
    ];
    gaur(&arguments).refused();
    let options = format!("{},data_file_raw=on", onto(&scratch.path("x")));
    let arguments = ["create", "-b", &base, "-F", "qcow2", "-o", &options, &new];
    gaur(&arguments).refused();
    assert_same_bytes(&twin, &kept);
    gaur(&["compare", "-F", "raw", &base, &twin]).ok();
}

/// Gaur sees what QEMU sees: bytes, map and health.
fn reads(layout: Layout) {
    for raw in [false, true] {
        let scratch = Scratch::new("data-file-reads");
        let (image, twin, data) = made_by_qemu(&layout, raw, &scratch);
        let back = scratch.path("back.raw");
        gaur(&["convert", "-O", "raw", &image, &back]).ok();
        assert_same_bytes(&twin, &back);
        gaur(&["compare", "-F", "raw", &image, &twin]).ok();
        gaur(&["check", &image]).ok();
        let text = gaur(&["map", &image]).ok().stdout;
        assert!(text.contains(&data), "{text}");
        if raw {
            gaur(&["compare", "-f", "raw", "-F", "raw", &data, &twin]).ok();
        }
        let map = gaur(&["map", "--output=json", &image]).ok().json();
        let mapped = map.as_array().expect("a map").iter();
        let mapped = mapped.filter(|entry| entry["offset"].is_u64());
        let entries: Vec<_> = mapped.collect();
        assert!(!entries.is_empty(), "nothing is mapped");
        for entry in entries {
            assert_eq!(entry["offset"], entry["start"], "{entry}");
        }
    }
}

#[test]
fn an_overlay_and_its_data_file_lie_anywhere_the_policy_allows() {
    let layout = Layout::v3(65536);
    let scratch = Scratch::new("data-file-base");
    let (image, twin, data) = made_by_qemu(&layout, false, &scratch);
    let overlay = scratch.path("overlay.qcow2");
    gaur(&["create", "-q", "-b", &image, "-F", "qcow2", &overlay]).ok();
    gaur(&["compare", "-F", "raw", &overlay, &twin]).ok();
    // The same file under another name, which the image does not know.
    let moved = scratch.path("moved.raw");
    std::fs::rename(&data, &moved).expect("it was made");
    let line = gaur(&["compare", "-F", "raw", &overlay, &twin]).refused();
    assert!(line.stderr.contains("data.raw"), "{line}");
    let told = format!("driver=qcow2,file.filename={image},data-file.filename={moved}");
    let back = scratch.path("back.raw");
    gaur(&["convert", "--image-opts", "-O", "raw", &told, &back]).ok();
    assert_same_bytes(&twin, &back);
    let json = format!(
        r#"json:{{"driver":"qcow2","file":{{"driver":"file","filename":"{image}"}},
        "data-file":{{"driver":"file","filename":"{moved}"}}}}"#
    );
    gaur(&["convert", "-O", "raw", &json, &back]).ok();
    assert_same_bytes(&twin, &back);
    let plain = format!("driver=qcow2,file.filename={overlay},data-file.filename={moved}");
    let line = gaur(&["convert", "--image-opts", "-O", "raw", &plain, &back]).refused();
    assert!(line.stderr.contains("no external data file"), "{line}");
}

#[test]
fn a_missing_or_truncated_data_file_is_one_line_that_names_it() {
    let scratch = Scratch::new("data-file-missing");
    let (image, _twin, data) = made_by_qemu(&Layout::v3(65536), true, &scratch);
    let out = scratch.path("out.raw");
    let file = std::fs::File::options().write(true).open(&data);
    file.and_then(|file| file.set_len(1 << 20))
        .expect("it was made");
    let line = gaur(&["convert", "-O", "raw", &image, &out]).refused();
    assert!(line.stderr.contains("data.raw"), "{line}");
    assert!(line.stderr.contains("truncated"), "{line}");
    std::fs::remove_file(&data).expect("it was made");
    let line = gaur(&["convert", "-O", "raw", &image, &out]).refused();
    assert!(line.stderr.contains("data.raw"), "{line}");
    gaur(&["info", &image]).ok();
}

/// Gaur writes on what QEMU made, and QEMU on that.
fn writes(layout: Layout) {
    for raw in [false, true] {
        let scratch = Scratch::new("data-file-writes");
        let (image, twin, data) = made_by_qemu(&layout, raw, &scratch);
        let server = serve(&image, &scratch.path("s"));
        let noise = noise(&scratch);
        let mut ops = op::random(&layout, 7, 80, true, &noise);
        ops.extend(op::mixed(&layout, &noise));
        ops.push(Op::Flush);
        op::apply("raw", &server.uri(), &ops);
        op::apply("raw", &twin, &ops);
        assert_same_view(("raw", &server.uri()), ("raw", &twin));
        server.stop();
        let healthy = || {
            assert_clean(&image);
            gaur(&["check", &image]).ok();
            assert_same_view(("qcow2", &image), ("raw", &twin));
            gaur(&["compare", "-F", "raw", &image, &twin]).ok();
            if raw {
                // QEMU makes it as long as its last cluster.
                assert_same_view(("raw", &data), ("raw", &twin));
                let info = qemu_img(&["info", "--output=json", &image]).ok().json();
                let specific = &info["format-specific"]["data"];
                assert_eq!(specific["data-file-raw"], true, "{info}");
            }
        };
        healthy();
        let more = op::random(&layout, 8, 60, true, &noise);
        op::apply("qcow2", &image, &more);
        op::apply("raw", &twin, &more);
        healthy();
        for size in [
            layout.size_bytes() + (3 << 20) + 512,
            layout.size_bytes() / 2 / 512 * 512,
        ] {
            let size = size.to_string();
            gaur(&["resize", "--shrink", &image, &size]).ok();
            qemu_img(&["resize", "-f", "raw", "--shrink", "-q", &twin, &size]).ok();
            healthy();
        }
        gaur(&["resize", &image, "9M"]).ok();
        qemu_img(&["resize", "-f", "raw", "-q", &twin, "9M"]).ok();
        healthy();
        qemu_img(&["resize", "-q", &image, "10M"]).ok();
        qemu_img(&["resize", "-f", "raw", "-q", &twin, "10M"]).ok();
        healthy();
    }
}

#[test]
fn discarded_space_of_a_data_file_goes_back_to_the_host() {
    use std::os::unix::fs::MetadataExt;
    for raw in [false, true] {
        let scratch = Scratch::new("data-file-space");
        let layout = Layout::v3(65536);
        let (image, _twin, data) = made_by_qemu(&layout, raw, &scratch);
        let server = serve(&image, &scratch.path("s"));
        let (offset, len) = (0, 3 << 20);
        let write = Op::Write {
            offset,
            len,
            pattern: 3,
        };
        op::apply("raw", &server.uri(), &[write, Op::Flush]);
        let blocks = || std::fs::metadata(&data).expect("it is there").blocks();
        let before = blocks();
        op::apply(
            "raw",
            &server.uri(),
            &[Op::Discard { offset, len }, Op::Flush],
        );
        server.stop();
        assert!(before >= 3 << 11, "{before} blocks");
        assert!(blocks() < 1 << 10, "{} of {before} blocks", blocks());
        assert_clean(&image);
    }
}

#[test]
fn snapshots_and_compression_are_refused_by_name() {
    let scratch = Scratch::new("data-file-refused");
    let (image, twin, _data) = made_by_qemu(&Layout::v3(65536), false, &scratch);
    for line in [
        &["snapshot", "-c", "one", &image][..],
        &[
            "convert", "-c", "-n", "-f", "raw", "-O", "qcow2", &twin, &image,
        ],
    ] {
        let said = gaur(line).refused();
        assert!(said.stderr.contains("external data file"), "{said}");
    }
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("raw", &twin));
}

mod created {
    gaur_interop::every_v3_layout!(crate::made, |layout| layout);
}

mod written {
    gaur_interop::every_v3_layout!(crate::writes, |layout| layout);
}

mod read {
    gaur_interop::every_v3_layout!(crate::reads, |layout| layout);
}
