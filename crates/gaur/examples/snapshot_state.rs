//! The state of a virtual machine beside a snapshot of its disk, as `savevm` and `loadvm` have it.

use std::io::{Read, Write};

use gaur::{CreateOptions, Disk, OpenOptions, References, Result};

fn main() -> Result<()> {
    Disk::create("disk.qcow2", &CreateOptions::new(64 << 20))?;
    let disk = Disk::open("disk.qcow2", &OpenOptions::new(References::Beside))?;
    let queue = disk.blocking();
    queue.write_at(0, b"as it was")?;

    // Any stream will do: each byte goes to the disk once, in large pieces.
    let memory: Vec<u8> = (0..3 << 20).map(|at: u32| (at >> 12) as u8).collect();
    let snapshot = queue.save_state("before the upgrade", |out| {
        for (number, page) in memory.chunks(4096).enumerate() {
            out.write_all(&(number as u64).to_be_bytes())?;
            out.write_all(page)?;
        }
        Ok(())
    })?;
    println!("{} bytes of state", snapshot.vm_state_size);

    queue.write_at(0, b"as it is.")?;
    queue.apply_snapshot("before the upgrade")?;
    let mut bytes = [0; 9];
    queue.read_at(0, &mut bytes)?;
    assert_eq!(&bytes, b"as it was");

    let mut state = queue.read_state("before the upgrade")?;
    for (number, page) in memory.chunks(4096).enumerate() {
        let (mut header, mut read) = ([0; 8], [0; 4096]);
        state.read_exact(&mut header)?;
        state.read_exact(&mut read)?;
        assert_eq!(
            (u64::from_be_bytes(header), &read[..]),
            (number as u64, page)
        );
    }
    drop(state);
    queue.delete_snapshot("before the upgrade")?;
    assert!(queue.snapshots()?.is_empty());
    drop(queue);
    disk.close()
}
