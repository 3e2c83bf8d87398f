//! Programs of others that call `qemu-img`, `qemu-io` and `qemu-nbd`, unchanged, with ours first in PATH. What they make
//! is judged by QEMU's own tools.

use gaur_interop::guest::root_disk;
use gaur_interop::in_path::InPath;
use gaur_interop::packages::unpacked;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

/// QEMU's program, where the tests have it from.
fn qemu_img_path() -> String {
    let found = run("bash", &["-c", "command -v qemu-img"]).ok().stdout;
    found.trim().to_owned()
}

#[track_caller]
fn assert_same(first: &str, second: &str) {
    qemu_img(&["compare", first, second]).ok();
}

/// What QEMU says of an image that is not about where its data lies or what its file is called.
fn shape(image: &str) -> String {
    let info = qemu_img(&["info", "--output=json", image]).ok().json();
    let keys = ["format", "virtual-size", "cluster-size", "format-specific"];
    keys.map(|key| format!("{key}: {}", info[key])).join("\n")
}

/// Runs the distribution's Python, whose packages are used.
#[track_caller]
fn python(users: &InPath, text: &str, argument: &str) {
    users.script("exec /usr/bin/python3 -c \"$@\"", &[text, argument]);
}

#[test]
fn programs_in_path_are_ours() {
    let users = InPath::new("users-path");
    for name in ["qemu-img", "qemu-io", "qemu-nbd"] {
        let version = users.script("exec \"$1\" --version", &[name]).stdout;
        assert!(version.contains("gaur"), "{version}");
        users.assert_called(&format!("{name} --version"));
    }
}

#[test]
fn virtnbdbackup_and_virtnbdrestore() {
    let users = InPath::new("users-virtnbd");
    users.script(include_str!("real_users/virtnbdbackup.sh"), &[]);
    for restored in ["both", "again"] {
        let image = users.path(&format!("{restored}/disk.qcow2"));
        assert_clean(&image);
        assert_same(&image, &users.path("disk.qcow2"));
    }
    assert_same(&users.path("first/vda"), &users.path("before.qcow2"));
    for call in [
        "qemu-nbd -r --format=qcow2 -x vda ./disk.qcow2 -k ./s.vda -t -e 2 --fork",
        "--bitmap=virtnbdbackup.0",
        "qemu-nbd --discard=unmap --format=qcow2 -x vda ./both/disk.qcow2 -k ./s --fork",
        "qemu-img create -f qcow2 ./both/disk.qcow2 -o size=67108864 -o compat=1.1",
        "qemu-img info ./disk.qcow2 --output json --force-share",
    ] {
        users.assert_called(call);
    }
}

/// libvirt makes volumes with `-o lazy_refcounts`, without a value.
#[test]
fn libvirt_makes_clones_resizes_and_encrypts_volumes() {
    let users = InPath::new("users-libvirt");
    // The daemon of the system would be started for root.
    let inside =
        "exec unshare --user --map-user=1000 --map-group=1000 bash -euo pipefail -c \"$1\"";
    users.script(inside, &[include_str!("real_users/libvirt.sh")]);
    let volume = |name: &str| users.path(&format!("pool/{name}.qcow2"));
    for name in ["base", "allocated", "top", "lazy", "clone", "from"] {
        assert_clean(&volume(name));
    }
    assert!(shape(&volume("clone")).contains("\"lazy-refcounts\":true"));
    assert_same(&volume("from"), &users.path("data.raw"));
    let secret = format!("secret,id=s,file={}", users.path("key"));
    let locked = volume("locked");
    let locked = format!("driver=qcow2,encrypt.key-secret=s,file.filename={locked}");
    qemu_img(&["check", "--object", &secret, "--image-opts", &locked]).ok();
    let data = format!("driver=raw,file.filename={}", users.path("data.raw"));
    qemu_img(&[
        "compare",
        "--object",
        &secret,
        "--image-opts",
        &locked,
        &data,
    ])
    .ok();
    for call in [
        "qemu-img create -f qcow2 -o compat=1.1,cluster_size=131072,lazy_refcounts ./pool/lazy",
        "qemu-img create -f qcow2 --object secret,id=",
        "qemu-img convert --image-opts -n --target-image-opts --object secret,id=",
        "qemu-img resize --shrink ./pool/lazy.qcow2 67108864",
    ] {
        users.assert_called(call);
    }
}

#[test]
fn openstack_reads_info_and_converts_under_limits() {
    let users = InPath::new("users-openstack");
    let make = r#"
qemu-img create -q -f qcow2 base.qcow2 32M
qemu-io -f qcow2 -c 'write -P 6 2M 1M' base.qcow2
qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2
qemu-img snapshot -c one top.qcow2
qemu-img snapshot -c two top.qcow2
qemu-io -f qcow2 -c 'write -P 4 1M 4M' top.qcow2
cp "$1" qemu
"#;
    let theirs = qemu_img_path();
    users.script(make, &[&theirs]);
    // The library starts programs without PATH.
    let line = "exec /usr/bin/python3 -W ignore -c \"$@\"";
    let library = include_str!("real_users/ironic.py");
    users.script_in_place(line, &[library, &users.path("qemu")]);
    for made in ["flat.qcow2", "flat.raw", "populated.raw"] {
        assert_same(&users.path("top.qcow2"), &users.path(made));
    }
    users.assert_called("qemu-img convert -O raw -t none -S 0 -W top.qcow2 flat.raw");
    users.assert_called("qemu-img convert -O raw -S 0 top.qcow2 populated.raw");
}

#[test]
fn cloud_localds_makes_a_seed() {
    let users = InPath::new("users-localds");
    let make = r#"
printf '#cloud-config\nhostname: one\n' >user-data
printf 'instance-id: i-1\n' >meta-data
cloud-localds --disk-format qcow2 seed.qcow2 user-data meta-data
cloud-localds seed.raw user-data meta-data
"#;
    users.script(make, &[]);
    users.assert_called("qemu-img convert -f raw -O qcow2 ");
    assert_clean(&users.path("seed.qcow2"));
    // It has the same files; the times in it differ.
    let raw = users.path("again.raw");
    qemu_img(&["convert", "-O", "raw", &users.path("seed.qcow2"), &raw]).ok();
    let seed = std::fs::read(raw).expect("an image");
    let has = |text: &[u8]| seed.windows(text.len()).any(|part| part == text);
    assert!(has(b"cidata") && has(b"hostname: one") && has(b"instance-id: i-1"));
}

/// What KIWI wants to know of an image.
const KIWI_CONFIG: &str = r#"<?xml version="1.0" encoding="utf-8"?>
<image schemaversion="7.4" name="small">
  <description type="system"><author>a</author><contact>a@b.cd</contact><specification>A disk</specification></description>
  <preferences><version>1.0.0</version><packagemanager>apt</packagemanager>
    <type image="oem" filesystem="ext4" format="qcow2"/>
  </preferences>
  <repository><source path="dir:///nowhere"/></repository>
  <packages type="image"/>
  <packages type="bootstrap"/>
</image>
"#;

#[test]
fn image_builders_end_with_a_qcow2_image() {
    let users = InPath::new("users-builders");
    let data = r#"
truncate -s 12M disk.raw
seq 500000 | dd of=disk.raw conv=notrunc bs=1M seek=2 status=none
printf '%s' "$1" >config.xml
"#;
    users.script(data, &[KIWI_CONFIG]);
    let check = || {
        let made = users.path("disk.qcow2");
        assert_clean(&made);
        assert_same(&users.path("disk.raw"), &made);
        std::fs::remove_file(made).expect("it was made");
    };

    python(&users, include_str!("real_users/kiwi.py"), "");
    users.assert_called("-o cluster_size=2M -o compat=1.1 -o lazy_refcounts");
    users.assert_called("qemu-img resize ./small.");
    users.assert_called("qemu-img convert -c -f qcow2");
    check();

    let mkosi = unpacked("mkosi").display().to_string();
    python(&users, include_str!("real_users/mkosi.py"), &mkosi);
    users.assert_called("qemu-img convert -onocow=on -fraw -Oqcow2 disk.raw");
    check();

    let builder = unpacked("python3-diskimage-builder").display().to_string();
    let script = r#"
_LIB=$1/usr/lib/python3/dist-packages/diskimage_builder/lib
set +u
. $_LIB/img-functions
finish_image() { mv "$OUT_IMAGE_PATH" "$1"; }
IMAGE_TYPE=qcow2 COMPRESS_IMAGE=true QEMU_IMG_OPTIONS=cluster_size=2M,compat=0.10 TMP_IMAGE_PATH=disk.raw
compress_and_save_image disk.qcow2
"#;
    users.script(script, &[&builder]);
    users.assert_called(
        "qemu-img convert -c -f raw -O qcow2 -o cluster_size=2M,compat=0.10 disk.raw",
    );
    check();

    let fai = unpacked("fai-server").display().to_string();
    // The installation itself is that of a file system with one file.
    users.add("fai", "#!/bin/sh\necho installed >installed\nexec dd if=installed of=/dev/$disklist conv=notrunc\n");
    users.add("setup-storage", "#!/bin/sh\n");
    let script = "bash \"$1/usr/sbin/fai-diskimage\" -u one -S 16M -c BASE -s \"$PWD\" fai.qcow2";
    users.script(script, &[&fai]);
    users.assert_called("qemu-img create fai.raw 16M");
    users.assert_called("qemu-img convert -f raw fai.raw -c -O qcow2 fai.qcow2");
    let read = ["-r", "-c", "read -v 0 9", &users.path("fai.qcow2")];
    let read = run("qemu-io", &read).ok().stdout;
    assert!(read.contains("installed"), "{read}");
}

#[test]
fn libnbd_tools_start_qemu_nbd_with_a_socket() {
    let users = InPath::new("users-libnbd");
    let make = r#"
qemu-img create -q -f qcow2 source.qcow2 48M
qemu-img bitmap --add -g 64k source.qcow2 changed
qemu-io -f qcow2 -c 'write -P 4 1M 4M' -c 'write -P 5 40M 4k' source.qcow2
qemu-img create -q -f qcow2 target.qcow2 48M
"#;
    users.script(make, &[]);
    let copy = r#"
nbdcopy -- [ qemu-nbd -r -f qcow2 source.qcow2 ] [ qemu-nbd -f qcow2 target.qcow2 ]
nbdcopy -- [ qemu-nbd -r -f qcow2 source.qcow2 ] out.raw
"#;
    users.script(copy, &[]);
    assert_same(&users.path("source.qcow2"), &users.path("out.raw"));
    let map = r#"
nbdinfo --map=qemu:dirty-bitmap:changed -- [ "$1" -r -f qcow2 -B changed source.qcow2 ]
nbdinfo --map -- [ "$1" -r -f qcow2 source.qcow2 ]
nbdinfo --map=qemu:allocation-depth -- [ "$1" -r -A -f qcow2 source.qcow2 ]
nbdinfo --json -- [ "$1" -r -f qcow2 -B changed -x '' -D 'a disk' source.qcow2 ]
"#;
    let theirs = run("bash", &["-c", "command -v qemu-nbd"]).ok().stdout;
    let seen = users.script(map, &["qemu-nbd"]).stdout;
    assert_eq!(seen, users.script(map, &[theirs.trim()]).stdout);
    assert!(seen.contains("dirty"), "{seen}");
    users.assert_called("qemu-nbd -r -f qcow2 -B changed source.qcow2");
}

#[test]
fn image_by_a_newcomer_is_the_same_as_with_qemu() {
    let users = InPath::new("users-newcomer");
    let theirs = users.script_beside_qemu(include_str!("real_users/newcomer.sh"));
    // Each has a file system of its own, with the times at which it was made.
    for image in ["base.qcow2", "moved.qcow2", "work.qcow2", "flat.qcow2"] {
        let (ours, theirs) = (users.path(image), theirs(image));
        assert_clean(&ours);
        assert_eq!(shape(&ours), shape(&theirs), "{image}");
    }
    assert_same(&users.path("base.qcow2"), &users.path("disk.raw"));
    for image in ["work.qcow2", "flat.qcow2"] {
        assert_same(&users.path(image), &users.path("moved.qcow2"));
    }
    assert!(users.calls().len() > 25);
}

#[test]
fn sequences_of_well_known_programs_give_what_qemu_gives() {
    let users = InPath::new("users-sequences");
    let theirs = users.script_beside_qemu(include_str!("real_users/sequences.sh"));
    for image in [
        "cloud.img",
        "packer",
        "packer-backed",
        "packer-copy",
        "multipass.img",
        "multipass.qcow2",
        "lima",
        "lima.raw",
        "vdsm-target",
        "vdsm-top",
        "kubevirt.raw",
        "kubevirt.qcow2",
        "kubevirt-full.raw",
        "nova",
        "nova-snapshot",
    ] {
        let (ours, theirs) = (users.path(image), theirs(image));
        assert_eq!(shape(&ours), shape(&theirs), "{image}");
        assert_same(&ours, &theirs);
    }
    assert!(users.calls().len() > 40);
}

/// A distribution, as `debootstrap` makes it, becomes a compressed image, and what is written to an overlay goes into it.
#[test]
fn distribution_becomes_an_image_and_an_overlay() {
    let users = InPath::new("users-distribution");
    let scratch = Scratch::new("users-root");
    let disk = root_disk(&scratch);
    let make = r#"
mv "$1" disk.raw
qemu-img convert -c -f raw -O qcow2 -o compression_type=zstd disk.raw image.qcow2
qemu-img create -q -f qcow2 -b image.qcow2 -F qcow2 machine.qcow2 2G
dd if=disk.raw bs=1M skip=1 count=8 of=part status=none
qemu-io -f qcow2 -c 'write -q -s part 1500M 8M' machine.qcow2
qemu-img commit -q machine.qcow2
qemu-img check -q image.qcow2
truncate -s 2G disk.raw
dd if=part of=disk.raw bs=1M seek=1500 conv=notrunc status=none
"#;
    users.script(make, &[&disk]);
    assert_clean(&users.path("image.qcow2"));
    assert_same(&users.path("disk.raw"), &users.path("image.qcow2"));
}
