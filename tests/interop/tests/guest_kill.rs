//! `kill -9` of the server while its device is in use. A new server takes over; requests that were
//! waiting go on, and what the first one had flushed is there.

use std::time::Duration;

use gaur_interop::attached::{Shape, Via, assert_leaks_at_worst, attach_lasting};
use gaur_interop::ledger::{Ledger, Promise};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;

const SIZE_MIB: u64 = 512;
const MIB: u64 = 1 << 20;

/// Kills in one test.
fn rounds(via: Via) -> u64 {
    match (std::env::var_os("GAUR_GUEST_LONG"), via) {
        (Some(_), _) => 50,
        // The kernel needs seconds to find out that requests on a dead connection wait in vain.
        (None, Via::Nbd) => 2,
    }
}

/// Rounds of kills under a load that keeps book; the image is judged after each.
fn under_load(via: Via, shape: Shape) {
    let scratch = Scratch::new("kill");
    let image = shape.create(&scratch, SIZE_MIB);
    let mut disk = attach_lasting(via, &image, &scratch, &[]);
    let mut ledger = Ledger::new(&disk.path(), 256 * MIB, 8, 1);
    let mut random = Random::new(3);
    for round in 0..rounds(via) {
        ledger.start();
        std::thread::sleep(Duration::from_millis(100 + random.below(400)));
        ledger.server_dies();
        disk.kill();
        ledger.server_dies();
        assert_leaks_at_worst(&image);
        disk.recover();
        std::thread::sleep(Duration::from_millis(100));
        ledger.pause();
        println!("round {round}: {} writes", ledger.writes());
        ledger.verify(Promise::Flushed);
    }
    ledger.start();
    std::thread::sleep(Duration::from_millis(200));
    ledger.pause();
    ledger.verify(Promise::Flushed);
    disk.detach_unchecked();
    assert_leaks_at_worst(&image);
}

mod load {
    gaur_interop::every_disk!(crate::under_load);
}
