//! The policies *compact* and *contiguous*: what an image takes of its host, and what it gives back.
//! Whatever Gaur does with the space, QEMU finds the image valid and reads the same bytes.

use std::os::unix::fs::MetadataExt;

use gaur_interop::builder::{Kind, build, noise};
use gaur_interop::compare::{assert_same_view, qemu_view};
use gaur_interop::gaur::{gaur, serve_with};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img};
use serde_json::Value;

/// File systems have no smaller holes.
const BLOCK: u64 = 4096;

/// Bytes of the host's space that a file takes.
fn space(path: &str) -> u64 {
    let file = std::fs::File::open(path).expect("the image is there");
    // Delayed allocation of the file system would hide what was written last.
    file.sync_all().expect("the image reaches its disk");
    file.metadata().expect("it is a file").blocks() * 512
}

/// A new image of this layout with a policy, by Gaur.
fn create(path: &str, layout: &Layout, policy: &str) {
    let options = format!("{},allocation={policy}", layout.options());
    let size = layout.size_bytes().to_string();
    gaur(&["create", "-q", "-f", "qcow2", "-o", &options, path, &size]).ok();
}

/// `gaur map` and `qemu-img map` say the same; what they say.
fn same_map(image: &str) -> Value {
    let arguments = ["map", "--output=json", image];
    let ours = gaur(&arguments).ok().json();
    assert_eq!(ours, qemu_img(&arguments).ok().json());
    ours
}

fn everywhere(layout: &Layout, file: String) -> Op {
    Op::WriteFile {
        offset: 0,
        len: layout.size_bytes(),
        file,
    }
}

/// Every other piece of the disk is discarded, in pieces smaller than a cluster: that is the space
/// that goes, `map` shows it, and QEMU cannot do it.
fn holes(layout: Layout) {
    let scratch = Scratch::new("holes");
    let (image, twin) = (scratch.path("disk.qcow2"), scratch.path("twin.raw"));
    create(&image, &layout, "compact");
    let twin_len = layout.size_bytes();
    scratch.zeros("twin.raw", twin_len);
    let piece = layout.unit_bytes().max(BLOCK);
    let discards: Vec<Op> = (0..layout.size_bytes() / piece / 2)
        .map(|index| Op::Discard {
            offset: 2 * index * piece,
            len: piece,
        })
        .collect();
    let discarded = discards.len() as u64 * piece;
    let fill = everywhere(&layout, noise(&scratch));

    let server = serve_with(&image, &scratch.path("s"), &[]);
    op::apply("raw", &server.uri(), &[fill.clone(), Op::Flush]);
    let before = space(&image);
    for part in discards.chunks(100) {
        op::apply("raw", &server.uri(), &[part, &[Op::Flush]].concat());
    }
    server.stop();
    op::apply("raw", &twin, &[fill]);
    for part in discards.chunks(100) {
        op::apply("raw", &twin, part);
    }
    let after = space(&image);
    // Metadata may have taken a little more meanwhile.
    let given_back = before.saturating_sub(after);
    assert!(
        given_back + 64 * 1024 >= discarded,
        "{discarded} bytes were discarded, {given_back} given back"
    );
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("raw", &twin));
    let map = same_map(&image);
    let entries = map.as_array().expect("a list");
    assert!(entries.len() as u64 >= layout.size_bytes() / piece);
    assert_eq!(
        (&entries[0]["length"], &entries[0]["data"]),
        (&Value::from(piece), &Value::from(false))
    );
    let check = gaur(&["check", "--output=json", &image]).ok().json();
    assert_eq!(check["reclaimable-bytes"], Value::Null, "{check}");
}

#[test]
fn subclusters_of_512_bytes_leave_holes() {
    holes(Layout::extended(16 << 10));
}

#[test]
fn subclusters_of_2_kib_leave_holes() {
    holes(Layout::extended(64 << 10));
}

#[test]
fn subclusters_of_64_kib_leave_holes() {
    holes(Layout::extended(2 << 20));
}

/// What was discarded in an overlay reads as zeros, not as what lies below.
#[test]
fn the_backing_file_does_not_show_through_a_hole() {
    let layout = Layout::extended(64 << 10);
    let scratch = Scratch::new("below");
    let base = scratch.zeros("base.raw", layout.size_bytes());
    op::apply("raw", &base, &[everywhere(&layout, noise(&scratch))]);
    let image = scratch.path("top.qcow2");
    let options = layout.options();
    gaur(&[
        "create", "-q", "-o", &options, "-b", &base, "-F", "raw", &image,
    ])
    .ok();
    let unit = layout.unit_bytes();
    let ops = [
        Op::Write {
            offset: 0,
            len: 16 * unit,
            pattern: 1,
        },
        Op::Discard {
            offset: 4 * unit,
            len: 4 * unit,
        },
        Op::Discard {
            offset: 20 * unit,
            len: 2 * unit,
        },
        // Not whole subclusters: nothing happens.
        Op::Discard {
            offset: 12 * unit + 1,
            len: 2 * unit - 2,
        },
        Op::Flush,
    ];
    let server = serve_with(&image, &scratch.path("s"), &[]);
    op::apply("raw", &server.uri(), &ops);
    server.stop();
    assert_clean(&image);
    let expect = |offset: u64, len: u64, pattern| Op::Expect {
        offset: offset * unit,
        len: len * unit,
        pattern,
    };
    let zeros = [
        expect(0, 4, 1),
        expect(4, 4, 0),
        expect(8, 8, 1),
        expect(20, 2, 0),
    ];
    op::apply("qcow2", &image, &zeros);
    let view = scratch.path("view.raw");
    qemu_view(&image, &view);
    let read = |path: &str| std::fs::read(path).expect("a raw file");
    let (view, base) = (read(&view), read(&base));
    let rest = 22 * unit as usize..;
    assert!(view[rest.clone()] == base[rest]);
    same_map(&image);
}

/// The image's policy holds unless an option overrides it.
#[test]
fn the_policy_can_be_told_when_the_image_is_used() {
    let layout = Layout::extended(64 << 10);
    let scratch = Scratch::new("override");
    let image = scratch.path("disk.qcow2");
    create(&image, &layout, "compact");
    let cluster = layout.cluster_bytes;
    let count = layout.size_bytes() / cluster;
    let touch: Vec<Op> = (0..count)
        .map(|index| Op::Write {
            offset: index * cluster,
            len: BLOCK,
            pattern: 7,
        })
        .collect();
    let trim: Vec<Op> = (0..count)
        .map(|index| Op::Discard {
            offset: index * cluster + BLOCK,
            len: cluster - BLOCK,
        })
        .collect();
    let run = |policy: Option<&str>, ops: &[Op]| {
        let arguments = policy.map(|policy| ["--allocation", policy]);
        let arguments = arguments.as_ref().map_or(&[][..], |pair| &pair[..]);
        let server = serve_with(&image, &scratch.path("s"), arguments);
        op::apply("raw", &server.uri(), &[ops, &[Op::Flush]].concat());
        server.stop();
        assert_clean(&image);
        same_map(&image);
        space(&image)
    };
    // Whole clusters are taken, and parts of them are not given back.
    let taken = run(Some("contiguous"), &touch);
    let untouched = Op::Expect {
        offset: BLOCK,
        len: cluster - BLOCK,
        pattern: 0,
    };
    op::apply("qcow2", &image, &[untouched]);
    assert!(taken >= count * cluster, "{taken}");
    assert!(run(Some("contiguous"), &trim) >= count * cluster);
    // As the image itself has it, they are.
    let left = run(None, &trim);
    assert!(left <= count * BLOCK + 8 * cluster, "{left}");
    gaur(&["resize", "-q", "--allocation", "contiguous", &image, "+1M"]).ok();
    let refused = gaur(&["resize", "--allocation", "tight", &image, "+1M"]).refused();
    assert!(refused.stderr.contains("contiguous"), "{refused}");
    let raw = scratch.zeros("disk.raw", 1 << 20);
    let refused = gaur(&["resize", "-f", "raw", "--allocation", "compact", &raw, "2M"]);
    assert!(refused.refused().stderr.contains("qcow2"));
}

/// A target that takes whole clusters, and one that takes what has data.
#[test]
fn convert_takes_the_policy_of_its_target() {
    let layout = Layout::extended(2 << 20);
    let scratch = Scratch::new("convert");
    let source = scratch.zeros("source.raw", layout.size_bytes());
    op::apply(
        "raw",
        &source,
        &[Op::Write {
            offset: 3 << 20,
            len: 64 << 10,
            pattern: 5,
        }],
    );
    let options = layout.options();
    for (arguments, least, most) in [
        (&["-o", &options][..], 0, 1 << 20),
        (
            &["-o", &options, "--allocation", "contiguous"],
            2 << 20,
            64 << 20,
        ),
        (
            &["-o", &format!("{options},allocation=contiguous")],
            2 << 20,
            64 << 20,
        ),
        (
            &[
                "-o",
                &format!("{options},allocation=contiguous"),
                "--allocation",
                "compact",
            ],
            0,
            1 << 20,
        ),
    ] {
        let target = scratch.path("target.qcow2");
        let files = [source.as_str(), &target];
        gaur(&[&["convert", "-f", "raw", "-O", "qcow2"], arguments, &files].concat()).ok();
        assert_clean(&target);
        assert_same_view(("raw", &source), ("qcow2", &target));
        let taken = space(&target);
        assert!((least..=most).contains(&taken), "{arguments:?}: {taken}");
    }
}

/// Random operations with discards of any whole subclusters, beside a raw file.
fn random_discards(kind: Kind, seed: u64) {
    let layout = Layout::extended(64 << 10);
    let scratch = Scratch::new("random");
    let image = build(kind, &layout, &scratch);
    let twin = scratch.path("twin.raw");
    qemu_view(&image, &twin);
    let mut random = Random::new(seed);
    let unit = layout.unit_bytes();
    let units = layout.size_bytes() / unit;
    let mut ops = Vec::new();
    for op in op::random(&layout, seed, 150, false, &noise(&scratch)) {
        ops.push(op);
        if random.one_in(2) {
            let first = random.below(units);
            let len = (random.below(40) + 1).min(units - first);
            ops.push(Op::Discard {
                offset: first * unit,
                len: len * unit,
            });
        }
    }
    for (number, part) in ops.chunks(80).enumerate() {
        let server = serve_with(&image, &scratch.path(&format!("s{number}")), &[]);
        op::apply("raw", &server.uri(), part);
        server.stop();
        op::apply("raw", &twin, part);
        assert_same_view(("qcow2", &image), ("raw", &twin));
    }
    assert_clean(&image);
    gaur(&["check", &image]).ok();
    same_map(&image);
}

#[test]
fn random_discards_in_a_plain_image() {
    random_discards(Kind::Plain, 11);
}

#[test]
fn random_discards_in_a_chain() {
    random_discards(Kind::Chain, 12);
}

#[test]
fn random_discards_beside_snapshots() {
    random_discards(Kind::Snapshots, 13);
}

/// 100 MB of random 4-KiB writes to an empty image of 40 GB take little more than that, whatever
/// the size of its clusters.
#[test]
fn random_writes_take_the_space_of_their_data() {
    let scratch = Scratch::new("growth");
    for (cluster, most_mb) in [("64k", 115), ("512k", 110), ("2M", 110)] {
        let image = scratch.path("disk.qcow2");
        let options = format!("extended_l2=on,cluster_size={cluster}");
        gaur(&["create", "-q", "-o", &options, &image, "40G"]).ok();
        let count = (100_u64 << 20) / 4096;
        let bench = ["bench", "-q", "-w", "--random", "-s", "4096", "-c"];
        gaur(&[&bench[..], &[&count.to_string(), &image]].concat()).ok();
        assert_clean(&image);
        let taken_mb = space(&image).div_ceil(1 << 20);
        assert!(taken_mb <= most_mb, "clusters of {cluster}: {taken_mb} MB");
    }
}

/// What `map` says of a disk, without where it lies.
fn kinds(map: &Value) -> Vec<(u64, bool, bool, bool)> {
    let runs = map.as_array().expect("a list").iter();
    let kind = |run: &Value| {
        let is = |key: &str| run[key].as_bool().expect("a flag");
        let start = run["start"].as_u64().expect("a number");
        (start, is("present"), is("zero"), run["offset"].is_u64())
    };
    runs.map(kind).collect()
}

/// Zeros that are written become zeros of the image as they do with QEMU.
#[test]
fn detected_zeros_are_those_of_qemu() {
    let scratch = Scratch::new("detect");
    let zeros = scratch.zeros("zeros.raw", 4 << 20);
    for detect in ["off", "on", "unmap"] {
        let after = |tool: &dyn Fn(&[&str])| {
            let image = scratch.path("disk.qcow2");
            qemu_img(&["create", "-q", "-f", "qcow2", &image, "4M"]).ok();
            let data = Op::Write {
                offset: 64 << 10,
                len: 1 << 20,
                pattern: 7,
            };
            op::apply("qcow2", &image, &[data]);
            let options =
                format!("driver=qcow2,file.filename={image},discard=unmap,detect-zeroes={detect}");
            let how = ["convert", "-n", "-S", "0", "-f", "raw"];
            tool(&[&how[..], &["--target-image-opts", &zeros, &options]].concat());
            assert_clean(&image);
            kinds(&same_map(&image))
        };
        let theirs = after(&|arguments| {
            qemu_img(arguments).ok();
        });
        let ours = after(&|arguments| {
            gaur(arguments).ok();
        });
        let zero = |map: &[(u64, bool, bool, bool)]| map.iter().all(|run| run.2);
        assert_eq!(zero(&ours), detect != "off", "{ours:?}");
        assert_eq!(zero(&theirs), zero(&ours));
        let mapped = |map: &[(u64, bool, bool, bool)]| map.iter().any(|run| run.3);
        assert_eq!(mapped(&ours), mapped(&theirs), "{ours:?}, {theirs:?}");
    }
    let image = scratch.path("disk.qcow2");
    let refused = gaur(&[
        "serve",
        "--discard",
        "ignore",
        "--detect-zeroes",
        "unmap",
        &image,
    ]);
    let refused = refused.refused();
    assert!(refused.stderr.contains("discard=unmap"), "{refused}");
}

/// With `discard-no-unref` the space of a discarded cluster goes and its place stays, as with QEMU.
#[test]
fn discarded_clusters_keep_their_place() {
    let scratch = Scratch::new("unref");
    let ops = |ops: &mut Vec<String>| {
        for op in [
            Op::Discard {
                offset: 1 << 20,
                len: 1 << 20,
            },
            Op::Flush,
        ] {
            ops.extend(["-c".to_owned(), op.command()]);
        }
    };
    let made = |name: &str| {
        let image = scratch.path(name);
        qemu_img(&["create", "-q", "-f", "qcow2", &image, "4M"]).ok();
        let data = Op::Write {
            offset: 0,
            len: 4 << 20,
            pattern: 7,
        };
        op::apply("qcow2", &image, &[data]);
        let more = "discard=unmap,discard-no-unref=on,pass-discard-request=on";
        let options = format!("driver=qcow2,file.filename={image},{more}");
        (image, options)
    };
    let (theirs, options) = made("theirs.qcow2");
    let mut arguments = vec!["--image-opts".to_owned(), options];
    ops(&mut arguments);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    gaur_interop::tool::run("qemu-io", &arguments).ok();
    let (ours, options) = made("ours.qcow2");
    let before = space(&ours);
    let server = serve_with(&options, &scratch.path("s"), &["--image-opts"]);
    let mut arguments = vec!["-f".to_owned(), "raw".to_owned(), "-d".to_owned()];
    arguments.push("unmap".to_owned());
    ops(&mut arguments);
    arguments.push(server.uri());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    gaur_interop::tool::run("qemu-io", &arguments).ok();
    server.stop();
    assert_clean(&ours);
    assert_eq!(same_map(&ours), same_map(&theirs));
    assert!(kinds(&same_map(&ours)).contains(&(1 << 20, true, true, true)));
    // Metadata may have got a block that was a hole.
    assert!(
        space(&ours) + (1 << 20) <= before + (64 << 10),
        "its space is given back"
    );
}
