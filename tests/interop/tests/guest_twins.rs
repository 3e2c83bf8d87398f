//! Random operations on a block device over an image that has more to it than plain clusters, and the
//! same on a raw file: the same bytes afterwards. These are the images with which other drivers for
//! block devices in user space went wrong: an overlay longer than what is behind it, compressed
//! clusters that are written to, clusters that an internal snapshot shares.

use gaur_interop::attached::{DeviceKind, attach};
use gaur_interop::builder::{Kind, build, noise, snapshot_view};
use gaur_interop::compare::{assert_same_bytes, assert_same_view, qemu_view};
use gaur_interop::layout::Layout;
use gaur_interop::op;
use gaur_interop::scratch::Scratch;

fn same_as_raw(kind: Kind, via: DeviceKind) {
    for layout in [Layout::v3(65536), Layout::extended(65536), Layout::v2(4096)] {
        let scratch = Scratch::new("twins");
        let image = build(kind, &layout, &scratch);
        let twin = scratch.path("twin.raw");
        qemu_view(&image, &twin);
        let snapshots: &[&str] = match kind {
            Kind::Snapshots => &["one", "two"],
            _ => &[],
        };
        let view = |name: &str, when: &str| {
            let path = scratch.path(&format!("{name}-{when}.raw"));
            snapshot_view(&image, name, &path);
            path
        };
        let before: Vec<String> = snapshots.iter().map(|name| view(name, "before")).collect();
        // What a discard leaves behind is the driver's affair.
        let ops = op::random(&layout, 29, 100, false, &noise(&scratch));
        op::apply("raw", &twin, &ops);
        let disk = attach(via, &image, &scratch, &[]);
        op::apply("raw", &disk.path(), &ops);
        assert_same_view(("raw", &disk.path()), ("raw", &twin));
        disk.detach();
        assert_same_view(("qcow2", &image), ("raw", &twin));
        for (name, before) in snapshots.iter().zip(&before) {
            assert_same_bytes(&view(name, "after"), before);
        }
    }
}

macro_rules! twins {
    ($($module:ident, $via:ident;)*) => {$(
        mod $module {
            use super::*;

            #[test]
            #[ignore = "runs in the guest: cargo xtask vm test"]
            fn overlay_longer_than_its_backing_file() {
                same_as_raw(Kind::Chain, DeviceKind::$via);
            }

            #[test]
            #[ignore = "runs in the guest: cargo xtask vm test"]
            fn compressed_clusters() {
                same_as_raw(Kind::Compressed, DeviceKind::$via);
            }

            #[test]
            #[ignore = "runs in the guest: cargo xtask vm test"]
            fn clusters_shared_with_snapshots() {
                same_as_raw(Kind::Snapshots, DeviceKind::$via);
            }
        }
    )*};
}

twins! {
    nbd, Nbd;
    ublk, Ublk;
    vduse, Vduse;
}
