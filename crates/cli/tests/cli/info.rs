//! `gaur info` against `qemu-img info`.

use crate::workdir::WorkDir;

#[test]
fn every_image_is_described_as_by_qemu_img() {
    let dir = WorkDir::new();
    for image in dir.gallery() {
        dir.same(&["info", image]);
        dir.same(&["info", "--output=json", image]);
        dir.same(&["info", "--backing-chain", image]);
        dir.same(&["info", "--backing-chain", "--output=json", image]);
        dir.same(&["info", "-f", "raw", image]);
    }
}

#[test]
fn raw_files_of_any_length_are_described_as_by_qemu_img() {
    let dir = WorkDir::new();
    for len in [0, 1, 511, 512, 3_000_001] {
        std::fs::write(dir.path("disk.raw"), vec![1; len]).expect("a file");
        dir.same(&["info", "disk.raw"]);
        dir.same(&["info", "--output", "json", "disk.raw"]);
    }
}

#[test]
fn dirty_and_corrupt_images_say_so() {
    let dir = WorkDir::new();
    dir.qemu_img(&["create", "-qf", "qcow2", "disk.qcow2", "1M"])
        .ok();
    for bits in [1, 2, 3] {
        dir.patch("disk.qcow2", 79, &[bits]);
        dir.same(&["info", "disk.qcow2"]);
        dir.same(&["info", "--output=json", "disk.qcow2"]);
    }
}

#[test]
fn an_external_data_file_is_named_and_not_opened() {
    let dir = WorkDir::new();
    for raw in ["off", "on"] {
        let options = format!("data_file=data.raw,data_file_raw={raw}");
        dir.qemu_img(&["create", "-qf", "qcow2", "-o", &options, "disk.qcow2", "1M"])
            .ok();
        std::fs::remove_file(dir.path("data.raw")).expect("a data file");
        dir.same(&["info", "disk.qcow2"]);
        dir.same(&["info", "--output=json", "disk.qcow2"]);
    }
}

#[test]
fn encryption_is_described_without_a_key() {
    let dir = WorkDir::new();
    let secret = ["--object", "secret,id=key,data=abcdefghijklmnop"];
    for options in [
        "encrypt.format=luks,encrypt.iter-time=10",
        "encrypt.format=luks,encrypt.iter-time=10,encrypt.cipher-alg=serpent-128,\
         encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256,\
         encrypt.hash-alg=sha512",
        "encrypt.format=aes",
    ] {
        let options = format!("{options},encrypt.key-secret=key");
        let args = [
            &["create", "-qf", "qcow2"],
            &secret[..],
            &["-o", &options, "disk.qcow2", "1M"],
        ];
        dir.qemu_img(&args.concat()).ok();
        dir.same(&["info", "disk.qcow2"]);
        dir.same(&["info", "--output=json", "disk.qcow2"]);
    }
}

#[test]
fn an_unknown_incompatible_feature_is_refused_by_its_name() {
    let dir = WorkDir::new();
    dir.qemu_img(&["create", "-qf", "qcow2", "disk.qcow2", "1M"])
        .ok();
    dir.patch("disk.qcow2", 79, &[0x40]);
    dir.gaur(&["info", "disk.qcow2"])
        .fails(1, &["disk.qcow2", "bit 6"]);
}

#[test]
fn info_refuses_a_backing_loop() {
    let dir = WorkDir::new();
    let make = |args: &[&str]| {
        dir.qemu_img(&[&["create", "-qf", "qcow2", "-u"], args].concat())
            .ok()
    };
    make(&["-b", "b.qcow2", "-F", "qcow2", "a.qcow2", "1M"]);
    make(&["-b", "a.qcow2", "-F", "qcow2", "b.qcow2", "1M"]);
    dir.gaur(&["info", "--backing-chain", "a.qcow2"])
        .fails(1, &["loop"]);
    dir.gaur(&["info", "a.qcow2"]).ok();
}

#[test]
fn open_error_is_one_line() {
    let dir = WorkDir::new();
    std::fs::create_dir(dir.path("directory")).expect("a directory");
    dir.gaur(&["info", "missing"])
        .fails(1, &["missing: no such file or directory"]);
    dir.gaur(&["info", "directory"])
        .fails(1, &["directory: is a directory"]);
    dir.gaur(&["info", "-f", "qed", "x"])
        .fails(1, &["qed", "qcow2", "raw", "vmdk"]);
}
