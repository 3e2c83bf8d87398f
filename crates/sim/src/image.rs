//! The content of a simulated file, sparse.

use std::collections::BTreeMap;
use std::rc::Rc;

use crate::SECTOR_BYTES;
use crate::random::spread;

/// Bytes per chunk: what is stored or absent as a whole.
const CHUNK_BYTES: u64 = 16 * 1024;

/// Content and length of a file, sparse. Absent parts read as zeros, or as garbage on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileImage {
    len_bytes: u64,
    /// Seed of the garbage in parts never written; `None` for zeros.
    garbage: Option<u64>,
    /// Shared with the copies of this image until one of them changes.
    chunks: BTreeMap<u64, Rc<[u8]>>,
}

impl FileImage {
    /// A file of `len_bytes` zeros.
    pub fn new(len_bytes: u64) -> FileImage {
        FileImage {
            len_bytes,
            garbage: None,
            chunks: BTreeMap::new(),
        }
    }

    /// A file that holds `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> FileImage {
        let mut image = FileImage::new(bytes.len() as u64);
        image.write(0, bytes);
        image
    }

    /// A device of `len_bytes` whose parts never written hold garbage.
    pub fn device(len_bytes: u64, seed: u64) -> FileImage {
        FileImage {
            len_bytes,
            garbage: Some(seed),
            chunks: BTreeMap::new(),
        }
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Fills `target` from `offset_bytes`; bytes past the end are zeros.
    pub fn read(&self, offset_bytes: u64, target: &mut [u8]) {
        let inside = self
            .len_bytes
            .saturating_sub(offset_bytes)
            .min(target.len() as u64) as usize;
        target[inside..].fill(0);
        let mut done = 0;
        while done < inside {
            let at = offset_bytes + done as u64;
            let start = (at % CHUNK_BYTES) as usize;
            let len = (CHUNK_BYTES as usize - start).min(inside - done);
            let part = &mut target[done..done + len];
            match (self.chunks.get(&(at / CHUNK_BYTES)), self.garbage) {
                (Some(chunk), _) => part.copy_from_slice(&chunk[start..start + len]),
                (None, None) => part.fill(0),
                (None, Some(seed)) => {
                    let chunk = fresh_chunk(Some(seed), at / CHUNK_BYTES);
                    part.copy_from_slice(&chunk[start..start + len]);
                }
            }
            done += len;
        }
    }

    /// `len_bytes` bytes from `offset_bytes`.
    pub fn bytes(&self, offset_bytes: u64, len_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes];
        self.read(offset_bytes, &mut bytes);
        bytes
    }

    /// Stores `source` at `offset_bytes` and grows the file when it ends behind its end.
    pub fn write(&mut self, offset_bytes: u64, source: &[u8]) {
        let end = offset_bytes + source.len() as u64;
        self.len_bytes = self.len_bytes.max(end);
        let mut done = 0;
        while done < source.len() {
            let at = offset_bytes + done as u64;
            let start = (at % CHUNK_BYTES) as usize;
            let len = (CHUNK_BYTES as usize - start).min(source.len() - done);
            let part = &source[done..done + len];
            let index = at / CHUNK_BYTES;
            done += len;
            let absent = !self.chunks.contains_key(&index);
            if absent && self.garbage.is_none() && part.iter().all(|&byte| byte == 0) {
                continue;
            }
            let garbage = self.garbage;
            let chunk = self
                .chunks
                .entry(index)
                .or_insert_with(|| fresh_chunk(garbage, index));
            Rc::make_mut(chunk)[start..start + len].copy_from_slice(part);
        }
    }

    /// Changes the length. What is cut off is gone; new bytes are zeros.
    pub fn set_len(&mut self, len_bytes: u64) {
        if len_bytes < self.len_bytes {
            let tail = len_bytes % CHUNK_BYTES;
            let last = len_bytes / CHUNK_BYTES;
            drop(self.chunks.split_off(&(last + u64::from(tail > 0))));
            if let Some(chunk) = self.chunks.get_mut(&last) {
                Rc::make_mut(chunk)[tail as usize..].fill(0);
            }
        }
        self.len_bytes = len_bytes;
    }

    /// The first sector at or after `sector` and below `end` that is stored at all.
    pub(crate) fn next_stored(&self, sector: u64, end: u64) -> Option<u64> {
        if self.garbage.is_some() {
            return (sector < end).then_some(sector);
        }
        let per_chunk = CHUNK_BYTES / SECTOR_BYTES;
        let (&index, _) = self.chunks.range(sector / per_chunk..).next()?;
        let found = sector.max(index * per_chunk);
        (found < end).then_some(found)
    }
}

fn fresh_chunk(garbage: Option<u64>, index: u64) -> Rc<[u8]> {
    let mut chunk = vec![0_u8; CHUNK_BYTES as usize];
    if let Some(seed) = garbage {
        let base = spread(seed ^ spread(index));
        for (number, word) in chunk.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&spread(base ^ number as u64).to_le_bytes());
        }
    }
    chunk.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_range_reads_as_zeros_after_growth() {
        let mut image = FileImage::from_bytes(&[7; 40_000]);
        image.set_len(20_000);
        image.set_len(40_000);
        let bytes = image.bytes(19_999, 20_001);
        assert_eq!(bytes[0], 7);
        assert!(bytes[1..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_device_holds_the_same_garbage_each_time_and_keeps_it_around_a_write() {
        let mut image = FileImage::device(100_000, 3);
        let before = image.bytes(0, 100_000);
        assert!(before.iter().filter(|&&byte| byte == 0).count() < 2000);
        image.write(30_000, &[9; 10]);
        let after = image.bytes(0, 100_000);
        assert_eq!(before[..30_000], after[..30_000]);
        assert_eq!(before[30_010..], after[30_010..]);
        assert_eq!(after[30_000..30_010], [9; 10]);
    }
}
