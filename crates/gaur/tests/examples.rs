//! The examples do what they show: each runs in a folder of its own.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program that cargo builds with the tests of this crate.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a path to itself");
    let profile = test.ancestors().nth(2).expect("the folder of the profile");
    let program = profile.join("examples").join(name);
    let hint = "cargo build --package gaur --examples";
    assert!(program.exists(), "{} is missing: {hint}", program.display());
    program
}

fn run(name: &str, folder: &Path) -> String {
    let mut command = Command::new(example(name));
    let output = command.current_dir(folder).output().expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{name}: {}: {errors}",
        output.status
    );
    String::from_utf8(output.stdout).expect("text")
}

fn prints(name: &str, wanted: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    assert_eq!(run(name, folder.path()).trim_end(), wanted);
}

#[test]
fn example_blocking_reads_through_an_overlay() {
    prints("blocking", "from an overlay");
}

#[test]
fn example_epoll_answers_every_request() {
    prints("epoll", "32 requests");
}

#[test]
fn example_tokio_writes_from_its_tasks() {
    prints("tokio", "snapshot written");
}

#[test]
fn example_vcpu_threads_have_a_queue_each() {
    prints("vcpu_threads", "");
}

#[test]
fn example_snapshot_state_comes_back() {
    prints("snapshot_state", "3151872 bytes of state");
}

#[test]
fn example_vhost_user_blk_serves_until_its_input_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    run("blocking", folder.path());
    let mut command = Command::new(example("vhost_user_blk"));
    command.args(["overlay.qcow2", "disk.socket"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut server = command
        .current_dir(folder.path())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    let output = server.stdout.take().expect("its output");
    BufReader::new(output).read_line(&mut line).expect("a line");
    assert_eq!(line, "disk.socket\n");
    let client = std::os::unix::net::UnixStream::connect(folder.path().join("disk.socket"));
    drop(client.expect("a client is let in"));
    drop(server.stdin.take());
    assert!(server.wait().expect("it ends").success());
}
