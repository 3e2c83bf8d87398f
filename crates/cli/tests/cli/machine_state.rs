//! `gaur snapshot save` and `extract`: VM state in and out, in this process and through a server.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::control::RawConnection;
use crate::server::{Server, client};
use crate::workdir::{GAUR, WorkDir};

/// Bytes that say where they are, with some zeros among them.
fn state(len: usize) -> Vec<u8> {
    let word = |at: usize| match at / 300_000 % 4 {
        3 => 0_u64,
        _ => (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    };
    let mut bytes: Vec<u8> = (0..len.div_ceil(8))
        .flat_map(|at| word(at).to_le_bytes())
        .collect();
    bytes.truncate(len);
    bytes
}

fn disk(dir: &WorkDir, options: &str) {
    dir.qemu_create(&["-o", options, "disk.qcow2", "20M"]);
    dir.qemu_io("disk.qcow2", &["write -P 1 0 3M"]);
}

/// Runs the command with `input`, which must go well; returns its standard output.
#[track_caller]
fn with_input(dir: &WorkDir, args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = dir.command(GAUR, args);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut stdin = child.stdin.take().expect("its input");
    let input = input.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{args:?}: {output:?}");
    writer.join().expect("no panic").expect("it reads all");
    output.stdout
}

fn state_size(dir: &WorkDir, name: &str) -> Value {
    let info = ["snapshot", "info", "--output=json", "disk.qcow2", name];
    dir.gaur(&info).json()["vm-state-size"].clone()
}

#[test]
fn a_state_goes_in_and_comes_out_of_every_kind_of_image() {
    for (options, len) in [
        ("compat=1.1", 5_000_001),
        ("compat=0.10", 1),
        ("extended_l2=on", 3 << 20),
        ("cluster_size=512", 700_000),
        ("cluster_size=2M", 2_500_000),
    ] {
        let dir = WorkDir::new();
        disk(&dir, options);
        let bytes = state(len);
        std::fs::write(dir.path("state"), &bytes).expect("a file");
        let save = ["snapshot", "save", "disk.qcow2"];
        dir.gaur(&[&save[..], &["--state", "state", "--icount=4", "a"]].concat())
            .ok();
        dir.qemu_io("disk.qcow2", &["write -P 2 0 3M"]);
        with_input(
            &dir,
            &[&save[..], &["b", "-t", "none"]].concat(),
            &bytes[len / 2..],
        );
        with_input(&dir, &[&save[..], &["c", "--host=blocking"]].concat(), b"x");
        dir.check_clean("disk.qcow2");
        dir.same(&["snapshot", "-l", "disk.qcow2"]).ok();
        assert_eq!(state_size(&dir, "a"), len);
        let out = with_input(&dir, &["snapshot", "extract", "disk.qcow2", "a"], b"");
        assert!(out == bytes, "{options}");
        let to_file = [
            "snapshot",
            "extract",
            "-q",
            "disk.qcow2",
            "--to",
            "out",
            "3",
        ];
        dir.gaur(&[&to_file[..], &["--host=blocking"]].concat())
            .ok();
        assert_eq!(dir.read("out"), b"x");
        let to_file = ["snapshot", "extract", "disk.qcow2", "b", "--to", "out"];
        dir.gaur(&[&to_file[..], &["-t", "none"]].concat()).ok();
        assert!(dir.read("out") == bytes[len / 2..], "{options}");
        dir.qemu_img(&["snapshot", "-a", "a", "disk.qcow2"]).ok();
        dir.qemu_io("disk.qcow2", &["read -P 1 0 3M"]);
        dir.qemu_img(&["snapshot", "-d", "a", "disk.qcow2"]).ok();
        dir.gaur(&["snapshot", "-d", "b", "disk.qcow2"]).ok();
        dir.check_clean("disk.qcow2");
    }
}

/// Starts a save whose state does not end, and waits until the first of it was taken.
fn endless(dir: &WorkDir, args: &[&str]) -> (Child, std::process::ChildStdin) {
    let mut child = dir
        .command(GAUR, &[&["snapshot", "save"], args].concat())
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut stdin = child.stdin.take().expect("its input");
    // More than a pipe of the system has room for, and less than what is read ahead.
    stdin.write_all(&state(3 << 20)).expect("it reads");
    (child, stdin)
}

fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    let status = Command::new("kill").args([name, &pid]).status();
    assert!(status.expect("kill runs").success());
}

/// Waits for the end, and that it was given up in order.
#[track_caller]
fn given_up(mut child: Child) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while child.try_wait().expect("a child").is_none() {
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("it has ended");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        error,
        "gaur: disk.qcow2: cancelled, the image is unchanged\n"
    );
    assert_eq!(output.status.code(), Some(130));
}

#[test]
fn ctrl_c_gives_a_save_up_and_leaves_no_trace() {
    for host in ["uring", "blocking"] {
        let dir = WorkDir::new();
        disk(&dir, "compat=1.1");
        let (child, stdin) = endless(&dir, &["--host", host, "disk.qcow2", "a"]);
        signal(&child, "-INT");
        given_up(child);
        drop(stdin);
        dir.check_clean("disk.qcow2");
        assert_eq!(dir.gaur(&["snapshot", "-l", "disk.qcow2"]).ok(), "");

        let server = Server::start(
            &dir,
            &["--host", host, "-t", "--control", "sock", "disk.qcow2"],
        );
        let (child, stdin) = endless(&dir, &["--control", "sock", "a"]);
        signal(&child, "-TERM");
        given_up(child);
        drop(stdin);
        // The server's own end is one, too.
        let (child, stdin) = endless(&dir, &["--control", "sock", "a"]);
        server.stop();
        given_up(child);
        drop(stdin);
        dir.check_clean("disk.qcow2");
        assert_eq!(dir.gaur(&["snapshot", "-l", "disk.qcow2"]).ok(), "");
    }
}

#[test]
fn save_and_extract_errors_are_reported() {
    let dir = WorkDir::new();
    disk(&dir, "compat=1.1");
    dir.gaur(&["snapshot", "create", "disk.qcow2", "plain"])
        .ok();
    std::fs::write(dir.path("state"), state(4 << 20)).expect("a file");
    dir.gaur(&["snapshot", "save", "disk.qcow2", "s", "--state", "state"])
        .ok();
    let before = dir.read("disk.qcow2");
    let save = |words: &[&str]| dir.gaur(&[&["snapshot", "save"], words].concat());
    save(&["disk.qcow2", "x", "--state", "missing"]).fails(1, &["missing", "no such file"]);
    save(&["disk.qcow2", "x", "--state", "."]).fails(1, &["directory"]);
    save(&["disk.qcow2", "x", "--state", "/proc/self/mem"]).fails(1, &["/proc/self/mem"]);
    save(&["disk.qcow2", "x"]).fails(1, &["empty", "gaur snapshot create"]);
    save(&["disk.qcow2", "s", "--state", "state"]).fails(1, &["\"s\"", "already"]);
    save(&["disk.qcow2", "1", "--state", "state"]).fails(1, &["\"1\""]);
    save(&["disk.qcow2"]).fails(1, &["name is missing"]);
    let extract =
        |words: &[&str]| dir.gaur(&[&["snapshot", "extract", "disk.qcow2"], words].concat());
    extract(&["nope", "--to", "out"]).fails(1, &["\"nope\"", "\"plain\""]);
    extract(&["plain", "--to", "out"]).fails(1, &["\"plain\"", "no machine state"]);
    assert!(!dir.path("out").exists());
    extract(&["s", "--to", "missing/out"]).fails(1, &["missing/out", "no such file"]);
    extract(&["s", "--to", "/dev/full"]).fails(1, &["/dev/full", "no space", "incomplete"]);
    dir.check_clean("disk.qcow2");
    let list = dir.gaur(&["snapshot", "list", "--output=json", "disk.qcow2"]);
    assert_eq!(list.json().as_array().map(Vec::len), Some(2));
    assert_eq!(
        dir.read("disk.qcow2")[..before.len() / 2],
        before[..before.len() / 2]
    );
}

#[test]
fn progress_never_mixes_with_state_on_stdout() {
    let dir = WorkDir::new();
    disk(&dir, "compat=1.1");
    let bytes = state(2 << 20);
    std::fs::write(dir.path("state"), &bytes).expect("a file");
    let shown = dir.gaur(&[
        "snapshot",
        "save",
        "-p",
        "disk.qcow2",
        "s",
        "--state",
        "state",
    ]);
    let shown = shown.ok();
    assert!(
        shown.contains("(0.00/100%)") && shown.ends_with("(100.00/100%)\r\n"),
        "{shown}"
    );
    let out = with_input(&dir, &["snapshot", "extract", "-p", "disk.qcow2", "s"], b"");
    assert!(out == bytes);
    let shown = dir.gaur(&[
        "snapshot",
        "extract",
        "-p",
        "disk.qcow2",
        "s",
        "--to",
        "out",
    ]);
    assert!(shown.ok().ends_with("(100.00/100%)\r\n"));
    assert_eq!(
        dir.gaur(&["snapshot", "extract", "disk.qcow2", "s", "--to", "out"])
            .ok(),
        ""
    );
}

#[test]
fn a_state_goes_through_a_server_while_its_clients_write() {
    for host in ["uring", "blocking"] {
        let dir = WorkDir::new();
        disk(&dir, "extended_l2=on");
        let bytes = state(9_000_001);
        std::fs::write(dir.path("state"), &bytes).expect("a file");
        let server = Server::start(
            &dir,
            &["--host", host, "-t", "--control", "sock", "disk.qcow2"],
        );
        let write = ["-f", "raw", "-c", "write -P 7 1M 4M", &server.uri];
        client(&dir, "qemu-io", &write);
        let save = ["snapshot", "save", "--control", "sock"];
        dir.gaur(&[&save[..], &["--state", "state", "a"]].concat())
            .ok();
        client(
            &dir,
            "qemu-io",
            &["-f", "raw", "-c", "write -P 8 1M 4M", &server.uri],
        );
        with_input(
            &dir,
            &[&save[..], &["b", "--vm-clock=9"]].concat(),
            &bytes[..1],
        );
        let extract = ["snapshot", "extract", "--control", "sock"];
        let out = with_input(&dir, &[&extract[..], &["a"]].concat(), b"");
        assert!(out == bytes);
        dir.gaur(&[&extract[..], &["-q", "b", "--to", "out"]].concat())
            .ok();
        assert_eq!(dir.read("out"), bytes[..1]);
        dir.gaur(&[&save[..], &["a", "--state", "state"]].concat())
            .fails(1, &["\"a\"", "already"]);
        dir.gaur(&[&save[..], &["x", "--state", "/proc/self/mem"]].concat())
            .fails(1, &["/proc/self/mem"]);
        dir.gaur(&[&save[..], &["x"]].concat()).fails(1, &["empty"]);
        dir.gaur(&[&extract[..], &["nope"]].concat())
            .fails(1, &["\"nope\""]);
        dir.gaur(&[&extract[..], &["a", "--to", "/dev/full"]].concat())
            .fails(1, &["/dev/full", "no space"]);
        server.stop();
        dir.check_clean("disk.qcow2");
        dir.same(&["snapshot", "-l", "disk.qcow2"]).ok();
        dir.qemu_img(&["snapshot", "-a", "a", "disk.qcow2"]).ok();
        dir.qemu_io("disk.qcow2", &["read -P 7 1M 4M"]);
    }
}

fn frame(bytes: &[u8]) -> Vec<u8> {
    let mut frame = (bytes.len() as u32).to_be_bytes().to_vec();
    frame.extend(bytes);
    frame
}

const END: [u8; 4] = [0; 4];
const ABORT: [u8; 4] = [0xff; 4];

#[test]
fn frames_of_any_length_are_a_state_and_a_client_may_give_up() {
    let dir = WorkDir::new();
    disk(&dir, "compat=1.1");
    let server = Server::start(&dir, &["-t", "--control", "sock", "disk.qcow2"]);
    let mut hand = RawConnection::connect(&dir);
    let save = |name: &str| json!({"command": "save", "name": name});
    let bytes = state(2_500_000);

    assert_eq!(hand.ask(&save("a")), json!({"event": "ready"}));
    let mut rest = &bytes[..];
    for len in (1..).map(|step: usize| step * step % 70_001 + 1) {
        let (part, after) = rest.split_at(len.min(rest.len()));
        hand.send(&frame(part));
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    hand.send(&END);
    let saved = hand.answer();
    assert_eq!(saved["result"]["vm-state-size"], bytes.len());

    assert_eq!(hand.ask(&save("b")), json!({"event": "ready"}));
    hand.send(&frame(&bytes));
    hand.send(&ABORT);
    assert_eq!(hand.answer()["error"]["kind"], "cancelled");
    // The connection goes on, and what was given up is as if it had never been.
    let list = hand.ask(&json!({"command": "list"}));
    assert_eq!(list["result"].as_array().map(Vec::len), Some(1));

    assert_eq!(hand.ask(&save("b")), json!({"event": "ready"}));
    hand.send(&frame(&bytes));
    drop(hand);
    let mut hand = RawConnection::connect(&dir);
    let header = hand.ask(&json!({"command": "extract", "snapshot": "a"}));
    assert_eq!(header, json!({"event": "state", "size": bytes.len()}));
    let mut out = Vec::new();
    loop {
        let mut head = [0; 4];
        hand.input.read_exact(&mut head).expect("a frame");
        let len = u32::from_be_bytes(head) as usize;
        if len == 0 {
            break;
        }
        let start = out.len();
        out.resize(start + len, 0);
        hand.input.read_exact(&mut out[start..]).expect("its bytes");
    }
    assert!(out == bytes);
    assert_eq!(hand.answer()["result"]["name"], "a");
    // A snapshot that is being read cannot be deleted; this one is not.
    assert_eq!(
        hand.ask(&json!({"command": "delete", "snapshot": "a"}))["result"]["id"],
        "1"
    );
    server.stop();
    dir.check_clean("disk.qcow2");
    assert_eq!(dir.gaur(&["snapshot", "-l", "disk.qcow2"]).ok(), "");
}
