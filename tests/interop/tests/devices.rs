//! O_DIRECT and block devices: requests of any alignment on disks with sectors of 512 bytes and of
//! 4 KiB.

use gaur_interop::builder::{Kind, build, create, noise};
use gaur_interop::compare::assert_same_view;
use gaur_interop::gaur::{gaur, serve_with};
use gaur_interop::layout::Layout;
use gaur_interop::op;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

/// The same operations on an image through a server that bypasses the host's cache, and by QEMU on
/// a twin in a file.
fn same_as_twin(layout: &Layout, ours: &str, scratch: &Scratch, cache: &str) {
    let theirs = scratch.path("twin.qcow2");
    create(&theirs, layout);
    let ops = op::random(layout, 17, 120, true, &noise(scratch));
    op::apply("qcow2", &theirs, &ops);
    let server = serve_with(ours, &scratch.path("s"), &["--cache", cache]);
    op::apply("raw", &server.uri(), &ops);
    assert_same_view(("raw", &server.uri()), ("qcow2", &theirs));
    server.stop();
    assert_clean(ours);
    gaur(&["check", ours]).ok();
    assert_same_view(("qcow2", ours), ("qcow2", &theirs));
}

#[test]
fn direct_input_and_output_on_a_file() {
    for layout in [
        Layout::v2(512),
        Layout::v3(4096).refcount_bits(1),
        Layout::v3(65536),
        Layout::extended(16384),
    ] {
        for cache in ["none", "directsync"] {
            let scratch = Scratch::new("direct");
            let ours = scratch.path("ours.qcow2");
            create(&ours, &layout);
            same_as_twin(&layout, &ours, &scratch, cache);
        }
    }
}

#[test]
fn direct_input_and_output_through_a_chain_and_compressed_clusters() {
    for kind in [Kind::Chain, Kind::Compressed, Kind::Snapshots] {
        let layout = Layout::extended(16384);
        let scratch = Scratch::new("direct");
        let image = build(kind, &layout, &scratch);
        let twin = scratch.path("view.raw");
        gaur_interop::compare::qemu_view(&image, &twin);
        let ops = op::random(&layout, 23, 120, true, &noise(&scratch));
        op::apply("raw", &twin, &ops);
        let server = serve_with(&image, &scratch.path("s"), &["--cache", "none"]);
        op::apply("raw", &server.uri(), &ops);
        server.stop();
        assert_clean(&image);
        assert_same_view(("qcow2", &image), ("raw", &twin));
    }
}

/// A loop device, which is a block device with sectors of a size of choice.
struct Loop {
    device: String,
}

impl Loop {
    /// # Panics
    /// On a machine without loop devices: what cannot be tested fails, it is not skipped.
    fn new(file: &str, sector_bytes: u64) -> Loop {
        let sector = sector_bytes.to_string();
        let made = run(
            "losetup",
            &["--find", "--show", "--sector-size", &sector, file],
        )
        .ok();
        Loop {
            device: made.stdout.trim().to_owned(),
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let run = run("losetup", &["--detach", &self.device]);
        if run.code != 0 {
            eprintln!("{run}");
        }
    }
}

/// Space of a block device that was never written holds anything: here it is full of noise.
fn on_a_device(sector_bytes: u64) {
    for layout in [Layout::v3(4096), Layout::v3(65536), Layout::extended(16384)] {
        for cache in ["none", "writeback"] {
            let scratch = Scratch::new("device");
            let file = scratch.zeros("disk", 64 << 20);
            let everywhere = op::Op::WriteFile {
                offset: 0,
                len: 64 << 20,
                file: noise(&scratch),
            };
            op::apply("raw", &file, &[everywhere]);
            let device = Loop::new(&file, sector_bytes);
            let size = layout.size_bytes().to_string();
            let options = layout.options();
            let arguments = ["create", "-q", "-f", "qcow2", "-o", &options];
            qemu_img(&[&arguments[..], &[&device.device, &size]].concat()).ok();
            same_as_twin(&layout, &device.device, &scratch, cache);
        }
    }
}

#[test]
fn a_block_device_with_sectors_of_512_bytes() {
    on_a_device(512);
}

#[test]
fn a_block_device_with_sectors_of_4_kib() {
    on_a_device(4096);
}
