//! VM state as a stream of the standard library, for callers that can wait for a future.

use std::io::{self, Error, ErrorKind, IoSlice, Read, Seek, SeekFrom, Write};

use gaur_block::File;

use super::reader::VmStateReader;
use super::writer::VmStateWriter;

/// Waits for a future. The engine has no runtime, so the caller says how; with `gaur-reactor` it is
/// one line, `gaur_reactor::block_on(future)` on the blocking host or `reactor.block_on(future)` on a
/// thread with a ring.
pub trait BlockOn {
    /// Drives `future` to its end.
    fn block_on<T>(&self, future: impl Future<Output = T>) -> T;
}

impl<B: BlockOn> BlockOn for &B {
    fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        (**self).block_on(future)
    }
}

/// A writer of a state as [`Write`] and [`Seek`], or a reader as [`Read`] and [`Seek`].
#[derive(Debug)]
pub struct VmStateIo<T, B> {
    inner: T,
    block: B,
}

impl<T, B> VmStateIo<T, B> {
    /// The writer or reader behind it.
    pub fn into_inner(self) -> T {
        self.inner
    }
}

impl<F: File> VmStateWriter<'_, F> {
    /// As a stream; `block` waits for its futures.
    pub fn into_io<B: BlockOn>(self, block: B) -> VmStateIo<Self, B> {
        VmStateIo { inner: self, block }
    }
}

impl<F: File> VmStateReader<'_, F> {
    /// As a stream; `block` waits for its futures.
    pub fn into_io<B: BlockOn>(self, block: B) -> VmStateIo<Self, B> {
        VmStateIo { inner: self, block }
    }
}

impl<F: File, B: BlockOn> Write for VmStateIo<VmStateWriter<'_, F>, B> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.block.block_on(self.inner.write(bytes))?;
        Ok(bytes.len())
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.block.block_on(self.inner.write_vectored(parts))?;
        Ok(parts.iter().map(|part| part.len()).sum())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(self.block.block_on(self.inner.flush())?)
    }
}

impl<F: File, B: BlockOn> Seek for VmStateIo<VmStateWriter<'_, F>, B> {
    /// From the end is from the last byte that any writer has written.
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let end = self.inner.save().size_bytes();
        let position = target(to, self.inner.position(), end)?;
        self.inner.set_position(position);
        Ok(position)
    }
}

impl<F: File, B: BlockOn> Read for VmStateIo<VmStateReader<'_, F>, B> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        Ok(self.block.block_on(self.inner.read(out))?)
    }
}

impl<F: File, B: BlockOn> Seek for VmStateIo<VmStateReader<'_, F>, B> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = target(to, self.inner.position(), self.inner.size_bytes())?;
        self.inner.set_position(position);
        Ok(position)
    }
}

fn target(to: SeekFrom, position: u64, end: u64) -> io::Result<u64> {
    let target = match to {
        SeekFrom::Start(position) => Some(position),
        SeekFrom::Current(by) => position.checked_add_signed(by),
        SeekFrom::End(by) => end.checked_add_signed(by),
    };
    target.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "seek to before the start"))
}
