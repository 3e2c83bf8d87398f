//! The time a server takes to end is bounded, whatever its clients and the file system below it do.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gaur_interop::gaur::{binary, gaur, serve_with};
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, run, run_for};

const MIB: u32 = 1 << 20;
/// What an end may take besides its limit, on a machine with other things to do.
const SLACK: Duration = Duration::from_secs(20);

/// A disk that is served, with a control socket.
struct ServedDisk {
    scratch: Scratch,
    image: String,
    control: String,
    server: Server,
}

impl ServedDisk {
    fn new(more: &[&str]) -> ServedDisk {
        let scratch = Scratch::new("end");
        let (image, control) = (scratch.path("d.qcow2"), scratch.path("c"));
        gaur(&["create", "-q", &image, "64M"]).ok();
        let more = [&["--control", &control, "-x", "d"], more].concat();
        let server = serve_with(&image, &scratch.path("s"), &more);
        ServedDisk {
            scratch,
            image,
            control,
            server,
        }
    }

    /// A client that has connected, and has read the greeting.
    fn client(&self) -> UnixStream {
        let socket = self.scratch.path("s");
        let mut client = UnixStream::connect(socket).expect("the server listens");
        client.set_read_timeout(Some(SLACK)).expect("a limit");
        let mut greeting = [0; 18];
        client.read_exact(&mut greeting).expect("a greeting");
        client
    }

    /// A client that uses the export.
    fn client_of_export(&self) -> UnixStream {
        let mut client = self.client();
        client.write_all(&hello()).expect("it is read");
        let mut export = [0; 10];
        client.read_exact(&mut export).expect("the export");
        client
    }

    /// A client that has written, and asks for far more than it takes.
    fn deaf_client(&self) -> UnixStream {
        let mut client = self.client_of_export();
        let mut reply = [0; 16];
        for at in 0..8 {
            client.write_all(&request(1, at, 65536)).expect("a write");
            client.write_all(&[7; 65536]).expect("its payload");
            client.read_exact(&mut reply).expect("a reply");
            assert_eq!(reply[4..8], [0; 4], "the write succeeds");
        }
        for at in 0..48 {
            client.write_all(&request(0, at % 8, MIB)).expect("a read");
        }
        // The server is at work on them by then.
        std::thread::sleep(Duration::from_millis(300));
        client
    }

    /// Waits for the end, which must be one in order, and tells how long it took.
    #[track_caller]
    fn ended(mut self, asked: Instant) -> Duration {
        let end = self.server.wait();
        let took = asked.elapsed();
        assert_eq!(end.code, 0, "{end}");
        assert!(!end.stderr.contains("stopped at once"), "{end}");
        assert_clean(&self.image);
        took
    }
}

/// Fixed newstyle without zeroes, and NBD_OPT_EXPORT_NAME of the one called "d".
fn hello() -> Vec<u8> {
    let mut hello = 3_u32.to_be_bytes().to_vec();
    hello.extend_from_slice(b"IHAVEOPT");
    hello.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 1, b'd']);
    hello
}

/// An NBD request at that MiB.
fn request(kind: u8, at_mib: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend_from_slice(&[0, 0, 0, kind]);
    bytes.extend_from_slice(&at_mib.to_be_bytes());
    bytes.extend_from_slice(&(at_mib * u64::from(MIB)).to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes
}

/// SIGTERM took 30 s when a client did not read, and nothing could change that.
#[test]
fn a_client_that_never_reads_is_cut_off_after_the_drain_limit() {
    let served = ServedDisk::new(&["--drain-limit", "2"]);
    let client = served.deaf_client();
    let asked = Instant::now();
    served.server.signal("TERM");
    let took = served.ended(asked);
    assert!(took < Duration::from_secs(2) + SLACK, "{took:?}");
    assert!(took >= Duration::from_millis(1500), "it has its time");
    drop(client);
}

/// Who stops in the middle of a sentence has nothing to wait for, and is not waited for.
#[test]
fn clients_that_stop_in_the_middle_do_not_hold_the_end_up() {
    let limits = ["--drain-limit", "600", "--handshake-limit", "600"];
    let served = ServedDisk::new(&limits);
    let send = |mut client: UnixStream, bytes: &[u8]| {
        client.write_all(bytes).expect("it is read");
        client
    };
    let write = request(1, 0, 65536);
    let clients = [
        served.client(),
        send(served.client(), &hello()[..9]),
        served.client_of_export(),
        send(served.client_of_export(), &write[..11]),
        send(served.client_of_export(), &[&write[..], &[7; 100]].concat()),
    ];
    std::thread::sleep(Duration::from_millis(300));
    let asked = Instant::now();
    served.server.signal("TERM");
    let took = served.ended(asked);
    assert!(took < SLACK, "{took:?}");
    drop(clients);
}

/// `gaur export remove` took 20 s and more.
#[test]
fn the_removal_of_an_export_has_a_drain_limit_too() {
    let served = ServedDisk::new(&["--drain-limit", "600"]);
    let client = served.deaf_client();
    let asked = Instant::now();
    let remove = ["export", "remove", "--control", &served.control];
    gaur(&[&remove[..], &["--drain-limit", "1", "d"]].concat()).ok();
    assert!(asked.elapsed() < Duration::from_secs(1) + SLACK);
    assert_clean(&served.image);
    drop(client);
    served.server.stop();
}

/// The second signal ends a server that waits for a client.
#[test]
fn second_signal_ends_the_server_at_once() {
    let mut served = ServedDisk::new(&["--drain-limit", "600"]);
    let client = served.deaf_client();
    served.server.signal("TERM");
    std::thread::sleep(Duration::from_secs(1));
    let asked = Instant::now();
    served.server.signal("TERM");
    let end = served.server.wait();
    assert!(asked.elapsed() < SLACK, "{end}");
    assert_eq!(end.code, 1, "{end}");
    assert!(end.stderr.contains("stopped at once"), "{end}");
    drop(client);
}

/// `timeout` signals its child, and then the child's group: the server took that for two signals, and
/// often ended at once.
#[test]
fn a_server_that_timeout_ends_is_ended_in_order() {
    let scratch = Scratch::new("end");
    let image = scratch.path("d.qcow2");
    gaur(&["create", "-q", &image, "64M"]).ok();
    for _ in 0..3 {
        let (program, socket) = (binary(), scratch.path("s"));
        let line = ["--preserve-status", "1", program, "serve", "-t", "-k"];
        let end = run("timeout", &[&line[..], &[&socket, &image]].concat());
        assert_eq!(end.code, 0, "{end}");
        assert!(!end.stderr.contains("stopped at once"), "{end}");
        assert_clean(&image);
    }
}

/// Ends a client of a control socket, as it must within the slack; its exit code and what it said.
#[track_caller]
fn ended_client(verb: &[&str], mut client: Child) -> (Option<i32>, String) {
    let start = Instant::now();
    while client.try_wait().expect("a child").is_none() {
        if start.elapsed() > SLACK {
            client.kill().expect("a child can be killed");
            panic!("{verb:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = client.wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said)
}

/// `gaur export list` waited for ever for a server that hung, and SIGTERM did not end it.
#[test]
fn clients_of_a_server_that_hangs_say_so_and_obey_signals() {
    let served = ServedDisk::new(&[]);
    served.server.signal("STOP");
    let start = |verb: &[&str], timeout: &str| {
        let socket = ["--control", &served.control, "--timeout", timeout];
        let mut command = Command::new(binary());
        command
            .args([verb, &socket].concat())
            .stderr(Stdio::piped());
        command.spawn().expect("gaur starts")
    };
    let save = ["snapshot", "save", "s", "--state", &served.image];
    for verb in [
        &["export", "list"][..],
        &["export", "remove", "d"],
        &["export", "resize", "d", "+1M"],
        &["snapshot", "list"],
        &["snapshot", "create", "s"],
        &save,
    ] {
        let (code, said) = ended_client(verb, start(verb, "1"));
        assert_eq!(code, Some(1), "{verb:?}: {said}");
        assert!(said.contains("has not answered for 1 s"), "{said}");
        assert!(said.contains("--timeout"), "{said}");
    }
    for (verb, told) in [
        (&["export", "list"][..], None),
        (&["snapshot", "create", "s"], Some(130)),
    ] {
        let client = start(verb, "600");
        std::thread::sleep(Duration::from_millis(500));
        run("kill", &["-TERM", &client.id().to_string()]).ok();
        let (code, said) = ended_client(verb, client);
        assert_eq!(code, told, "{verb:?}: {said}");
    }
    served.server.signal("CONT");
    served.server.stop();
}

/// A server that waits for a client of an export is at work, and its control client waits with it.
#[test]
fn a_command_that_takes_long_is_not_taken_for_a_hang() {
    let served = ServedDisk::new(&[]);
    let client = served.deaf_client();
    let remove = ["export", "remove", "--control", &served.control];
    let more = ["--timeout", "3", "--drain-limit", "6", "d"];
    gaur(&[&remove[..], &more].concat()).ok();
    drop(client);
    served.server.stop();
}

/// A server that is storage for another, and can be made to hang.
struct HangingStorage(Child);

impl HangingStorage {
    fn signal(&self, name: &str) {
        run("kill", &[name, &self.0.id().to_string()]).ok();
    }
}

impl Drop for HangingStorage {
    fn drop(&mut self) {
        // A thread that waits for it in the kernel cannot end before.
        self.signal("-CONT");
        self.signal("-TERM");
        let _ = self.0.wait();
    }
}

/// A server whose image lay on a file system that did not answer any more never ended.
#[test]
fn a_file_system_that_hangs_holds_the_end_up_no_longer_than_the_close_limit() {
    let scratch = Scratch::new("end");
    let (below, image) = (scratch.path("below.qcow2"), scratch.path("d.raw"));
    gaur(&["create", "-q", &below, "64M"]).ok();
    std::fs::write(&image, "").expect("scratch is writable");
    let mut command = Command::new(binary());
    command.args(["serve", "-q", "--fuse", &image, &below]);
    let storage = HangingStorage(command.spawn().expect("gaur starts"));
    let deadline = Instant::now() + SLACK;
    while std::fs::metadata(&image).is_ok_and(|found| found.len() == 0) {
        assert!(Instant::now() < deadline, "the file is not covered");
        std::thread::sleep(Duration::from_millis(10));
    }
    let limits = ["--drain-limit", "1", "--close-limit", "2", "-f", "raw"];
    let mut server = serve_with(&image, &scratch.path("s"), &limits);
    storage.signal("-STOP");
    let uri = server.uri();
    let write = ["-f", "raw", "-c", "write 0 1M", "-c", "flush"].map(str::to_owned);
    let client = std::thread::spawn(move || {
        let words: Vec<&str> = write
            .iter()
            .map(String::as_str)
            .chain([uri.as_str()])
            .collect();
        run_for("qemu-io", &words, 20)
    });
    std::thread::sleep(Duration::from_millis(500));
    server.signal("TERM");
    std::thread::sleep(Duration::from_secs(8));
    // The server has given up by now, but the kernel keeps a process whose file does not close.
    storage.signal("-CONT");
    let end = server.wait();
    drop(client.join());
    assert_eq!(end.code, 1, "{end}");
    assert!(end.stderr.contains("--close-limit"), "{end}");
}
