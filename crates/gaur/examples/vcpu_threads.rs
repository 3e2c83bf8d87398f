//! One queue for each thread: what a monitor does whose vCPU threads serve the disk themselves. The
//! threads meet only where their writes need new space in the same table.

use std::thread;

use gaur::{CreateOptions, Disk, OpenOptions, Reactor, ReactorConfig, References, Result};

const VCPUS: u64 = 4;
const SHARE: u64 = 16 << 20;

fn main() -> Result<()> {
    Disk::create("disk.qcow2", &CreateOptions::new(VCPUS * SHARE))?;
    let disk = Disk::open("disk.qcow2", &OpenOptions::new(References::Beside))?;
    thread::scope(|scope| {
        let disk = &disk;
        let vcpus = (0..VCPUS).map(|vcpu| scope.spawn(move || run(disk, vcpu)));
        let vcpus: Vec<_> = vcpus.collect();
        let mut results = vcpus.into_iter().map(|vcpu| vcpu.join());
        results.try_for_each(|result| result.expect("no thread panics"))
    })?;
    disk.close()
}

/// The thread of a vCPU: a ring and a queue of its own.
fn run(disk: &Disk, vcpu: u64) -> Result<()> {
    let reactor = Reactor::new(&ReactorConfig::default())?;
    let queue = disk.queue();
    let start = vcpu * SHARE;
    reactor.block_on(async {
        let mut bytes = vec![0; 64 << 10];
        for at in (start..start + SHARE).step_by(bytes.len()) {
            bytes.fill(vcpu as u8 + 1);
            queue.write_at(at, &bytes).await?;
            queue.read_at(at, &mut bytes).await?;
            assert!(bytes.iter().all(|byte| u64::from(*byte) == vcpu + 1));
        }
        queue.flush().await
    })
}
