//! ublk servers in this process, with devices that no image is. Clients are processes of their own:
//! the process that serves a block device must not wait for it.

#![cfg(feature = "ublk")]

mod harness;

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gaur_block::{Device, DeviceLimits, Errno, Payload, Request, Status};
use gaur_export::Front;
use gaur_export::device::{Memory, Null};
use gaur_export::ublk::{self, Deletion, Options, Server, State};
use harness::counting::{Counting, allocations};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MIB: u64 = 1 << 20;

/// Memory that may break its word, and whose size changes.
#[derive(Clone)]
struct Odd {
    memory: Memory,
    size_bytes: Arc<AtomicU64>,
    /// Reads from here on panic.
    panics_from: u64,
}

impl Odd {
    fn new(size_bytes: u64) -> Odd {
        Odd {
            memory: Memory::new(2 * size_bytes),
            size_bytes: Arc::new(AtomicU64::new(size_bytes)),
            panics_from: u64::MAX,
        }
    }
}

impl Device for Odd {
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    fn limits(&self) -> DeviceLimits {
        self.memory.limits()
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        if let Request::Read { offset_bytes } = request {
            assert!(
                offset_bytes < self.panics_from,
                "this device was told to panic"
            );
        }
        self.memory.submit(request, payload).await
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
        self.memory.status(offset_bytes, len_bytes).await
    }
}

fn options() -> Options {
    let mut options = Options::new();
    options.queues = 2;
    options.depth = Some(16);
    options.buffer_bytes = 64 << 10;
    options.partition_scan = false;
    options
}

#[track_caller]
fn start<D: Device + Clone + Send + Sync + 'static>(options: Options, device: D) -> Server {
    ublk::start(options, move |_| Ok(device.clone())).unwrap_or_else(|error| panic!("{error}"))
}

fn shell(line: &str, server: &Server) -> Output {
    let mut command = Command::new("timeout");
    let command = command.args(["60", "sh", "-ec", line, &server.place()]);
    command.output().expect("a shell runs")
}

#[track_caller]
fn works(line: &str, server: &Server) {
    let output = shell(line, server);
    assert!(output.status.success(), "{line}: {output:?}");
}

#[track_caller]
fn finish(server: Server) {
    let (place, id) = (server.place(), server.info().id);
    server.stop();
    Box::new(server).finish().expect("it ends in order");
    assert!(!Path::new(&place).exists());
    assert!(ublk::info(id).is_err());
}

/// Writes noise and reads it again.
const ROUND_TRIP: &str = "cd \"$(mktemp -d)\"
head -c 300000 /dev/urandom >noise
dd if=noise of=\"$0\" bs=4k conv=fsync,notrunc status=none
head -c 300000 \"$0\" | cmp - noise
dd if=\"$0\" bs=64k count=4 iflag=direct status=none | cmp -n 262144 - noise";

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn requests_allocate_nothing_after_warm_up() {
    let server = start(options(), Null::new(64 * MIB));
    let name = format!("--filename={}", server.place());
    let job = [
        "--name=load",
        &name,
        "--ioengine=io_uring",
        "--direct=1",
        "--rw=randrw",
        "--bsrange=512-128k",
        "--iodepth=32",
        "--fsync=16",
        "--time_based",
        "--runtime=6",
    ];
    let mut load = Command::new("fio");
    let load = load.args(job).stdout(std::process::Stdio::null());
    let mut load = load.spawn().expect("fio runs");
    std::thread::sleep(Duration::from_secs(3));
    let before = allocations();
    std::thread::sleep(Duration::from_secs(1));
    let after = allocations();
    assert!(load.wait().expect("fio ends").success());
    assert_eq!(after - before, 0, "in a second of load");
    finish(server);
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn threads_may_be_fewer_or_more_than_queues() {
    for threads in [1, 2, 4] {
        let mut options = options();
        options.threads = Some(threads);
        let server = start(options, Memory::new(64 * MIB));
        works(ROUND_TRIP, &server);
        finish(server);
    }
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn a_device_that_panics_fails_its_request_and_no_other() {
    let mut device = Odd::new(16 * MIB);
    device.panics_from = 8 * MIB;
    let server = start(options(), device);
    for _ in 0..40 {
        let bad = "dd if=\"$0\" of=/dev/null bs=4k skip=2048 count=1 iflag=direct status=none";
        let output = shell(bad, &server);
        assert!(!output.status.success(), "{output:?}");
    }
    works(ROUND_TRIP, &server);
    finish(server);
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn the_size_follows_the_device() {
    let device = Odd::new(16 * MIB);
    let size_bytes = Arc::clone(&device.size_bytes);
    let server = start(options(), device);
    size_bytes.store(24 * MIB, Ordering::Relaxed);
    server.resized().expect("the kernel takes it");
    works("test $(blockdev --getsize64 \"$0\") = 25165824", &server);
    works(
        "dd if=/dev/zero of=\"$0\" bs=1M seek=23 count=1 oflag=direct status=none",
        &server,
    );
    size_bytes.store(24 * MIB + 1, Ordering::Relaxed);
    let error = server.resized().expect_err("no whole sectors");
    assert!(error.to_string().contains("512"), "{error}");
    finish(server);
}

/// A server ends and leaves its device, another one goes on with it, from the same memory.
#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn a_server_leaves_its_device_to_the_next() {
    let memory = Memory::new(16 * MIB);
    let mut server = start(options(), memory.clone());
    let id = server.info().id;
    works(
        "echo one | dd of=\"$0\" bs=512 conv=sync,fsync,notrunc status=none",
        &server,
    );
    for _ in 0..5 {
        server.quiesce().expect("it can");
        Box::new(server).finish().expect("it ends in order");
        let end = Instant::now() + Duration::from_secs(10);
        while ublk::info(id).expect("it stays").state != State::Quiesced {
            assert!(Instant::now() < end, "the driver lets go of the server");
        }
        let again = memory.clone();
        let next = ublk::recover(id, options(), move |_| Ok(again.clone()));
        server = next.unwrap_or_else(|error| panic!("{error}"));
        works("test $(head -c 3 \"$0\") = one", &server);
    }
    works(ROUND_TRIP, &server);
    assert_eq!(ublk::delete(id, true), Ok(Deletion::Gone));
    Box::new(server).finish().expect("it ends in order");
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn what_does_not_start_leaves_no_device() {
    let before = ublk::list().expect("a list");
    let failing = |thread| match thread {
        1 => Err("no device for the second thread".to_owned()),
        _ => Ok(Null::new(MIB)),
    };
    let error = ublk::start(options(), failing).err().expect("it cannot");
    assert_eq!(error.to_string(), "no device for the second thread");
    for size_bytes in [0, 1000] {
        assert!(ublk::start(options(), move |_| Ok(Null::new(size_bytes))).is_err());
    }
    let panics = |_| -> Result<Null, String> { panic!("this one panics") };
    assert!(ublk::start(options(), panics).is_err());
    let end = Instant::now() + Duration::from_secs(10);
    while ublk::list().expect("a list") != before {
        assert!(Instant::now() < end, "what was made goes");
    }
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn the_end_of_a_read_only_device_is_zeros() {
    let mut options = options();
    options.read_only = true;
    let server = start(options, Null::new(8 * MIB + 1));
    works("test $(blockdev --getsize64 \"$0\") = 8389120", &server);
    works("test $(blockdev --getro \"$0\") = 1", &server);
    works("tail -c 4608 \"$0\" | cmp -n 4608 - /dev/zero", &server);
    assert!(
        !shell("echo 1 | dd of=\"$0\" bs=512 conv=sync,notrunc", &server)
            .status
            .success()
    );
    finish(server);
}

/// A server that is killed later leaves a block device; the command that started it must have been answered by then.
#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn the_number_is_told_before_there_is_a_block_device() {
    let told = Arc::new(AtomicU64::new(u64::MAX));
    let mut options = options();
    let number = Arc::clone(&told);
    options.added = Some(Arc::new(move |id| {
        assert!(!Path::new(&format!("/dev/ublkb{id}")).exists());
        number.store(id.into(), Ordering::Relaxed);
    }));
    let server = start(options, Null::new(MIB));
    assert_eq!(told.load(Ordering::Relaxed), server.info().id.into());
    assert!(Path::new(&server.place()).exists());
    finish(server);
}
