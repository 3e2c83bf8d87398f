//! What the queues of a disk promise, whichever of them it is.

use std::io::{IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use gaur::{
    AsyncConfig, CreateOptions, Disk, Encryption, ErrorKind, Format, OpenOptions, Passphrase,
    Reactor, ReactorConfig, References, SharedBases, Unmap, spawn,
};
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;

struct Scratch {
    folder: TempDir,
}

impl Scratch {
    fn new() -> Scratch {
        let folder = tempfile::tempdir().expect("a folder");
        Scratch { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn disk(&self) -> Disk {
        let create = CreateOptions::new(SIZE);
        Disk::create(self.path("disk"), &create).expect("a new image");
        self.open("disk")
    }

    fn open(&self, name: &str) -> Disk {
        Disk::open(self.path(name), &OpenOptions::new(References::Beside)).expect("it opens")
    }
}

fn on_reactor<T>(work: impl AsyncFnOnce() -> T) -> T {
    let reactor = Reactor::new(&ReactorConfig::default()).expect("a reactor");
    reactor.block_on(work())
}

#[test]
fn what_one_queue_writes_every_other_reads() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    let blocking = disk.blocking();
    blocking.write_at(1, b"blocking").expect("a write");
    on_reactor(async || {
        let queue = disk.queue();
        let mut bytes = [0; 8];
        queue.read_at(1, &mut bytes).await.expect("a read");
        assert_eq!(&bytes, b"blocking");
        queue.write_at(1, b"a ring's").await.expect("a write");
    });
    let shared = disk.start(&AsyncConfig::default()).expect("threads");
    gaur::reactor::block_on(async {
        let bytes = shared.read_at(1, vec![0; 8]).await.expect("a read");
        assert_eq!(bytes, b"a ring's");
        shared.write_at(1, "a thread").await.expect("a write");
        shared.close().await;
    });
    let mut bytes = [0; 8];
    blocking.read_at(1, &mut bytes).expect("a read");
    assert_eq!(&bytes, b"a thread");
    drop(blocking);
    disk.close().expect("a clean end");
}

/// Front ends hold a request for every place of their rings, and poll it on the stack of a thread: what
/// is rare belongs on the heap.
#[test]
fn state_of_a_request_is_small() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    on_reactor(async || {
        let queue = disk.queue();
        let bytes = [0; 512];
        let write = size_of_val(&queue.write_at(0, &bytes));
        let flush = size_of_val(&queue.flush());
        assert!(write.max(flush) <= 6400, "{write} and {flush} bytes");
    });
}

#[test]
fn parts_of_memory_are_one_range_of_the_disk() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    let queue = disk.blocking();
    let parts = [
        IoSlice::new(b"one"),
        IoSlice::new(b""),
        IoSlice::new(b"two"),
    ];
    queue.write_vectored_at(65_533, &parts).expect("a write");
    let (mut left, mut right) = ([0; 1], [0; 5]);
    let mut parts = [IoSliceMut::new(&mut left), IoSliceMut::new(&mut right)];
    queue.read_vectored_at(65_533, &mut parts).expect("a read");
    assert_eq!((&left, &right), (b"o", b"netwo"));
    let shared = disk.start(&AsyncConfig::default()).expect("threads");
    gaur::reactor::block_on(async {
        let parts = vec!["si", "x"];
        shared
            .write_vectored_at(65_536, parts)
            .await
            .expect("a write");
        let parts = vec![vec![0; 4], vec![0; 2]];
        let parts = shared.read_vectored_at(65_533, parts).await;
        assert_eq!(parts.expect("a read"), [b"ones".to_vec(), b"ix".to_vec()]);
    });
}

#[test]
fn zeroed_and_discarded_ranges_read_as_zeros_and_status_tells() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    let queue = disk.blocking();
    queue.write_at(0, &[1; 256 << 10]).expect("a write");
    assert!(queue.status(0..64 << 10).expect("a status").allocated);
    queue.zero(0..64 << 10, Unmap::Forbidden).expect("zeros");
    queue.discard(64 << 10..128 << 10).expect("a discard");
    let status = queue.status(0..256 << 10).expect("a status");
    assert!(status.zero && status.len_bytes >= 64 << 10, "{status:?}");
    let mut bytes = vec![0xff; 192 << 10];
    queue.read_at(0, &mut bytes).expect("a read");
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    assert_eq!(zeros, 128 << 10);
}

#[test]
fn requests_beyond_the_end_fail_and_say_where() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    let queue = disk.blocking();
    let error = queue.write_at(SIZE - 1, b"two").expect_err("too far");
    let wanted = "cannot write 3 bytes at offset 16777215: no space left on device";
    assert_eq!(error.to_string(), wanted);
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    queue.grow(SIZE + 512).expect("room");
    queue.write_at(SIZE - 1, b"two").expect("there is room");
    assert_eq!(disk.size_bytes(), SIZE + 512);
    queue.grow(SIZE).expect_err("that would lose something");
    queue.shrink(SIZE).expect("it may");
    assert_eq!(queue.size_bytes(), SIZE);
}

#[test]
fn errors_of_opening_name_the_file_and_the_cause() {
    let scratch = Scratch::new();
    let text = Disk::open(scratch.path("none"), &OpenOptions::new(References::Beside));
    let text = text.expect_err("nothing is there").to_string();
    assert!(text.ends_with("none: no such file or directory"), "{text}");
    let disk = scratch.disk();
    let again = Disk::open(scratch.path("disk"), &OpenOptions::new(References::Beside));
    assert_eq!(again.expect_err("it is in use").kind(), ErrorKind::Locked);
    drop(disk);
    let create = CreateOptions::default();
    let text = Disk::create(scratch.path("new"), &create).expect_err("no size");
    assert!(text.to_string().ends_with("new: a new image needs a size"));
    let create = CreateOptions::new(SIZE);
    let text = Disk::create(scratch.path("disk"), &create).expect_err("it is there");
    assert!(text.to_string().ends_with("disk: the file exists already"));
    scratch.open("disk").close().expect("it is as it was");
}

#[test]
fn disk_in_use_is_closed_by_its_last_queue() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    let queue = disk.blocking();
    queue.write_at(0, b"kept").expect("a write");
    let error = disk.close().expect_err("a queue has it");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    drop(queue);
    let disk = scratch.open("disk");
    assert_eq!(disk.image().unclosed(), None);
    let mut bytes = [0; 4];
    disk.blocking().read_at(0, &mut bytes).expect("a read");
    assert_eq!(&bytes, b"kept");
}

#[test]
fn blocking_queue_moves_to_another_thread() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    let queue = disk.blocking();
    queue.write_at(0, &[1; 5000]).expect("a write");
    let moved = thread::spawn(move || {
        let mut bytes = [0; 5000];
        queue.read_at(0, &mut bytes).map(|()| bytes)
    });
    let bytes = moved.join().expect("no panic").expect("a read");
    assert_eq!(bytes, [1; 5000]);
}

#[test]
fn overlay_has_the_size_of_its_backing_image_and_never_writes_to_it() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    disk.blocking().write_at(0, b"below").expect("a write");
    disk.close().expect("a clean end");
    let create = CreateOptions::overlay("disk", Format::Qcow2);
    Disk::create(scratch.path("overlay"), &create).expect("an overlay");
    let overlay = scratch.open("overlay");
    assert_eq!(overlay.size_bytes(), SIZE);
    overlay.blocking().write_at(0, b"above").expect("a write");
    overlay.close().expect("a clean end");
    let mut bytes = [0; 5];
    let below = scratch.open("disk").blocking();
    below.read_at(0, &mut bytes).expect("a read");
    assert_eq!(&bytes, b"below");
}

#[test]
fn failed_state_leaves_no_snapshot_and_the_error_as_it_was() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    let queue = disk.blocking();
    let failed = queue.save_state("half", |out| {
        out.write_all(&[7; 3 << 20])?;
        Err(std::io::Error::other("the machine went away"))
    });
    let error = failed.expect_err("it did not end");
    assert_eq!(error.to_string(), "the machine went away");
    assert!(queue.snapshots().expect("a list").is_empty());
    queue
        .save_state("whole", |out| out.write_all(&[7; 3 << 20]))
        .expect("a snapshot");
    let mut state = queue.read_state("whole").expect("its state");
    assert_eq!(
        state.seek(SeekFrom::End(-1)).expect("a place"),
        (3 << 20) - 1
    );
    let mut rest = Vec::new();
    state.read_to_end(&mut rest).expect("a byte");
    assert_eq!(rest, [7]);
    drop(state);
    drop(queue);
    disk.close().expect("a clean end");
}

#[test]
fn state_is_saved_by_futures_too() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    on_reactor(async || {
        let queue = disk.queue();
        let saved = queue.save_state("now", async |out| Ok(out.write(&[3; 100_000]).await?));
        assert_eq!(saved.await.expect("a snapshot").vm_state_size, 100_000);
        let mut reader = queue.read_state("now").await.expect("its state");
        let mut bytes = [0; 100];
        assert_eq!(reader.read(&mut bytes).await.expect("a read"), 100);
        assert_eq!(bytes, [3; 100]);
    });
}

#[test]
fn async_queue_bounds_what_is_under_way_and_serves_all() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    let config = AsyncConfig {
        threads: 2,
        depth: 1,
        ..AsyncConfig::default()
    };
    let shared = disk.start(&config).expect("threads");
    let clone = shared.clone();
    on_reactor(async move || {
        let writes = (0..100_u64).map(|number| {
            let queue = clone.clone();
            spawn(async move { queue.write_at(number << 12, vec![number as u8; 4096]).await })
        });
        for write in writes.collect::<Vec<_>>() {
            write.await.expect("a write");
        }
    });
    let mut bytes = vec![0; 100 << 12];
    disk.blocking().read_at(0, &mut bytes).expect("a read");
    let same = |(number, page): (usize, &[u8])| page.iter().all(|byte| *byte == number as u8);
    assert!(bytes.chunks(4096).enumerate().all(same));
    gaur::reactor::block_on(shared.close());
    disk.close().expect("the threads have let go of it");
}

#[test]
fn dropped_request_of_an_async_queue_ends_by_itself() {
    let scratch = Scratch::new();
    let disk = scratch.disk();
    let shared = disk.start(&AsyncConfig::default()).expect("threads");
    let mut write = Box::pin(shared.write_at(0, vec![9; 1 << 20]));
    let polled = write
        .as_mut()
        .poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    assert!(polled.is_pending());
    drop(write);
    let after = shared.clone();
    gaur::reactor::block_on(shared.close());
    let mut bytes = vec![0; 1 << 20];
    disk.blocking().read_at(0, &mut bytes).expect("a read");
    assert!(bytes.iter().all(|byte| *byte == 9));
    let refused = gaur::reactor::block_on(after.flush());
    assert_eq!(
        refused.expect_err("it is closed").kind(),
        ErrorKind::Cancelled
    );
}

#[test]
fn overlays_that_share_their_base_are_read_and_written_apart_and_closed_in_any_order() {
    let scratch = Scratch::new();
    let base = scratch.disk();
    base.blocking().write_at(0, &[7; 8192]).expect("a write");
    base.close().expect("closed");
    let paths: Vec<PathBuf> = (0..6)
        .map(|number| scratch.path(&format!("overlay{number}")))
        .collect();
    for path in &paths {
        let create = CreateOptions::overlay(scratch.path("disk"), Format::Qcow2);
        Disk::create(path, &create).expect("an overlay");
    }
    let (bases, options) = (SharedBases::default(), OpenOptions::new(References::Beside));
    let open = |path: &PathBuf| Disk::open_sharing(path, &options, &bases).expect("it opens");
    let disks: Vec<Disk> = paths.iter().map(open).collect();
    assert!(disks.iter().all(|disk| disk.image().shares_base()));
    // Each on a thread of its own, with two queues on one reactor that share the thread's handles.
    thread::scope(|threads| {
        for pair in disks.chunks(2) {
            threads.spawn(move || {
                on_reactor(async || {
                    let queues: Vec<_> = pair.iter().map(Disk::queue).collect();
                    for (number, queue) in queues.iter().enumerate() {
                        let mut bytes = [0; 4096];
                        queue
                            .write_at(0, &[number as u8; 4096])
                            .await
                            .expect("a write");
                        queue.read_at(4096, &mut bytes).await.expect("a read");
                        assert_eq!(bytes, [7; 4096]);
                        queue.read_at(0, &mut bytes).await.expect("a read");
                        assert_eq!(bytes, [number as u8; 4096]);
                    }
                });
            });
        }
    });
    // The base is locked as long as one of them is open.
    let locked = Disk::open(scratch.path("disk"), &options).expect_err("in use");
    assert_eq!(locked.kind(), ErrorKind::Locked);
    let mut disks: Vec<Option<Disk>> = disks.into_iter().map(Some).collect();
    for number in [0, 5, 2, 1, 4] {
        disks[number].take().expect("open").close().expect("closed");
        let mut bytes = [0; 512];
        let left = disks[3].as_ref().expect("open");
        left.blocking().read_at(4096, &mut bytes).expect("a read");
        assert_eq!(bytes, [7; 512]);
    }
    assert!(Disk::open(scratch.path("disk"), &options).is_err());
    disks[3].take().expect("open").close().expect("closed");
    scratch.open("disk").close().expect("closed");
}

#[test]
fn encrypted_images_open_with_their_passphrase_only() {
    let scratch = Scratch::new();
    let passphrase = |text: &str| Passphrase::new(text.as_bytes().to_vec());
    let create = CreateOptions {
        passphrase: Some(passphrase("open")),
        encryption: Encryption {
            unlock_time: Duration::from_millis(1),
            ..Encryption::default()
        },
        ..CreateOptions::new(SIZE)
    };
    Disk::create(scratch.path("secret"), &create).expect("a new image");
    let open = |name: &str, key: Option<&str>| {
        let mut options = OpenOptions::new(References::Beside);
        if let Some(key) = key {
            options.keys.for_others(passphrase(key));
        }
        Disk::open(scratch.path(name), &options)
    };
    let refused = |key| open("secret", key).expect_err("it is locked").kind();
    assert_eq!(refused(None), ErrorKind::KeyMissing);
    assert_eq!(refused(Some("other")), ErrorKind::WrongKey);
    let disk = open("secret", Some("open")).expect("it opens");
    let queue = disk.blocking();
    let text = b"a text that shows";
    queue.write_at(4096, text).expect("a write");
    drop(queue);
    disk.close().expect("a close");
    let file = std::fs::read(scratch.path("secret")).expect("the file");
    assert!(!file.windows(text.len()).any(|bytes| bytes == text));

    // An overlay that is encrypted otherwise.
    let mut overlay = CreateOptions {
        passphrase: Some(passphrase("above")),
        encryption: create.encryption,
        ..CreateOptions::overlay("secret", Format::Qcow2)
    };
    let missing = Disk::create(scratch.path("above"), &overlay).expect_err("the base is locked");
    assert_eq!(missing.kind(), ErrorKind::KeyMissing);
    overlay.backing_keys.for_others(passphrase("open"));
    Disk::create(scratch.path("above"), &overlay).expect("an overlay");
    let mut options = OpenOptions::new(References::Beside);
    options.keys.add("base", passphrase("open"));
    options.keys.assign(1, "base");
    options.keys.for_others(passphrase("above"));
    let disk = Disk::open(scratch.path("above"), &options).expect("it opens");
    let mut bytes = [0; 17];
    disk.blocking().read_at(4096, &mut bytes).expect("a read");
    assert_eq!(&bytes, text);
}
