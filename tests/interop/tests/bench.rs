//! `gaur bench` beside `qemu-img bench`: what one writes the other writes, in every layout, and the
//! image is as good as one that QEMU wrote.

use gaur_interop::builder::{Kind, build, create};
use gaur_interop::compare::assert_same_view;
use gaur_interop::gaur::gaur;
use gaur_interop::layout::Layout;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, assert_clean, qemu_img, run};

/// A place where QEMU writes in a copy of the image.
fn twin(image: &str, scratch: &Scratch) -> String {
    let path = scratch.path("twin.qcow2");
    run("cp", &[image, &path]).ok();
    path
}

/// Fails unless the last line is qemu-img's closing line.
#[track_caller]
fn assert_closed(run: Run) {
    let run = run.ok();
    let last = run.stdout.lines().last().unwrap_or_default();
    let time = last.strip_prefix("Run completed in ");
    let time = time.and_then(|rest| rest.strip_suffix(" seconds."));
    let seconds: Option<f64> = time.and_then(|time| time.parse().ok());
    assert!(seconds.is_some_and(|seconds| seconds >= 0.0), "{run}");
}

fn same_writes(kind: Kind, layout: Layout) {
    let scratch = Scratch::new("bench");
    let image = build(kind, &layout, &scratch);
    let twin = twin(&image, &scratch);
    let cluster = layout.cluster_bytes.to_string();
    let third = (layout.cluster_bytes / 3).to_string();
    for (pattern, options) in [
        ("161", &["-c", "100"][..]),
        (
            "162",
            &["-c", "60", "-s", "1536", "-o", "700", "-S", &cluster],
        ),
        ("163", &["-c", "8", "-s", "70000", "-S", &third, "-d", "5"]),
        (
            "164",
            &["-c", "40", "-d", "3", "--flush-interval=7", "-t", "none"],
        ),
        (
            "165",
            &["-c", "40", "-d", "3", "--flush-interval=3", "--no-drain"],
        ),
    ] {
        let bench = |image| {
            [
                &["bench", "-q", "-w", "--pattern", pattern],
                options,
                &[image],
            ]
            .concat()
        };
        assert_closed(gaur(&bench(&image)));
        assert_closed(qemu_img(&bench(&twin)));
        assert_clean(&image);
        assert_same_view(("qcow2", &image), ("qcow2", &twin));
    }
    // Threads end up with the same, whichever of them is first.
    let bench = ["bench", "-q", "-w", "-c", "90", "--pattern=166"];
    assert_closed(gaur(&[&bench[..], &["--threads=3", &image]].concat()));
    assert_closed(qemu_img(&[&bench[..], &[&twin]].concat()));
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("qcow2", &twin));
}

fn plain(layout: Layout) {
    same_writes(Kind::Plain, layout);
}

fn chain(layout: Layout) {
    same_writes(Kind::Chain, layout);
}

mod plain_images {
    gaur_interop::every_layout!(crate::plain);
}

mod chains {
    gaur_interop::every_layout!(crate::chain);
}

#[test]
fn reading_changes_nothing() {
    let scratch = Scratch::new("bench-reads");
    let image = build(Kind::Snapshots, &Layout::extended(65536), &scratch);
    let before = std::fs::read(&image).expect("the image is there");
    for options in [
        &["-c", "2000"][..],
        &["-c", "2000", "--random", "--threads=2"],
        &["-c", "30", "-s", "100000", "-t", "none"],
    ] {
        assert_closed(gaur(&[&["bench", "-q"], options, &[&image]].concat()));
    }
    assert!(before == std::fs::read(&image).expect("the image is there"));
}

/// Threads that write to the same clusters at random, with copies from a backing file.
#[test]
fn a_mixed_load_leaves_a_clean_image() {
    let scratch = Scratch::new("bench-mixed");
    for layout in [Layout::v3(4096), Layout::v3(65536), Layout::extended(65536)] {
        let image = build(Kind::Chain, &layout, &scratch);
        let load = ["--random", "--read-percent=40", "--threads=4", "-c", "4000"];
        gaur(&[&["bench", "-q", "-s", "1024"], &load[..], &[&image]].concat()).ok();
        assert_clean(&image);
    }
}

/// Threads that need each other's place in a cache next to nothing once lost mappings: a slice that
/// was found was evicted before it was pinned.
#[test]
fn no_write_is_lost_when_slices_come_and_go() {
    let scratch = Scratch::new("bench-evict");
    let raw = scratch.zeros("twin.raw", 100 << 20);
    let load = ["--random", "-w", "-c", "40000", "-d", "16", "-s", "3000"];
    let load = [&["bench", "-q", "--threads=4", "--pattern=7"], &load[..]].concat();
    gaur(&[&load[..], &["-f", "raw", &raw]].concat()).ok();
    for round in 0..3 {
        let image = scratch.path(&format!("disk{round}.qcow2"));
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k"];
        qemu_img(&[&create[..], &[&image, "100M"]].concat()).ok();
        let small = "l2-cache-size=16k,l2-cache-entry-size=512,refcount-cache-size=16k";
        let options = format!("driver=qcow2,file.filename={image},{small}");
        gaur(&[&load[..], &["--image-opts", &options]].concat()).ok();
        assert_clean(&image);
        assert_same_view(("qcow2", &image), ("raw", &raw));
    }
}

#[test]
fn bench_refuses_what_qemu_img_bench_refuses() {
    let scratch = Scratch::new("bench-refused");
    let image = scratch.path("disk.qcow2");
    create(&image, &Layout::v3(65536));
    for options in [
        &["-c", "0"][..],
        &["-d", "0"],
        &["-s", "0"],
        &["-s", "2G"],
        &["-o", "-1"],
        &["-w", "--pattern=300"],
        &["--flush-interval=100"],
        &["-w", "--flush-interval=5"],
        &["-i", "native"],
        &["-n"],
        &["-t", "warm"],
        &["-i", "magic"],
        &["-o", "1G"],
        &["-w", "-U"],
        &["--object", "thing,id=a"],
    ] {
        let arguments = [&["bench"], options, &[&image]].concat();
        qemu_img(&arguments).refused_by_qemu();
        gaur(&arguments).refused();
    }
    gaur(&["bench"]).refused();
    gaur(&["bench", &scratch.path("none.qcow2")]).refused();
}

/// QEMU may take several lines, and prints the first line of the run before a request fails.
trait RefusedByQemu {
    fn refused_by_qemu(self);
}

impl RefusedByQemu for Run {
    #[track_caller]
    fn refused_by_qemu(self) {
        assert_eq!(self.code, 1, "{self}");
    }
}
