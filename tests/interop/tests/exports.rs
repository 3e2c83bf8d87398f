//! Exports that come and go in a running server, over its control socket: with libnbd's and QEMU's
//! clients.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gaur_interop::builder::create;
use gaur_interop::gaur::{binary, gaur};
use gaur_interop::layout::Layout;
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, qemu_img, run};
use serde_json::Value;

const GIB: u64 = 1 << 30;

/// A server that waits for commands.
struct Exporter {
    scratch: Scratch,
    server: Server,
}

impl Exporter {
    fn start(name: &str, more: &[&str]) -> Exporter {
        let scratch = Scratch::new(name);
        let (socket, control) = (scratch.path("s"), scratch.path("c"));
        let mut command = Command::new(binary());
        command.args(["serve", "-e", "0", "-k", &socket, "--control", &control]);
        command.args(more);
        let server = Server::start(command, &socket);
        Exporter { scratch, server }
    }

    /// A new qcow2 image of 1 GiB.
    fn image(&self, name: &str) -> String {
        let path = self.scratch.path(name);
        gaur(&["create", "-q", &path, "1G"]).ok();
        path
    }

    fn export(&self, words: &[&str]) -> Run {
        let (verb, rest) = words.split_first().expect("a verb");
        let control = self.scratch.path("c");
        gaur(&[&["export", verb, "--control", &control], rest].concat())
    }

    fn list(&self) -> Vec<Value> {
        let list = self.export(&["list", "--output", "json"]).ok().json();
        list.as_array().expect("an array").clone()
    }

    fn names(&self) -> Vec<String> {
        let name = |export: &Value| export["name"].as_str().expect("text").to_owned();
        self.list().iter().map(name).collect()
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.scratch.path("s"))
    }
}

/// A client that writes and reads until it is cut off.
fn load(uri: &str) -> Child {
    let script = "
import nbd, os, sys
h = nbd.NBD()
h.connect_uri(sys.argv[1])
print('ready', flush=True)
done = 0
try:
    while True:
        at = (done * 65536) % (64 << 20)
        h.pwrite(bytes([done % 255 + 1]) * 4096, at)
        assert h.pread(4096, at) == bytes([done % 255 + 1]) * 4096
        done += 1
except nbd.Error as error:
    print(done, error.errno or 'closed', flush=True)
";
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", script, uri]).stdout(Stdio::piped());
    command.spawn().expect("python3 with libnbd's module")
}

/// Waits until the client works.
fn ready(client: &mut Child) -> std::io::BufReader<std::process::ChildStdout> {
    use std::io::BufRead;
    let out = client.stdout.take().expect("its output");
    let mut out = std::io::BufReader::new(out);
    let mut line = String::new();
    out.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    out
}

fn rest(mut out: impl std::io::Read) -> String {
    let mut text = String::new();
    out.read_to_string(&mut text).expect("text");
    text
}

#[test]
fn exports_come_and_go_while_a_client_works_on_another() {
    let exporter = Exporter::start("come-and-go", &[]);
    let stays = exporter.image("stays.qcow2");
    let added = exporter.export(&["add", &stays]).ok();
    assert_eq!(added.stdout.trim(), exporter.uri("stays"));
    let mut client = load(&exporter.uri("stays"));
    let out = ready(&mut client);
    for round in 0..10 {
        let image = exporter.image(&format!("disk{round}.qcow2"));
        let named = format!("disk={image}");
        exporter.export(&["add", &named, "-D", "one of many"]).ok();
        assert_eq!(exporter.names(), ["stays", "disk"]);
        run("nbdcopy", &["--", "/dev/null", &exporter.uri("disk")]);
        let size = run("nbdinfo", &["--size", &exporter.uri("disk")]).ok();
        assert_eq!(size.stdout.trim(), GIB.to_string());
        exporter.export(&["remove", "disk"]).ok();
        assert_eq!(exporter.names(), ["stays"]);
        assert!(run("nbdinfo", &[&exporter.uri("disk")]).code != 0);
        // It was closed: others may write to it.
        run("qemu-io", &["-c", "write 0 64k", &image]).ok();
    }
    assert!(client.try_wait().expect("a child").is_none(), "it works on");
    exporter.export(&["remove", "stays"]).ok();
    let said = rest(out);
    let (done, _) = said.trim().split_once(' ').expect("how far it came");
    assert!(done.parse::<u64>().expect("a number") > 0, "{said}");
    assert!(client.wait().expect("a child").success());
    qemu_img(&["check", &stays]).ok();
    assert!(exporter.names().is_empty());
    exporter.server.stop();
}

/// What a client was told is written is there after its export was removed under it.
#[test]
fn an_export_that_is_removed_under_load_loses_nothing() {
    let exporter = Exporter::start("removed", &[]);
    for round in 0..5 {
        let image = exporter.image(&format!("disk{round}.qcow2"));
        exporter.export(&["add", &image, "-x", "disk"]).ok();
        let mut client = load(&exporter.uri("disk"));
        let out = ready(&mut client);
        std::thread::sleep(Duration::from_millis(150));
        let start = Instant::now();
        exporter.export(&["remove", "disk"]).ok();
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "the command does not wait for a busy client"
        );
        let said = rest(out);
        assert!(client.wait().expect("a child").success(), "{said}");
        let done: u64 = said
            .split(' ')
            .next()
            .and_then(|text| text.parse().ok())
            .expect("a number");
        // The last writes, each still the latest at its place.
        for number in done.saturating_sub(64)..done {
            let (at, pattern) = ((number * 65536) % (64 << 20), number % 255 + 1);
            let command = format!("read -P {pattern} {at} 4096");
            let read = run("qemu-io", &["-r", "-c", &command, &image]).ok();
            assert!(!read.stdout.contains("failed"), "{read}");
        }
        qemu_img(&["check", &image]).ok();
    }
    exporter.server.stop();
}

#[test]
fn an_image_has_one_writer_or_any_number_of_readers() {
    let exporter = Exporter::start("in-use", &[]);
    let image = exporter.image("disk.qcow2");
    exporter.export(&["add", "-x", "writer", &image]).ok();
    for more in [&["-x", "second"][..], &["-x", "reader", "-r"]] {
        let refused = exporter
            .export(&[&["add", &image], more].concat())
            .refused();
        assert!(refused.stderr.contains("\"writer\""), "{refused}");
    }
    // By another name it is the same file.
    let link = exporter.scratch.path("link.qcow2");
    std::os::unix::fs::symlink(&image, &link).expect("a link");
    exporter.export(&["add", &link]).refused();
    // Another process is kept out as well.
    let (socket, control) = (exporter.scratch.path("s2"), exporter.scratch.path("c2"));
    let refused = gaur(&["serve", "-k", &socket, "--control", &control, &image]).refused();
    assert!(refused.stderr.contains("lock"), "{refused}");
    exporter.export(&["remove", "writer"]).ok();

    for name in ["a", "b", "c"] {
        exporter.export(&["add", "-r", "-x", name, &image]).ok();
    }
    let refused = exporter.export(&["add", "-x", "writer", &image]).refused();
    assert!(refused.stderr.contains("reads it"), "{refused}");
    // Another way to open it is an open image of its own.
    exporter
        .export(&["add", "-r", "--cache", "none", "-x", "d", &image])
        .ok();
    for name in ["a", "b", "c", "d"] {
        let info = run("nbdinfo", &["--json", &exporter.uri(name)]).ok().json();
        assert_eq!(info["exports"][0]["is_read_only"], true, "{name}");
    }
    // Readers of another process may read, too; a writer may not.
    run("qemu-io", &["-r", "-c", "read 0 64k", &image]).ok();
    assert!(run("qemu-io", &["-c", "write 0 64k", &image]).code != 0);
    exporter.export(&["remove", "a"]).ok();
    run("nbdinfo", &[&exporter.uri("b")]).ok();
    for name in ["b", "c", "d"] {
        exporter.export(&["remove", name]).ok();
    }
    exporter.export(&["add", "-x", "writer", &image]).ok();
    exporter.server.stop();
}

/// A failed command gets its reason on one line, and other clients do not notice.
#[test]
fn failed_commands_leave_other_exports_alone() {
    let exporter = Exporter::start("bad", &[]);
    let good = exporter.image("good.qcow2");
    exporter.export(&["add", &good]).ok();
    let mut client = load(&exporter.uri("good"));
    let out = ready(&mut client);
    let missing = exporter.scratch.path("missing.qcow2");
    let text = exporter
        .scratch
        .file("text", b"not an image, but some bytes");
    let damaged = exporter.image("damaged.qcow2");
    let mut bytes = std::fs::read(&damaged).expect("an image");
    bytes[20..24].copy_from_slice(&[0xff; 4]);
    std::fs::write(&damaged, bytes).expect("damaged");
    let folder = exporter.scratch.folder().to_str().expect("text");
    for (words, told) in [
        (&["add", &missing][..], "missing.qcow2"),
        (&["add", &text], "raw"),
        (&["add", "-f", "qcow2", &text], "text"),
        (&["add", &damaged], "damaged.qcow2"),
        (&["add", folder], "directory"),
        (&["add", &good, "-x", "other"], "in use"),
        (&["add", &missing, "-x", "good"], "already"),
        (
            &["add", "--snapshot", "none", "-x", "y", &damaged],
            "damaged",
        ),
        (&["remove", "nothing"], "there is no export"),
        (&["resize", "nothing", "2G"], "there is no export"),
        (&["resize", "good", "500M"], "smaller"),
        (&["resize", "good", "3000000001"], "512"),
        (&["resize", "good", "huge"], "size"),
        (
            &["add", "--fuse", &text, "--vduse", "x", &good],
            "one front end",
        ),
    ] {
        let refused = exporter.export(words).refused();
        assert!(refused.stderr.contains(told), "{refused}");
    }
    assert_eq!(exporter.names(), ["good"]);
    assert!(client.try_wait().expect("a child").is_none(), "it works on");
    exporter.server.stop();
    drop(rest(out));
    assert!(client.wait().expect("a child").success());
    qemu_img(&["check", &good]).ok();
}

#[test]
fn an_image_grows_and_shrinks_while_it_is_served() {
    let exporter = Exporter::start("resize", &[]);
    let image = exporter.image("disk.qcow2");
    exporter.export(&["add", &image]).ok();
    let mut client = load(&exporter.uri("disk"));
    let out = ready(&mut client);
    let size = || {
        let size = run("nbdinfo", &["--size", &exporter.uri("disk")]).ok();
        size.stdout.trim().parse::<u64>().expect("a number")
    };
    for (asked, expected) in [
        ("2G", 2 * GIB),
        ("+512M", 2 * GIB + GIB / 2),
        ("600G", 600 * GIB),
    ] {
        exporter.export(&["resize", "disk", asked]).ok();
        assert_eq!(size(), expected);
        assert_eq!(exporter.list()[0]["virtual-size"], expected);
    }
    let last = format!("write -P 7 {} 64k", 600 * GIB - 65536);
    run(
        "qemu-io",
        &["-f", "raw", "-c", &last, &exporter.uri("disk")],
    )
    .ok();
    exporter.export(&["resize", "--shrink", "disk", "1G"]).ok();
    assert_eq!(size(), GIB);
    exporter.export(&["resize", "disk", "600G"]).ok();
    let last = format!("read -P 0 {} 64k", 600 * GIB - 65536);
    let read = run(
        "qemu-io",
        &["-f", "raw", "-c", &last, &exporter.uri("disk")],
    )
    .ok();
    assert!(
        !read.stdout.contains("failed"),
        "what was cut off reads as zeros: {read}"
    );
    assert!(client.try_wait().expect("a child").is_none(), "it works on");
    // Where it works there is no disk any more.
    exporter.export(&["resize", "--shrink", "disk", "32M"]).ok();
    let said = rest(out);
    assert!(said.contains("ENOSPC") || said.contains("EINVAL"), "{said}");
    assert!(client.wait().expect("a child").success());
    exporter.export(&["remove", "disk"]).ok();
    qemu_img(&["check", &image]).ok();
    exporter.export(&["add", "-r", &image]).ok();
    let refused = exporter.export(&["resize", "disk", "1T"]).refused();
    assert!(refused.stderr.contains("reading only"), "{refused}");
    exporter.server.stop();
}

#[test]
fn two_hundred_exports_are_added_and_removed() {
    let exporter = Exporter::start("many", &[]);
    let paths: Vec<String> = (0..200)
        .map(|number| {
            let path = exporter.scratch.path(&format!("disk{number}.qcow2"));
            create(&path, &Layout::v3(65536));
            path
        })
        .collect();
    for path in &paths {
        exporter.export(&["add", path]).ok();
    }
    let list = run("nbdinfo", &["--list", "--json", &exporter.uri("")]).ok();
    let listed = list.json()["exports"].as_array().map_or(0, Vec::len);
    assert_eq!((listed, exporter.names().len()), (200, 200));
    for number in 0..200 {
        exporter.export(&["remove", &format!("disk{number}")]).ok();
    }
    assert!(exporter.names().is_empty());
    for path in paths.iter().step_by(50) {
        qemu_img(&["check", path]).ok();
    }
    exporter.server.stop();
}

/// Without the rights that it takes, `--pin` says which are missing, and nothing is served.
#[test]
fn a_server_that_may_not_be_pinned_says_why() {
    let scratch = Scratch::new("pin");
    let image = scratch.path("disk.qcow2");
    gaur(&["create", "-q", &image, "1G"]).ok();
    let script =
        "ulimit -l 64; exec setpriv --bounding-set=-all -- \"$0\" serve --pin -k \"$1\" \"$2\"";
    let words = ["-c", script, binary(), &scratch.path("s"), &image];
    let refused = run("bash", &words).refused();
    assert!(refused.stderr.contains("ulimit -l"), "{refused}");
}

/// The images of a command line and those of commands are exports alike; the server stays for the
/// latter.
#[test]
fn a_server_with_commands_outlives_its_clients() {
    let scratch = Scratch::new("outlives");
    let image = |name: &str| {
        let path = scratch.path(name);
        gaur(&["create", "-q", &path, "1G"]).ok();
        path
    };
    let (socket, control) = (scratch.path("s"), scratch.path("c"));
    let first = image("first.qcow2");
    let mut command = Command::new(binary());
    command.args(["serve", "-k", &socket, "--control", &control, &first]);
    let server = Server::start(command, &socket);
    let second = image("second.qcow2");
    gaur(&["export", "add", "--control", &control, &second]).ok();
    let uri = |export: &str| format!("nbd+unix:///{export}?socket={socket}");
    for _ in 0..3 {
        run("qemu-io", &["-f", "raw", "-c", "write 0 64k", &uri("")]).ok();
        run(
            "qemu-io",
            &["-f", "raw", "-c", "write 0 64k", &uri("second")],
        )
        .ok();
    }
    server.stop();
    for image in [&first, &second] {
        qemu_img(&["check", image]).ok();
    }
}
