//! Long verbs that are interrupted: the first signal ends them in order, the second at once.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gaur_interop::gaur::{binary, gaur};
use gaur_interop::op::{self, Op};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

/// Exit code after a signal that was obeyed.
const INTERRUPTED: i32 = 130;
/// No verb may take longer to end, on a machine with other things to do.
const PATIENCE: Duration = Duration::from_secs(20);

fn start(arguments: &[&str]) -> Child {
    let mut command = Command::new(binary());
    command.args(arguments).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().expect("gaur starts")
}

fn signal(child: &Child, name: &str) {
    run("kill", &[&format!("-{name}"), &child.id().to_string()]);
}

/// Waits for the end; exit code and what was said.
#[track_caller]
fn end(mut child: Child) -> (i32, String) {
    let start = Instant::now();
    while child.try_wait().expect("a child is waited for").is_none() {
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().expect("a child is waited for");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    // A signal before the verb obeys signals ends the process as ever, with nothing changed.
    (output.status.code().unwrap_or(INTERRUPTED), said)
}

/// Runs a verb again and again, each time interrupted somewhere else, until it has come to its end
/// twice; `judge` gets each time whether it did.
fn interrupt_anywhere(
    name: &str,
    arguments: &[&str],
    mut prepare: impl FnMut(),
    mut judge: impl FnMut(bool),
) {
    let mut random = Random::new(7);
    prepare();
    let began = Instant::now();
    gaur(arguments).ok();
    let whole = began.elapsed();
    judge(true);
    for round in 0..12 {
        prepare();
        let child = start(arguments);
        let delay = random.below(whole.as_micros() as u64 + 1);
        std::thread::sleep(Duration::from_micros(delay));
        signal(&child, if round % 2 == 0 { "INT" } else { "TERM" });
        let (code, said) = end(child);
        assert!(
            code == 0 || code == INTERRUPTED,
            "{name}: code {code}: {said}"
        );
        assert!(said.lines().count() <= 1, "{name}: {said}");
        judge(code == 0);
    }
}

fn data(image: &str, offset: u64, len: u64) {
    let write = Op::Write {
        offset,
        len,
        pattern: 0x42,
    };
    op::apply("qcow2", image, &[write]);
}

fn size_of(image: &str) -> u64 {
    let info = qemu_img(&["info", "--output=json", image]).ok().json();
    info["virtual-size"].as_u64().expect("an image has a size")
}

/// An image with data, and a copy to begin with each time.
struct InterruptedImage {
    scratch: Scratch,
    image: String,
}

impl InterruptedImage {
    fn new(options: &str, size: &str, data_bytes: u64) -> InterruptedImage {
        let scratch = Scratch::new("interrupt");
        let image = scratch.path("d.qcow2");
        let original = scratch.path("original.qcow2");
        qemu_img(&[
            "create", "-q", "-f", "qcow2", "-o", options, &original, size,
        ])
        .ok();
        let mut offset = 0;
        while offset < data_bytes {
            let len = (data_bytes - offset).min(64 << 20);
            data(&original, offset, len);
            offset += len;
        }
        InterruptedImage { scratch, image }
    }

    fn restore(&self) {
        let original = self.scratch.path("original.qcow2");
        run("cp", &["--sparse=always", &original, &self.image]).ok();
    }
}

/// `gaur resize` ignored signals while it looked for a place that it did not find.
#[test]
fn interrupted_resize_is_atomic() {
    for (options, from, to, full) in [
        ("cluster_size=512", "40M", "8G", 1 << 20),
        ("cluster_size=4k", "1G", "500G", 1 << 20),
        ("cluster_size=512", "24M", "1M", 24 << 20),
        ("cluster_size=4k", "32M", "5M", 32 << 20),
    ] {
        let original = InterruptedImage::new(options, from, full);
        let image = &*original.image;
        let old = size_of(&original.scratch.path("original.qcow2"));
        let arguments = ["resize", "-q", "--shrink", image, to];
        let prepare = || original.restore();
        interrupt_anywhere("resize", &arguments, prepare, |done| {
            assert_clean(image);
            assert_eq!(size_of(image) != old, done, "the size says how it ended");
        });
    }
}

#[test]
fn interrupted_snapshot_change_is_atomic() {
    let original = InterruptedImage::new("cluster_size=512", "256M", 16 << 20);
    let source = original.scratch.path("original.qcow2");
    qemu_img(&["snapshot", "-c", "one", &source]).ok();
    data(&source, 0, 4 << 20);
    let image = &*original.image;
    for (verb, snapshot) in [("create", "two"), ("delete", "one"), ("apply", "one")] {
        let before = qemu_img(&["snapshot", "-l", &source]).ok().stdout;
        let arguments = ["snapshot", verb, "-q", image, snapshot];
        interrupt_anywhere(
            verb,
            &arguments,
            || original.restore(),
            |done| {
                assert_clean(image);
                let after = qemu_img(&["snapshot", "-l", image]).ok().stdout;
                let changed = before.lines().count() != after.lines().count();
                assert_eq!(changed, done && verb != "apply", "{verb}: {after}");
            },
        );
    }
}

#[test]
fn a_convert_that_is_interrupted_leaves_a_sound_image() {
    let original = InterruptedImage::new("cluster_size=4k", "48M", 40 << 20);
    let source = original.scratch.path("original.qcow2");
    let image = &*original.image;
    for target in [&["-O", "qcow2"][..], &["-n", "-O", "qcow2"]] {
        let mut arguments = vec!["convert", "-q"];
        arguments.extend(target);
        arguments.extend([source.as_str(), image]);
        let makes = !target.contains(&"-n");
        let prepare = || {
            if !makes {
                qemu_img(&["create", "-q", "-f", "qcow2", image, "48M"]).ok();
            }
        };
        interrupt_anywhere("convert", &arguments, prepare, |done| {
            // Before it was made, or in the middle of that, the target is no image.
            let start = std::fs::read(image).unwrap_or_default();
            if done || !makes || start.starts_with(b"QFI") {
                assert_clean(image);
            }
            if done {
                qemu_img(&["compare", "-q", &source, image]).ok();
            }
        });
    }
}

#[test]
fn interrupted_create_leaves_no_image() {
    let scratch = Scratch::new("create");
    for format in ["qcow2", "raw"] {
        let image = scratch.path("d");
        let options = ["create", "-q", "-f", format, "-o", "preallocation=full"];
        let arguments = [&options[..], &[image.as_str(), "96M"]].concat();
        let prepare = || drop(std::fs::remove_file(&image));
        interrupt_anywhere("create", &arguments, prepare, |done| {
            assert_eq!(std::fs::metadata(&image).is_ok(), done, "half an image");
        });
    }
}

#[test]
fn a_benchmark_that_is_interrupted_leaks_nothing() {
    let original = InterruptedImage::new("cluster_size=4k", "64M", 1 << 20);
    let image = &*original.image;
    let arguments = [
        "bench", "-q", "-w", "-c", "20000", "-s", "4k", "--random", image,
    ];
    interrupt_anywhere(
        "bench",
        &arguments,
        || original.restore(),
        |_| assert_clean(image),
    );
}

/// Reading verbs change nothing, but say that they have not come to their end.
#[test]
fn interrupted_reading_verb_reports_it() {
    let original = InterruptedImage::new("cluster_size=512", "64M", 48 << 20);
    let source = original.scratch.path("original.qcow2");
    original.restore();
    let image = &*original.image;
    for arguments in [&["check", image][..], &["compare", &source, image]] {
        let began = Instant::now();
        gaur(arguments).ok();
        let half = began.elapsed() / 2;
        let child = start(arguments);
        std::thread::sleep(half);
        signal(&child, "INT");
        let (code, said) = end(child);
        assert!(
            code == 0 || (code == INTERRUPTED && said.contains("interrupted")),
            "{arguments:?}: code {code}: {said}"
        );
    }
}

/// The second signal is for a verb that cannot obey the first: here one whose input never comes.
#[test]
fn the_second_signal_ends_a_verb_at_once() {
    let original = InterruptedImage::new("cluster_size=64k", "64M", 1 << 20);
    original.restore();
    let image = &*original.image;
    let fifo = original.scratch.path("fifo");
    run("mkfifo", &[&fifo]).ok();
    let _writer = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&fifo)
        .expect("a fifo opens");
    let child = start(&["snapshot", "save", image, "s", "--state", &fifo]);
    std::thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    for _ in 0..3 {
        signal(&child, "TERM");
        // Sooner it would be taken for the same signal.
        std::thread::sleep(Duration::from_millis(600));
    }
    let (code, _) = end(child);
    assert_eq!(code, INTERRUPTED);
    assert!(began.elapsed() < PATIENCE);
    assert_eq!(
        qemu_img(&["check", "-q", image]).code & !3,
        0,
        "leaks at worst"
    );
}
