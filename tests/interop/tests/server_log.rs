//! What a server says when its image fails, while it serves.

use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use gaur_interop::gaur::{binary, gaur};
use gaur_interop::nbd::Server;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{qemu_img, run};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// A server whose standard error goes to a file, and whose files are limited in length.
struct LoggedServer {
    server: Server,
    log: String,
    control: String,
}

impl LoggedServer {
    fn start(scratch: &Scratch, image: &str, more: &[&str]) -> LoggedServer {
        let (socket, log) = (scratch.path("s"), scratch.path("log"));
        let control = scratch.path("c");
        let mut command = Command::new("bash");
        let script = "log=$1; shift; exec \"$@\" 2>>\"$log\"";
        command.args(["-c", script, "bash", &log, binary()]);
        command.args(["serve", "-t", "-e", "8", "-k", &socket]);
        command.args(["--control", &control, "-x", "d"]);
        command.args(more).arg(image);
        File::create(&log).expect("scratch is writable");
        LoggedServer {
            server: Server::start(command, &socket),
            log,
            control,
        }
    }

    /// Bytes that a file may have from now on, `unlimited` for any number.
    fn limit(&self, bytes: &str) {
        let (id, limit) = (self.server.id().to_string(), format!("--fsize={bytes}:"));
        run("prlimit", &["--pid", &id, &limit]).ok();
    }

    fn uri(&self) -> String {
        self.server.uri().replace("///?", "///d?")
    }

    fn write(&self, at: u64) -> i32 {
        let write = Op::Write {
            offset: at,
            len: MIB,
            pattern: 0x55,
        };
        op::try_apply("raw", &self.uri(), &[write, Op::Flush]).code
    }

    fn lines(&self) -> Vec<String> {
        let log = std::fs::read_to_string(&self.log).expect("a log");
        log.lines().map(str::to_owned).collect()
    }

    /// Waits until a line has all these words.
    #[track_caller]
    fn says(&self, words: &[&str]) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let lines = self.lines();
            let has = |line: &&String| words.iter().all(|word| line.contains(word));
            if let Some(line) = lines.iter().find(has) {
                return line.clone();
            }
            assert!(Instant::now() < deadline, "no {words:?} in {lines:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn listed(&self) -> String {
        let list = ["export", "list", "--control", &self.control];
        gaur(&list).ok().stdout
    }
}

/// A server whose disk was full said nothing until it ended, and its operator learned of it from the
/// guest.
#[test]
fn the_first_failure_and_the_recovery_are_told_and_those_between_are_counted() {
    let scratch = Scratch::new("log");
    let image = scratch.zeros("d.raw", 0);
    qemu_img(&["create", "-q", "-f", "raw", &image, "64M"]).ok();
    let served = LoggedServer::start(&scratch, &image, &["-f", "raw"]);
    assert_eq!(served.write(0), 0);
    assert_eq!(served.lines().len(), 0, "nothing to be told");
    served.limit(&(16 * MIB).to_string());
    for at in 0..8 {
        assert_ne!(served.write((32 + at) * MIB), 0, "beyond the limit");
        // What has its place succeeds all the same, and that is no recovery.
        assert_eq!(served.write(0), 0);
    }
    let first = served.says(&["export \"d\"", "d.raw", "write of", "offset 33554432"]);
    assert!(first.contains("file too large"), "{first}");
    let words: Vec<&str> = first.split(' ').collect();
    assert_eq!(words[1].len(), "2026-01-01".len(), "the date: {first}");
    assert_eq!(words[2].matches(':').count(), 2, "the time: {first}");
    assert_eq!(served.lines().len(), 1, "{:#?}", served.lines());
    let listed = served.listed();
    assert!(listed.contains("file too large; "), "{listed}");
    served.limit("unlimited");
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(served.write(32 * MIB), 0, "there is room again");
    let again = served.says(&["export \"d\"", "succeeded again", "write of"]);
    assert!(again.contains("in all"), "{again}");
    assert_eq!(served.lines().len(), 2, "{:#?}", served.lines());
    assert!(!served.listed().contains("too large"));
    served.server.stop();
}

/// Corruption that a request met ended as an input/output error, and nothing said of what.
#[test]
fn corruption_is_logged_with_file_structure_and_offset() {
    let scratch = Scratch::new("log");
    let image = scratch.path("d.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &image, "64M"]).ok();
    let write = Op::Write {
        offset: 0,
        len: MIB,
        pattern: 0x55,
    };
    op::apply("qcow2", &image, &[write]);
    let mut bytes = std::fs::read(&image).expect("an image");
    let pointer = |at: usize| {
        let raw = u64::from_be_bytes(*bytes[at..].first_chunk().expect("inside"));
        (raw & 0x00ff_ffff_ffff_fe00) as usize
    };
    let entry = pointer(pointer(40));
    bytes[entry..entry + 8].copy_from_slice(&(1 << 63 | 0x51200_u64).to_be_bytes());
    std::fs::write(&image, bytes).expect("scratch is writable");
    let served = LoggedServer::start(&scratch, &image, &["-f", "qcow2"]);
    assert_ne!(served.write(0), 0, "the entry is damaged");
    let place = format!("l2 table at offset {entry}");
    let said = served.says(&["export \"d\"", "is corrupt", "d.qcow2", &place]);
    assert!(said.contains("0x8000000000051200"), "{said}");
    served.says(&["export \"d\"", "refuses writes", "corrupt"]);
    let listed = served.listed();
    assert!(listed.contains(&place), "{listed}");
    drop(served);
}

/// A folder for devices of its own, with a system log that a test reads.
const WITH_A_LOG: &str = r#"
set -e
folder=$1 log=$2; shift 2
mount -t tmpfs none "$folder"
for name in null zero random urandom log; do touch "$folder/$name"; done
for name in null zero random urandom; do mount --bind "/dev/$name" "$folder/$name"; done
mount --bind "$log" "$folder/log"
mount --rbind "$folder" /dev
exec "$@"
"#;

/// What a server in the background had to say went nowhere.
#[test]
fn a_server_in_the_background_writes_to_the_system_log() {
    let scratch = Scratch::new("log");
    let image = scratch.path("d.raw");
    qemu_img(&["create", "-q", "-f", "raw", &image, "64M"]).ok();
    let (folder, log) = (scratch.path("dev"), scratch.path("log"));
    std::fs::create_dir(&folder).expect("scratch is writable");
    let reader = UnixDatagram::bind(&log).expect("a socket");
    reader.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let (socket, pid) = (scratch.path("s"), scratch.path("pid"));
    let words = ["--mount", "bash", "-c", WITH_A_LOG, "bash", &folder, &log];
    let serve = [
        "serve",
        "--fork",
        "-q",
        "-t",
        "-f",
        "raw",
        "--pid-file",
        &pid,
    ];
    let line = [&words[..], &[binary()], &serve, &["-k", &socket, &image]].concat();
    run("unshare", &line).ok();
    let pid = std::fs::read_to_string(&pid).expect("its number");
    run("prlimit", &["--pid", pid.trim(), "--fsize=1048576:"]).ok();
    let write = Op::Write {
        offset: 32 * MIB,
        len: MIB,
        pattern: 0x55,
    };
    let uri = format!("nbd+unix:///?socket={socket}");
    let written = op::try_apply("raw", &uri, &[write]).code;
    let mut line = [0; 4096];
    let len = reader.recv(&mut line).expect("a line");
    run("kill", &["-TERM", pid.trim()]).ok();
    assert_ne!(written, 0, "beyond the limit");
    let line = String::from_utf8_lossy(&line[..len]);
    let start = format!("<28>gaur[{}]: ", pid.trim());
    assert!(line.starts_with(&start), "{line}");
    assert!(
        line.contains("write of") && line.contains("file too large"),
        "{line}"
    );
}

/// A failed write of metadata closes an image to writes, and only the guest saw that.
#[test]
fn an_image_that_refuses_writes_is_told_once() {
    let scratch = Scratch::new("log");
    let image = scratch.path("d.qcow2");
    gaur(&["create", "-q", &image, "64M"]).ok();
    let mut served = LoggedServer::start(&scratch, &image, &[]);
    assert_eq!(served.write(0), 0);
    served.limit("65536");
    for at in 1..6 {
        let ops = [
            Op::Write {
                offset: at * MIB,
                len: 4096,
                pattern: 1,
            },
            Op::Flush,
        ];
        assert_ne!(op::try_apply("raw", &served.uri(), &ops).code, 0);
    }
    served.says(&["export \"d\"", "d.qcow2", "failed: file too large"]);
    served.says(&["export \"d\"", "refuses writes until it is served anew"]);
    assert!(served.listed().contains("d: refuses writes"));
    let refusals = |line: &String| line.contains("refuses writes");
    assert_eq!(served.lines().into_iter().filter(refusals).count(), 1);
    assert!(served.lines().len() <= 4, "{:#?}", served.lines());
    served.server.signal("TERM");
    assert_ne!(served.server.wait().code, 0, "it was not flushed");
}
