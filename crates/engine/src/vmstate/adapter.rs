//! VM state as a stream of the standard library, for callers that can wait for a future.

use std::io::{self, Error, ErrorKind, IoSlice, Read, Seek, SeekFrom, Write};

use gaur_block::File;

use super::reader::VmStateReader;
use super::writer::VmStateWriter;
use crate::error::{ErrorKind as ImageErrorKind, ImageError};

/// Waits for a future. The engine has no runtime, so whoever has one says how; with `gaur-reactor` it is
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

/// A state that is being saved, as [`Write`] and [`Seek`]; [`VmStateWriter::into_io`] makes it.
#[derive(Debug)]
pub struct VmStateOutput<'q, F: File, B> {
    writer: VmStateWriter<'q, F>,
    block: B,
}

/// A state that is read, as [`Read`] and [`Seek`]; [`VmStateReader::into_io`] makes it.
#[derive(Debug)]
pub struct VmStateInput<'q, F: File, B> {
    reader: VmStateReader<'q, F>,
    block: B,
}

impl<'q, F: File> VmStateWriter<'q, F> {
    /// As a stream; `block` waits for its futures.
    pub fn into_io<B: BlockOn>(self, block: B) -> VmStateOutput<'q, F, B> {
        VmStateOutput {
            writer: self,
            block,
        }
    }
}

impl<'q, F: File> VmStateReader<'q, F> {
    /// As a stream; `block` waits for its futures.
    pub fn into_io<B: BlockOn>(self, block: B) -> VmStateInput<'q, F, B> {
        VmStateInput {
            reader: self,
            block,
        }
    }
}

impl<'q, F: File, B> VmStateOutput<'q, F, B> {
    /// The writer behind it.
    pub fn into_inner(self) -> VmStateWriter<'q, F> {
        self.writer
    }
}

impl<'q, F: File, B> VmStateInput<'q, F, B> {
    /// The reader behind it.
    pub fn into_inner(self) -> VmStateReader<'q, F> {
        self.reader
    }
}

impl<F: File, B: BlockOn> Write for VmStateOutput<'_, F, B> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.block.block_on(self.writer.write(bytes));
        written.map(|()| bytes.len()).map_err(io_error)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = self.block.block_on(self.writer.write_vectored(parts));
        written.map_err(io_error)?;
        Ok(parts.iter().map(|part| part.len()).sum())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.block.block_on(self.writer.flush()).map_err(io_error)
    }
}

impl<F: File, B: BlockOn> Seek for VmStateOutput<'_, F, B> {
    /// From the end is from the last byte that any writer has written.
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let end = self.writer.save().size_bytes();
        let position = target(to, self.writer.position(), end)?;
        self.writer.set_position(position);
        Ok(position)
    }
}

impl<F: File, B: BlockOn> Read for VmStateInput<'_, F, B> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.block.block_on(self.reader.read(out)).map_err(io_error)
    }
}

impl<F: File, B: BlockOn> Seek for VmStateInput<'_, F, B> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = target(to, self.reader.position(), self.reader.size_bytes())?;
        self.reader.set_position(position);
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

fn io_error(error: ImageError) -> Error {
    let kind = match error.kind() {
        ImageErrorKind::NoSpace => ErrorKind::StorageFull,
        ImageErrorKind::InvalidInput => ErrorKind::InvalidInput,
        ImageErrorKind::ReadOnly => ErrorKind::ReadOnlyFilesystem,
        ImageErrorKind::Corrupt => ErrorKind::InvalidData,
        _ => ErrorKind::Other,
    };
    Error::new(kind, error)
}
