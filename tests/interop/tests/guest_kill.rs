//! `kill -9` of the server while its device is in use. A new server takes over; requests that were
//! waiting go on, everything that was acknowledged is there, flushed or not, and users of the device do not notice.

use std::time::Duration;

use gaur_interop::attached::{DeviceKind, Shape, assert_leaks_at_worst, attach_lasting};
use gaur_interop::filesystem::Kind;
use gaur_interop::ledger::{Expected, Ledger};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::run_for;

const SIZE_MIB: u64 = 512;
const MIB: u64 = 1 << 20;

/// Kills in one test.
fn rounds(via: DeviceKind) -> u64 {
    match (std::env::var_os("GAUR_GUEST_LONG"), via) {
        (Some(_), _) => 50,
        // The kernel needs seconds to find out that requests on a dead connection wait in vain.
        (None, DeviceKind::Nbd) => 2,
        (None, DeviceKind::Ublk) => 8,
        (None, DeviceKind::Vduse) => 5,
    }
}

/// Rounds of kills under a load that keeps book; the image is judged after each.
fn under_load(via: DeviceKind, shape: Shape) {
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
        ledger.verify(Expected::Acknowledged);
    }
    ledger.start();
    std::thread::sleep(Duration::from_millis(200));
    ledger.pause();
    ledger.verify(Expected::Acknowledged);
    disk.detach_unchecked();
    assert_leaks_at_worst(&image);
}

/// A mounted file system with a load on it goes on over several kills.
fn below_a_file_system(via: DeviceKind, shape: Shape) {
    let scratch = Scratch::new("mounted");
    let image = shape.create(&scratch, SIZE_MIB);
    let mut disk = attach_lasting(via, &image, &scratch, &[]);
    Kind::Ext4.make(&disk.path());
    let mounted = Kind::Ext4.mount(&disk.path(), &scratch);
    let folder = format!("--directory={}", mounted.folder());
    let load = std::thread::spawn(move || {
        let job = [
            "--name=load",
            &folder,
            "--numjobs=2",
            "--size=24m",
            "--rw=randwrite",
            "--bsrange=1k-64k",
            "--fsync=50",
            "--end_fsync=1",
            "--loops=4",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
        ];
        run_for("fio", &job, 180)
    });
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(700));
        disk.kill();
        assert_leaks_at_worst(&image);
        disk.recover();
    }
    let run = load.join().expect("the load's thread ends").ok();
    assert!(!run.stderr.contains("verify"), "{run}");
    mounted.unmount();
    Kind::Ext4.check(&disk.path());
    disk.detach_unchecked();
    assert_leaks_at_worst(&image);
}

mod load {
    gaur_interop::every_disk!(crate::under_load);
}

mod mounted {
    gaur_interop::every_disk!(crate::below_a_file_system);
}
