//! A new size of an image is the size of its device, while the device is used.

use std::time::Duration;

use gaur_interop::attached::{Attached, DeviceKind, Shape, attach};
use gaur_interop::filesystem::Kind;
use gaur_interop::gaur::{first_export, gaur};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::run;

const MIB: u64 = 1 << 20;

/// The kernel changes a virtio disk's size in its own time, after the interrupt.
#[track_caller]
fn wait_for_size(disk: &Attached, expected: u64) {
    for _ in 0..500 {
        if disk.size_bytes() == expected {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the device has {} bytes, not {expected}", disk.size_bytes());
}

fn resized(via: DeviceKind, shape: Shape) {
    let scratch = Scratch::new("resize");
    let image = shape.create(&scratch, 256);
    let socket = scratch.path("control");
    let disk = attach(via, &image, &scratch, &["--control", &socket]);
    assert_eq!(disk.size_bytes(), 256 * MIB);
    Kind::Ext4.make(&disk.path());
    let mounted = Kind::Ext4.mount(&disk.path(), &scratch);
    let name = first_export(&socket);
    let resize = ["export", "resize", "--control", &socket, &name];
    for size_mib in [300, 600] {
        let size = format!("{size_mib}M");
        gaur(&[&resize[..], &[size.as_str()]].concat()).ok();
        wait_for_size(&disk, size_mib * MIB);
    }
    run("resize2fs", &[&disk.path()]).ok();
    mounted.shell(
        "head -c 400M /dev/urandom >big; sync; sha256sum big >sum",
        &[],
    );
    mounted.unmount();
    Kind::Ext4.check(&disk.path());
    let mounted = Kind::Ext4.mount(&disk.path(), &scratch);
    mounted.shell("sha256sum -c sum", &[]);
    mounted.unmount();
    // And shorter again: data behind the end is dropped.
    let shrink = ["export", "resize", "--shrink", "--control", &socket, &name];
    gaur(&[&shrink[..], &["128M"]].concat()).ok();
    wait_for_size(&disk, 128 * MIB);
    disk.detach();
}

gaur_interop::every_shape!(ublk, Ublk, crate::resized);
gaur_interop::every_shape!(vduse, Vduse, crate::resized);
