//! A disk for the tasks of tokio, on any of its threads. Nothing here is particular to tokio.

use gaur::{AsyncConfig, CreateOptions, Disk, OpenOptions, References, Result};

#[tokio::main]
async fn main() -> Result<()> {
    Disk::create("disk.qcow2", &CreateOptions::new(64 << 20))?;
    let disk = Disk::open("disk.qcow2", &OpenOptions::new(References::Beside))?;
    let queue = disk.start(&AsyncConfig::default())?;
    let writers: Vec<_> = (0..16_u8)
        .map(|number| {
            let queue = queue.clone();
            tokio::spawn(async move {
                let at = u64::from(number) << 16;
                queue.write_at(at, vec![number; 4096]).await?;
                let bytes = queue.read_at(at, vec![0xff; 4096]).await?;
                assert!(bytes.iter().all(|byte| *byte == number));
                Result::Ok(())
            })
        })
        .collect();
    for writer in writers {
        writer.await.expect("no task panics")?;
    }
    queue.flush().await?;
    // All else a queue can do, on one of the threads of this one.
    let snapshot = queue.run(async |queue| queue.create_snapshot("written").await);
    println!("snapshot {}", snapshot.await?.name.escape_ascii());
    queue.close().await;
    disk.close()
}
