//! `gaur commit` and `gaur rebase`: the disk stays what it was, by QEMU's view, and every file of the chain is clean.

use gaur_interop::builder::{create, noise};
use gaur_interop::compare::{assert_same_bytes, assert_same_view, qemu_view};
use gaur_interop::gaur::gaur;
use gaur_interop::layout::Layout;
use gaur_interop::op;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img};

const LAYOUTS: [Layout; 5] = [
    Layout::v3(65536),
    Layout::v3(4096).refcount_bits(64),
    Layout::extended(65536),
    Layout::extended(16384),
    Layout::v2(4096),
];

/// A chain of images, the base first, all changed at random.
fn chain(scratch: &Scratch, layout: &Layout, depth: u64, raw_base: bool) -> Vec<String> {
    let noise = noise(scratch);
    let mut images: Vec<String> = Vec::new();
    for number in 0..depth {
        let raw = number == 0 && raw_base;
        let format = if raw { "raw" } else { "qcow2" };
        let name = format!("{number}.{format}");
        let path = scratch.path(&name);
        let size = layout.size_bytes().to_string();
        if raw {
            qemu_img(&["create", "-q", "-f", "raw", &path, &size]).ok();
        } else if let Some(below) = images.last() {
            let below_format = if below.ends_with("raw") {
                "raw"
            } else {
                "qcow2"
            };
            let options = layout.options();
            let line = ["create", "-q", "-f", "qcow2", "-o", &options, "-b", below];
            qemu_img(&[&line[..], &["-F", below_format, &path]].concat()).ok();
        } else {
            create(&path, layout);
        }
        op::apply(
            format,
            &path,
            &op::random(layout, number + 1, 40, false, &noise),
        );
        images.push(path);
    }
    images
}

fn info(image: &str) -> serde_json::Value {
    qemu_img(&["info", "--output=json", image]).ok().json()
}

fn allocated_extents(image: &str) -> usize {
    let map = qemu_img(&["map", "--output=json", image]).ok().json();
    let map = map.as_array().expect("a list");
    let own = |entry: &&serde_json::Value| entry["depth"] == 0 && entry["present"] == true;
    map.iter().filter(own).count()
}

#[test]
fn commit_writes_into_the_backing_file_and_empties_the_overlay() {
    for (layout, raw) in LAYOUTS.iter().flat_map(|one| [(one, false), (one, true)]) {
        let scratch = Scratch::new("commit");
        let images = chain(&scratch, layout, 2, raw);
        let (base, top) = (&images[0], &images[1]);
        let before = scratch.path("before.raw");
        qemu_view(top, &before);
        gaur(&["commit", "-q", top]).ok();
        let format = if raw { "raw" } else { "qcow2" };
        assert_same_view((format, base), ("raw", &before));
        assert_same_view(("qcow2", top), ("raw", &before));
        assert_clean(top);
        if !raw {
            assert_clean(base);
        }
        assert_eq!(allocated_extents(top), 0, "{layout:?}");
    }
}

#[test]
fn commit_over_several_images_leaves_the_overlay_and_does_what_qemu_does() {
    for layout in &LAYOUTS {
        let scratch = Scratch::new("commit");
        let images = chain(&scratch, layout, 4, false);
        let copies: Vec<String> = images
            .iter()
            .map(|path| path.replace("qcow2", "copy"))
            .collect();
        for (from, to) in images.iter().zip(&copies) {
            std::fs::copy(from, to).expect("a copy");
        }
        let before = scratch.path("before.raw");
        qemu_view(&images[3], &before);
        gaur(&["commit", "-q", "-b", &images[1], &images[3]]).ok();
        assert_same_view(("qcow2", &images[1]), ("raw", &before));
        assert_same_bytes(&images[0], &copies[0]);
        assert_same_bytes(&images[2], &copies[2]);
        assert_same_view(("qcow2", &images[3]), ("raw", &before));
        assert_clean(&images[1]);
        gaur(&[
            "rebase", "-u", "-q", "-b", &images[1], "-F", "qcow2", &images[3],
        ])
        .ok();
        assert_same_view(("qcow2", &images[3]), ("raw", &before));
        gaur(&["commit", "-q", "-d", &images[3]]).ok();
        assert!(allocated_extents(&images[3]) > 0);
    }
}

#[test]
fn commit_into_a_smaller_base_grows_it() {
    let scratch = Scratch::new("commit");
    let (base, top) = (scratch.path("base.raw"), scratch.path("top.qcow2"));
    qemu_img(&["create", "-q", "-f", "raw", &base, "1M"]).ok();
    qemu_img(&[
        "create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &top, "3M",
    ])
    .ok();
    let write = |offset| op::Op::Write {
        offset,
        len: 70_000,
        pattern: 7,
    };
    op::apply("qcow2", &top, &[write(900 << 10), write(2 << 20)]);
    let before = scratch.path("before.raw");
    qemu_view(&top, &before);
    gaur(&["commit", "-q", &top]).ok();
    assert_same_view(("raw", &base), ("raw", &before));
    assert_same_view(("qcow2", &top), ("raw", &before));
}

/// What a short image hides of the base is zeros for the overlay, although no image above the base has them.
#[test]
fn commit_past_a_shorter_image_keeps_what_it_hides() {
    let scratch = Scratch::new("commit");
    let path = |name: &str| scratch.path(name);
    let (base, short, top) = (path("base.qcow2"), path("short.qcow2"), path("top.qcow2"));
    let create = ["create", "-q", "-f", "qcow2"];
    let on = |below| ["-b", below, "-F", "qcow2"];
    qemu_img(&[&create[..], &[&base, "3M"]].concat()).ok();
    qemu_img(&[&create[..], &on(&base), &[&short, "1M"]].concat()).ok();
    qemu_img(&[&create[..], &on(&short), &[&top, "3M"]].concat()).ok();
    let write = |offset, pattern| op::Op::Write {
        offset,
        len: 70_000,
        pattern,
    };
    op::apply("qcow2", &base, &[write(500 << 10, 1), write(2 << 20, 2)]);
    op::apply("qcow2", &short, &[write(300 << 10, 3)]);
    op::apply("qcow2", &top, &[write(1500 << 10, 4)]);
    let before = path("before.raw");
    qemu_view(&top, &before);
    gaur(&["commit", "-q", "-b", &base, &top]).ok();
    assert_same_view(("qcow2", &base), ("raw", &before));
    assert_clean(&base);
}

#[test]
fn rebase_keeps_the_disk_over_any_other_file_and_over_none() {
    for layout in &LAYOUTS {
        let scratch = Scratch::new("rebase");
        let images = chain(&scratch, layout, 3, false);
        let noise = noise(&scratch);
        let other = scratch.path("other.qcow2");
        create(&other, layout);
        op::apply("qcow2", &other, &op::random(layout, 9, 40, false, &noise));
        let short = scratch.path("short.raw");
        std::fs::write(&short, vec![0xa5; 100_000]).expect("a file");
        let before = scratch.path("before.raw");
        qemu_view(&images[2], &before);
        for (backing, format) in [
            (&images[0], "qcow2"),
            (&other, "qcow2"),
            (&short, "raw"),
            (&images[1], "qcow2"),
        ] {
            gaur(&["rebase", "-q", "-b", backing, "-F", format, &images[2]]).ok();
            assert_same_view(("qcow2", &images[2]), ("raw", &before));
            assert_clean(&images[2]);
            let info = info(&images[2]);
            assert_eq!(info["backing-filename"], **backing, "{layout:?}");
            assert_eq!(info["backing-filename-format"], format, "{layout:?}");
        }
        gaur(&["rebase", "-q", "-b", "", &images[2]]).ok();
        assert!(info(&images[2])["backing-filename"].is_null());
        assert_same_view(("qcow2", &images[2]), ("raw", &before));
        assert_clean(&images[2]);
    }
}

#[test]
fn rebase_stores_what_it_copies_compressed() {
    for layout in &LAYOUTS {
        let scratch = Scratch::new("rebase");
        let images = chain(&scratch, layout, 2, false);
        let before = scratch.path("before.raw");
        qemu_view(&images[1], &before);
        let theirs = scratch.path("theirs.qcow2");
        std::fs::copy(&images[1], &theirs).expect("a copy");
        // QEMU 10 ends with an assertion where clusters have subclusters.
        if !layout.extended {
            qemu_img(&["rebase", "-c", "-b", "", &theirs]).ok();
        }
        gaur(&["rebase", "-q", "-c", "-b", "", &images[1]]).ok();
        assert_same_view(("qcow2", &images[1]), ("raw", &before));
        assert_clean(&images[1]);
        let compressed = |image: &str| {
            let map = qemu_img(&["map", "--output=json", image]).ok().json();
            let extents = map.as_array().expect("extents").iter();
            let packed = extents.filter(|extent| extent["compressed"] == true);
            packed
                .map(|extent| extent["length"].as_u64().unwrap_or_default())
                .sum::<u64>()
        };
        let (ours, wanted) = (compressed(&images[1]), compressed(&theirs));
        assert!(
            ours > 0 && ours * 10 >= wanted * 9,
            "{layout:?}: {ours} of {wanted}"
        );
    }
}

#[test]
fn rebase_leaves_bitmaps_that_qemu_finds() {
    let layout = &Layout::v3(65536);
    let scratch = Scratch::new("rebase");
    let images = chain(&scratch, layout, 2, false);
    let top = images[1].as_str();
    qemu_img(&["bitmap", "--add", top, "kept"]).ok();
    for (backing, format) in [
        ("", None),
        (&images[0], Some("raw")),
        (&images[0], Some("qcow2")),
    ] {
        let mut line = vec!["rebase", "-u", "-b", backing];
        line.extend(format.iter().flat_map(|format| ["-F", *format]));
        line.push(top);
        gaur(&line).ok();
        assert_clean(top);
        let bitmaps = &info(top)["format-specific"]["data"]["bitmaps"];
        assert_eq!(bitmaps[0]["name"], "kept", "{backing}");
        assert_eq!(
            bitmaps[0]["flags"],
            serde_json::json!(["auto"]),
            "{backing}"
        );
    }
}

#[test]
fn rebase_down_its_own_chain_copies_only_what_lay_between() {
    let layout = &Layout::v3(65536);
    let scratch = Scratch::new("rebase");
    let images = chain(&scratch, layout, 2, false);
    let top = scratch.path("top.qcow2");
    let line = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"];
    qemu_img(&[&line[..], &[&images[1], &top]].concat()).ok();
    let middle = allocated_extents(&images[1]);
    gaur(&["rebase", "-q", "-b", &images[0], "-F", "qcow2", &top]).ok();
    let copied = allocated_extents(&top);
    assert!(copied > 0 && copied <= middle, "{copied} of {middle}");
    assert_same_view(("qcow2", &top), ("qcow2", &images[1]));
}

#[test]
fn bad_requests_are_refused_in_one_line_and_change_nothing() {
    let scratch = Scratch::new("rebase");
    let images = chain(&scratch, &Layout::v3(4096), 2, false);
    let (base, top) = (images[0].as_str(), images[1].as_str());
    let raw = scratch.zeros("disk.raw", 1 << 20);
    let copy = scratch.path("copy.qcow2");
    std::fs::copy(top, &copy).expect("a copy");
    let long = "n".repeat(1024);
    for (line, why) in [
        (vec!["commit", base], "has no backing file"),
        (vec!["commit", "-f", "raw", &raw], "has no backing file"),
        (vec!["commit", "-b", &raw, top], "is not below it"),
        (
            vec!["rebase", "-b", top, "-F", "qcow2", top],
            "below its own backing file",
        ),
        (vec!["rebase", "-b", "gone", "-F", "raw", top], "gone"),
        (vec!["rebase", "-b", &raw, top], "format must be told"),
        (
            vec!["rebase", "-b", "ssh:x:1", "-F", "raw", top],
            "protocol",
        ),
        (
            vec!["rebase", "-u", "-b", &long, "-F", "raw", top],
            "bad backing file name",
        ),
        (
            vec!["rebase", "-f", "raw", "-b", "", &raw],
            "raw image has no backing file",
        ),
        (
            vec!["rebase", "-F", "raw", top],
            "format without a backing file",
        ),
    ] {
        let refused = gaur(&line).refused();
        assert!(refused.stderr.contains(why), "{line:?}: {}", refused.stderr);
        assert_same_bytes(top, &copy);
    }
}
