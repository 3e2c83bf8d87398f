//! A disk with calls that block: an image, an overlay over it, and what each of them holds.

use gaur::{CreateOptions, Disk, Format, OpenOptions, References, Result, Unmap};

fn main() -> Result<()> {
    Disk::create("base.qcow2", &CreateOptions::new(64 << 20))?;
    let disk = Disk::open("base.qcow2", &OpenOptions::new(References::Beside))?;
    let queue = disk.blocking();
    queue.write_at(4096, b"from the base")?;
    queue.flush()?;
    drop(queue);
    disk.close()?;

    let overlay = CreateOptions::overlay("base.qcow2", Format::Qcow2);
    Disk::create("overlay.qcow2", &overlay)?;
    let disk = Disk::open("overlay.qcow2", &OpenOptions::new(References::Beside))?;
    let queue = disk.blocking();
    queue.write_at(4101, b"an overlay")?;
    queue.zero(1 << 20..2 << 20, Unmap::Allowed)?;
    let mut bytes = [0; 15];
    queue.read_at(4096, &mut bytes)?;
    assert_eq!(&bytes, b"from an overlay");
    assert!(queue.status(1 << 20..2 << 20)?.zero);
    println!("{}", String::from_utf8_lossy(&bytes));
    drop(queue);
    disk.close()
}
