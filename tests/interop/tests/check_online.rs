//! `gaur check --control`: an image is checked while clients write to it; QEMU's checker judges it after the end.

use std::process::{Command, Stdio};

use gaur_interop::builder::create;
use gaur_interop::field;
use gaur_interop::gaur::{gaur, serve_with};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, assert_clean, qemu_img};

const MIB: u64 = 1 << 20;
/// The load stays before this.
const LOAD_END: u64 = 96 * MIB;

/// An image with data, half of which an internal snapshot shares.
fn used(layout: &Layout, scratch: &Scratch) -> String {
    let image = scratch.path("disk.qcow2");
    create(&image, layout);
    qemu_img(&["resize", "-q", &image, "128M"]).ok();
    let write = |offset, pattern| Op::Write {
        offset,
        len: 16 * MIB,
        pattern,
    };
    op::apply("qcow2", &image, &[write(0, 1), write(LOAD_END, 2)]);
    qemu_img(&["snapshot", "-c", "before", &image]).ok();
    op::apply(
        "qcow2",
        &image,
        &[write(8 * MIB, 3), write(LOAD_END + 8 * MIB, 4)],
    );
    image
}

/// Checks the served image again and again while two clients write, discard and flush.
fn check_beside_load(image: &str, scratch: &Scratch) -> Vec<Run> {
    let control = scratch.path("control");
    let server = serve_with(image, &scratch.path("s"), &["--control", &control]);
    let uri = server.uri();
    let mut load = Command::new("fio");
    load.args([
        "--name=load",
        "--ioengine=nbd",
        "--numjobs=2",
        "--iodepth=16",
    ]);
    load.args([
        "--rw=randtrimwrite",
        "--bsrange=4k-256k",
        "--size=48m",
        "--offset_increment=48m",
    ]);
    load.args([
        "--fsync=32",
        "--time_based",
        "--runtime=6",
        "--randrepeat=1",
        "--group_reporting",
    ]);
    load.arg(format!("--uri={uri}"));
    load.stdout(Stdio::null()).stderr(Stdio::null());
    let mut load = load.spawn().expect("fio starts");
    let mut checks = Vec::new();
    let ended = loop {
        let words = ["check", "--control", &control, "--output", "json"];
        checks.push(gaur(&words));
        if let Some(status) = load.try_wait().expect("a child") {
            break status;
        }
    };
    assert!(ended.success(), "the clients were not disturbed: {ended}");
    server.stop();
    checks
}

#[test]
fn a_served_image_is_checked_while_clients_write() {
    for layout in [Layout::v3(65536), Layout::extended(65536), Layout::v3(4096)] {
        let scratch = Scratch::new("check-online");
        let image = used(&layout, &scratch);
        let checks = check_beside_load(&image, &scratch);
        assert!(checks.len() > 3, "{} checks", checks.len());
        for check in checks {
            let report = check.ok().json();
            assert_eq!(report["check-errors"], 0, "{report}");
            assert!(report.get("leaks").is_none(), "{report}");
            assert!(report.get("corruptions").is_none(), "{report}");
            assert!(report["allocated-clusters"].as_u64() > Some(0), "{report}");
        }
        assert_clean(&image);
    }
}

/// A leak, and a cluster that nothing counts, in the part that the load leaves alone.
#[test]
fn damage_is_found_in_a_served_image() {
    let scratch = Scratch::new("check-online");
    let image = used(&Layout::v3(65536), &scratch);
    let map = qemu_img(&["map", "--output=json", &image]).ok().json();
    let runs = map.as_array().expect("a list").iter();
    let mut last = runs.filter(|run| run["data"] == true);
    let missing = last.next_back().expect("data")["offset"]
        .as_u64()
        .expect("a number")
        / 65536;
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&image)
        .expect("the image");
    let leaked = file.metadata().expect("the image").len().div_ceil(65536);
    file.set_len((leaked + 1) * 65536).expect("longer");
    let table = field::header("refcount_table_offset").get(&image);
    let bytes = std::fs::read(&image).expect("the image");
    let block = u64::from_be_bytes(*bytes[table as usize..].first_chunk().expect("8 bytes"));
    let count = |cluster: u64, count: u16| {
        use std::os::unix::fs::FileExt;
        file.write_all_at(&count.to_be_bytes(), block + cluster * 2)
            .expect("written");
    };
    count(missing, 0);
    count(leaked, 1);
    for check in check_beside_load(&image, &scratch) {
        let check = check.code(2);
        assert_eq!(check.json()["leaks"], 1, "{check}");
        for cluster in [missing, leaked] {
            assert!(
                check.stderr.contains(&format!("cluster {cluster} at ")),
                "{check}"
            );
        }
    }
    qemu_img(&["check", "-q", "-r", "all", &image]).code(0);
}
