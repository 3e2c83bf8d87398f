//! The control socket of `gaur serve`: commands about an image that clients are using.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{Server, client};
use crate::workdir::WorkDir;

fn disk(dir: &WorkDir) {
    dir.gaur(&["create", "-q", "disk.qcow2", "64M"]).ok();
}

fn serve(dir: &WorkDir, args: &[&str]) -> Server {
    let server = Server::start(dir, &[&["-t", "--control", "sock"], args].concat());
    let mode = dir.path("sock").metadata().expect("there").permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    server
}

/// A connection by hand.
pub struct RawConnection {
    stream: UnixStream,
    /// What the server sends.
    pub input: BufReader<UnixStream>,
}

impl RawConnection {
    /// Connects.
    pub fn connect(dir: &WorkDir) -> RawConnection {
        let stream = UnixStream::connect(dir.path("sock")).expect("a server");
        let patience = Some(Duration::from_secs(60));
        stream.set_read_timeout(patience).expect("a socket");
        let input = BufReader::new(stream.try_clone().expect("a descriptor"));
        RawConnection { stream, input }
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server takes it");
    }

    /// The next line; nothing when the server has hung up.
    fn line(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.input.read_line(&mut line) {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(serde_json::from_str(&line).expect("a line of json")),
        }
    }

    /// Sends a command; what comes first that is no progress.
    pub fn ask(&mut self, command: &Value) -> Value {
        self.send(format!("{command}\n").as_bytes());
        self.answer()
    }

    /// What comes next that is no progress.
    pub fn answer(&mut self) -> Value {
        loop {
            let answer = self.line().expect("an answer");
            if answer["event"] != "progress" {
                return answer;
            }
        }
    }
}

#[test]
fn snapshots_come_and_go_while_a_client_writes() {
    for host in ["uring", "blocking"] {
        let dir = WorkDir::new();
        disk(&dir);
        let server = serve(&dir, &["--host", host, "disk.qcow2"]);
        let control = |words: &[&str]| {
            let (verb, rest) = words.split_first().expect("a verb");
            dir.gaur(&[&["snapshot", verb, "--control", "sock"], rest].concat())
        };
        let write = |pattern: &str| {
            let command = format!("write -P {pattern} 0 32M");
            client(&dir, "qemu-io", &["-f", "raw", "-c", &command, &server.uri]);
        };
        write("1");
        assert_eq!(control(&["create", "one"]).ok(), "");
        write("2");
        assert_eq!(control(&["create", "--vm-clock=7", "two"]).ok(), "");
        write("3");
        control(&["rename", "two", "zwei"]).ok();
        let list = control(&["list", "--output=json"]).json();
        assert_eq!(
            (&list[0]["name"], &list[1]["name"]),
            (&json!("one"), &json!("zwei"))
        );
        let table = control(&["list"]).ok();
        assert!(table.starts_with("Snapshot list:\nID "), "{table}");
        let detail = control(&["info", "zwei"]).ok();
        assert!(detail.contains("id: 2\nname: zwei\n"), "{detail}");
        control(&["apply", "one"]).fails(1, &["served", "--snapshot"]);
        control(&["create", "one"]).fails(1, &["disk.qcow2", "\"one\""]);
        control(&["delete", "nope"]).fails(1, &["disk.qcow2", "\"nope\""]);
        control(&["delete", "one", "two"]).fails(1, &["the image is not named"]);
        control(&["delete", "one"]).ok();
        server.stop();
        assert!(!dir.path("sock").exists(), "the socket is removed");
        dir.check_clean("disk.qcow2");
        dir.qemu_io("disk.qcow2", &["read -P 3 0 32M"]);
        dir.same(&["snapshot", "-l", "disk.qcow2"]).ok();
        dir.qemu_img(&["snapshot", "-a", "zwei", "disk.qcow2"]).ok();
        dir.qemu_io("disk.qcow2", &["read -P 2 0 32M"]);
    }
}

#[test]
fn control_connection_takes_commands_in_sequence_and_reports_errors() {
    let dir = WorkDir::new();
    disk(&dir);
    let server = serve(&dir, &["disk.qcow2"]);
    let mut hand = RawConnection::connect(&dir);
    let greeting = &hand.ask(&json!({"command": "ping"}))["result"];
    assert_eq!(
        (&greeting["program"], &greeting["protocol"]),
        (&json!("gaur"), &json!(1))
    );
    assert_eq!(greeting["exports"][0]["virtual-size"], 64 << 20);
    for (command, kind, word) in [
        (json!([]), "invalid-input", "object"),
        (json!({"command": "dance"}), "invalid-input", "dance"),
        (
            json!({"command": "list", "more": 1}),
            "invalid-input",
            "more",
        ),
        (json!({"command": "list", "export": "x"}), "not-found", "x"),
        (
            json!({"command": "info", "snapshot": "x"}),
            "not-found",
            "x",
        ),
        (
            json!({"command": "apply", "snapshot": "x"}),
            "unsupported",
            "served",
        ),
        (
            json!({"command": "create", "name": ""}),
            "invalid-input",
            "name",
        ),
    ] {
        let error = &hand.ask(&command)["error"];
        assert_eq!(error["kind"], kind, "{command}: {error}");
        let message = error["message"].as_str().expect("text");
        assert!(message.contains(word), "{command}: {error}");
    }
    hand.send(b"\n  \n");
    let made = &hand.ask(&json!({"command": "create", "name": "s", "date-sec": 7}))["result"];
    assert_eq!((&made["name"], &made["date-sec"]), (&json!("s"), &json!(7)));
    assert_eq!(
        hand.ask(&json!({"command": "list"}))["result"][0]["id"],
        "1"
    );
    hand.send(&vec![b'x'; 300_000]);
    let error = &hand.line().expect("an answer")["error"];
    assert!(
        error["message"]
            .as_str()
            .expect("text")
            .contains("too long")
    );
    assert_eq!(hand.line(), None);
    // Others are not concerned.
    assert_eq!(
        RawConnection::connect(&dir).ask(&json!({"command": "ping"}))["error"],
        Value::Null
    );
    server.stop();
}

#[test]
fn commands_pick_an_export_by_name() {
    let dir = WorkDir::new();
    for name in ["a.qcow2", "b.qcow2"] {
        dir.gaur(&["create", "-q", name, "1M"]).ok();
    }
    let server = serve(&dir, &["a.qcow2", "b.qcow2"]);
    let control = ["snapshot", "create", "--control", "sock"];
    dir.gaur(&[&control[..], &["s"]].concat())
        .fails(1, &["several exports", "\"a\", \"b\""]);
    dir.gaur(&[&control[..], &["-x", "c", "s"]].concat())
        .fails(1, &["\"c\"", "\"a\", \"b\""]);
    dir.gaur(&[&control[..], &["-x", "b", "s"]].concat()).ok();
    server.stop();
    assert!(dir.gaur(&["snapshot", "list", "a.qcow2"]).ok().is_empty());
    assert!(
        dir.gaur(&["snapshot", "list", "b.qcow2"])
            .ok()
            .contains(" s ")
    );
}

#[test]
fn read_only_export_answers_list_and_info() {
    let dir = WorkDir::new();
    disk(&dir);
    dir.gaur(&["snapshot", "create", "disk.qcow2", "one"]).ok();
    for args in [
        &["-r", "disk.qcow2"][..],
        &["--snapshot", "one", "disk.qcow2"],
    ] {
        let server = serve(&dir, args);
        let list = dir.gaur(&["snapshot", "list", "--control", "sock"]).ok();
        assert!(list.contains("one"), "{list}");
        for verb in [
            &["create", "two"][..],
            &["delete", "one"],
            &["rename", "one", "x"],
        ] {
            let (verb, names) = verb.split_first().expect("a verb");
            dir.gaur(&[&["snapshot", verb, "--control", "sock"], names].concat())
                .fails(1, &["disk.qcow2", "read"]);
        }
        server.stop();
    }
}

#[test]
fn only_an_unused_control_socket_is_replaced() {
    let dir = WorkDir::new();
    disk(&dir);
    std::fs::write(dir.path("sock"), "a file").expect("a file");
    dir.gaur(&["serve", "--control", "sock", "disk.qcow2"])
        .fails(1, &["sock", "no socket"]);
    assert_eq!(dir.read("sock"), b"a file");
    std::fs::remove_file(dir.path("sock")).expect("there");
    // A server that was killed leaves its socket behind.
    let mut killed = serve(&dir, &["disk.qcow2"]);
    killed.signal("-KILL");
    killed.child.wait().expect("it ends");
    assert!(dir.path("sock").exists());
    // The kernel takes its time to tear a ring down, and what it waits for is open that long.
    let deadline = Instant::now() + Duration::from_secs(60);
    let list = ["snapshot", "list", "disk.qcow2"];
    while UnixStream::connect(dir.path("sock")).is_ok() || dir.gaur(&list).code != 0 {
        assert!(Instant::now() < deadline, "somebody still listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    dir.gaur(&["snapshot", "list", "--control", "sock"])
        .fails(1, &["sock", "refused", "gaur serve --control"]);
    let server = serve(&dir, &["disk.qcow2"]);
    dir.gaur(&["create", "-q", "other.qcow2", "1M"]).ok();
    dir.gaur(&["serve", "--control", "sock", "other.qcow2"])
        .fails(1, &["sock", "somebody listens"]);
    dir.gaur(&["snapshot", "list", "--control", "sock"]).ok();
    server.stop();
}

#[test]
fn control_connection_does_not_keep_a_server_alive() {
    let dir = WorkDir::new();
    disk(&dir);
    let mut server = Server::start(&dir, &["--control", "sock", "disk.qcow2"]);
    let mut hand = RawConnection::connect(&dir);
    assert_eq!(hand.ask(&json!({"command": "ping"}))["error"], Value::Null);
    client(
        &dir,
        "qemu-io",
        &["-f", "raw", "-c", "read 0 4k", &server.uri],
    );
    assert_eq!(server.wait(), Some(0));
    assert_eq!(hand.line(), None);
}

#[test]
fn served_image_is_checked_without_being_closed() {
    let dir = WorkDir::new();
    disk(&dir);
    std::fs::write(dir.path("raw.img"), vec![0; 1 << 20]).expect("a file");
    let server = serve(&dir, &["--threads", "2", "disk.qcow2"]);
    let command = "write -P 1 0 8M";
    client(&dir, "qemu-io", &["-f", "raw", "-c", command, &server.uri]);
    let check = |more: &[&str]| dir.gaur(&[&["check", "--control", "sock"], more].concat());
    let text = check(&[]).ok();
    assert!(
        text.starts_with("No errors were found on the image.\n64/512 = "),
        "{text}"
    );
    let report = check(&["--output", "json"]).json();
    assert_eq!(report["filename"], "disk.qcow2");
    assert_eq!(
        (&report["check-errors"], &report["allocated-clusters"]),
        (&json!(0), &json!(64))
    );
    check(&["-x", "other"]).fails(1, &["other"]);
    check(&["-r", "all"]).fails(1, &["--repair", "--control"]);
    check(&["disk.qcow2"]).fails(1, &["FILE", "--control"]);
    dir.gaur(&["check"]).fails(1, &["FILE"]);
    let mut hand = RawConnection::connect(&dir);
    let result = &hand.ask(&json!({"command": "check"}))["result"];
    assert_eq!(
        (&result["rounds"], &result["unsettled-clusters"]),
        (&json!(1), &json!(0))
    );
    assert_eq!(result["findings"], json!([]));
    let add = json!({"command": "export-add", "export": "raw", "file": "raw.img", "format": "raw"});
    assert_eq!(hand.ask(&add)["result"]["name"], "raw");
    let refused = &hand.ask(&json!({"command": "check", "export": "raw"}))["error"];
    assert_eq!(refused["kind"], "unsupported");
    server.stop();
    dir.check_clean("disk.qcow2");
}
