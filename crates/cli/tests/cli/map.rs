//! `gaur map` against `qemu-img map`.

use crate::workdir::WorkDir;

#[test]
fn every_image_has_the_runs_that_qemu_img_finds() {
    let dir = WorkDir::new();
    for image in dir.gallery() {
        dir.same(&["map", "--output=json", image]);
        dir.same(&["map", image]);
    }
}

#[test]
fn parts_of_an_image_have_the_runs_that_qemu_img_finds() {
    let dir = WorkDir::new();
    for image in dir.gallery() {
        for part in [
            ["--start-offset=70k", "--max-length=2M"],
            ["--start-offset=5M", "--max-length=1G"],
            ["--start-offset=65535k", "--max-length=4k"],
            ["--start-offset=2G", "--max-length=1M"],
        ] {
            dir.same(&["map", "--output=json", part[0], part[1], image]);
        }
    }
}

#[test]
fn preallocated_images_have_the_runs_that_qemu_img_finds() {
    let dir = WorkDir::new();
    for options in [
        "preallocation=metadata",
        "preallocation=falloc",
        "preallocation=full",
        "preallocation=metadata,extended_l2=on",
    ] {
        dir.qemu_img(&["create", "-qf", "qcow2", "-o", options, "disk.qcow2", "5M"])
            .ok();
        dir.same(&["map", "--output=json", "disk.qcow2"]);
        dir.same(&["map", "disk.qcow2"]);
    }
}

#[test]
fn raw_files_with_holes_have_the_runs_that_qemu_img_finds() {
    let dir = WorkDir::new();
    for len in [0, 3000, 3003, 1 << 20] {
        let mut bytes = vec![0; len];
        bytes.iter_mut().step_by(100_000).for_each(|byte| *byte = 1);
        std::fs::write(dir.path("full.raw"), &bytes).expect("a file");
        let copy = dir
            .command("cp", &["--sparse=always", "full.raw", "disk.raw"])
            .status();
        assert!(copy.expect("cp runs").success());
        dir.same(&["map", "--output=json", "disk.raw"]);
        dir.same(&["map", "disk.raw"]);
    }
}
