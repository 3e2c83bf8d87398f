//! A program that is not part of Gaur's workspace and depends on `gaur` alone: it opens an overlay, serves
//! four threads, makes a snapshot with the state of a machine and reads all of it back.

use std::io::{Read, Write};
use std::thread;

use gaur::{CreateOptions, Disk, Format, OpenOptions, References, Reactor, ReactorConfig, Result};

const SHARE: u64 = 4 << 20;

fn serve(disk: &Disk, number: u64) -> Result<()> {
    let reactor = Reactor::new(&ReactorConfig::default())?;
    let queue = disk.queue();
    reactor.block_on(async {
        let start = number * SHARE;
        let mut bytes = vec![0; 64 << 10];
        queue.read_at(start, &mut bytes).await?;
        assert!(bytes.iter().all(|byte| *byte == b'b'), "what the base has");
        bytes.fill(number as u8);
        queue.write_at(start, &bytes).await?;
        queue.flush().await
    })
}

fn main() -> Result<()> {
    Disk::create("base.qcow2", &CreateOptions::new(4 * SHARE))?;
    let disk = Disk::open("base.qcow2", &OpenOptions::new(References::Beside))?;
    disk.blocking()
        .write_at(0, &vec![b'b'; 4 * SHARE as usize])?;
    disk.close()?;

    Disk::create(
        "disk.qcow2",
        &CreateOptions::overlay("base.qcow2", Format::Qcow2),
    )?;
    let disk = Disk::open("disk.qcow2", &OpenOptions::new(References::Beside))?;
    thread::scope(|scope| {
        for number in 0..4 {
            let disk = &disk;
            scope.spawn(move || serve(disk, number).expect("a thread is served"));
        }
    });

    let queue = disk.blocking();
    queue.save_state("now", |out| out.write_all(&[42; 5 << 20]))?;
    queue.write_at(0, &[0xff; 4 * SHARE as usize])?;
    queue.apply_snapshot("now")?;
    let mut state = Vec::new();
    queue.read_state("now")?.read_to_end(&mut state)?;
    assert!(state.len() == 5 << 20 && state.iter().all(|byte| *byte == 42));
    for number in 0..4 {
        let mut byte = [0; 1];
        queue.read_at(number * SHARE + 4096, &mut byte)?;
        assert_eq!(u64::from(byte[0]), number);
    }
    drop(queue);
    disk.close()
}
