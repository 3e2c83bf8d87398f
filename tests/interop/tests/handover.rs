//! Handover: a killed server leaves a commit log, which counts as long as the image names it and no
//! longer, and an image that is marked as not closed.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use gaur_interop::gaur::{binary, gaur, serve, serve_with};
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, qemu_img, run};

const ADOPTED: &str = "taken over from a server";
const LOST: &str = "was written to since its server was killed";
const NO_LOG: &str = "a server that was killed left a log of changes (--handover)";
const LEAKED: &str = "clusters may be leaked: 'gaur check";

/// An image, the log of its servers and their socket.
struct Disk {
    scratch: Scratch,
    image: String,
    log: String,
    socket: String,
}

impl Disk {
    fn new(name: &str) -> Disk {
        let scratch = Scratch::new(name);
        let [image, log, socket] = ["d.qcow2", "log", "s"].map(|name| scratch.path(name));
        qemu_img(&["create", "-q", "-f", "qcow2", &image, "64M"]).ok();
        Disk {
            scratch,
            image,
            log,
            socket,
        }
    }

    fn serve_with_log(&self) -> Server {
        serve_with(&self.image, &self.socket, &["--handover", &self.log])
    }

    fn serve(&self) -> Server {
        serve(&self.image, &self.socket)
    }

    /// What a server says that does not start.
    fn refused(&self, more: &[&str]) -> Run {
        let mut command = Command::new(binary());
        command.args(["serve", "--persistent", "--socket", &self.socket]);
        command.args(more).arg(&self.image);
        match Server::try_start(command, &self.socket) {
            Ok(_) => panic!("it is served"),
            Err(run) => {
                let run = run.refused();
                assert_eq!(run.stderr.trim().lines().count(), 1, "{run}");
                run
            }
        }
    }

    /// A server that dies with writes that were acknowledged and not flushed.
    fn leave_a_log(&self) {
        let server = self.serve_with_log();
        let _client = write(&server, "write -P 1 0 8M");
        server.kill();
    }

    fn write_with_qemu(&self) {
        let mut tries = 0;
        // The kernel takes a moment to let go of the lock.
        while run("qemu-io", &["-c", "write -P 2 4M 16M", &self.image]).code != 0 {
            tries += 1;
            assert!(tries < 100, "the lock outlives its holder");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.image).expect("the image can be read")
    }

    /// The autoclear bits.
    fn bits(&self) -> u64 {
        u64::from_be_bytes(*self.bytes()[88..].first_chunk().expect("a header"))
    }

    fn reads(&self, what: &str) {
        let run = run("qemu-io", &["-r", "-c", what, &self.image]).ok();
        assert!(!run.stdout.contains("failed"), "{run}");
    }

    fn has_no_more_than_leaks(&self) {
        let run = qemu_img(&["check", &self.image]);
        assert!(matches!(run.code, 0 | 3), "{run}");
    }
}

/// A client that has written, has not flushed, and stays: the server flushes when it goes.
struct Client(Child);

impl Drop for Client {
    fn drop(&mut self) {
        // It may have ended with its server.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn write(server: &Server, what: &str) -> Client {
    let mut command = Command::new("stdbuf");
    let stays = ["-oL", "qemu-io", "-t", "writeback", "-f", "raw", "-c", what];
    command
        .args(stays)
        .args(["-c", "sleep 30000", &server.uri()]);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("qemu-io starts");
    let mut line = String::new();
    let output = child.stdout.as_mut().expect("a pipe");
    let read = BufReader::new(output).read_line(&mut line);
    read.expect("it can be read");
    assert!(line.starts_with("wrote"), "{line}");
    Client(child)
}

/// Ends a server in order and returns what it said.
fn end(mut server: Server) -> String {
    server.signal("TERM");
    server.wait().ok().stderr
}

/// The server of a disk was killed, and its image served without the log, or written to by QEMU. Then a user
/// remembered the log, and 200 clusters that had other owners by now were "taken over": flushed writes
/// were replaced, and the check found errors.
fn a_log_is_stale_after(name: &str, with_snapshot: bool, between: impl Fn(&Disk)) {
    let disk = Disk::new(name);
    if with_snapshot {
        gaur(&["snapshot", "create", &disk.image, "one"]).ok();
    }
    disk.leave_a_log();
    between(&disk);
    let said = end(disk.serve_with_log());
    assert!(said.contains(LOST) && !said.contains(ADOPTED), "{said}");
    disk.has_no_more_than_leaks();
    disk.reads("read -P 2 4M 16M");
}

#[test]
fn a_log_is_stale_after_a_server_without_it() {
    for with_snapshot in [false, true] {
        a_log_is_stale_after("stale-own", with_snapshot, |disk| {
            let server = disk.serve();
            let uri = server.uri();
            let write = ["-f", "raw", "-c", "write -P 2 4M 16M", &uri];
            run("qemu-io", &write).ok();
            let said = end(server);
            assert!(said.contains(NO_LOG), "{said}");
        });
    }
}

#[test]
fn a_log_is_stale_after_qemu() {
    a_log_is_stale_after("stale-qemu", false, Disk::write_with_qemu);
}

/// With snapshots QEMU leaves the bits that name the log alone. But what it has mapped says who was there.
#[test]
fn a_log_that_contradicts_qemu_is_refused() {
    let disk = Disk::new("contradicts");
    gaur(&["snapshot", "create", &disk.image, "one"]).ok();
    disk.leave_a_log();
    disk.write_with_qemu();
    let before = disk.bytes();
    let run = disk.refused(&["--handover", &disk.log]);
    assert!(run.stderr.contains("does not fit the image"), "{run}");
    assert!(disk.bytes() == before);
    disk.reads("read -P 2 4M 16M");
}

#[test]
fn handover_log_serves_every_successor() {
    let disk = Disk::new("counts");
    disk.leave_a_log();
    let server = disk.serve_with_log();
    let client = write(&server, "write -P 2 8M 4M");
    server.kill();
    drop(client);
    let said = end(disk.serve_with_log());
    assert!(said.contains(ADOPTED) && !said.contains(LOST), "{said}");
    disk.reads("read -P 1 0 8M");
    disk.reads("read -P 2 8M 4M");
    disk.has_no_more_than_leaks();
    // Nothing is left, and who looks again finds nothing to say about a log.
    let said = end(disk.serve_with_log());
    assert!(!said.contains("log"), "{said}");
}

/// A server was killed with nothing left to hand over, the next one had nothing to do, and from then on everybody
/// was told of a log that had been removed.
#[test]
fn consumed_handover_log_is_not_reported() {
    let disk = Disk::new("done");
    let server = disk.serve_with_log();
    drop(write(&server, "write -P 1 0 8M"));
    let uri = server.uri();
    run("qemu-io", &["-f", "raw", "-c", "flush", &uri]).ok();
    server.kill();
    end(disk.serve_with_log());
    assert!(!std::path::Path::new(&disk.log).exists());
    let said = end(disk.serve());
    assert!(said.contains(LEAKED) && !said.contains(NO_LOG), "{said}");
}

/// A log with a wrong byte was followed wherever it led.
#[test]
fn a_damaged_log_is_refused_and_nothing_is_written() {
    let disk = Disk::new("damaged");
    disk.leave_a_log();
    let good = std::fs::read(&disk.log).expect("the log can be read");
    // The number, the image, how many there are, and the first and the last record.
    for at in [8, 13, 40, 72, 512, 520, 512 + 127 * 48] {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        std::fs::write(&disk.log, &bad).expect("the log can be written");
        let before = disk.bytes();
        let run = disk.refused(&["--handover", &disk.log]);
        assert!(run.stderr.contains("damaged"), "byte {at}: {run}");
        assert!(disk.bytes() == before, "byte {at}: something was written");
        let log = std::fs::read(&disk.log).expect("the log can be read");
        assert!(log == bad, "byte {at}: the log was changed");
    }
    std::fs::write(&disk.log, &good).expect("the log can be written");
    let said = end(disk.serve_with_log());
    assert!(said.contains(ADOPTED), "{said}");
}

#[test]
fn file_that_is_no_handover_log_is_kept() {
    let disk = Disk::new("no-log");
    for bytes in [b"letters".to_vec(), vec![0; 100], vec![7; (8 << 20) + 512]] {
        std::fs::write(&disk.log, &bytes).expect("it can be written");
        let run = disk.refused(&["--handover", &disk.log]);
        assert!(run.stderr.contains("is no handover log"), "{run}");
        assert!(std::fs::read(&disk.log).expect("it can be read") == bytes);
    }
}

#[test]
fn the_log_of_another_image_is_not_taken() {
    let disk = Disk::new("other");
    disk.leave_a_log();
    let other = disk.scratch.path("other.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &other, "64M"]).ok();
    let run = gaur(&[
        "serve",
        "-t",
        "-k",
        &disk.socket,
        "--handover",
        &disk.log,
        &other,
    ]);
    let run = run.refused();
    assert!(run.stderr.contains("another image"), "{run}");
    assert!(end(disk.serve_with_log()).contains(ADOPTED));
}

#[test]
fn version_2_cannot_name_a_log() {
    let disk = Disk::new("old");
    let old = ["-q", "-f", "qcow2", "-o", "compat=0.10", &disk.image, "64M"];
    qemu_img(&[&["create"], &old[..]].concat()).ok();
    let run = disk.refused(&["--handover", &disk.log]);
    assert!(run.stderr.contains("compat=1.1"), "{run}");
    assert!(!std::path::Path::new(&disk.log).exists());
}

/// A server was killed and left leaked clusters. No verb reported them, and the space was lost for good.
#[test]
fn leaks_of_a_killed_server_are_told_until_they_are_repaired() {
    let disk = Disk::new("leaks");
    let server = disk.serve();
    let client = write(&server, "write -P 1 0 1M");
    server.kill();
    drop(client);
    for _ in 0..2 {
        let server = disk.serve();
        let uri = server.uri();
        let write = ["-f", "raw", "-c", "write -P 3 9M 1M", &uri];
        run("qemu-io", &write).ok();
        let said = end(server);
        assert!(said.contains(LEAKED) && !said.contains(NO_LOG), "{said}");
    }
    // Others do not mind the bits.
    assert_eq!(disk.bits(), 1 << 15);
    qemu_img(&["info", &disk.image]).ok();
    qemu_img(&["compare", &disk.image, &disk.image]).ok();
    gaur(&["info", &disk.image]).ok();
    qemu_img(&["check", "-r", "leaks", &disk.image]).ok();
    assert_eq!(disk.bits(), 0);
    let said = end(disk.serve());
    assert_eq!(said, "");
}

/// A server was killed, and its image repaired with the command that Gaur had named. QEMU 10 deletes every
/// internal snapshot of an image with autoclear bits that it does not know.
#[test]
fn a_repair_after_a_kill_leaves_the_snapshots() {
    for online in [false, true] {
        let disk = Disk::new("repair");
        let control = disk.scratch.path("control");
        if !online {
            gaur(&["snapshot", "create", &disk.image, "one"]).ok();
        }
        let more = ["--handover", &disk.log, "--control", &control];
        let server = serve_with(&disk.image, &disk.socket, &more);
        let client = write(&server, "write -P 1 0 1M");
        assert_eq!(disk.bits() != 0, online);
        if online {
            gaur(&["snapshot", "create", "--control", &control, "one"]).ok();
        }
        assert_eq!(disk.bits(), 0);
        server.kill();
        drop(client);
        let check = ["check", "-r", "leaks", &disk.image];
        while qemu_img(&check).stderr.contains("lock") {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let list = qemu_img(&["snapshot", "-l", &disk.image]).ok();
        assert!(list.stdout.contains("one"), "{list}");
    }
}

#[test]
fn an_image_that_was_closed_says_nothing() {
    let disk = Disk::new("closed");
    let server = disk.serve_with_log();
    let client = write(&server, "write -P 1 0 1M");
    drop(client);
    assert!(disk.bits() >> 16 != 0 && disk.bits() & 1 << 15 != 0);
    assert_eq!(end(server), "");
    assert_eq!(disk.bits(), 0);
    gaur(&["resize", &disk.image, "128M"]).ok();
    gaur(&["snapshot", "create", &disk.image, "one"]).ok();
    assert_eq!(disk.bits(), 0);
    assert!(!std::path::Path::new(&disk.log).exists());
}

/// A watchdog starts a killed server again at once. In 4 to 10 of 20 tries the new one ended: the ring of the
/// killed one held the image's lock, or the socket, for a moment longer.
#[test]
fn a_server_starts_right_after_its_predecessor_was_killed() {
    let disk = Disk::new("again");
    for round in 0..20 {
        let server = match round % 2 {
            0 => disk.serve(),
            _ => disk.serve_with_log(),
        };
        let _client = write(&server, "write -P 1 0 1M");
        server.kill();
    }
    end(disk.serve());
}
