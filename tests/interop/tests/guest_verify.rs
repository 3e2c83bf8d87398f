//! fio with verification, past the kernel's cache: what is written is what is read, at every size and
//! after trims.

use gaur_interop::attached::{DeviceKind, Shape, attach};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::run_for;

const SIZE_MIB: u64 = 192;

/// Seconds for each load.
fn seconds() -> u32 {
    match std::env::var_os("GAUR_GUEST_LONG") {
        Some(_) => 120,
        None => 2,
    }
}

/// One load on a device.
#[track_caller]
fn fio(device: &str, job: &[&str]) {
    let name = format!("--filename={device}");
    let runtime = format!("--runtime={}", seconds());
    let common = [
        "--name=load",
        &name,
        "--ioengine=io_uring",
        "--direct=1",
        "--iodepth=16",
        "--time_based",
        &runtime,
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--serialize_overlap=1",
        "--size=48m",
    ];
    let run = run_for("fio", &[&common[..], job].concat(), seconds() * 4 + 100).ok();
    assert!(!run.stderr.contains("verify"), "{run}");
}

fn verified(via: DeviceKind, shape: Shape) {
    let scratch = Scratch::new("verify");
    let image = shape.create(&scratch, SIZE_MIB);
    let disk = attach(via, &image, &scratch, &[]);
    let device = disk.path();
    fio(
        &device,
        &["--rw=randwrite", "--bs=4k", "--verify_backlog=512"],
    );
    fio(
        &device,
        &[
            "--offset=48m",
            "--rw=randrw",
            "--bsrange=512-128k",
            "--blockalign=512",
            "--fsync=64",
            "--verify_backlog=128",
        ],
    );
    // Each block is trimmed and then written.
    fio(
        &device,
        &[
            "--offset=96m",
            "--rw=trimwrite",
            "--bs=32k",
            "--ioengine=psync",
        ],
    );
    disk.detach();
}

gaur_interop::every_disk!(crate::verified);
