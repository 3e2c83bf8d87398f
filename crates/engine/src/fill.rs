//! Copy-on-write: what goes beside the guest's bytes when subclusters get their first data. Nothing, zeros,
//! or what the guest sees there now.
//!
//! Head, data and tail of a new mapping go out as one write: copied together when the data is short or lies in
//! several runs of memory, as parts of a vectored write otherwise. Only memory registered with the host's
//! ring, which the engine cannot look into, takes a write for each. And what is much longer than the data goes out in
//! chunks that fit the processor's cache, because a copy through memory costs twice as much.

use std::ops::Range;

use gaur_block::{Errno, File, Segment, Segments, Source, Target};

use crate::active::Active;
use crate::pool::PoolBuffer;
use crate::write::NewMapping;

/// What the part of a mapping that the guest does not write is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    /// What is there already reads as zeros.
    Nothing,
    Zeros,
    /// What the guest sees there now.
    Old,
}

/// Longest data that is copied between its head and tail.
const COPIED_BYTES_MAX: usize = 64 << 10;
/// Longest mapping that is read, and then written, at once.
const CHUNK_BYTES: usize = 256 << 10;
/// Longest gap between head and tail that is read along with them.
const GAP_BYTES_MAX: usize = 16 << 10;

impl<F: File> Active<'_, F> {
    /// Writes head, data and tail of a mapping.
    pub(crate) async fn fill_mapping(
        &self,
        mapping: &mut NewMapping<'_, F>,
        data: Source<'_>,
    ) -> Result<(), Errno> {
        let head_len = (mapping.written.start - mapping.region.start) as usize;
        let tail_end = self.data_end(mapping.region.end());
        let tail_len = tail_end.saturating_sub(mapping.written.end()) as usize;
        let head_len = if mapping.head == Fill::Nothing {
            0
        } else {
            head_len
        };
        let tail_len = if mapping.tail == Fill::Nothing {
            0
        } else {
            tail_len
        };
        let data_at = mapping.host + (mapping.written.start - mapping.region.start);
        if head_len + tail_len == 0 {
            mapping.started = true;
            return self.write_data(data_at, data).await;
        }
        let start = data_at - head_len as u64;
        match data {
            Source::Memory(memory) => match memory.single() {
                Some(middle) if memory.len() > COPIED_BYTES_MAX => {
                    let (head, tail) = self.fill_apart(mapping, head_len, tail_len).await?;
                    let parts = [Segment::from(&head[..]), middle, Segment::from(&tail[..])];
                    let whole = Source::Memory(Segments::new(&parts));
                    mapping.started = true;
                    self.write_data(start, whole).await
                }
                _ => {
                    let middle = head_len..head_len + memory.len();
                    let whole = middle.end + tail_len;
                    self.fill_copied(mapping, memory, middle, whole).await
                }
            },
            Source::Registered(_) => {
                let (head, tail) = self.fill_apart(mapping, head_len, tail_len).await?;
                let data_end = data_at + data.len() as u64;
                mapping.started = true;
                self.write_data(start, Source::memory(&head)).await?;
                self.write_data(data_at, data).await?;
                self.write_data(data_end, Source::memory(&tail)).await
            }
        }
    }

    /// Fills and writes a mapping through a buffer, chunk by chunk. It is `whole` bytes long from where its
    /// head begins, and `data` is its `middle`.
    async fn fill_copied(
        &self,
        mapping: &mut NewMapping<'_, F>,
        data: Segments<'_>,
        middle: Range<usize>,
        whole: usize,
    ) -> Result<(), Errno> {
        let (file, pool) = (self.queue.data_file(), &self.queue.pool);
        let guest = mapping.written.start - middle.start as u64;
        let host = mapping.host + (guest - mapping.region.start);
        let mut buffer = pool.take(file, whole.min(CHUNK_BYTES));
        let (mut start, mut rest) = (0, data);
        while start < whole {
            let end = whole.min(start + CHUNK_BYTES);
            let chunk = &mut buffer[..end - start];
            // The guest's bytes in this chunk, counted from its start.
            let (from, upto) = (middle.start.clamp(start, end), middle.end.clamp(start, end));
            let inside = from - start..upto - start;
            let at = guest + start as u64;
            if inside.is_empty() {
                let fill = if start < middle.start {
                    mapping.head
                } else {
                    mapping.tail
                };
                self.fill_part(fill, at, chunk).await?;
            } else {
                self.fill_around(mapping, at, chunk, inside.clone()).await?;
                let (now, later) = rest.split_at(upto - from);
                now.copy_to(&mut chunk[inside]);
                rest = later;
            }
            mapping.started = true;
            let to = host + start as u64;
            self.write_data(to, Source::memory(chunk)).await?;
            start = end;
        }
        Ok(())
    }

    /// Fills `whole`, which goes to guest offset `at`, except for its `middle`, where the guest's bytes
    /// will go.
    async fn fill_around(
        &self,
        mapping: &NewMapping<'_, F>,
        at: u64,
        whole: &mut [u8],
        middle: Range<usize>,
    ) -> Result<(), Errno> {
        let both = 0 < middle.start && middle.end < whole.len();
        let old = [mapping.head, mapping.tail] == [Fill::Old; 2];
        if both && old && middle.len() <= GAP_BYTES_MAX {
            return self.fill_part(Fill::Old, at, whole).await;
        }
        let (head, rest) = whole.split_at_mut(middle.start);
        let tail = &mut rest[middle.len()..];
        let filled = futures_util::join!(
            self.fill_part(mapping.head, at, head),
            self.fill_part(mapping.tail, at + middle.end as u64, tail),
        );
        filled.0.and(filled.1)
    }

    /// Head and tail of a mapping in buffers of their own.
    async fn fill_apart(
        &self,
        mapping: &NewMapping<'_, F>,
        head_len: usize,
        tail_len: usize,
    ) -> Result<(PoolBuffer<F>, PoolBuffer<F>), Errno> {
        let mut head = self.queue.pool.take(self.queue.data_file(), head_len);
        let mut tail = self.queue.pool.take(self.queue.data_file(), tail_len);
        let filled = futures_util::join!(
            self.fill_part(
                mapping.head,
                mapping.written.start - head_len as u64,
                &mut head
            ),
            self.fill_part(mapping.tail, mapping.written.end(), &mut tail),
        );
        filled.0.and(filled.1)?;
        Ok((head, tail))
    }

    /// Fills `part`, which goes to guest offset `at`.
    async fn fill_part(&self, fill: Fill, at: u64, part: &mut [u8]) -> Result<(), Errno> {
        match fill {
            // On the heap, so that writes in place do not carry the state of a read.
            Fill::Old => Box::pin(self.queue.read(at, Target::memory(part))).await,
            Fill::Zeros | Fill::Nothing => {
                part.fill(0);
                Ok(())
            }
        }
    }
}
