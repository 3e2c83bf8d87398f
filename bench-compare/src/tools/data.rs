//! A disk that compresses like those of people: text, noise and zeros.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::Result;

/// What is of one kind in a row.
const RUN_BYTES: usize = 256 << 10;

/// Numbers without order.
fn noise() -> impl FnMut() -> u64 {
    let mut random = 1_u64;
    move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// Whether this MiB of a disk with zeros and holes is noise.
pub fn is_noise(mib: u64) -> bool {
    mib.is_multiple_of(2)
}

/// Writes a raw disk of noise, of which every fourth MiB is zeros and another a hole if it is to have them.
pub fn write_noise(path: &Path, mib: u64, with_zeros: bool) -> Result<()> {
    let out = File::create(path)?;
    out.set_len(mib << 20)?;
    let mut next = noise();
    for number in 0..mib {
        let bytes: Vec<u8> = match number % 4 {
            1 if with_zeros => vec![0; 1 << 20],
            3 if with_zeros => continue,
            _ => (0..1 << 17).flat_map(|_| next().to_le_bytes()).collect(),
        };
        out.write_all_at(&bytes, number << 20)?;
    }
    Ok(())
}

/// Writes a raw disk of so many MiB.
pub fn write_mixed(path: &Path, mib: u64) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    let mut next = noise();
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
