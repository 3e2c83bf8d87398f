//! Overlays of one base in one server: they share the base's open files, its caches and its index.

use std::process::Command;

use gaur_interop::builder::{create, noise};
use gaur_interop::gaur::{binary, gaur};
use gaur_interop::layout::Layout;
use gaur_interop::nbd::Server;
use gaur_interop::op::{self, Op};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img};

const LAYOUT: Layout = Layout::v3(4096);
const DEPTH: usize = 8;
const OVERLAYS: usize = 100;

struct Shelf {
    scratch: Scratch,
    server: Server,
}

impl Shelf {
    /// A chain of images, each with writes of its own, and a server without exports.
    fn new(name: &str) -> Shelf {
        let scratch = Scratch::new(name);
        let noise = noise(&scratch);
        for number in 0..DEPTH {
            let path = scratch.path(&format!("base{number}"));
            create(&path, &LAYOUT);
            if let Some(below) = number.checked_sub(1) {
                over(&path, &format!("base{below}"));
            }
            let writes = op::random(&LAYOUT, number as u64, 30, true, &noise);
            op::apply("qcow2", &path, &writes);
        }
        let (socket, control) = (scratch.path("s"), scratch.path("c"));
        let mut command = Command::new(binary());
        command.args(["serve", "-e", "0", "-k", &socket, "--control", &control]);
        let server = Server::start(command, &socket);
        Shelf { scratch, server }
    }

    /// A new overlay over the highest of them.
    fn overlay(&self, number: usize) -> String {
        let path = self.scratch.path(&format!("overlay{number}"));
        create(&path, &LAYOUT);
        over(&path, &format!("base{}", DEPTH - 1));
        path
    }

    fn command(&self, words: &[&str]) {
        let control = self.scratch.path("c");
        let (verb, rest) = words.split_first().expect("a verb");
        gaur(&[&["export", verb, "--control", &control], rest].concat()).ok();
    }

    fn add(&self, number: usize) {
        let path = self.scratch.path(&format!("overlay{number}"));
        self.command(&["add", "-x", &number.to_string(), &path]);
    }

    fn uri(&self, number: usize) -> String {
        format!("nbd+unix:///{number}?socket={}", self.scratch.path("s"))
    }

    /// An export and its image are the same to QEMU.
    fn assert_same(&self, number: usize) {
        let path = self.scratch.path(&format!("overlay{number}"));
        let uri = self.uri(number);
        qemu_img(&["compare", "-U", "-f", "raw", "-F", "qcow2", &uri, &path]).ok();
    }

    /// Files of the chain and overlays that the server has open.
    fn open_files(&self) -> usize {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.server.id()));
        let names = files.expect("the server runs").filter_map(|file| {
            let name = std::fs::read_link(file.ok()?.path()).ok()?;
            Some(name.file_name()?.to_string_lossy().into_owned())
        });
        names
            .filter(|name| name.starts_with("base") || name.starts_with("overlay"))
            .count()
    }

    /// Bytes of its memory.
    fn memory(&self) -> usize {
        let pages = std::fs::read_to_string(format!("/proc/{}/statm", self.server.id()));
        let pages = pages.expect("the server runs");
        let resident = pages.split(' ').nth(1).and_then(|pages| pages.parse().ok());
        resident.unwrap_or(usize::MAX >> 12) << 12
    }
}

/// Links an overlay to a backing file without looking at it.
fn over(overlay: &str, backing: &str) {
    let rebase = ["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", backing];
    qemu_img(&[&rebase[..], &[overlay]].concat()).ok();
}

#[test]
fn a_hundred_overlays_of_a_deep_base_cost_a_file_each_and_read_as_qemu_does() {
    let shelf = Shelf::new("shelf");
    let mark = |number: usize| Op::Write {
        offset: 8192 * number as u64 + 512,
        len: 2048,
        pattern: number as u8,
    };
    let marked = |number: usize| Op::Expect {
        offset: 8192 * number as u64 + 512,
        len: 2048,
        pattern: number as u8,
    };
    (0..OVERLAYS).for_each(|number| drop(shelf.overlay(number)));
    shelf.add(0);
    shelf.assert_same(0);
    let memory = shelf.memory();
    assert_eq!(shelf.open_files(), 1 + DEPTH);
    for number in 1..OVERLAYS {
        shelf.add(number);
    }
    assert_eq!(shelf.open_files(), OVERLAYS + DEPTH);
    let each = shelf.memory().saturating_sub(memory) / (OVERLAYS - 1);
    assert!(each < 100 << 10, "{each} bytes for an overlay");
    for number in (0..OVERLAYS).step_by(7) {
        op::apply("raw", &shelf.uri(number), &[mark(number)]);
    }
    for number in (0..OVERLAYS).step_by(7) {
        op::apply("raw", &shelf.uri(number), &[marked(number)]);
        // Others see nothing of it.
        shelf.assert_same(number + 1);
    }
    // In any order, the one that opened the base among the first.
    let mut left: Vec<usize> = (0..OVERLAYS).collect();
    let mut random = Random::new(1);
    while left.len() > 1 {
        let next = match left.len() {
            OVERLAYS => 0,
            len => random.below(len as u64) as usize,
        };
        let number = left.swap_remove(next);
        shelf.command(&["remove", &number.to_string()]);
        if left.len().is_multiple_of(20) {
            shelf.assert_same(left[0]);
        }
    }
    shelf.command(&["remove", &left[0].to_string()]);
    assert_eq!(shelf.open_files(), 0);
    shelf.server.stop();
    for number in (0..OVERLAYS).step_by(7) {
        let path = shelf.scratch.path(&format!("overlay{number}"));
        assert_clean(&path);
        op::apply("qcow2", &path, &[marked(number)]);
    }
}

#[test]
fn a_base_that_was_replaced_is_not_shared_with_the_one_that_is_open() {
    let shelf = Shelf::new("replaced");
    (0..3).for_each(|number| drop(shelf.overlay(number)));
    shelf.add(0);
    shelf.add(1);
    let highest = shelf.scratch.path(&format!("base{}", DEPTH - 1));
    let copy = shelf.scratch.path("copy");
    std::fs::copy(&highest, &copy).expect("a copy");
    let noted = |pattern| Op::Expect {
        offset: 0,
        len: 512,
        pattern,
    };
    let note = |pattern| Op::Write {
        offset: 0,
        len: 512,
        pattern,
    };
    op::apply("raw", &shelf.uri(0), &[note(3)]);
    op::apply("qcow2", &copy, &[note(7)]);
    assert_eq!(shelf.open_files(), 2 + DEPTH);
    std::fs::rename(&copy, &highest).expect("the base is replaced");
    shelf.add(2);
    assert_eq!(shelf.open_files(), 3 + 2 * DEPTH);
    shelf.assert_same(2);
    op::apply("raw", &shelf.uri(2), &[noted(7)]);
    op::apply("raw", &shelf.uri(0), &[noted(3)]);
    // The base of what is served cannot be written to.
    let (path, uri) = (shelf.scratch.path("overlay2"), shelf.uri(2));
    gaur(&["commit", "-q", &path]).refused();
    op::apply("raw", &uri, &[noted(7)]);
    shelf.server.stop();
}
