//! Growing and shrinking the guest's disk.
//!
//! Crash rule: the size changes by one header write between two flushes (O5). Before a disk grows,
//! what it will reach reads as zeros; before it shrinks, what it loses is unmapped. An L1 table
//! moves the same way: copy, flush, header, flush.

use gaur_block::{Errno, File, Source};
use gaur_format::geometry::Version;
use gaur_format::header::field;
use gaur_format::l2::L2Entry;
use gaur_format::limit;

use crate::align;
use crate::error::{ErrorKind, ImageError};
use crate::image::{Qcow2, Writer};
use crate::metadata::alloc::{AllocError, AllocNeed, Free};
use crate::metadata::maps::Located;
use crate::queue::Queue;
use crate::sync::atomic::Ordering;
use crate::tables::{Taken, forget_table};

impl<F: File> Queue<F> {
    /// Changes the guest size, also while other queues have requests. Shrinking gives up the data beyond
    /// the new end and must be asked for with `shrink`; requests of a qcow2 image that are under way then
    /// are waited for, while those of a raw image must not reach beyond the new end.
    pub async fn resize(&self, new_size_bytes: u64, shrink: bool) -> Result<(), ImageError> {
        if self.image.read_only {
            return Err(ImageError::new(
                ErrorKind::ReadOnly,
                "the image is open read-only",
            ));
        }
        let old = self.image.size_bytes();
        if new_size_bytes < old && !shrink {
            let text = "shrinking would lose the data beyond the new end; ask for it with --shrink";
            return Err(ImageError::new(ErrorKind::InvalidInput, text));
        }
        let fail = |errno| ImageError::io(errno, "cannot resize");
        let Some((qcow2, writer)) = self.top() else {
            return self.resize_raw(new_size_bytes).await.map_err(fail);
        };
        let _held = writer.resizing.lock().await;
        let old = self.image.size_bytes();
        self.check_resize(qcow2, writer, new_size_bytes)?;
        let resized = async {
            self.announce(writer).await?;
            if new_size_bytes > old {
                self.grow(qcow2, writer, old, new_size_bytes).await
            } else if new_size_bytes < old {
                self.shrink(qcow2, writer, old, new_size_bytes).await
            } else {
                Ok(())
            }
        };
        resized.await.map_err(fail)
    }

    async fn resize_raw(&self, new: u64) -> Result<(), Errno> {
        self.top_file().set_len(new).await?;
        self.image.size_bytes.store(new, Ordering::Release);
        self.flush_all().await
    }

    fn check_resize(&self, qcow2: &Qcow2, writer: &Writer, new: u64) -> Result<(), ImageError> {
        let geometry = &qcow2.geometry;
        if !new.is_multiple_of(512) {
            let text = format!("size {new} is not a multiple of 512 bytes");
            return Err(ImageError::new(ErrorKind::InvalidInput, text));
        }
        if geometry.l1_entries_for(new) > limit::L1_BYTES_MAX / 8 {
            let text = format!("size {new} needs a larger L1 table than is allowed");
            return Err(ImageError::new(ErrorKind::InvalidInput, text));
        }
        let none = writer.snapshots.lock().all().is_empty();
        if geometry.version() == Version::V2 && !none {
            let text = "a version 2 image with internal snapshots cannot be resized";
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        Ok(())
    }

    async fn grow(&self, qcow2: &Qcow2, writer: &Writer, old: u64, new: u64) -> Result<(), Errno> {
        let size = qcow2.geometry.cluster_size();
        let entries = qcow2.geometry.l1_entries_for(new);
        if entries > qcow2.maps.l1.len() {
            self.move_l1(qcow2, writer, entries).await?;
        }
        // Zeros are written in place below, like a request's: no cluster may be given away meanwhile.
        let entered = self.enter();
        let inside = old.next_multiple_of(size);
        if inside > old && self.cluster_has_bytes(qcow2, old).await? {
            self.write_zero_bytes(qcow2, writer, old, inside - old)
                .await?;
        }
        let backing = self
            .image
            .layers
            .get(1)
            .map_or(0, |layer| layer.size_bytes());
        let reached = backing.min(new).next_multiple_of(size);
        if reached > inside {
            self.zero_beyond(qcow2, writer, (inside, reached)).await?;
        }
        drop(entered);
        self.flush_all().await?;
        self.switch_size(writer, new).await
    }

    /// Whether the cluster at guest offset `at` may hold something other than zeros behind the end
    /// of the image: bytes of its own, or those of a longer backing file.
    async fn cluster_has_bytes(&self, qcow2: &Qcow2, at: u64) -> Result<bool, Errno> {
        loop {
            let located = qcow2.maps.locate(at);
            match located.map_err(|what| self.image.corruption(0, what))? {
                Located::Miss(slice) => self.load_slice(0, qcow2, slice).await?,
                Located::NoTable => return Ok(self.image.has_backing_at(at)),
                Located::Entry {
                    entry: L2Entry::Compressed(_),
                    ..
                } => return Ok(true),
                Located::Entry {
                    entry: L2Entry::Cluster { alloc, zero, .. },
                    ..
                } => {
                    let all = qcow2.geometry.subcluster_mask();
                    let through = (alloc | zero) & all != all && self.image.has_backing_at(at);
                    return Ok(alloc != 0 || through);
                }
            }
        }
    }

    async fn shrink(
        &self,
        qcow2: &Qcow2,
        writer: &Writer,
        old: u64,
        new: u64,
    ) -> Result<(), Errno> {
        let geometry = &qcow2.geometry;
        let size = geometry.cluster_size();
        {
            // A request that found its range inside the old size has ended before any of it is given up.
            let _closed = writer.grace.gate.close(|| writer.grace.is_empty()).await;
            self.image.size_bytes.store(new, Ordering::Release);
        }
        let unmapped = async {
            let range = (new.next_multiple_of(size), old.next_multiple_of(size));
            self.forget(qcow2, writer, range).await?;
            self.drop_tables(qcow2, writer, geometry.l1_entries_for(new))
                .await;
            self.flush_all().await
        };
        if let Err(errno) = unmapped.await {
            self.image.size_bytes.store(old, Ordering::Release);
            return Err(errno);
        }
        self.switch_size(writer, new).await
    }

    /// Gives up the L2 tables from L1 entry `first` on, which are empty.
    async fn drop_tables(&self, qcow2: &Qcow2, writer: &Writer, first: u64) {
        let _held = writer.tables.lock().await;
        let size = qcow2.geometry.cluster_size();
        let mut frees = Vec::new();
        {
            let maps = &qcow2.maps;
            for index in first..maps.l1.len() {
                if let Ok(Some(table)) = maps.table(index)
                    && table.copied
                    && self.beyond_vmstate(qcow2, index)
                {
                    maps.l1.set(index, None);
                    forget_table(maps, table.offset.0, size);
                    frees.push(Free {
                        start: table.offset.0 / size,
                        len: 1,
                    });
                }
            }
        }
        writer.unmapped(&self.image, &frees);
    }

    /// Tables beyond the old end of the disk may hold the state of a virtual machine.
    fn beyond_vmstate(&self, qcow2: &Qcow2, index: u64) -> bool {
        let old = self
            .image
            .layers
            .first()
            .map_or(0, |layer| layer.size_bytes());
        index < qcow2.geometry.l1_entries_for(old)
    }

    async fn switch_size(&self, writer: &Writer, new: u64) -> Result<(), Errno> {
        let _held = writer.structure.lock().await;
        self.switch_header(field::SIZE, &new.to_be_bytes()).await?;
        self.image.size_bytes.store(new, Ordering::Release);
        Ok(())
    }

    /// Moves the L1 table to a place where it has room for `entries` entries.
    async fn move_l1(&self, qcow2: &Qcow2, writer: &Writer, entries: u64) -> Result<(), Errno> {
        let size = qcow2.geometry.cluster_size();
        let clusters = (entries * 8).div_ceil(size);
        let taken = self.take_area(qcow2, writer, clusters).await?;
        let start = taken.free.start;
        let _held = writer.tables.lock().await;
        self.flush_all().await?;
        let (mut table, old_offset) = {
            let maps = &qcow2.maps;
            (maps.l1.entries(), maps.l1.offset())
        };
        let old_clusters = (table.len() as u64 * 8).div_ceil(size);
        table.resize(entries as usize, 0);
        self.write_table(&table, start * size, clusters * size)
            .await?;
        self.barrier().await?;
        let mut fields = [0; 12];
        fields[..4].copy_from_slice(&(entries as u32).to_be_bytes());
        fields[4..].copy_from_slice(&(start * size).to_be_bytes());
        {
            let _structure = writer.structure.lock().await;
            self.switch_header(field::L1_SIZE, &fields).await?;
        }
        taken.keep();
        let maps = &qcow2.maps;
        maps.l1.grow(start * size, entries);
        maps.metadata.insert(start, clusters);
        maps.metadata.remove(old_offset / size, old_clusters);
        let old = Free {
            start: old_offset / size,
            len: old_clusters,
        };
        writer.alloc.lock().releasable.push(old);
        Ok(())
    }

    /// Takes `clusters` clusters in a row; their counts are durable after the next pass.
    pub(crate) async fn take_area<'a>(
        &self,
        qcow2: &Qcow2,
        writer: &'a Writer,
        clusters: u64,
    ) -> Result<Taken<'a>, Errno> {
        loop {
            let reserved = writer.alloc.lock().reserve_area(self.id, clusters);
            match reserved {
                Ok(start) => {
                    let mut free = Free { start, len: 0 };
                    while free.len < clusters {
                        let run = self
                            .take_clusters(qcow2, writer, clusters - free.len)
                            .await?;
                        if run.start != free.start + free.len {
                            // Space beyond a short file was in use after all, or a request of this
                            // queue took some; look further on.
                            writer.alloc.lock().releasable.push(Free {
                                start: run.start,
                                len: run.len,
                            });
                            break;
                        }
                        free.len += run.len;
                    }
                    let taken = Taken {
                        writer,
                        free,
                        keep: false,
                    };
                    if taken.free.len == clusters {
                        return Ok(taken);
                    }
                }
                Err(AllocError::Need(AllocNeed::Block(index))) => {
                    self.make_block_elsewhere(qcow2, writer, index).await?;
                }
                Err(AllocError::Need(need)) => self.resolve_alloc(qcow2, writer, need).await?,
                Err(AllocError::Failed(errno)) => return Err(errno),
                Err(AllocError::Corrupt(_)) => return Err(self.image.contradiction()),
            }
        }
    }

    /// Writes a table of numbers at `offset`, padded with zeros to `len` bytes.
    pub(crate) async fn write_table(
        &self,
        entries: &[u64],
        offset: u64,
        len: u64,
    ) -> Result<(), Errno> {
        const PIECE: usize = 64 << 10;
        let file = self.top_file();
        let mut piece = self.pool.take(file, PIECE);
        let mut entries = entries.iter();
        let mut done = 0;
        while done < len {
            let part = (len - done).min(PIECE as u64);
            piece.fill(0);
            for (out, entry) in piece[..part as usize].chunks_exact_mut(8).zip(&mut entries) {
                out.copy_from_slice(&entry.to_be_bytes());
            }
            let source = Source::Memory(&piece[..part as usize]);
            align::write(file, &self.pool, &self.image.locks, offset + done, source).await?;
            done += part;
        }
        Ok(())
    }
}
