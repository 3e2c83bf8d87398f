//! `gaur convert -c`: QEMU reads, checks and writes on what it makes, and makes nothing much smaller itself.

use gaur_interop::build_paths::workspace_dir;
use gaur_interop::compare::{assert_same_bytes, assert_same_view};
use gaur_interop::gaur::gaur;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

/// A disk with text, noise, holes and zeros between them, which ends in the middle of a cluster.
fn disk(scratch: &Scratch, name: &str, seed: u64) -> String {
    let text = std::fs::read(workspace_dir().join("Cargo.lock")).expect("a long text");
    let mut random = Random::new(seed);
    let mut bytes = Vec::new();
    while bytes.len() < 6 << 20 {
        let len = 512 * (1 + random.below(700) as usize);
        match random.below(6) {
            0 => bytes.extend(random.bytes(len.min(100_000))),
            1 => bytes.resize(bytes.len() + len, 0),
            2 => bytes.resize(bytes.len() + len, seed as u8 + 7),
            _ => {
                let start = random.below(text.len() as u64 - 1) as usize;
                let from = &text[start..text.len().min(start + len)];
                bytes.extend(from);
            }
        }
    }
    bytes.truncate((6 << 20) - 5 * 512);
    scratch.file(name, &bytes)
}

fn len_of(path: &str) -> u64 {
    std::fs::metadata(path).expect("an image").len()
}

fn cluster_bytes(image: &str) -> u64 {
    let info = qemu_img(&["info", "--output=json", image]).ok().json();
    info["cluster-size"].as_u64().expect("a cluster size")
}

/// Converts with both, compares, and lets QEMU write on.
fn made_by_both(options: &str) {
    let scratch = Scratch::new("compressed");
    let raw = disk(&scratch, "disk.raw", 1);
    let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
    let arguments = |target| {
        let format = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options];
        [&format[..], &[&raw, target]].concat()
    };
    gaur(&arguments(ours.as_str())).ok();
    qemu_img(&arguments(theirs.as_str())).ok();
    assert_clean(&ours);
    gaur(&["check", &ours]).ok();
    assert_same_view(("qcow2", &ours), ("raw", &raw));
    let back = scratch.path("back.raw");
    gaur(&["convert", "-O", "raw", &ours, &back]).ok();
    assert_same_bytes(&raw, &back);
    // QEMU's files end with their last byte, ours with their last cluster.
    let limit = len_of(&theirs) * 102 / 100 + (128 << 10) + cluster_bytes(&ours);
    assert!(len_of(&ours) <= limit, "{} of {limit} bytes", len_of(&ours));
    let compressed = |image: &str| {
        let report = qemu_img(&["check", "--output=json", image]).ok().json();
        report["compressed-clusters"].as_u64().unwrap_or(0)
    };
    let (one, two) = (compressed(&ours), compressed(&theirs));
    assert!(
        one > 0 && one * 100 >= two * 98,
        "{one} clusters compressed, and {two}"
    );
    // Into compressed clusters, and over them.
    let commands = [
        "write -P 1 100k 3k",
        "write -P 2 2M 2M",
        "write -z -u 4M 64k",
        "write -z 5M 4k",
    ];
    for command in commands {
        run("qemu-io", &["-f", "qcow2", "-c", command, &ours]).ok();
        run("qemu-io", &["-f", "raw", "-c", command, &raw]).ok();
        assert_clean(&ours);
        assert_same_view(("qcow2", &ours), ("raw", &raw));
    }
    gaur(&["compare", "-F", "raw", &ours, &raw]).ok();
}

macro_rules! kinds {
    ($($name:ident: $options:literal,)*) => {
        mod kinds {
            $(#[test]
            fn $name() {
                crate::made_by_both($options);
            })*
        }
    };
}

kinds! {
    deflate: "compression_type=zlib",
    zstd: "compression_type=zstd",
    deflate_4k: "cluster_size=4k",
    zstd_4k: "cluster_size=4k,compression_type=zstd",
    deflate_2m: "cluster_size=2M",
    zstd_2m: "cluster_size=2M,compression_type=zstd",
    deflate_subclusters: "extended_l2=on",
    zstd_subclusters: "extended_l2=on,cluster_size=128k,compression_type=zstd",
    version_2: "compat=0.10",
    narrow_counts: "refcount_bits=1",
    counts_of_two_bits: "refcount_bits=2,cluster_size=4k",
}

#[test]
fn sources_that_share_a_cluster_are_read_into_it() {
    let scratch = Scratch::new("compressed");
    let (one, two) = (disk(&scratch, "one.raw", 2), disk(&scratch, "two.raw", 3));
    let (image, back) = (scratch.path("image.qcow2"), scratch.path("back.raw"));
    for more in [
        &[][..],
        &["-W"],
        &["-m", "1"],
        &["--compression-level", "9"],
    ] {
        let start = ["convert", "-c", "-f", "raw", "-O", "qcow2"];
        gaur(&[&start[..], more, &[&one, &two, &image]].concat()).ok();
        assert_clean(&image);
        qemu_img(&["convert", "-O", "raw", &image, &back]).ok();
        let both = [one.as_str(), two.as_str()].map(|path| std::fs::read(path).expect("a source"));
        assert!(std::fs::read(&back).expect("the copy") == both.concat());
    }
}

#[test]
fn overlays_and_existing_targets_get_compressed_clusters() {
    let scratch = Scratch::new("compressed");
    let base = disk(&scratch, "base.raw", 4);
    let (top, image) = (scratch.path("top.qcow2"), scratch.path("image.qcow2"));
    qemu_img(&["create", "-f", "qcow2", "-F", "raw", "-b", &base, &top]).ok();
    for command in [
        "write -P 5 300k 100k",
        "write -z 1M 128k",
        "write -P 6 6000k 10k",
    ] {
        run("qemu-io", &["-f", "qcow2", "-c", command, &top]).ok();
    }
    gaur(&[
        "convert", "-c", "-O", "qcow2", "-B", &base, "-F", "raw", &top, &image,
    ])
    .ok();
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("qcow2", &top));
    assert!(len_of(&image) < 1 << 20, "what the base has is not copied");
    // Over what is there, in a target that is longer and ends elsewhere.
    let longer = scratch.path("longer.qcow2");
    qemu_img(&["create", "-f", "qcow2", &longer, "7M"]).ok();
    run(
        "qemu-io",
        &["-f", "qcow2", "-c", "write -P 9 0 7M", &longer],
    )
    .ok();
    gaur(&["convert", "-c", "-n", "-f", "raw", &base, &longer]).ok();
    assert_clean(&longer);
    let len = len_of(&base);
    let rest = format!("read -P 9 {len} {}", (7 << 20) - len);
    run("qemu-io", &["-f", "qcow2", "-c", &rest, &longer]).ok();
    let back = scratch.path("back.raw");
    qemu_img(&["convert", "-O", "raw", &longer, &back]).ok();
    let bytes = std::fs::read(&back).expect("the copy");
    assert_same_bytes(&scratch.file("start.raw", &bytes[..len as usize]), &base);
}

#[test]
fn zeros_are_compressed_too_where_that_is_asked_for() {
    let scratch = Scratch::new("compress");
    let source = scratch.zeros("zeros.raw", 1 << 20);
    let map = |name: &str, image: &str| {
        let line = [
            "convert", "-c", "-S", "0", "-f", "raw", "-O", "qcow2", &source, image,
        ];
        match name {
            "ours" => gaur(&line).ok(),
            _ => qemu_img(&line).ok(),
        };
        qemu_img(&["map", "--output=json", image]).ok().stdout
    };
    let [ours, theirs] = ["ours", "theirs"].map(|name| map(name, &scratch.path(name)));
    assert_eq!(ours, theirs);
}

#[test]
fn what_cannot_be_compressed_is_refused_before_anything_is_touched() {
    let scratch = Scratch::new("compressed");
    let raw = scratch.zeros("disk.raw", 1 << 20);
    let target = scratch.file("target", b"what was there");
    let refused = |more: &[&str], words: &[&str]| {
        let run = gaur(&[&["convert", "-f", "raw"], more, &[&raw, &target]].concat()).refused();
        for word in words {
            assert!(run.stderr.contains(word), "{:?}", run.stderr);
        }
        let there = std::fs::read(&target).expect("the target is still there");
        assert_eq!(there, b"what was there");
    };
    refused(&["-c", "-O", "raw"], &["raw image", "-O qcow2"]);
    refused(
        &["-c", "-O", "qcow2", "--compression-level", "10"],
        &["levels 1 to 9"],
    );
    let zstd = [
        "-c",
        "-O",
        "qcow2",
        "-o",
        "compression_type=zstd",
        "--compression-level",
        "23",
    ];
    refused(&zstd, &["levels 1 to 22"]);
    let old = ["-c", "-O", "qcow2", "-o", "compression_type=zstd,compat=v2"];
    refused(&old, &["needs version 3"]);
}
