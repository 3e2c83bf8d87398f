//! The bare file: what the disk can do.

use futures_util::stream::{FuturesUnordered, StreamExt};
use gaur_block::{Errno, File, Source, Target};

use crate::engine::Failure;

const REQUEST_BYTES: u64 = 1 << 20;
const DEPTH: usize = 8;

pub(super) async fn save<F: File>(file: &F, bytes: u64) -> Result<(), Failure> {
    let mut memory = file.buffer(REQUEST_BYTES as usize);
    memory.fill(0x5a);
    let memory = &memory;
    at_depth(bytes, |offset| {
        file.write_at(offset, Source::memory(memory))
    })
    .await?;
    file.flush().await?;
    Ok(())
}

pub(super) async fn load<F: File>(file: &F, bytes: u64) -> Result<(), Failure> {
    at_depth(bytes, async |offset| {
        let mut memory = file.buffer(REQUEST_BYTES as usize);
        file.read_at(offset, Target::memory(&mut memory)).await
    })
    .await?;
    Ok(())
}

/// Does `request` for every MiB of `bytes`.
async fn at_depth<R: Future<Output = Result<(), Errno>>>(
    bytes: u64,
    request: impl Fn(u64) -> R,
) -> Result<(), Errno> {
    let mut requests = FuturesUnordered::new();
    for offset in (0..bytes).step_by(REQUEST_BYTES as usize) {
        while requests.len() >= DEPTH
            && let Some(result) = requests.next().await
        {
            result?;
        }
        requests.push(request(offset));
    }
    while let Some(result) = requests.next().await {
        result?;
    }
    Ok(())
}
