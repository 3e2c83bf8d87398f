//! A qcow2 image as a raw file (`gaur serve --fuse`), used by programs that know only files and
//! compared with what QEMU makes of the image. It needs root, a kernel with FUSE and loop devices.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gaur_interop::builder::{Kind, build, create, noise};
use gaur_interop::compare::{assert_same_bytes, assert_same_view};
use gaur_interop::gaur::{binary, gaur};
use gaur_interop::layout::Layout;
use gaur_interop::op;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// A server of one image at one path.
struct FuseServer {
    child: Child,
    file: String,
}

impl FuseServer {
    /// Serves `image` at the path of a file of its own.
    fn start(scratch: &Scratch, image: &str, more: &[&str]) -> FuseServer {
        let file = scratch.path("disk.raw");
        if !is_covered(&file) && std::fs::metadata(&file).is_err() {
            scratch.file("disk.raw", b"");
        }
        let mut command = Command::new(binary());
        command.args(["serve", "--fuse", &file]).args(more);
        command.arg(image).stdin(Stdio::null());
        // Its output goes to a file, so that it never waits for a reader.
        command.stdout(Stdio::null());
        let mut child = command.spawn().expect("gaur starts");
        let start = Instant::now();
        while !is_served(&file) {
            if let Some(status) = child.try_wait().expect("a child") {
                panic!("gaur serve --fuse: {status}");
            }
            assert!(start.elapsed() < PATIENCE, "the file is not covered");
            std::thread::sleep(Duration::from_millis(5));
        }
        FuseServer { child, file }
    }

    /// Ends it by a signal, and expects that nothing is left over the file.
    fn stop(mut self) {
        run("kill", &["-TERM", &self.child.id().to_string()]).ok();
        let status = self.child.wait().expect("a child");
        assert!(status.success(), "{status}");
        assert!(!is_covered(&self.file));
    }

    fn kill(mut self) -> String {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
        // What it leaves stays.
        std::mem::take(&mut self.file)
    }
}

/// Whether a server answers: the kernel remembers the size of a file whose server has just gone, but
/// cannot open it.
fn is_served(file: &str) -> bool {
    let opened = std::fs::File::open(file);
    opened
        .and_then(|file| file.metadata())
        .is_ok_and(|facts| facts.len() > 0)
}

fn is_covered(file: &str) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("a list of mounts");
    mounts
        .lines()
        .any(|line| line.split(' ').nth(4) == Some(file))
}

impl Drop for FuseServer {
    fn drop(&mut self) {
        // Of a test that failed; in the other case it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if is_covered(&self.file) {
            run("umount", &["--lazy", &self.file]);
        }
    }
}

fn layouts() -> [Layout; 3] {
    [Layout::v3(65536), Layout::extended(65536), Layout::v2(4096)]
}

#[test]
fn the_file_shows_what_is_in_the_image() {
    for kind in [Kind::Plain, Kind::Chain, Kind::Compressed, Kind::Snapshots] {
        for layout in layouts() {
            let scratch = Scratch::new("fuse-view");
            let image = build(kind, &layout, &scratch);
            let view = scratch.path("view.raw");
            gaur_interop::compare::qemu_view(&image, &view);
            let covered = FuseServer::start(&scratch, &image, &["--read-only"]);
            assert_same_bytes(&covered.file, &view);
            let copy = scratch.path("copy.raw");
            run("cp", &["--sparse=auto", &covered.file, &copy]).ok();
            assert_same_bytes(&copy, &view);
            qemu_img(&["compare", "-f", "raw", "-F", "raw", &covered.file, &view]).ok();
            covered.stop();
        }
    }
}

/// The same operations by QEMU's tools on the file and on a twin of the image.
#[test]
fn the_file_takes_what_qemu_writes() {
    for layout in layouts() {
        let scratch = Scratch::new("fuse-ops");
        let (ours, theirs) = (scratch.path("ours.qcow2"), scratch.path("theirs.qcow2"));
        create(&ours, &layout);
        create(&theirs, &layout);
        let ops = op::random(&layout, 5, 120, true, &noise(&scratch));
        op::apply("qcow2", &theirs, &ops);
        let covered = FuseServer::start(&scratch, &ours, &[]);
        op::apply("raw", &covered.file, &ops);
        assert_same_view(("raw", &covered.file), ("qcow2", &theirs));
        covered.stop();
        assert_clean(&ours);
        gaur(&["check", &ours]).ok();
        assert_same_view(("qcow2", &ours), ("qcow2", &theirs));
    }
}

#[test]
fn fio_finds_what_it_wrote() {
    for (engine, direct) in [("libaio", "1"), ("psync", "0")] {
        let scratch = Scratch::new("fuse-fio");
        let image = scratch.path("disk.qcow2");
        gaur(&["create", "-q", &image, "256M"]).ok();
        let covered = FuseServer::start(&scratch, &image, &[]);
        let options = [
            "--name=verify",
            "--rw=randwrite",
            "--bsrange=4k-128k",
            "--size=256m",
            "--io_size=64m",
            "--iodepth=32",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
            &format!("--ioengine={engine}"),
            &format!("--direct={direct}"),
            &format!("--filename={}", covered.file),
        ];
        run("fio", &options).ok();
        covered.stop();
        assert_clean(&image);
    }
}

/// A loop device over the file, and a file system on it.
struct Mounted {
    device: String,
    folder: String,
}

impl Mounted {
    fn new(file: &str, scratch: &Scratch) -> Mounted {
        let made = run("losetup", &["--find", "--show", file]).ok();
        let device = made.stdout.trim().to_owned();
        let folder = scratch.path("mounted");
        std::fs::create_dir_all(&folder).expect("a folder");
        let mounted = Mounted { device, folder };
        run("mount", &[&mounted.device, &mounted.folder]).ok();
        mounted
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.folder)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &[&self.folder]);
        run("losetup", &["--detach", &self.device]);
    }
}

fn host_bytes(image: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(image).expect("facts").blocks() * 512
}

#[test]
fn a_file_system_in_it_is_mounted_over_a_loop_device() {
    for options in ["extended_l2=off", "extended_l2=on"] {
        let scratch = Scratch::new("fuse-loop");
        let image = scratch.path("disk.qcow2");
        gaur(&["create", "-q", "-o", options, &image, "512M"]).ok();
        let covered = FuseServer::start(&scratch, &image, &["--discard", "unmap"]);
        run("mkfs.ext4", &["-q", "-F", &covered.file]).ok();
        let noise = scratch.path("noise");
        let words: Vec<u8> = (0..40 * MIB / 8)
            .flat_map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_ne_bytes())
            .collect();
        scratch.file("noise", &words);
        let mounted = Mounted::new(&covered.file, &scratch);
        run("cp", &[&noise, &mounted.path("noise")]).ok();
        drop(mounted);
        run("fsck.ext4", &["-f", "-n", &covered.file]).ok();
        covered.stop();
        assert_clean(&image);
        let full = host_bytes(&image);
        // Another server, the same bytes.
        let covered = FuseServer::start(&scratch, &image, &["--discard", "unmap"]);
        let mounted = Mounted::new(&covered.file, &scratch);
        assert_same_bytes(&noise, &mounted.path("noise"));
        std::fs::remove_file(mounted.path("noise")).expect("it is there");
        run("sync", &["-f", &mounted.folder]).ok();
        run("fstrim", &[&mounted.folder]).ok();
        drop(mounted);
        covered.stop();
        assert_clean(&image);
        let trimmed = host_bytes(&image);
        assert!(trimmed + 30 * MIB < full, "{full} bytes, then {trimmed}");
    }
}

#[test]
fn holes_are_punched_down_to_the_image() {
    let scratch = Scratch::new("fuse-holes");
    let image = scratch.path("disk.qcow2");
    gaur(&["create", "-q", &image, "64M"]).ok();
    let covered = FuseServer::start(&scratch, &image, &[]);
    let write = "write -P 7 0 32M";
    run("qemu-io", &["-f", "raw", "-c", write, &covered.file]).ok();
    let full = host_bytes(&image);
    run("fallocate", &["-p", "-o", "8M", "-l", "16M", &covered.file]).ok();
    let map = qemu_img(&["map", "--output=json", "-f", "raw", &covered.file]).ok();
    let runs: Vec<(u64, bool)> = map
        .json()
        .as_array()
        .expect("a list")
        .iter()
        .map(|run| {
            let start = run["start"].as_u64().expect("a number");
            (start, run["data"] == true)
        })
        .collect();
    let expected = [(0, true), (8 * MIB, false), (24 * MIB, true)];
    assert_eq!(runs[..3], expected);
    assert_eq!(runs[3..], [(32 * MIB, false)]);
    run("qemu-img", &["info", "-f", "raw", &covered.file]).ok();
    covered.stop();
    assert_clean(&image);
    assert!(host_bytes(&image) + 15 * MIB < full);
}

#[test]
fn a_growable_image_grows_and_another_does_not() {
    let scratch = Scratch::new("fuse-grow");
    let image = scratch.path("disk.qcow2");
    gaur(&["create", "-q", &image, "1M"]).ok();
    let len = |file: &str| std::fs::metadata(file).expect("facts").len();
    let covered = FuseServer::start(&scratch, &image, &[]);
    let write = ["-f", "raw", "-c", "write -P 7 2M 64k", &covered.file];
    run("qemu-io", &write).refused();
    run("truncate", &["-s", "4M", &covered.file]).refused();
    assert_eq!(len(&covered.file), MIB);
    covered.stop();
    let covered = FuseServer::start(&scratch, &image, &["--growable"]);
    let grow = format!("of={}", covered.file);
    let options = ["if=/dev/urandom", &grow, "bs=64k", "seek=32", "count=1"];
    run("dd", &[&options[..], &["conv=notrunc"]].concat()).ok();
    assert_eq!(len(&covered.file), 2 * MIB + 65536);
    run("truncate", &["-s", "8M", &covered.file]).ok();
    assert_eq!(len(&covered.file), 8 * MIB);
    let noise = scratch.file("some", &[9; 5_000_001]);
    run("cp", &[&noise, &covered.file]).ok();
    assert_eq!(len(&covered.file), 5_000_192);
    run("cmp", &["-n", "5000001", &noise, &covered.file]).ok();
    covered.stop();
    assert_clean(&image);
    let info = qemu_img(&["info", "--output=json", &image]).ok().json();
    assert_eq!(info["virtual-size"], 5_000_192);
}

/// What a program had made durable is there after the server was killed and another one started.
#[test]
fn a_server_that_is_killed_loses_nothing_that_was_flushed() {
    let scratch = Scratch::new("fuse-kill");
    let image = scratch.path("disk.qcow2");
    gaur(&["create", "-q", &image, "256M"]).ok();
    for round in 1..=5_u64 {
        let covered = FuseServer::start(&scratch, &image, &[]);
        let pattern = format!("write -P {round} {}M 1M", round * 2);
        let words = ["-f", "raw", "-c", &pattern, "-c", "flush", &covered.file];
        run("qemu-io", &words).ok();
        let mut load = Command::new("fio");
        load.args(["--name=load", "--rw=randwrite", "--bs=4k", "--offset=32m"]);
        load.args(["--size=200m", "--ioengine=libaio", "--iodepth=16"]);
        load.args(["--time_based", "--runtime=60", "--direct=1"]);
        load.arg(format!("--filename={}", covered.file));
        load.stdout(Stdio::null()).stderr(Stdio::null());
        let mut load = load.spawn().expect("fio starts");
        std::thread::sleep(Duration::from_millis(300));
        let file = covered.kill();
        assert!(is_covered(&file), "a dead mount is left");
        assert!(!load.wait().expect("it ends").success());
    }
    // At worst there are leaks, which is no damage.
    let checked = qemu_img(&["check", &image]);
    assert!([0, 3].contains(&checked.code), "{checked}");
    let covered = FuseServer::start(&scratch, &image, &["--read-only"]);
    for round in 1..=5_u64 {
        let pattern = format!("read -P {round} {}M 1M", round * 2);
        let words = ["-r", "-f", "raw", "-c", &pattern, &covered.file];
        let read = run("qemu-io", &words).ok();
        let differs = read.stdout.contains("verification failed");
        assert!(!differs, "{read}");
    }
    covered.stop();
}

#[test]
fn unusable_fuse_mount_point_is_reported() {
    let scratch = Scratch::new("fuse-refused");
    let image = scratch.path("disk.qcow2");
    gaur(&["create", "-q", &image, "1M"]).ok();
    let missing = scratch.path("missing");
    let folder = scratch.folder().to_str().expect("text");
    for (file, told) in [
        (missing.as_str(), "no such file"),
        (folder, "not a regular file"),
        ("/dev/null", "not a regular file"),
    ] {
        let refused = gaur(&["serve", "--fuse", file, &image]).refused();
        assert!(refused.stderr.contains(told), "{refused}");
    }
    let covered = FuseServer::start(&scratch, &image, &[]);
    let other = scratch.path("other.qcow2");
    gaur(&["create", "-q", &other, "1M"]).ok();
    let refused = gaur(&["serve", "--fuse", &covered.file, &other]).refused();
    assert!(refused.stderr.contains("already"), "{refused}");
    covered.stop();
}
