//! `gaur convert` to raw on a file system with reflinks: target and source share their space, and each keeps its bytes when the
//! other is written to.

use std::os::unix::fs::MetadataExt;

use gaur_interop::filesystem::Kind;
use gaur_interop::gaur::gaur;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{qemu_img, run};

const MIB: u64 = 1 << 20;

#[test]
fn converted_raw_disk_shares_the_space_of_its_source() {
    let scratch = Scratch::new("reflinks");
    let disk = scratch.zeros("disk", 400 * MIB);
    Kind::Xfs.make(&disk);
    let mounted = Kind::Xfs.mount_file(&disk, &scratch);
    let at = |name: &str| format!("{}/{name}", mounted.folder());
    // 20 MiB that do not end with a block of the file system, and a hole.
    let mut bytes = Random::new(5).bytes(20 << 20);
    bytes[4 << 20..6 << 20].fill(0);
    bytes.extend([7; 512]);
    std::fs::write(at("source.raw"), &bytes).expect("room for the source");
    let [raw, image, base, overlay] =
        ["source.raw", "source.qcow2", "base.qcow2", "overlay.qcow2"].map(at);
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &raw, &image]).ok();
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &raw, &base]).ok();
    let onto = ["-o", "extended_l2=on", "-F", "qcow2", "-b"];
    let create = [
        &["create", "-q", "-f", "qcow2"],
        &onto[..],
        &[&base, &overlay],
    ]
    .concat();
    qemu_img(&create).ok();
    let command = ["-c", "write -q -P 9 1000 300k", "-c", "write -q -z 3M 1M"];
    run("qemu-io", &[&command[..], &[&overlay]].concat()).ok();
    for (format, source) in [("raw", &raw), ("qcow2", &image), ("qcow2", &overlay)] {
        let target = at("target.raw");
        gaur(&["convert", "-f", format, "-O", "raw", source, &target]).ok();
        let compare = ["compare", "-f", format, "-F", "raw", source, &target];
        qemu_img(&compare).ok();
        let shared = mounted.shell("filefrag -v target.raw | grep -c shared", &[]);
        assert_ne!(shared.stdout.trim(), "0", "{source}: {shared:?}");
        // The source's bytes stay when the target changes.
        let copy = at("copy.raw");
        qemu_img(&["convert", "-f", format, "-O", "raw", source, &copy]).ok();
        let change = ["-f", "raw", "-c", "write -q -P 1 0 20M", &target];
        run("qemu-io", &change).ok();
        qemu_img(&["compare", "-f", format, "-F", "raw", source, &copy]).ok();
    }
    // Space that was asked for is the target's own, and so is that of a copy in QEMU's way, in which zeros are holes.
    let zeros = at("zeros.raw");
    run(
        "dd",
        &["if=/dev/zero", &format!("of={zeros}"), "bs=1M", "count=8"],
    )
    .ok();
    let qemu = ["qemu-img", "convert", "-f", "raw", "-O", "raw", &zeros];
    for (words, sectors) in [
        (
            vec![
                "convert",
                "-f",
                "raw",
                "-O",
                "raw",
                "-o",
                "preallocation=full",
                &zeros,
            ],
            16384,
        ),
        (qemu.to_vec(), 0),
    ] {
        let target = at("own.raw");
        gaur(&[&words[..], &[&target]].concat()).ok();
        let map = mounted.shell("sync; filefrag -v own.raw", &[]).stdout;
        assert!(!map.contains("shared"), "{map}");
        let blocks = std::fs::metadata(&target).expect("it is there").blocks();
        assert_eq!(blocks, sectors, "{words:?}");
    }
    mounted.unmount();
    Kind::Xfs.check(&disk);
}
