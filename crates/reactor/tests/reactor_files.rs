//! Files on a reactor, with a ring and with the fallback, against the same contract.

#[path = "scratch/contract.rs"]
mod contract;
#[path = "scratch/files.rs"]
mod scratch;

use std::time::Duration;

use gaur_block::{Access, Errno, File, Host};
use gaur_reactor::{Config, Driver, Reactor, ReactorFile, ReactorHost, Stream, sleep, spawn};
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

fn reactor(driver: Driver) -> Reactor {
    Reactor::new(&Config {
        driver,
        ..Config::default()
    })
    .expect("io_uring works here")
}

async fn open(name: &str, access: Access) -> ReactorFile {
    ReactorHost
        .open(name.as_ref(), access)
        .await
        .expect("the file opens")
}

fn keeps_the_contract(scratch: fn() -> Scratch, access: Access, unit: usize) {
    for driver in [Driver::Ring, Driver::Fallback] {
        let scratch = scratch();
        let name = scratch.file_with("image", &vec![1; 1 << 20]);
        reactor(driver).block_on(async {
            let file = open(&name, access).await;
            contract::transfers(&file, unit).await;
            contract::zeroing(&file, unit).await;
            contract::ends(&file, unit).await;
        });
    }
}

#[test]
fn a_cached_file_keeps_the_contract() {
    keeps_the_contract(Scratch::on_disk, WRITE, 512);
    keeps_the_contract(Scratch::on_disk, WRITE, 77);
}

#[test]
fn a_file_in_memory_keeps_the_contract() {
    keeps_the_contract(Scratch::in_memory, WRITE, 512);
}

#[test]
fn a_direct_file_keeps_the_contract() {
    keeps_the_contract(Scratch::on_disk, DIRECT, 4096);
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
        reactor(Driver::Ring).block_on(async {
            let file = open(&device.path, access).await;
            assert_eq!(file.len().await, Ok(8 << 20));
            contract::transfers(&file, 4096).await;
            contract::zeroing(&file, 4096).await;
            assert_eq!(file.set_len(0).await, Err(Errno::EOPNOTSUPP));
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

/// Transfers that never wait must not keep the thread from everybody else.
#[test]
fn a_busy_task_leaves_others_their_turn() {
    for (scratch, driver) in [
        (Scratch::in_memory(), Driver::Ring),
        (Scratch::on_disk(), Driver::Ring),
        (Scratch::on_disk(), Driver::Fallback),
    ] {
        let name = scratch.file_with("image", &vec![1; 1 << 20]);
        reactor(driver).block_on(async {
            let file = open(&name, WRITE).await;
            let busy = spawn(async move {
                loop {
                    contract::write(&file, 0, &[1; 512]).await.unwrap();
                    contract::read(&file, 0, 512).await;
                }
            });
            let (ours, theirs) = Stream::pair().unwrap();
            let echo = spawn(async move {
                let mut byte = [0];
                while theirs.recv(&mut byte).await == Ok(1) {
                    theirs.send(&byte).await.unwrap();
                }
            });
            for round in 0..20 {
                let mut byte = [0];
                ours.send(&[round]).await.unwrap();
                assert_eq!(ours.recv(&mut byte).await, Ok(1));
                assert_eq!(byte, [round]);
                sleep(Duration::from_millis(1)).await;
            }
            drop((busy, echo));
        });
    }
}
