//! Space that the guest gives up goes back to the host: discards of the device, and of a file system.

use std::os::unix::fs::MetadataExt;

use gaur_interop::attached::{Attached, DeviceKind, Shape, attach};
use gaur_interop::filesystem::Kind;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::run;

const SIZE_MIB: u64 = 512;
const MIB: u64 = 1 << 20;

/// Space that a file takes, in bytes.
fn space(image: &str) -> u64 {
    std::fs::metadata(image)
        .expect("the image is there")
        .blocks()
        * 512
}

/// Fills a range with noise, past the cache.
#[track_caller]
fn fill(disk: &Attached, scratch: &Scratch, offset_mib: u64, len_mib: u64) {
    let noise = gaur_interop::builder::noise(scratch);
    let script = "for number in $(seq $2); do cat \"$0\"; done |
        dd of=$3 bs=1M iflag=fullblock oflag=direct conv=notrunc,fsync seek=$1 status=none";
    let (offset, len) = (offset_mib.to_string(), len_mib.to_string());
    run("bash", &["-c", script, &noise, &offset, &len, &disk.path()]).ok();
}

#[track_caller]
fn discard(disk: &Attached, offset: u64, len: u64) {
    let (offset, len) = (offset.to_string(), len.to_string());
    run(
        "blkdiscard",
        &["-f", "--offset", &offset, "--length", &len, &disk.path()],
    )
    .ok();
    flush(disk);
}

/// Space goes back to the host once the mapping that gave it up is durable.
#[track_caller]
fn flush(disk: &Attached) {
    let of = format!("of={}", disk.path());
    run(
        "dd",
        &["if=/dev/null", &of, "conv=notrunc,fsync", "status=none"],
    )
    .ok();
}

fn of_the_device(via: DeviceKind, shape: Shape) {
    let scratch = Scratch::new("space");
    let image = shape.create(&scratch, SIZE_MIB);
    let disk = attach(via, &image, &scratch, &["--allocation", "compact"]);
    let empty = space(&image);
    fill(&disk, &scratch, 64, 64);
    let full = space(&image);
    assert!(full >= empty + 64 * MIB, "{empty} {full}");
    // Every second unit of the last half: only an image with subclusters can give parts of clusters.
    discard(&disk, 64 * MIB, 32 * MIB);
    let half = space(&image);
    assert!(half <= full - 31 * MIB, "{full} {half}");
    discard(&disk, 64 * MIB, 64 * MIB);
    let none = space(&image);
    assert!(none <= half - 31 * MIB, "{half} {none}");
    // What was discarded reads as zeros, also above a backing file.
    let script = "cmp <(dd if=$0 bs=1M skip=64 count=64 iflag=direct status=none) \
                  <(head -c 64M /dev/zero)";
    run("bash", &["-c", script, &disk.path()]).ok();
    // Small pieces: as small as the image can tell apart.
    fill(&disk, &scratch, 200, 4);
    let full = space(&image);
    let unit = shape.unit_bytes().max(4096);
    for number in 0..16 {
        discard(&disk, 200 * MIB + 2 * number * unit, unit);
    }
    let less = space(&image);
    assert!(less <= full - 15 * unit, "units of {unit}: {full} {less}");
    disk.detach();
}

fn of_a_file_system(via: DeviceKind, shape: Shape) {
    for kind in [Kind::Ext4, Kind::Xfs] {
        let scratch = Scratch::new("trim");
        let image = shape.create(&scratch, SIZE_MIB);
        let disk = attach(via, &image, &scratch, &[]);
        kind.make(&disk.path());
        let mounted = kind.mount(&disk.path(), &scratch);
        let noise = gaur_interop::builder::noise(&scratch);
        mounted.shell(
            "for number in $(seq 64); do cat $1; done >file; sync",
            &[&noise],
        );
        let full = space(&image);
        // XFS frees the space of a file that is gone some time later, at the latest when it is unmounted.
        mounted.shell("rm file; sync", &[]);
        mounted.unmount();
        let mounted = kind.mount(&disk.path(), &scratch);
        mounted.shell("fstrim -v .; sync", &[]);
        flush(&disk);
        let trimmed = space(&image);
        assert!(trimmed + 60 * MIB <= full, "{kind:?}: {full} {trimmed}");
        mounted.unmount();
        kind.check(&disk.path());
        disk.detach();
    }
}

mod device {
    gaur_interop::every_disk!(crate::of_the_device);
}

mod file_system {
    gaur_interop::every_disk!(crate::of_a_file_system);
}
