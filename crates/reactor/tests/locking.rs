//! Gaur and QEMU keep each other out of one image, in both directions.

#[path = "scratch/files.rs"]
mod scratch;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gaur_block::{Access, Errno, OpenError};
use gaur_reactor::OpenFile;
use scratch::Scratch;

const WRITER: Access = Access {
    write: true,
    direct: false,
    lock: true,
    force_share: false,
};
const READER: Access = Access {
    write: false,
    ..WRITER
};
const FORCED: Access = Access {
    force_share: true,
    ..READER
};

/// One test at a time: a child of another test holds our descriptors between fork and exec.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `qemu-io` with the image open until this is dropped.
struct Qemu {
    child: Child,
}

impl Qemu {
    fn hold(name: &str, options: &[&str]) -> Qemu {
        let mut child = Command::new("qemu-io")
            .args(["-f", "qcow2"])
            .args(options)
            .arg(name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io is installed (Debian: qemu-utils)");
        // An answer to a command means that the image is open.
        child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(b"length\n")
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(line.contains("64 KiB"), "qemu-io said {line:?}");
        Qemu { child }
    }

    /// Whether `qemu-io` could open the image, and what it said.
    fn tries(name: &str, options: &[&str]) -> (bool, String) {
        let output = Command::new("qemu-io")
            .args(["-f", "qcow2", "-c", "read 0 512"])
            .args(options)
            .arg(name)
            .output()
            .expect("qemu-io is installed (Debian: qemu-utils)");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), said)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn image(scratch: &Scratch) -> String {
    // With a format driver; on raw images qemu-io shares everything.
    let name = scratch.file("image");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", &name, "64K"])
        .status()
        .expect("qemu-img is installed (Debian: qemu-utils)");
    assert!(made.success());
    name
}

fn refused(name: &str, access: Access) -> OpenError {
    let error = OpenFile::open(name, access).expect_err("the lock is in the way");
    assert_eq!(error.errno, Errno::EAGAIN);
    error
}

#[test]
fn a_writer_in_qemu_keeps_us_out() {
    let _turn = turn();
    let scratch = Scratch::on_disk();
    let name = image(&scratch);
    let qemu = Qemu::hold(&name, &[]);
    let error = refused(&name, WRITER);
    assert_eq!(
        error.reason,
        "cannot get the \"write\" lock; is another program using the image?"
    );
    let error = refused(&name, READER);
    assert!(
        error.reason.contains("another program is writing"),
        "{}",
        error.reason
    );
    OpenFile::open(&name, FORCED).unwrap();
    OpenFile::open(
        &name,
        Access {
            lock: false,
            ..WRITER
        },
    )
    .unwrap();
    drop(qemu);
    OpenFile::open(&name, WRITER).unwrap();
}

#[test]
fn a_reader_in_qemu_lets_us_read_only() {
    let _turn = turn();
    let scratch = Scratch::on_disk();
    let name = image(&scratch);
    let qemu = Qemu::hold(&name, &["-r"]);
    refused(&name, WRITER);
    OpenFile::open(&name, READER).unwrap();
    drop(qemu);

    let qemu = Qemu::hold(&name, &["-r", "-U"]);
    OpenFile::open(&name, WRITER).unwrap();
    drop(qemu);
}

#[test]
fn our_writer_keeps_qemu_out() {
    let _turn = turn();
    let scratch = Scratch::on_disk();
    let name = image(&scratch);
    let file = OpenFile::open(&name, WRITER).unwrap();
    let (opened, said) = Qemu::tries(&name, &[]);
    assert!(
        !opened && said.contains("Failed to get \"write\" lock"),
        "{said}"
    );
    let (opened, said) = Qemu::tries(&name, &["-r"]);
    assert!(
        !opened && said.contains("Failed to get shared \"write\" lock"),
        "{said}"
    );
    assert_eq!(Qemu::tries(&name, &["-r", "-U"]), (true, String::new()));

    // A clone is the same open file: the lock goes with the last one.
    let clone = file.clone();
    drop(file);
    assert!(!Qemu::tries(&name, &[]).0);
    drop(clone);
    assert_eq!(Qemu::tries(&name, &[]), (true, String::new()));
}

#[test]
fn our_reader_lets_qemu_read_only() {
    let _turn = turn();
    let scratch = Scratch::on_disk();
    let name = image(&scratch);
    let file = OpenFile::open(&name, READER).unwrap();
    let (opened, said) = Qemu::tries(&name, &[]);
    assert!(!opened && said.contains("lock"), "{said}");
    assert_eq!(Qemu::tries(&name, &["-r"]), (true, String::new()));
    drop(file);

    let _forced = OpenFile::open(&name, FORCED).unwrap();
    assert_eq!(Qemu::tries(&name, &[]), (true, String::new()));
}

#[test]
fn we_keep_ourselves_out() {
    let _turn = turn();
    let scratch = Scratch::on_disk();
    let name = image(&scratch);
    let writer = OpenFile::open(&name, WRITER).unwrap();
    refused(&name, WRITER);
    refused(&name, READER);
    drop(writer);
    let _readers = [
        OpenFile::open(&name, READER).unwrap(),
        OpenFile::open(&name, READER).unwrap(),
    ];
    refused(&name, WRITER);
}

/// A ring that is being taken down keeps its registered files open for a moment after the program
/// has closed them; a duplicate stands for it here.
#[test]
fn lock_ends_with_our_last_handle_even_if_others_keep_the_file_open() {
    let _turn = turn();
    let scratch = Scratch::on_disk();
    let name = image(&scratch);
    let file = OpenFile::open(&name, WRITER).unwrap();
    let clone = file.clone();
    let _kept_open = file.local_fd().unwrap().try_clone_to_owned().unwrap();
    drop(file);
    refused(&name, READER);
    drop(clone);
    OpenFile::open(&name, WRITER).unwrap();
}
