//! A disk that compresses like those of people: text, noise and zeros.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::Result;

/// What is of one kind in a row.
const RUN_BYTES: usize = 256 << 10;

/// Writes a raw disk of so many MiB.
pub fn write_mixed(path: &Path, mib: u64) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    let mut random = 1_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    for run in 0..mib * 4 {
        let bytes = match run % 4 {
            0 => vec![0; RUN_BYTES],
            1 => (0..RUN_BYTES / 8)
                .flat_map(|_| next().to_le_bytes())
                .collect(),
            _ => text(&mut next),
        };
        out.write_all(&bytes)?;
    }
    out.flush()?;
    Ok(())
}

/// Lines like those of a log.
fn text(next: &mut impl FnMut() -> u64) -> Vec<u8> {
    const WORDS: [&str; 16] = [
        "request", "server", "client", "opened", "closed", "image", "offset", "bytes", "error",
        "device", "started", "waiting", "cluster", "table", "written", "flushed",
    ];
    let mut out = Vec::with_capacity(RUN_BYTES + 100);
    while out.len() < RUN_BYTES {
        let number = next();
        let word = |shift: u32| WORDS[(number >> shift) as usize % WORDS.len()];
        let (first, second, third) = (word(0), word(4), word(8));
        let value = number >> 48;
        out.extend(format!("{value:06} {first} {second}: {third} {}\n", number >> 52).bytes());
    }
    out.truncate(RUN_BYTES);
    out
}
