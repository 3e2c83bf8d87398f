//! `gaur serve` with real clients.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::server::{Server, client};
use crate::workdir::{GAUR, WorkDir};

fn socket_of(uri: &str) -> &Path {
    let (_, path) = uri.split_once("socket=").expect("a socket in the URI");
    Path::new(path)
}

#[test]
fn an_image_is_served_without_any_option_until_the_client_leaves() {
    let dir = WorkDir::new();
    dir.gallery();
    let mut server = Server::start(&dir, &["top.qcow2"]);
    let socket = socket_of(&server.uri).to_owned();
    let parent = socket
        .parent()
        .expect("a directory")
        .metadata()
        .expect("there");
    assert_eq!(parent.permissions().mode() & 0o777, 0o700);
    client(&dir, "nbdcopy", &[&server.uri, "copy.raw"]);
    assert_eq!(server.wait(), Some(0));
    assert!(!socket.exists(), "the socket is removed");
    dir.identical("top.qcow2", "copy.raw");
    let mut rest = String::new();
    server.rest.read_to_string(&mut rest).expect("output");
    assert!(
        rest.contains(&format!("nbdinfo '{}'", server.uri)),
        "{rest}"
    );
    assert!(
        rest.contains("qemu-system-x86_64") && rest.contains("format=raw"),
        "{rest}"
    );
}

#[test]
fn client_writes_survive_a_server_stop() {
    for host in ["uring", "blocking"] {
        let dir = WorkDir::new();
        dir.gallery();
        let server = Server::start(&dir, &["--host", host, "-t", "top.qcow2"]);
        let write = [
            "-f",
            "raw",
            "-c",
            "write -P 77 3M 100k",
            "-c",
            "discard 6M 1M",
            &server.uri,
        ];
        client(&dir, "qemu-io", &write);
        client(
            &dir,
            "qemu-io",
            &["-f", "raw", "-c", "read -P 77 3M 100k", &server.uri],
        );
        server.stop();
        dir.qemu_io("top.qcow2", &["read -P 77 3M 100k", "read -P 4 90M 1M"]);
        dir.check_clean("top.qcow2");
    }
}

#[test]
fn every_cache_mode_keeps_what_was_written() {
    let dir = WorkDir::new();
    for mode in ["none", "writeback", "writethrough", "directsync", "unsafe"] {
        for host in ["uring", "blocking"] {
            dir.gaur(&["create", "-q", "disk.qcow2", "10M"]).ok();
            let server =
                Server::start(&dir, &["--cache", mode, "--host", host, "-t", "disk.qcow2"]);
            let write = ["-f", "raw", "-c", "write -P 5 1000 70000", &server.uri];
            client(&dir, "qemu-io", &write);
            server.stop();
            dir.qemu_io(
                "disk.qcow2",
                &["read -P 5 1000 70000", "read -P 0 71000 100000"],
            );
            dir.check_clean("disk.qcow2");
        }
    }
}

#[test]
fn several_images_are_exports_of_their_names() {
    let dir = WorkDir::new();
    dir.gallery();
    let server = Server::start(&dir, &["-t", "-e", "4", "base.qcow2", "x=packed.qcow2"]);
    let list = client(&dir, "nbdinfo", &["--list", &server.uri]);
    assert!(
        list.contains("export=\"base\"") && list.contains("export=\"x\""),
        "{list}"
    );
    let second = server.uri.replacen("/base", "/x", 1);
    client(&dir, "nbdcopy", &[&server.uri, "base.raw"]);
    client(&dir, "nbdcopy", &[&second, "x.raw"]);
    server.stop();
    dir.identical("base.qcow2", "base.raw");
    dir.identical("packed.qcow2", "x.raw");
}

#[test]
fn overlays_share_their_base_in_one_server_and_in_several() {
    let dir = WorkDir::new();
    dir.gallery();
    for name in ["a.qcow2", "b.qcow2", "c.qcow2"] {
        dir.qemu_create(&["-b", "top.qcow2", "-F", "qcow2", name]);
    }
    let first = Server::start(&dir, &["-t", "-e", "0", "a.qcow2", "b.qcow2"]);
    let second = Server::start(&dir, &["-t", "c.qcow2"]);
    let exports = [
        first.uri.clone(),
        first.uri.replacen("/a", "/b", 1),
        second.uri.clone(),
    ];
    for (uri, pattern) in exports.iter().zip(["11", "22", "33"]) {
        let write = format!("write -P {pattern} 90M 64k");
        client(&dir, "qemu-io", &["-f", "raw", "-c", &write, uri]);
    }
    first.stop();
    second.stop();
    for (name, pattern) in [("a.qcow2", "11"), ("b.qcow2", "22"), ("c.qcow2", "33")] {
        dir.qemu_io(
            name,
            &[
                &format!("read -P {pattern} 90M 64k"),
                "read -P 4 92224k 16k",
            ],
        );
        dir.check_clean(name);
    }
    dir.check_clean("top.qcow2");
}

#[test]
fn a_terminal_that_goes_away_ends_the_server_in_order_unless_it_is_to_stay() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "disk.qcow2", "1M"]).ok();
    let mut server = Server::start(&dir, &["-t", "disk.qcow2"]);
    server.signal("-HUP");
    assert_eq!(server.wait(), Some(0));

    let line = "trap '' HUP; exec \"$0\" serve -t -k sock --pid-file pid disk.qcow2";
    let mut command = dir.command("bash", &["-c", line, GAUR]);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("bash runs");
    let mut uri = String::new();
    let mut out = BufReader::new(child.stdout.take().expect("its output"));
    out.read_line(&mut uri).expect("a line");
    let pid = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-HUP", &pid])
            .status()
            .expect("kill runs")
            .success()
    );
    client(&dir, "nbdinfo", &["--size", uri.trim_end()]);
    assert!(
        Command::new("kill")
            .args(["-TERM", &pid])
            .status()
            .expect("kill runs")
            .success()
    );
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

#[test]
fn a_tcp_port_a_name_and_a_description() {
    let dir = WorkDir::new();
    dir.gallery();
    let args = [
        "-t",
        "-b",
        "127.0.0.1",
        "-p",
        "0",
        "-x",
        "a b",
        "-D",
        "for you",
        "-r",
        "base.qcow2",
    ];
    let server = Server::start(&dir, &args);
    assert!(server.uri.starts_with("nbd://127.0.0.1:") && server.uri.ends_with("/a%20b"));
    let info = client(&dir, "nbdinfo", &[&server.uri]);
    assert!(info.contains("is_read_only: true"), "{info}");
    let list = client(&dir, "nbdinfo", &["--list", &server.uri]);
    assert!(list.contains("for you"), "{list}");
    server.stop();
}

#[test]
fn serve_create_makes_the_image_and_never_overwrites() {
    let dir = WorkDir::new();
    let args = [
        "--create",
        "10M",
        "-o",
        "extended_l2=on",
        "-k",
        "sock",
        "new.qcow2",
    ];
    let mut server = Server::start(&dir, &args);
    let write = ["-f", "raw", "-c", "write -P 1 0 64k", &server.uri];
    client(&dir, "qemu-io", &write);
    assert_eq!(server.wait(), Some(0));
    dir.check_clean("new.qcow2");
    let info = dir.gaur(&["info", "--output=json", "new.qcow2"]).json();
    assert_eq!(info["virtual-size"], 10 << 20);
    assert_eq!(info["format-specific"]["data"]["extended-l2"], true);
    let before = dir.read("new.qcow2");
    dir.gaur(&[&["serve"], &args[..]].concat())
        .fails(1, &["new.qcow2", "exists already"]);
    assert!(dir.read("new.qcow2") == before);
}

#[test]
fn a_probed_raw_image_is_not_served_for_writing() {
    let dir = WorkDir::new();
    std::fs::write(dir.path("disk.raw"), [1; 1 << 20]).expect("a file");
    dir.gaur(&["serve", "-k", "sock", "disk.raw"])
        .fails(1, &["disk.raw", "-f raw"]);
    Server::start(&dir, &["-k", "sock", "-r", "disk.raw"]).stop();
    let server = Server::start(&dir, &["-k", "sock", "-f", "raw", "-t", "disk.raw"]);
    client(
        &dir,
        "qemu-io",
        &["-f", "raw", "-c", "write -P 2 0 1k", &server.uri],
    );
    server.stop();
    assert_eq!(
        dir.read("disk.raw")[..1025],
        [&[2; 1024][..], &[1]].concat()
    );
}

#[test]
fn an_image_that_is_served_is_locked() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "disk.qcow2", "1M"]).ok();
    let server = Server::start(&dir, &["-t", "disk.qcow2"]);
    dir.gaur(&["serve", "-k", "other", "disk.qcow2"])
        .fails(1, &["lock"]);
    let theirs = dir.qemu_img(&["info", "disk.qcow2"]);
    assert!(
        theirs.code == 1 && theirs.err.contains("lock"),
        "{theirs:?}"
    );
    server.stop();
    dir.qemu_img(&["info", "disk.qcow2"]).ok();
}

#[test]
fn a_server_in_the_background_is_ready_when_the_command_returns() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "disk.qcow2", "1M"]).ok();
    let args = [
        "serve",
        "--fork",
        "--pid-file",
        "pid",
        "-k",
        "sock",
        "disk.qcow2",
    ];
    let text = dir.gaur(&args).ok();
    let uri = text.lines().next().expect("a line");
    let pid = String::from_utf8(dir.read("pid")).expect("text");
    assert!(Path::new("/proc").join(pid.trim()).exists());
    client(&dir, "nbdinfo", &["--size", uri]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while dir.path("pid").exists() {
        assert!(
            Instant::now() < deadline,
            "the server ends when its client leaves"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    let args = ["serve", "--fork", "-k", "sock", "missing.qcow2"];
    dir.gaur(&args).fails(1, &["missing.qcow2: no such file"]);
}

#[test]
fn a_second_signal_does_not_wait_for_clients() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "disk.qcow2", "1M"]).ok();
    let mut server = Server::start(&dir, &["-t", "-k", "sock", "disk.qcow2"]);
    // A client that says nothing.
    let silent = std::os::unix::net::UnixStream::connect(dir.path("sock")).expect("connected");
    server.signal("-TERM");
    server.signal("-TERM");
    server.wait();
    drop(silent);
    // The kernel takes a ring apart after its process has ended, and the locks go with its files.
    let deadline = Instant::now() + Duration::from_secs(60);
    while dir.gaur(&["info", "disk.qcow2"]).code != 0 {
        assert!(Instant::now() < deadline, "the locks are never released");
        std::thread::sleep(Duration::from_millis(10));
    }
    dir.check_clean("disk.qcow2");
}

/// The refusal did not say how to serve two images of one name.
#[test]
fn two_images_of_one_name_are_refused_with_advice() {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "disk.qcow2", "1M"]).ok();
    dir.gaur(&["serve", "disk.qcow2", "disk.qcow2"])
        .fails(1, &["\"disk\" already", "NAME=FILE"]);
}

#[test]
fn images_are_served_as_their_options_say() {
    let dir = WorkDir::new();
    dir.qemu_create(&["a.qcow2", "4M"]);
    dir.qemu_create(&["b.qcow2", "4M"]);
    let options = [
        "driver=qcow2,file.filename=a.qcow2,l2-cache-size=64k,cache-clean-interval=1",
        "driver=qcow2,file.filename=b.qcow2,read-only=on",
    ];
    let args = [&["-t", "--image-opts"], &options[..]].concat();
    let server = Server::start(&dir, &args);
    let socket = socket_of(&server.uri).display().to_string();
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={socket}");
    let write = |name: &str| {
        let args = ["-f", "raw", "-c", "write -P 5 0 64k", &uri(name)];
        let output = dir
            .command("qemu-io", &args)
            .output()
            .expect("qemu-io runs");
        output.status.success()
    };
    assert!(write("a"));
    assert!(!write("b"), "its options say that it is not written to");
    server.stop();
    dir.check_clean("a.qcow2");
    dir.qemu_io("a.qcow2", &["read -P 5 0 64k"]);
    dir.qemu_io("b.qcow2", &["read -P 0 0 64k"]);
    let json = r#"disk=json:{"driver":"qcow2","file.filename":"a.qcow2","discard":"ignore"}"#;
    let server = Server::start(&dir, &["-t", json]);
    assert!(server.uri.contains("/disk?"), "{}", server.uri);
    client(
        &dir,
        "qemu-io",
        &["-f", "raw", "-c", "discard 0 64k", &server.uri],
    );
    server.stop();
    dir.qemu_io("a.qcow2", &["read -P 5 0 64k"]);
}
