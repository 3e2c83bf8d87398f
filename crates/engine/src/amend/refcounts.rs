//! Changing the width of refcounts: new blocks and a new table behind the end of all that is used, a switch to them, and
//! then the count of the old ones.
//!
//! ```text
//! read    every old block: does each count fit, which new blocks are needed, where does the used part end
//! write   clusters of zeros, where they are wanted, too
//! write   the new blocks, which count the old table and blocks, the new ones and themselves; the new table
//! FLUSH
//! write   the header: offset and size of the table and the width, which lie in one sector
//! FLUSH   nothing refers to the old table and blocks
//! write   in the new blocks their counts go down
//! FLUSH
//! ```
//!
//! Memory: the new table, at most 8 MiB, a block of either width, and an index for each new block.

use std::collections::BTreeSet;
use std::ops::Range;

use gaur_block::File;
use gaur_format::header::{Header, field};
use gaur_format::{Geometry, limit, refcount};

use super::{Editor, step};
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;

/// First bytes of the header, with all that the switch changes.
const SECTOR: u64 = 512;

/// The old refcounts.
struct Old {
    geometry: Geometry,
    table: u64,
    table_bytes: u64,
    /// Host offset of each block, 0 for none.
    blocks: Vec<u64>,
}

/// What the old refcounts say.
struct Census {
    /// Blocks of the new width that have counts.
    needed: BTreeSet<u64>,
    /// One past the last cluster that is counted.
    end: u64,
}

/// Where the new refcounts go, in clusters.
struct Place {
    /// Before them clusters of zeros.
    zeros: u64,
    table: Range<u64>,
    blocks: Range<u64>,
    /// Which blocks those are.
    indexes: Vec<u64>,
}

impl<F: File> Editor<'_, F> {
    /// Gives refcounts the width `2^order`.
    pub(super) async fn change_refcounts(&self, order: u32, job: &Job) -> Result<(), ImageError> {
        if order != self.header().await?.refcount_order {
            self.rebuild_refcounts(order, &[], job).await?;
        }
        Ok(())
    }

    /// Does so, whatever they have now. Clusters of zeros are there afterwards that are counted as often as `zeros` says;
    /// which is the first.
    pub(super) async fn rebuild_refcounts(
        &self,
        order: u32,
        zeros: &[u64],
        job: &Job,
    ) -> Result<u64, ImageError> {
        let header = self.header().await?;
        let old = self.old_refcounts(&header).await?;
        let mut wanted = header.clone();
        wanted.refcount_order = order;
        let new = wanted.geometry();
        job.expect(2 * old.blocks.len() as u64 * new.cluster_size());
        let census = self.census(&old, &new, job).await?;
        let place = self.place(census, &new, zeros.len() as u64).await?;
        for number in 0..zeros.len() as u64 {
            let blank = vec![0; new.cluster_size() as usize];
            let at = (place.zeros + number) * new.cluster_size();
            self.write(at, &blank).await?;
        }
        self.write_new((&old, &new, &place), zeros, job).await?;
        self.flush_before_switch().await?;
        self.switch_refcounts(order, &place, &new).await?;
        self.flush().await?;
        self.forget_old(&old, &new, &place).await?;
        self.flush().await?;
        Ok(place.zeros)
    }

    async fn old_refcounts(&self, header: &Header) -> Result<Old, ImageError> {
        let geometry = header.geometry();
        let table = header.refcount_table_offset.0;
        let table_bytes = u64::from(header.refcount_table_clusters) * geometry.cluster_size();
        let bytes = self
            .reader
            .bytes("refcount table", table, table_bytes)
            .await?;
        let mut blocks = Vec::new();
        for (index, raw) in bytes.as_chunks().0.iter().enumerate() {
            let damaged = || format!("refcount block {index} is damaged");
            let block = refcount::decode_table_entry(u64::from_be_bytes(*raw), &geometry)
                .map_err(|corruption| ImageError::corrupt(corruption, damaged()))?;
            if let Some(block) = block {
                self.reader
                    .check_inside(&damaged(), block.0, geometry.cluster_size())?;
            }
            blocks.push(block.map_or(0, |block| block.0));
        }
        let last = blocks.iter().rposition(|block| *block != 0);
        blocks.truncate(last.map_or(0, |last| last + 1));
        Ok(Old {
            geometry,
            table,
            table_bytes,
            blocks,
        })
    }

    /// Bytes of old block `index`; nothing where there is none.
    async fn old_block(&self, old: &Old, index: u64) -> Result<Vec<u8>, ImageError> {
        match old.blocks.get(index as usize) {
            Some(0) | None => Ok(Vec::new()),
            Some(at) => self.reader.padded(*at, old.geometry.cluster_size()).await,
        }
    }

    async fn census(&self, old: &Old, new: &Geometry, job: &Job) -> Result<Census, ImageError> {
        let (entries, most) = (old.geometry.refcount_block_entries(), new.refcount_max());
        let mut census = Census {
            needed: BTreeSet::new(),
            end: 0,
        };
        for number in 0..old.blocks.len() as u64 {
            let block = self.old_block(old, number).await?;
            for index in 0..entries {
                let count = refcount::get(&block, old.geometry.refcount_order(), index);
                if count == 0 {
                    continue;
                }
                let cluster = number * entries + index;
                if count > most {
                    let text = format!(
                        "refcounts of {} bits are too narrow: the cluster at {} is counted {count} times",
                        new.refcount_bits(),
                        cluster * new.cluster_size()
                    );
                    return Err(ImageError::new(ErrorKind::InvalidInput, text));
                }
                census.needed.insert(cluster / new.refcount_block_entries());
                census.end = cluster + 1;
            }
            step(job, old.geometry.cluster_size())?;
        }
        Ok(census)
    }

    /// Finds a place for the new table and blocks, which have to be counted too.
    async fn place(&self, census: Census, new: &Geometry, zeros: u64) -> Result<Place, ImageError> {
        let size = new.cluster_size();
        let file_end = self.reader.len_bytes.div_ceil(size);
        let resizable = self.file.limits().resizable;
        let start = match resizable {
            true => census.end.max(file_end),
            false => census.end,
        };
        let per_block = new.refcount_block_entries();
        let mut needed = census.needed;
        let (mut table, mut end) = (0, start);
        loop {
            let last = end.max(1) - 1;
            needed.extend(start / per_block..=last / per_block);
            let entries = needed.last().map_or(0, |last| last + 1);
            table = new.clusters_for(entries * 8).max(table);
            let more = start + zeros + table + needed.len() as u64;
            if more == end {
                break;
            }
            end = more;
        }
        if table * size > limit::REFCOUNT_TABLE_BYTES_MAX {
            let text = "refcounts this wide need a larger table than the format allows";
            return Err(ImageError::new(ErrorKind::InvalidInput, text));
        }
        if resizable {
            let grown = self.file.set_len(end * size).await;
            grown.map_err(|errno| ImageError::io(errno, "cannot make room for new refcounts"))?;
        } else if end > self.reader.len_bytes / size {
            let text = "the device has no room for new refcounts at its end";
            return Err(ImageError::new(ErrorKind::NoSpace, text));
        }
        let first = start + zeros;
        Ok(Place {
            zeros: start,
            table: first..first + table,
            blocks: first + table..end,
            indexes: needed.into_iter().collect(),
        })
    }

    async fn write_new(
        &self,
        (old, new, place): (&Old, &Geometry, &Place),
        zeros: &[u64],
        job: &Job,
    ) -> Result<(), ImageError> {
        let size = new.cluster_size();
        let fresh = place.table.start..place.blocks.end;
        let mut table = vec![0; ((place.table.end - place.table.start) * size) as usize];
        // Old block that was read last.
        let mut cached = (u64::MAX, Vec::new());
        let all = old.blocks.len() as u64 * size;
        let share = all / (place.indexes.len() as u64).max(1);
        for (number, index) in (0..).zip(&place.indexes) {
            let mut block = vec![0; size as usize];
            let entries = new.refcount_block_entries();
            for slot in 0..entries {
                let cluster = index * entries + slot;
                let per_old = old.geometry.refcount_block_entries();
                if cached.0 != cluster / per_old {
                    let at = cluster / per_old;
                    cached = (at, self.old_block(old, at).await?);
                }
                let order = old.geometry.refcount_order();
                let zero = cluster.checked_sub(place.zeros).map(|at| at as usize);
                let count = match zero.and_then(|at| zeros.get(at)) {
                    Some(count) => *count,
                    None if fresh.contains(&cluster) => 1,
                    None => refcount::get(&cached.1, order, cluster % per_old),
                };
                set(&mut block, new, slot, count)?;
            }
            let at = (place.blocks.start + number) * size;
            self.write(at, &block).await?;
            let entry = at.to_be_bytes();
            let slot = *index as usize * 8;
            if let Some(target) = table.get_mut(slot..slot + 8) {
                target.copy_from_slice(&entry);
            }
            step(job, share)?;
        }
        self.write(place.table.start * size, &table).await
    }

    /// One write of the header's first sector.
    async fn switch_refcounts(
        &self,
        order: u32,
        place: &Place,
        new: &Geometry,
    ) -> Result<(), ImageError> {
        let mut sector = self.reader.bytes("header", 0, SECTOR).await?;
        let mut put = |at: u64, bytes: &[u8]| {
            if let Some(target) = sector.get_mut(at as usize..at as usize + bytes.len()) {
                target.copy_from_slice(bytes);
            }
        };
        let clusters = (place.table.end - place.table.start) as u32;
        let offset = place.table.start * new.cluster_size();
        put(field::REFCOUNT_TABLE_OFFSET, &offset.to_be_bytes());
        put(field::REFCOUNT_TABLE_CLUSTERS, &clusters.to_be_bytes());
        put(field::REFCOUNT_ORDER, &order.to_be_bytes());
        self.write(0, &sector).await
    }

    /// Takes the old table and blocks out of the new counts.
    async fn forget_old(&self, old: &Old, new: &Geometry, place: &Place) -> Result<(), ImageError> {
        let size = new.cluster_size();
        let mut clusters: Vec<u64> = old
            .blocks
            .iter()
            .filter(|at| **at != 0)
            .map(|at| at / size)
            .collect();
        clusters.extend(old.table / size..(old.table + old.table_bytes) / size);
        clusters.sort_unstable();
        let entries = new.refcount_block_entries();
        for run in clusters.chunk_by(|left, right| left / entries == right / entries) {
            let Some(index) = run.first().map(|cluster| cluster / entries) else {
                continue;
            };
            let Ok(number) = place.indexes.binary_search(&index) else {
                continue;
            };
            let at = (place.blocks.start + number as u64) * size;
            let mut block = self.reader.padded(at, size).await?;
            for cluster in run {
                let slot = cluster % entries;
                let count = refcount::get(&block, new.refcount_order(), slot);
                set(&mut block, new, slot, count.saturating_sub(1))?;
            }
            self.write(at, &block).await?;
        }
        Ok(())
    }
}

fn set(block: &mut [u8], geometry: &Geometry, index: u64, count: u64) -> Result<(), ImageError> {
    refcount::set(block, geometry.refcount_order(), index, count).map_err(|error| {
        ImageError::new(
            ErrorKind::Corrupt,
            format!("cannot change refcounts: {error}"),
        )
    })
}
