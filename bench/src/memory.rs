//! A file in memory that any number of threads use at once and that answers without waiting.
//!
//! It takes the host out of a measurement: what is left is the engine's own time. Bytes are kept in
//! chunks with a lock each, so that threads meet only where they touch the same chunk. Writes that
//! begin with [`DROPPED`] are counted as done and not kept.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use gaur_block::{
    Access, Errno, Extent, File, FileId, FileLimits, Host, OpenError, Segment, Segments, Source,
    Target, Within,
};

const CHUNK_BYTES: usize = 64 << 10;
/// Longest file in bytes.
const LEN_MAX: u64 = 256 << 30;

/// First bytes of a block whose content does not matter.
pub const DROPPED: [u8; 8] = *b"dropped!";

/// What all handles share.
struct Disk {
    len: AtomicU64,
    chunks: Vec<RwLock<Vec<u8>>>,
}

/// A handle on the file.
#[derive(Clone)]
pub struct MemoryFile(Arc<Disk>);

impl MemoryFile {
    /// An empty file.
    pub fn new() -> MemoryFile {
        let chunks = (0..LEN_MAX / CHUNK_BYTES as u64).map(|_| RwLock::default());
        MemoryFile(Arc::new(Disk {
            len: AtomicU64::new(0),
            chunks: chunks.collect(),
        }))
    }

    /// Calls `visit` with every chunk in a range, and where the range starts in it.
    fn pieces(offset: u64, len: usize, mut visit: impl FnMut(usize, usize, usize, usize)) {
        let mut done = 0;
        while done < len {
            let at = offset as usize + done;
            let (chunk, start) = (at / CHUNK_BYTES, at % CHUNK_BYTES);
            let count = (CHUNK_BYTES - start).min(len - done);
            visit(chunk, start, done, count);
            done += count;
        }
    }

    fn store(&self, offset: u64, piece: Segment<'_>) -> Result<(), Errno> {
        let bytes = Segments::from(piece);
        let end = offset + bytes.len() as u64;
        if end > LEN_MAX {
            return Err(Errno::ENOSPC);
        }
        if end > self.0.len.load(Ordering::Relaxed) {
            self.0.len.fetch_max(end, Ordering::Relaxed);
        }
        let mut first = [0; DROPPED.len()];
        if bytes.len() >= first.len() {
            bytes.split_at(first.len()).0.copy_to(&mut first);
        }
        if first == DROPPED {
            return Ok(());
        }
        MemoryFile::pieces(offset, bytes.len(), |chunk, start, done, count| {
            let mut chunk = self.0.chunks[chunk]
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            if chunk.is_empty() {
                chunk.resize(CHUNK_BYTES, 0);
            }
            let part = bytes.split_at(done).1.split_at(count).0;
            part.copy_to(&mut chunk[start..start + count]);
        });
        Ok(())
    }
}

impl Default for MemoryFile {
    fn default() -> MemoryFile {
        MemoryFile::new()
    }
}

impl File for MemoryFile {
    type Buffer = Vec<u8>;

    fn limits(&self) -> FileLimits {
        FileLimits {
            request_alignment: 1,
            memory_alignment: 1,
            max_transfer: 1 << 30,
            resizable: true,
            discard_zeroes: true,
            read_only: false,
        }
    }

    fn id(&self) -> Option<FileId> {
        None
    }

    fn buffer(&self, len_bytes: usize) -> Vec<u8> {
        vec![0; len_bytes]
    }

    async fn len(&self) -> Result<u64, Errno> {
        Ok(self.0.len.load(Ordering::Relaxed))
    }

    async fn read_at(&self, offset: u64, target: Target<'_>) -> Result<(), Errno> {
        let Target::Memory(memory) = target else {
            return Err(Errno::EINVAL);
        };
        MemoryFile::pieces(offset, memory.len(), |chunk, start, done, count| {
            let out = memory.split_at(done).1.split_at(count).0;
            match self.0.chunks.get(chunk).map(RwLock::read) {
                Some(Ok(chunk)) if !chunk.is_empty() => {
                    out.copy_from(&chunk[start..start + count]);
                }
                _ => out.fill_zeros(),
            }
        });
        Ok(())
    }

    async fn write_at(&self, offset: u64, source: Source<'_>) -> Result<(), Errno> {
        let Source::Memory(memory) = source else {
            return Err(Errno::EINVAL);
        };
        let mut at = offset;
        for piece in memory.pieces() {
            self.store(at, piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    async fn write_zeroes_at(&self, offset: u64, len: u64, _unmap: bool) -> Result<(), Errno> {
        MemoryFile::pieces(offset, len as usize, |chunk, start, _, count| {
            let mut chunk = self.0.chunks[chunk]
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            if !chunk.is_empty() {
                chunk[start..start + count].fill(0);
            }
        });
        Ok(())
    }

    async fn discard_at(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.write_zeroes_at(offset, len, true).await
    }

    async fn flush(&self) -> Result<(), Errno> {
        Ok(())
    }

    async fn set_len(&self, len: u64) -> Result<(), Errno> {
        if len > LEN_MAX {
            return Err(Errno::EFBIG);
        }
        self.0.len.store(len, Ordering::Relaxed);
        Ok(())
    }

    async fn extent_at(&self, offset: u64) -> Result<Extent, Errno> {
        let len = self.0.len.load(Ordering::Relaxed);
        Ok(Extent {
            len: len.saturating_sub(offset),
            data: true,
        })
    }
}

/// A host whose every name is the one file.
pub struct MemoryHost(pub MemoryFile);

impl Host for MemoryHost {
    type File = MemoryFile;

    async fn open_within(
        &self,
        _name: &Path,
        _within: Within<'_>,
        _access: Access,
    ) -> Result<MemoryFile, OpenError> {
        Ok(self.0.clone())
    }
}
