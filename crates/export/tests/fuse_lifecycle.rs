//! The beginnings and ends of a file that is a disk. They need root and a kernel with FUSE.

#![cfg(feature = "fuse")]

mod harness;

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gaur_export::Front;
use gaur_export::device::{Memory, Null};
use gaur_export::fuse::{self, Options};
use harness::covered::*;
use harness::*;

const MIB: u64 = 1 << 20;

fn refused(options: Options) -> String {
    match fuse::start(options, |_| Ok(Null::new(MIB))) {
        Ok(_) => panic!("it is covered"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn only_a_regular_file_that_is_there_is_covered() {
    let place = Place::new();
    let none = refused(Options::new(place.path("none")));
    assert!(none.contains("no such file"), "{none}");
    let folder = refused(Options::new(&place.folder));
    assert!(folder.contains("not a regular file"), "{folder}");
    let device = refused(Options::new("/dev/null"));
    assert!(device.contains("not a regular file"), "{device}");
}

#[test]
fn a_covered_file_is_refused() {
    let place = Place::new();
    let server = cover(place.options(), Null::new(MIB));
    let again = refused(place.options());
    assert!(again.contains("already"), "{again}");
    assert_eq!(std::fs::read(&place.file).expect("a read").len(), 1 << 20);
    finish(server);
    finish(cover(place.options(), Null::new(MIB)));
    place.expect_uncovered();
}

#[test]
fn a_link_leads_to_the_file() {
    let place = Place::new();
    let link = place.folder.join("link");
    std::os::unix::fs::symlink("disk.raw", &link).expect("a link");
    let mut options = place.options();
    options.path = link;
    let server = cover(options, Null::new(MIB));
    assert_eq!(std::fs::metadata(&place.file).expect("facts").len(), MIB);
    finish(server);
    place.expect_uncovered();
}

#[test]
fn a_failed_device_leaves_nothing_mounted() {
    let place = Place::new();
    let mut options = place.options();
    options.threads = 3;
    let failed = fuse::start(options, |thread| match thread {
        2 => Err("this one not".to_owned()),
        _ => Ok(Null::new(MIB)),
    });
    let error = failed.err().expect("no server").to_string();
    assert_eq!(error, "this one not");
    place.expect_uncovered();
}

#[test]
fn unmounting_ends_the_server() {
    let place = Place::new();
    let mut options = place.options();
    options.threads = 2;
    let server = cover(options, Null::new(MIB));
    run("umount", &[&place.text()]);
    let ended = server.ended();
    eventually("the server has ended", || ended.is_stopped());
    Box::new(server).finish().expect("an orderly end");
    place.expect_uncovered();
}

#[test]
fn dropping_the_server_unmounts() {
    let place = Place::new();
    drop(cover(place.options(), Null::new(MIB)));
    place.expect_uncovered();
}

/// Programs in the middle of reading and writing get an error and none of them hangs.
#[test]
fn a_stop_under_load_ends_in_order() {
    for _ in 0..5 {
        let place = Place::new();
        let device = gate::Gated::new(16 * MIB);
        let mut options = place.options();
        options.threads = 2;
        let server = cover(options, device.clone());
        let transfers = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let file = OpenOptions::new().read(true).write(true).open(&place.file);
                let file = file.expect("it can be opened");
                let transfers = &transfers;
                scope.spawn(move || {
                    let mut bytes = vec![0; 64 << 10];
                    let offset = thread * MIB;
                    while file.write_all_at(&bytes, offset).is_ok()
                        && file.read_exact_at(&mut bytes, offset).is_ok()
                    {
                        transfers.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            eventually("load", || transfers.load(Ordering::Relaxed) > 50);
            finish(server);
        });
        assert!(device.gate.flushes.load(Ordering::Acquire) > 0);
        place.expect_uncovered();
    }
}

/// What is under way when a stop comes is answered; a second stop waits for nobody.
#[test]
fn a_stop_waits_for_requests_and_a_second_one_does_not() {
    for patient in [true, false] {
        let place = Place::new();
        let device = gate::Gated::new(MIB);
        let server = cover(place.options(), device.clone());
        let file = OpenOptions::new().read(true).open(&place.file);
        let file = file.expect("it can be opened");
        device.gate.close();
        let answered = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let read = file.read_exact_at(&mut [0; 512], 0);
                answered.store(true, Ordering::Release);
                read
            });
            let begun = || device.gate.begun.load(Ordering::Acquire) == 1;
            eventually("the request is under way", begun);
            server.stop();
            eventually("it is uncovered", || !place.is_covered());
            assert!(!answered.load(Ordering::Acquire));
            assert!(!server.ended().is_stopped());
            if patient {
                device.gate.open();
                reader.join().expect("no panic").expect("an answer");
                Box::new(server).finish().expect("an orderly end");
            } else {
                server.stop();
                reader.join().expect("no panic").expect_err("cut off");
                let forced = Box::new(server).finish().expect_err("not in order");
                assert!(forced.to_string().contains("at once"), "{forced}");
                device.gate.open();
            }
        });
    }
}

#[test]
fn a_device_that_panics_ends_the_export() {
    let place = Place::new();
    let device = gate::Gated::new(MIB);
    device.gate.panic_at(4096);
    let mut options = place.options();
    options.threads = 2;
    let server = cover(options, device.clone());
    let file = OpenOptions::new().read(true).open(&place.file);
    let file = file.expect("it can be opened");
    file.read_exact_at(&mut [0; 512], 0).expect("a read");
    file.read_exact_at(&mut [0; 512], 4096)
        .expect_err("nobody is left to answer");
    let ended = server.ended();
    eventually("the server has ended", || ended.is_stopped());
    Box::new(server).finish().expect_err("it did not end well");
    drop(file);
    place.expect_uncovered();
}

const CHILD: &str = "GAUR_FUSE_TEST_CHILD";

/// Not a test: the server of the next one, in a process of its own.
#[test]
fn serve_until_killed() {
    let Some(path) = std::env::var_os(CHILD) else {
        return;
    };
    let server = fuse::start(Options::new(path), |_| Ok(Memory::new(MIB)));
    let server = server.expect("it can be covered");
    std::thread::sleep(Duration::from_secs(60));
    finish(server);
}

/// A server that was killed leaves a mount that answers nobody; the next one takes it away.
#[test]
fn a_stale_mount_is_replaced() {
    let place = Place::new();
    let program = std::env::current_exe().expect("this program");
    let mut child = Command::new(program)
        .args(["--exact", "serve_until_killed"])
        .env(CHILD, &place.file)
        .stdout(Stdio::null())
        .spawn()
        .expect("this program again");
    let covered = || std::fs::metadata(&place.file).is_ok_and(|facts| facts.len() == MIB);
    eventually("it is covered", covered);
    let file = OpenOptions::new().write(true).open(&place.file);
    let file = file.expect("it can be opened");
    file.write_all_at(b"lost", 0).expect("a write");
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    // Its connection may end a moment after the process, and a write be under way by then.
    let dead = file.write_at(b"lost", 0).expect_err("nobody is there");
    let gone = [ErrorKind::NotConnected, ErrorKind::ConnectionAborted];
    assert!(gone.contains(&dead.kind()), "{dead}");
    drop(file);
    let server = cover(place.options(), Memory::new(2 * MIB));
    assert_eq!(
        std::fs::metadata(&place.file).expect("facts").len(),
        2 * MIB
    );
    let lines = place.lines.lock().unwrap().join("\n");
    assert!(lines.contains("gone"), "{lines}");
    finish(server);
    place.expect_uncovered();
}

#[test]
fn start_and_stop_repeat() {
    let place = Place::new();
    let start = Instant::now();
    for _ in 0..50 {
        let server = cover(place.options(), Null::new(MIB));
        assert_eq!(std::fs::metadata(&place.file).expect("facts").len(), MIB);
        finish(server);
    }
    let limit = Duration::from_secs(60);
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
    place.expect_uncovered();
}

#[test]
fn invalid_options_are_refused() {
    let place = Place::new();
    type Spoil = fn(&mut Options);
    let spoils: [(Spoil, &str); 4] = [
        (|options| options.threads = 0, "threads"),
        (|options| options.threads = 5000, "threads"),
        (|options| options.depth = 0, "depth"),
        (|options| options.depth = 1 << 20, "depth"),
    ];
    for (spoil, word) in spoils {
        let mut options = place.options();
        spoil(&mut options);
        let error = refused(options);
        assert!(error.contains(word), "{error}");
    }
}
