//! `fio` with verification, over libnbd, by several clients at once.

use gaur_interop::builder::{create, noise};
use gaur_interop::gaur::{gaur, serve};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run_for};

/// Seconds that each load goes on: short by default, as long as `GAUR_SOAK_SECONDS` says in the long
/// form (`cargo xtask soak`).
fn seconds() -> u32 {
    let told = std::env::var("GAUR_SOAK_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    told.unwrap_or(10)
}

/// Four clients, each with a connection and a region of its own, sixteen requests in flight each:
/// writes of mixed sizes, read back and verified.
fn verify(image: &str, scratch: &Scratch, block_sizes: &str) {
    let server = serve(image, &scratch.path("s"));
    let runtime = seconds().to_string();
    let uri = server.uri();
    let job = [
        "--name=clients",
        "--ioengine=nbd",
        &format!("--uri={uri}"),
        "--numjobs=4",
        "--size=24m",
        "--offset_increment=24m",
        "--rw=randrw",
        "--rwmixread=30",
        &format!("--bsrange={block_sizes}"),
        "--blockalign=512",
        "--iodepth=16",
        "--fsync=64",
        "--time_based",
        &format!("--runtime={runtime}"),
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_backlog=256",
        "--verify_state_save=0",
        "--serialize_overlap=1",
        "--group_reporting",
    ];
    let run = run_for("fio", &job, seconds() * 4 + 120).ok();
    assert!(!run.stderr.contains("verify"), "{run}");
    println!("{}", run.stdout);
    server.stop();
    assert_clean(image);
    gaur(&["check", image]).ok();
}

fn sized(layout: &Layout, scratch: &Scratch, name: &str) -> String {
    let path = scratch.path(name);
    create(&path, layout);
    qemu_img(&["resize", "-q", &path, "128M"]).ok();
    path
}

#[test]
fn long_load_on_an_image_with_subclusters() {
    let scratch = Scratch::new("load");
    let image = sized(&Layout::extended(65536), &scratch, "a.qcow2");
    verify(&image, &scratch, "512-64k");
}

/// Subclusters of 512 bytes, refcounts of 1 bit.
#[test]
fn long_load_on_an_image_with_small_subclusters() {
    let scratch = Scratch::new("load");
    let layout = Layout::extended(16384).refcount_bits(1);
    let image = sized(&layout, &scratch, "a.qcow2");
    verify(&image, &scratch, "512-32k");
}

/// Every first write copies: from compressed clusters below, from a snapshot's clusters.
#[test]
fn long_load_on_an_overlay_with_a_snapshot() {
    let scratch = Scratch::new("load");
    let layout = Layout::extended(65536);
    let raw = scratch.zeros("base.raw", 128 << 20);
    let file = noise(&scratch);
    op::apply(
        "raw",
        &raw,
        &[
            Op::WriteFile {
                offset: 0,
                len: 64 << 20,
                file,
            },
            Op::Write {
                offset: 64 << 20,
                len: 32 << 20,
                pattern: 5,
            },
        ],
    );
    let base = scratch.path("base.qcow2");
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", &raw, &base]).ok();
    let top = scratch.path("top.qcow2");
    let options = layout.options();
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        &options,
        "-b",
        "base.qcow2",
        "-F",
        "qcow2",
    ];
    qemu_img(&[&create[..], &[&top]].concat()).ok();
    op::apply(
        "qcow2",
        &top,
        &[Op::Write {
            offset: 10 << 20,
            len: 30 << 20,
            pattern: 6,
        }],
    );
    qemu_img(&["snapshot", "-c", "kept", &top]).ok();
    verify(&top, &scratch, "512-128k");
    let kept = scratch.path("kept.raw");
    gaur_interop::builder::snapshot_view(&top, "kept", &kept);
    op::apply(
        "raw",
        &kept,
        &[
            Op::Expect {
                offset: 10 << 20,
                len: 30 << 20,
                pattern: 6,
            },
            Op::Expect {
                offset: 64 << 20,
                len: 32 << 20,
                pattern: 5,
            },
        ],
    );
}
