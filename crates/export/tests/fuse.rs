//! Programs that know only files, on a file that is a disk. They need root and a kernel with FUSE.

#![cfg(feature = "fuse")]

mod harness;

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use gaur_export::Front;
use gaur_export::device::Memory;
use harness::covered::*;
use harness::*;

const MIB: u64 = 1 << 20;

fn open(place: &Place) -> File {
    let opened = OpenOptions::new().read(true).write(true).open(&place.file);
    opened.expect("the disk can be opened")
}

/// A file of noise, the same each time.
fn noise(place: &Place, name: &str, len: u64) -> String {
    let path = place.path(name);
    let mut state = 88_172_645_463_325_252_u64;
    let words = (0..len.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_ne_bytes()
    });
    let mut bytes: Vec<u8> = words.collect();
    bytes.truncate(len as usize);
    std::fs::write(&path, bytes).expect("room for noise");
    path
}

#[test]
fn the_file_is_the_disk() {
    let place = Place::new();
    let server = cover(place.options(), Memory::new(10 * MIB + 512));
    let facts = std::fs::metadata(&place.file).expect("facts");
    assert!(facts.is_file());
    assert_eq!(
        (facts.len(), facts.mode() & 0o7777),
        (10 * MIB + 512, 0o600)
    );
    // SAFETY: the call has no conditions.
    assert_eq!(facts.uid(), unsafe { libc::geteuid() });
    assert_eq!(server.place(), place.text());
    finish(server);
    place.expect_uncovered();
}

#[test]
fn copies_are_the_same() {
    for threads in [1, 3] {
        let place = Place::new();
        let mut options = place.options();
        options.threads = threads;
        let server = cover(options, Memory::new(24 * MIB));
        let noise = noise(&place, "noise", 16 * MIB + 12345);
        let (from, to) = (format!("if={noise}"), format!("of={}", place.text()));
        for block in ["bs=1000", "bs=4M"] {
            run("dd", &[&from, &to, block, "conv=notrunc", "status=none"]);
            let len = (16 * MIB + 12345).to_string();
            run("cmp", &["-n", &len, &noise, &place.text()]);
        }
        // What was never written is a hole, and stays one in a copy.
        let copy = place.path("copy");
        run("cp", &["--sparse=auto", &place.text(), &copy]);
        run("cmp", &[&place.text(), &copy]);
        let copied = std::fs::metadata(&copy).expect("facts");
        assert!(copied.blocks() * 512 < 18 * MIB, "{}", copied.blocks());
        finish(server);
    }
}

#[test]
fn transfers_of_any_place_and_length() {
    let place = Place::new();
    let device = gate::Gated::new(8 * MIB);
    let server = cover(place.options(), device.clone());
    let file = open(&place);
    for (offset, len) in [
        (0, 1),
        (511, 2),
        (4095, 4098),
        (1, 1 << 20),
        (3 << 20, (2 << 20) + 1),
        (8 * MIB - 1, 1),
    ] {
        let bytes = pattern(offset, len);
        file.write_all_at(&bytes, offset).expect("a write");
        let mut read = vec![0; len];
        file.read_exact_at(&mut read, offset).expect("a read");
        assert!(read == bytes, "{len} bytes at {offset}");
    }
    // The end is where it is.
    let mut tail = [0; 100];
    assert_eq!(file.read_at(&mut tail, 8 * MIB - 60).expect("a read"), 60);
    assert_eq!(file.read_at(&mut tail, 8 * MIB).expect("a read"), 0);
    assert_eq!(file.read_at(&mut tail, 9 * MIB).expect("a read"), 0);
    assert_eq!(file.write_at(&tail, 8 * MIB - 60).expect("a write"), 60);
    let full = file.write_at(&tail, 8 * MIB).expect_err("no room");
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let longest = device
        .gate
        .longest
        .load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(longest, 1 << 20, "long transfers stay long");
    drop(file);
    finish(server);
}

#[test]
fn a_device_with_short_transfers_gets_short_ones() {
    let place = Place::new();
    let device = gate::Gated::new(8 * MIB);
    device.gate.limit_transfer(64 << 10);
    let server = cover(place.options(), device.clone());
    let file = open(&place);
    let bytes = pattern(5, 3 << 20);
    file.write_all_at(&bytes, 5).expect("a write");
    let mut read = vec![0; bytes.len()];
    file.read_exact_at(&mut read, 5).expect("a read");
    assert!(read == bytes);
    let longest = device
        .gate
        .longest
        .load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(longest, 64 << 10);
    drop(file);
    finish(server);
}

#[test]
fn fio_finds_what_it_wrote() {
    for (engine, threads) in [("libaio", 1), ("libaio", 3), ("psync", 2), ("io_uring", 2)] {
        let place = Place::new();
        let mut options = place.options();
        options.threads = threads;
        let server = cover(options, Memory::new(32 * MIB));
        let arguments = [
            "--name=verify",
            &format!("--filename={}", place.text()),
            &format!("--ioengine={engine}"),
            "--rw=randwrite",
            "--bsrange=512-256k",
            "--bs_unaligned",
            "--direct=0",
            "--size=32m",
            "--io_size=64m",
            "--iodepth=32",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--randrepeat=1",
        ];
        let mut direct = arguments.to_vec();
        direct.retain(|argument| *argument != "--direct=0" && *argument != "--bs_unaligned");
        direct.push("--direct=1");
        run("fio", &arguments);
        run("fio", &direct);
        finish(server);
    }
}

/// Takes a loop device down at the end.
struct Loop(String);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup")
            .args(["--detach", &self.0])
            .status();
    }
}

#[test]
fn a_file_system_on_a_loop_device() {
    let place = Place::new();
    let memory = Memory::new(64 * MIB);
    let mut options = place.options();
    options.threads = 2;
    let server = cover(options, memory.clone());
    run("mkfs.ext4", &["-q", "-F", &place.text()]);
    let device = Loop(
        run("losetup", &["--find", "--show", &place.text()])
            .trim()
            .to_owned(),
    );
    let folder = place.path("mounted");
    std::fs::create_dir(&folder).expect("a new folder");
    let noise = noise(&place, "noise", 20 * MIB);
    run("mount", &[&device.0, &folder]);
    run("cp", &[&noise, &format!("{folder}/noise")]);
    run("sync", &["-f", &folder]);
    run("umount", &[&folder]);
    run("fsck.ext4", &["-f", "-n", &device.0]);
    let before = data_bytes(&place);
    run("mount", &[&device.0, &folder]);
    run("cmp", &[&noise, &format!("{folder}/noise")]);
    std::fs::remove_file(format!("{folder}/noise")).expect("it is there");
    run("sync", &["-f", &folder]);
    run("fstrim", &[&folder]);
    run("umount", &[&folder]);
    let after = data_bytes(&place);
    assert!(after + 15 * MIB < before, "{before} bytes, then {after}");
    drop(device);
    run("fsck.ext4", &["-f", "-n", &place.text()]);
    finish(server);
}

/// How much of the disk is no hole, by `lseek(2)`.
fn data_bytes(place: &Place) -> u64 {
    let file = File::open(&place.file).expect("it can be opened");
    let seek = |at: u64, whence| {
        // SAFETY: no memory is passed.
        let found = unsafe { libc::lseek(file.as_raw_fd(), at as i64, whence) };
        u64::try_from(found).ok()
    };
    let (mut at, mut sum) = (0, 0);
    while let Some(data) = seek(at, libc::SEEK_DATA) {
        at = seek(data, libc::SEEK_HOLE).expect("the end is a hole");
        sum += at - data;
    }
    sum
}

#[test]
fn holes_are_punched_and_found() {
    let place = Place::new();
    let server = cover(place.options(), Memory::new(8 * MIB));
    assert_eq!(data_bytes(&place), 0);
    let file = open(&place);
    file.write_all_at(&pattern(0, 4 << 20), 0).expect("a write");
    assert_eq!(data_bytes(&place), 4 * MIB);
    let text = place.text();
    run("fallocate", &["-p", "-o", "1M", "-l", "1M", &text]);
    assert_eq!(data_bytes(&place), 3 * MIB);
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &text]);
    assert_eq!(map.matches("\"data\": true").count(), 2, "{map}");
    // Beyond the end there is nothing to punch, and the size stays.
    run("fallocate", &["-p", "-o", "7M", "-l", "5M", &text]);
    run("fallocate", &["-z", "-n", "-o", "2M", "-l", "512K", &text]);
    let mut bytes = vec![1; 4 << 20];
    file.read_exact_at(&mut bytes, 0).expect("a read");
    let mut expected = pattern(0, 4 << 20);
    expected[1 << 20..5 << 19].fill(0);
    assert!(bytes == expected);
    assert_eq!(
        std::fs::metadata(&place.file).expect("facts").len(),
        8 * MIB
    );
    let info = run("qemu-img", &["info", "-f", "raw", &text]);
    assert!(info.contains("8 MiB (8388608 bytes)"), "{info}");
    drop(file);
    finish(server);
}

#[test]
fn a_disk_of_fixed_size_is_not_truncated() {
    let place = Place::new();
    let server = cover(place.options(), Memory::new(8 * MIB));
    let file = open(&place);
    file.write_all_at(b"kept", 0).expect("a write");
    for size in [0, 4 * MIB, 9 * MIB] {
        let refused = file.set_len(size).expect_err("not by this");
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    }
    file.set_len(8 * MIB).expect("no change is no harm");
    let emptied = File::create(&place.file).expect_err("that truncates");
    assert_eq!(emptied.kind(), ErrorKind::PermissionDenied);
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, 0).expect("a read");
    assert_eq!(&bytes, b"kept");
    drop(file);
    finish(server);
}

fn elastic(place: &Place, size_bytes: u64) -> gaur_export::Server {
    let device = Elastic::new(size_bytes);
    let resized = device.clone();
    let mut options = place.options();
    options.threads = 2;
    options.resize = Some(Arc::new(move |size_bytes| resized.resize(size_bytes)));
    cover(options, device)
}

#[test]
fn a_growing_disk_grows_when_it_is_written_to() {
    let place = Place::new();
    let server = elastic(&place, 0);
    let len = || std::fs::metadata(&place.file).expect("facts").len();
    assert_eq!(len(), 0);
    let noise = noise(&place, "noise", 5 * MIB + 1);
    run("cp", &[&noise, &place.text()]);
    assert_eq!(len(), 5 * MIB + 512);
    run(
        "cmp",
        &["-n", &(5 * MIB + 1).to_string(), &noise, &place.text()],
    );
    run("truncate", &["-s", "6M", &place.text()]);
    assert_eq!(len(), 6 * MIB);
    run("fallocate", &["-l", "7M", &place.text()]);
    assert_eq!(len(), 7 * MIB);
    run("fallocate", &["-z", "-o", "7M", "-l", "1M", &place.text()]);
    assert_eq!(len(), 8 * MIB);
    run("truncate", &["-s", "1M", &place.text()]);
    assert_eq!(len(), MIB);
    let file = open(&place);
    let refused = file.write_at(b"too far", Elastic::MOST).expect_err("no");
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    assert!(file.set_len(Elastic::MOST + 1).is_err());
    let lines = place.lines.lock().unwrap().join("\n");
    assert!(lines.contains("not that elastic"), "{lines}");
    drop(file);
    finish(server);
}

#[test]
fn resize_is_seen_through_open_files() {
    let place = Place::new();
    let device = Elastic::new(4 * MIB);
    let server = cover(place.options(), device.clone());
    let file = open(&place);
    assert_eq!(file.metadata().expect("facts").len(), 4 * MIB);
    device.resize(6 * MIB).expect("elastic");
    server.resized().expect("the kernel is told");
    assert_eq!(file.metadata().expect("facts").len(), 6 * MIB);
    file.write_all_at(b"new", 5 * MIB).expect("a write");
    let mut bytes = [0; 3];
    file.read_exact_at(&mut bytes, 5 * MIB).expect("a read");
    assert_eq!(&bytes, b"new");
    drop(file);
    finish(server);
}

#[test]
fn a_read_only_export_refuses_writes() {
    let place = Place::new();
    let mut options = place.options();
    options.read_only = true;
    let server = cover(options, Memory::new(MIB));
    let facts = std::fs::metadata(&place.file).expect("facts");
    assert_eq!(facts.mode() & 0o7777, 0o400);
    let refused = OpenOptions::new().write(true).open(&place.file);
    let refused = refused.expect_err("read only");
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    assert_eq!(std::fs::read(&place.file).expect("a read").len(), 1 << 20);
    finish(server);
}

#[test]
fn owner_permissions_and_times_can_be_set() {
    let place = Place::new();
    let server = cover(place.options(), Memory::new(MIB));
    let text = place.text();
    run("chmod", &["640", &text]);
    run("chown", &["12:34", &text]);
    run("touch", &["-d", "@1000000000", &text]);
    let facts = std::fs::metadata(&place.file).expect("facts");
    assert_eq!(facts.mode() & 0o7777, 0o640);
    assert_eq!((facts.uid(), facts.gid()), (12, 34));
    assert_eq!(facts.mtime(), 1_000_000_000);
    // A write moves the time on, a read does not.
    let file = open(&place);
    file.read_exact_at(&mut [0; 512], 0).expect("a read");
    assert_eq!(file.metadata().expect("facts").mtime(), 1_000_000_000);
    file.write_all_at(b"new", 0).expect("a write");
    let moved = || file.metadata().expect("facts").mtime() > 1_000_000_000;
    eventually("the time has moved on", moved);
    drop(file);
    finish(server);
}

#[test]
fn fsync_and_dsync_flush() {
    use std::os::unix::fs::OpenOptionsExt;
    let place = Place::new();
    let device = gate::Gated::new(MIB);
    let server = cover(place.options(), device.clone());
    let flushes = || {
        device
            .gate
            .flushes
            .load(std::sync::atomic::Ordering::Acquire)
    };
    let file = open(&place);
    file.write_all_at(b"x", 0).expect("a write");
    assert_eq!(flushes(), 0);
    file.sync_data().expect("a flush");
    assert_eq!(flushes(), 1);
    file.sync_all().expect("a flush");
    assert_eq!(flushes(), 2);
    drop(file);
    eventually("closing flushes", || flushes() == 3);
    let fua = device
        .gate
        .durable
        .load(std::sync::atomic::Ordering::Acquire);
    assert_eq!(fua, 0);
    let mut options = OpenOptions::new();
    let file = options.write(true).custom_flags(libc::O_DSYNC);
    let file = file.open(&place.file).expect("it can be opened");
    file.write_all_at(b"x", 0).expect("a write");
    let fua = device
        .gate
        .durable
        .load(std::sync::atomic::Ordering::Acquire);
    assert_eq!(fua, 1);
    drop(file);
    finish(server);
}

#[test]
fn a_shared_mapping_reads_and_writes_the_disk() {
    let place = Place::new();
    let server = cover(place.options(), Memory::new(MIB));
    let file = open(&place);
    file.write_all_at(b"before", 4096).expect("a write");
    // SAFETY: a mapping of a whole page of the file, which is longer, and is used as bytes only; it
    // is unmapped before it is forgotten.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let start = libc::mmap(
            std::ptr::null_mut(),
            4096,
            protection,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            4096,
        );
        assert_ne!(
            start,
            libc::MAP_FAILED,
            "{}",
            std::io::Error::last_os_error()
        );
        let bytes = std::slice::from_raw_parts_mut(start.cast::<u8>(), 4096);
        assert_eq!(&bytes[..6], b"before");
        bytes[..6].copy_from_slice(b"after!");
        assert_eq!(libc::msync(start, 4096, libc::MS_SYNC), 0);
        libc::munmap(start, 4096);
    }
    let mut bytes = [0; 6];
    file.read_exact_at(&mut bytes, 4096).expect("a read");
    assert_eq!(&bytes, b"after!");
    drop(file);
    finish(server);
}

#[test]
fn errors_of_the_disk_reach_the_program() {
    let place = Place::new();
    let device = gate::Gated::new(MIB);
    let server = cover(place.options(), device.clone());
    let file = open(&place);
    for number in [libc::EIO, libc::ENOSPC] {
        device.gate.fail(gaur_block::Errno::from_raw(number));
        let failed = file.read_at(&mut [0; 512], 0).expect_err("it fails");
        assert_eq!(failed.raw_os_error(), Some(number));
        let failed = file.write_at(&[0; 512], 0).expect_err("it fails");
        assert_eq!(failed.raw_os_error(), Some(number));
        let failed = file.sync_all().expect_err("it fails");
        assert_eq!(failed.raw_os_error(), Some(number));
    }
    drop(file);
    let failed = end(server).expect_err("the last flush fails").to_string();
    assert!(failed.contains("flush"), "{failed}");
    place.expect_uncovered();
}
