//! The kernel gets memory by writing to a device of ours: by writing out what programs have
//! changed in files, or by swapping. A server that waits for memory meanwhile waits for itself, and so does
//! everybody else. The guest of these tests has little memory, and ends at once when a task hangs.

use gaur_interop::attached::{Attached, DeviceKind, Footprint, Shape, attach};
use gaur_interop::filesystem::Kind;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, run, run_for};

/// Longest time of a load, in seconds.
const LIMIT_SECONDS: u32 = 300;
/// Each write to new space also reads what is behind it.
const ALL_AT_ONCE: Shape = Shape {
    extended: true,
    backed: true,
};

/// A number from a list of names and numbers that the kernel keeps.
#[track_caller]
fn kernel_number(file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{file}: {error}"));
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next());
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no {name:?} in {file}"))
}

fn memory_mib() -> u64 {
    let mib = kernel_number("/proc/meminfo", "MemTotal:") >> 10;
    assert!(mib < 1024, "{mib} MiB: too much to be filled in a test");
    mib
}

#[track_caller]
fn set(name: &str, value: &str) {
    let path = format!("/proc/sys/{name}");
    std::fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
}

/// Has the kernel end when a task hangs: its log says which and where. Nothing else helps, for a
/// process that waits for memory cannot be killed.
fn end_when_a_task_hangs() {
    set("kernel/hung_task_panic", "1");
}

/// Runs what needs much memory. Meanwhile, and for good, the device's server stays what it is.
#[track_caller]
fn under_pressure(disk: &Attached, load: impl FnOnce() -> Run) {
    let before = Footprint::of(disk.server());
    before.assert_pinned();
    load().ok();
    let after = Footprint::of(disk.server());
    after.assert_pinned();
    println!("{after:?}");
    assert_eq!(before.major_faults, after.major_faults, "{after:?}");
}

/// Files larger than memory, written by plain writes and through mappings. Verified when all are
/// written.
#[track_caller]
fn fio(folder: &str, more: &[&str]) -> Run {
    let folder = format!("--directory={folder}");
    let size = format!("--size={}m", memory_mib() * 3 / 4);
    let mapped_size = format!("--size={}m", memory_mib() / 4);
    let common = [
        &folder,
        "--direct=0",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--end_fsync=1",
        "--eta=never",
    ];
    let written = [
        "--name=written",
        "--ioengine=psync",
        "--rw=write",
        "--bs=256k",
    ];
    let mapped = [
        "--name=mapped",
        "--ioengine=mmap",
        "--rw=randwrite",
        "--bs=64k",
    ];
    let words = [
        &common[..],
        more,
        &written,
        &["--numjobs=2", &size],
        &mapped,
        &["--numjobs=1", &mapped_size],
    ]
    .concat();
    run_for("fio", &words, LIMIT_SECONDS)
}

#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn files_on_ublk_past_the_cache() {
    // Dirty pages may take 95 of 100 here: memory for 128 requests would leave too little.
    const PAST_THE_CACHE: [&str; 4] = ["--cache", "none", "--depth", "64"];
    end_when_a_task_hangs();
    // Writing starts when next to all memory is full of changes.
    set("vm/dirty_ratio", "95");
    set("vm/dirty_background_ratio", "90");
    let scratch = Scratch::new("writeback");
    let image = ALL_AT_ONCE.create(&scratch, 2048);
    let disk = attach(DeviceKind::Ublk, &image, &scratch, &PAST_THE_CACHE);
    Kind::Ext4.make(&disk.path());
    let mounted = Kind::Ext4.mount(&disk.path(), &scratch);
    let before = kernel_number("/proc/vmstat", "pgsteal_direct ");
    under_pressure(&disk, || fio(mounted.folder(), &[]));
    let pages = kernel_number("/proc/vmstat", "pgsteal_direct ") - before;
    println!("{pages} pages were taken by those who needed them");
    assert!(pages > 0, "memory was never short");
    mounted.unmount();
    Kind::Ext4.check(&disk.path());
    disk.detach();
    // And once more with another server.
    let disk = attach(DeviceKind::Ublk, &image, &scratch, &PAST_THE_CACHE);
    let mounted = Kind::Ext4.mount(&disk.path(), &scratch);
    fio(mounted.folder(), &["--verify_only"]).ok();
    mounted.unmount();
    disk.detach();
}

const PIECE_BYTES: usize = 1 << 20;

/// Bytes that no two pieces of memory have in common.
fn noise(seed: u64) -> Vec<u8> {
    Random::new(seed).bytes(PIECE_BYTES)
}

#[track_caller]
fn assert_noise(seed: u64, piece: &[u8]) {
    assert!(piece == noise(seed), "piece {seed} is not what was written");
}

/// What programs have in memory, all of it written, changed and read: more than the machine has.
#[test]
#[ignore = "runs in the guest: cargo xtask vm test"]
fn memory_is_swapped_to_ublk() {
    end_when_a_task_hangs();
    let scratch = Scratch::new("swap");
    let image = ALL_AT_ONCE.create(&scratch, 1024);
    let more = ["--realtime", "--cache", "none"];
    let disk = attach(DeviceKind::Ublk, &image, &scratch, &more);
    run("mkswap", &[&disk.path()]).ok();
    let before = Footprint::of(disk.server());
    before.assert_pinned();
    run("swapon", &[&disk.path()]).ok();
    let count = memory_mib();
    std::thread::scope(|scope| {
        for half in 0..2 {
            scope.spawn(move || {
                let seeds = 1 + half * count..1 + half * count + count / 2;
                let mut pieces: Vec<_> = seeds.map(|seed| (seed, noise(seed))).collect();
                for (seed, piece) in &mut pieces {
                    assert_noise(*seed, piece);
                    *seed += 4 * count;
                    piece.copy_from_slice(&noise(*seed));
                }
                for (seed, piece) in &pieces {
                    assert_noise(*seed, piece);
                }
            });
        }
    });
    let pages = kernel_number("/proc/vmstat", "pswpout ");
    println!("{pages} pages were swapped out");
    assert!(pages > 10_000, "{pages} pages: there was memory enough");
    let after = Footprint::of(disk.server());
    after.assert_pinned();
    assert_eq!(before.major_faults, after.major_faults, "{after:?}");
    run("swapoff", &[&disk.path()]).ok();
    disk.detach();
}
