//! Help, versions, completions and wrong command lines.

use std::os::unix::fs::symlink;

use crate::workdir::{GAUR, WorkDir};

const VERBS: [&str; 11] = [
    "serve", "export", "ublk", "create", "info", "check", "map", "convert", "compare", "resize",
    "snapshot",
];

#[test]
fn every_verb_explains_itself() {
    let dir = WorkDir::new();
    let all = dir.gaur(&["--help"]).ok();
    for verb in VERBS {
        assert!(all.contains(verb), "{all}");
        let help = dir.gaur(&[verb, "--help"]).ok();
        assert!(help.contains("Usage: gaur"), "{help}");
        assert_eq!(dir.gaur(&["help", verb]).ok(), help);
    }
    assert!(dir.gaur(&["--version"]).ok().starts_with("gaur "));
}

#[test]
fn completions_and_manual_pages_are_made_from_the_command_line() {
    let dir = WorkDir::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = dir.gaur(&["completions", shell]).ok();
        assert!(
            script.contains("compare") && script.contains("force-share"),
            "{shell}"
        );
    }
    assert!(dir.gaur(&["man"]).ok().contains(".TH gaur"));
    assert!(dir.gaur(&["man", "serve"]).ok().contains("persistent"));
}

#[test]
fn wrong_command_lines_are_told_on_one_line() {
    let dir = WorkDir::new();
    dir.gaur(&["frobnicate"])
        .fails(1, &["frobnicate", "--help"]);
    dir.gaur(&["info", "--output=xml", "x"])
        .fails(1, &["xml", "human", "json"]);
    dir.gaur(&["info"]).fails(1, &["FILE", "gaur info --help"]);
    dir.gaur(&["create", "x", "big"])
        .fails(1, &["big", "not a size"]);
    dir.gaur(&["serve", "--cache=some", "x"])
        .fails(1, &["none", "writeback", "unsafe"]);
}

#[test]
fn under_the_name_of_qemu_img_the_verbs_work_the_same() {
    let dir = WorkDir::new();
    symlink(GAUR, dir.path("my-qemu-img")).expect("a link");
    let alias = dir.path("my-qemu-img");
    let run = |args: &[&str]| dir.command(&alias, args).output().expect("the alias runs");
    assert!(
        run(&["create", "-f", "qcow2", "disk.qcow2", "1M"])
            .status
            .success()
    );
    let info = run(&["info", "disk.qcow2"]);
    assert_eq!(
        info.stdout,
        dir.qemu_img(&["info", "disk.qcow2"]).out.as_bytes()
    );
    let error = run(&["info", "missing"]).stderr;
    assert!(
        error.starts_with(b"my-qemu-img: "),
        "{}",
        String::from_utf8_lossy(&error)
    );
}

#[test]
fn a_reader_that_goes_away_is_no_disaster() {
    let dir = WorkDir::new();
    let line = format!("{GAUR} completions bash | head -c 1");
    let output = dir
        .command("bash", &["-c", &line])
        .output()
        .expect("bash runs");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
