//! The blocking host against real files.

#[path = "scratch/contract.rs"]
mod contract;
#[path = "scratch/files.rs"]
mod scratch;

use std::path::PathBuf;

use gaur_block::{Access, Errno, File, Host, Source, Within};
use gaur_reactor::{BlockingFile, BlockingHost, CreateFile, OpenFile, block_on};
use scratch::{LoopDevice, Scratch};

const WRITE: Access = Access {
    write: true,
    direct: false,
    lock: true,
    force_share: false,
};
const DIRECT: Access = Access {
    direct: true,
    ..WRITE
};
const READ: Access = Access {
    write: false,
    ..WRITE
};

fn open(name: &str, access: Access) -> BlockingFile {
    block_on(BlockingHost.open(name.as_ref(), access)).expect("the file opens")
}

fn keeps_the_contract(scratch: &Scratch, access: Access, unit: usize) {
    let name = scratch.file_with("image", &vec![1; 1 << 20]);
    let file = open(&name, access);
    block_on(async {
        contract::transfers(&file, unit).await;
        contract::zeroing(&file, unit).await;
        contract::ends(&file, unit).await;
    });
}

#[test]
fn a_cached_file_keeps_the_contract() {
    keeps_the_contract(&Scratch::on_disk(), WRITE, 512);
    keeps_the_contract(&Scratch::on_disk(), WRITE, 77);
}

#[test]
fn a_file_in_memory_keeps_the_contract() {
    keeps_the_contract(&Scratch::in_memory(), WRITE, 512);
    keeps_the_contract(&Scratch::in_memory(), WRITE, 100);
}

#[test]
fn a_direct_file_keeps_the_contract() {
    keeps_the_contract(&Scratch::on_disk(), DIRECT, 4096);
}

#[test]
fn a_block_device_keeps_the_contract() {
    for (sector, access) in [(512, WRITE), (512, DIRECT), (4096, WRITE), (4096, DIRECT)] {
        let scratch = Scratch::on_disk();
        let backing = scratch.file_with("disk", &vec![1; 8 << 20]);
        let Some(device) = LoopDevice::attach(&backing, sector) else {
            eprintln!("skipped: this machine gives no loop device");
            return;
        };
        let file = open(&device.path, access);
        let limits = file.limits();
        assert!(!limits.resizable && !limits.discard_zeroes && !limits.read_only);
        if access.direct {
            assert_eq!(limits.request_alignment, sector);
        }
        block_on(async {
            assert_eq!(file.len().await, Ok(8 << 20));
            contract::transfers(&file, 4096).await;
            contract::zeroing(&file, 4096).await;
            assert_eq!(file.set_len(0).await, Err(Errno::EOPNOTSUPP));
            let extent = file.extent_at(4096).await.unwrap();
            assert_eq!((extent.len, extent.data), ((8 << 20) - 4096, true));
            // Reading across the end gives zeros, writing beyond it fails.
            let bytes = contract::pattern(9, 4096);
            contract::write(&file, (8 << 20) - 4096, &bytes)
                .await
                .unwrap();
            let tail = contract::read(&file, (8 << 20) - 4096, 3 * 4096).await;
            assert_eq!(tail, [&bytes[..], &[0; 8192]].concat());
            assert_eq!(
                contract::write(&file, 8 << 20, &bytes).await,
                Err(Errno::ENOSPC)
            );
        });
    }
}

#[test]
fn a_read_only_file_refuses_every_change() {
    let scratch = Scratch::on_disk();
    let name = scratch.file_with("image", &[1; 4096]);
    let file = open(&name, READ);
    assert!(file.limits().read_only);
    block_on(async {
        assert_eq!(
            file.write_at(0, Source::memory(&[2])).await,
            Err(Errno::EROFS)
        );
        assert_eq!(
            file.write_at(0, Source::memory(&[])).await,
            Err(Errno::EROFS)
        );
        assert_eq!(file.write_zeroes_at(0, 1, true).await, Err(Errno::EROFS));
        assert_eq!(file.discard_at(0, 1).await, Err(Errno::EROFS));
        assert_eq!(file.allocate_at(0, 1).await, Err(Errno::EROFS));
        assert_eq!(file.set_len(0).await, Err(Errno::EROFS));
        assert_eq!(contract::read(&file, 0, 4096).await, [1; 4096]);
    });
}

fn open_error(name: &str, access: Access) -> (Errno, String) {
    let error = OpenFile::open(name, access).expect_err("it does not open");
    (error.errno, error.reason)
}

#[test]
fn what_is_no_image_file_is_refused_in_words() {
    let scratch = Scratch::on_disk();
    let (errno, reason) = open_error(&scratch.file("missing"), READ);
    assert_eq!(
        (errno, reason.as_str()),
        (Errno::ENOENT, "no such file or directory")
    );

    let (errno, reason) = open_error(&scratch.file("."), READ);
    assert_eq!(errno.raw(), libc::EISDIR);
    assert_eq!(
        reason,
        "is a directory; an image is a regular file or a block device"
    );

    let fifo = scratch.file("fifo");
    let made = std::process::Command::new("mkfifo")
        .arg(&fifo)
        .status()
        .unwrap();
    assert!(made.success());
    let (errno, reason) = open_error(&fifo, READ);
    assert_eq!(errno, Errno::EINVAL);
    assert!(reason.starts_with("is a fifo"), "{reason}");

    assert!(
        open_error("/dev/null", WRITE)
            .1
            .starts_with("is a character device")
    );
    assert_eq!(open_error("a\0b", READ).0, Errno::EINVAL);
    assert_eq!(
        open_error(&format!("{}/x", scratch.file_with("f", b"")), READ).1,
        "not a directory"
    );
}

#[test]
fn create_makes_and_empties_files_and_nothing_by_accident() {
    let scratch = Scratch::on_disk();
    let name = scratch.file("new");
    let fresh = CreateFile {
        lock: true,
        ..CreateFile::default()
    };
    let file = OpenFile::create(&name, fresh).unwrap();
    let locked = OpenFile::create(
        &name,
        CreateFile {
            truncate_existing: true,
            ..fresh
        },
    );
    assert_eq!(locked.unwrap_err().errno, Errno::EAGAIN);
    drop(file);

    std::fs::write(&name, b"old").unwrap();
    assert_eq!(
        OpenFile::create(&name, fresh).unwrap_err().errno.raw(),
        libc::EEXIST
    );
    assert_eq!(std::fs::read(&name).unwrap(), b"old");
    OpenFile::create(
        &name,
        CreateFile {
            truncate_existing: true,
            ..fresh
        },
    )
    .unwrap();
    assert_eq!(std::fs::read(&name).unwrap(), b"");
}

#[test]
fn a_file_is_known_by_itself_and_not_by_its_name() {
    let scratch = Scratch::on_disk();
    let name = scratch.file_with("a", b"");
    let link = scratch.file("b");
    std::os::unix::fs::symlink(&name, &link).unwrap();
    let other = scratch.file_with("c", b"");
    assert_eq!(open(&name, READ).id(), open(&link, READ).id());
    assert_ne!(open(&name, READ).id(), open(&other, READ).id());
}

/// An image beside `/dev/sda` must not get at it, nor by `--allow /dev`; a volume that the user names is a
/// base like any other, by a link to it too.
#[test]
fn a_block_device_is_within_a_place_only_when_it_is_the_place() {
    let scratch = Scratch::on_disk();
    let backing = scratch.file_with("backing", &[0; 4096]);
    let Some(device) = LoopDevice::attach(&backing, 512) else {
        return;
    };
    let link = scratch.file("link");
    std::os::unix::fs::symlink(&device.path, &link).unwrap();
    let open = |name: &str, place: &str| {
        let places = [PathBuf::from(place)];
        let within = Within::Places(&places);
        let opened = block_on(BlockingHost.open_within(name.as_ref(), within, READ));
        opened.map(|_| ()).map_err(|error| error.errno)
    };
    let folder = std::path::Path::new(&link).parent().unwrap();
    let folder = folder.to_str().unwrap();
    assert_eq!(open(&device.path, "/dev"), Err(Errno::EXDEV));
    assert_eq!(open(&link, folder), Err(Errno::EXDEV));
    assert_eq!(open(&device.path, &device.path), Ok(()));
    assert_eq!(open(&link, &device.path), Ok(()));
    assert_eq!(open(&device.path, &link), Ok(()));
}
