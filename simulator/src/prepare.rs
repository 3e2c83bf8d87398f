//! Prepared images: built by the simulator's own code, not by the engine.
//!
//! A prepared image has clusters of every kind, compressed ones that share host clusters, internal
//! snapshots that share tables and data with the active disk, holes in the host file that hold
//! garbage of an earlier life, and sometimes leaks. Its refcounts are right.

use std::collections::BTreeMap;

use gaur_sim::{FileImage, Random};

use crate::config::Bitmaps;
use crate::content::{Value, ValueEncoding, ZERO};
use crate::encryption::{Encryption, LUKS_EXTENSION};
use crate::extension::{
    ALLOCATION_EXTENSION, BITMAPS_EXTENSION, FEATURE_NAMES_EXTENSION, UNKNOWN_EXTENSION,
    allocation_data, push_extension,
};
use crate::shape::{COMPRESSED, COPIED, OFFSET_MASK, Shape, ZERO_FLAG};

/// What is wanted.
#[derive(Clone, Debug, Default)]
pub struct PreparedOptions {
    /// The shape.
    pub shape: Shape,
    /// Size of the disk in bytes.
    pub guest_bytes: u64,
    /// Name and format of the backing file.
    pub backing: Option<(String, &'static str)>,
    /// Internal snapshots.
    pub snapshots: u32,
    /// Clusters in a thousand that are not left alone, for the first state and after each snapshot.
    pub filled_per_mille: u32,
    /// Share of compressed clusters.
    pub compressed_per_mille: u32,
    /// The active L1 table has this many entries more than the disk needs.
    pub spare_l1_entries: u64,
    /// Some of these entries, and the last table that the disk needs, map clusters behind its end.
    pub mapped_beyond: bool,
    /// It has persistent bitmaps.
    pub bitmaps: Option<Bitmaps>,
    /// Clusters of the refcount table that it does not need.
    pub spare_refcount_clusters: u64,
    /// The header allows lazy refcounts; a writer need not use them.
    pub lazy_refcounts: bool,
    /// The start of the file is full of leaked clusters, so that the refcount table is about to
    /// become too small; only where that takes few of them.
    pub crowded: bool,
    /// Some free clusters have a refcount.
    pub leaks: bool,
    /// The header says that this is the policy for space.
    pub allocation: Option<u8>,
    /// Its data is encrypted.
    pub encryption: Option<Encryption>,
}

/// What a unit of a prepared disk holds: a value of its own, or whatever lies below.
pub type Content = Vec<Option<Value>>;

/// A prepared image.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The file.
    pub file: FileImage,
    /// The active disk.
    pub active: Content,
    /// The disk at each snapshot, oldest first.
    pub snapshots: Vec<Content>,
}

/// One L2 entry: its two words as they will be, without COPIED.
#[derive(Clone, Copy, Debug, Default)]
struct L2Words {
    entry: u64,
    bitmap: u64,
}

/// A table of cells, shared by the L1 tables that name it.
#[derive(Clone, Debug)]
struct L2Table {
    host: u64,
    cells: Vec<L2Words>,
}

#[derive(Clone, Debug)]
struct Disk {
    l1: Vec<Option<usize>>,
    content: Content,
}

/// The rest of a host cluster that holds compressed ones.
#[derive(Clone, Copy, Debug)]
struct CompressedRoom {
    at: u64,
    end: u64,
    /// How many more the refcount can bear.
    left: u64,
}

struct Builder<'a> {
    wanted: &'a PreparedOptions,
    script: ValueEncoding,
    random: &'a mut Random,
    next_value: &'a mut Value,
    file: FileImage,
    /// First host cluster never handed out.
    next: u64,
    /// Host clusters skipped, free to use.
    holes: Vec<u64>,
    tables: Vec<L2Table>,
    /// Where more compressed clusters have room.
    compressed: Option<CompressedRoom>,
    refcounts: BTreeMap<u64, u64>,
}

/// Makes an image; values for what it writes are taken from `next_value`.
pub fn prepare(
    wanted: &PreparedOptions,
    script: ValueEncoding,
    next_value: &mut Value,
    random: &mut Random,
) -> Prepared {
    let units = (wanted.guest_bytes / script.unit_bytes()) as usize;
    let l1 = vec![None; wanted.shape.l1_entries(wanted.guest_bytes) as usize];
    let mut disk = Disk {
        l1,
        content: vec![None; units],
    };
    let mut builder = Builder {
        wanted,
        script,
        random,
        next_value,
        file: FileImage::new(0),
        next: 1,
        holes: Vec::new(),
        tables: Vec::new(),
        compressed: None,
        refcounts: BTreeMap::new(),
    };
    builder.crowd();
    builder.mutate(&mut disk);
    let mut snapshots = Vec::new();
    for _ in 0..wanted.snapshots {
        snapshots.push(disk.clone());
        // The compressed cluster that is open is shared by the snapshot; the counts of small
        // refcounts would not hold more.
        builder.compressed = None;
        builder.mutate(&mut disk);
    }
    if wanted.mapped_beyond {
        builder.map_beyond(&mut disk, wanted.snapshots == 0);
    }
    let file = builder.finish(&disk, &snapshots);
    let snapshots = snapshots
        .into_iter()
        .map(|snapshot| snapshot.content)
        .collect();
    Prepared {
        file,
        active: disk.content,
        snapshots,
    }
}

impl Builder<'_> {
    fn shape(&self) -> Shape {
        self.wanted.shape
    }

    fn cluster_bytes(&self) -> u64 {
        self.shape().cluster_bytes()
    }

    /// Host clusters in a row; a single one may fill a hole.
    fn allocate(&mut self, count: u64) -> u64 {
        if count == 1 && !self.holes.is_empty() && self.random.chance(500) {
            let index = self.random.index(self.holes.len());
            return self.holes.swap_remove(index) * self.cluster_bytes();
        }
        if self.random.chance(150) {
            for _ in 0..self.random.between(1, 3) {
                self.holes.push(self.next);
                self.next += 1;
            }
        }
        let first = self.next;
        self.next += count;
        first * self.cluster_bytes()
    }

    /// Skips to where one cluster of refcount table nearly ends.
    fn crowd(&mut self) {
        let capacity = self.cluster_bytes() / 8 * self.shape().block_entries();
        let room = self.random.between(30, 600);
        if self.wanted.crowded && capacity <= CROWD_MAX && room < capacity {
            self.next = capacity - room;
            for cluster in 1..self.next {
                self.refcounts.insert(cluster, 1);
            }
        }
    }

    fn value(&mut self) -> Value {
        *self.next_value += 1;
        *self.next_value
    }

    /// Changes some clusters of a disk, without touching tables that a snapshot shares.
    fn mutate(&mut self, disk: &mut Disk) {
        let first_own = self.tables.len();
        let clusters = self.wanted.guest_bytes.div_ceil(self.cluster_bytes());
        for cluster in 0..clusters {
            if !self.random.chance(self.wanted.filled_per_mille) {
                continue;
            }
            let cell = self.cell(disk, cluster);
            let entries = self.shape().entries();
            let slot = &mut disk.l1[(cluster / entries) as usize];
            let table = match *slot {
                Some(index) if index >= first_own => index,
                shared => {
                    let cells = match shared {
                        Some(index) => self.tables[index].cells.clone(),
                        None => vec![L2Words::default(); entries as usize],
                    };
                    let host = self.allocate(1);
                    self.tables.push(L2Table { host, cells });
                    self.tables.len() - 1
                }
            };
            disk.l1[(cluster / entries) as usize] = Some(table);
            self.tables[table].cells[(cluster % entries) as usize] = cell;
        }
    }

    /// Maps clusters with garbage behind the end of the active disk: in the last table that it needs,
    /// unless a snapshot may share that (`own`), and in tables of its own behind it.
    fn map_beyond(&mut self, disk: &mut Disk, own: bool) {
        let entries = self.shape().entries();
        let clusters = self.wanted.guest_bytes.div_ceil(self.cluster_bytes());
        let last = disk.l1.last().copied().flatten();
        if let (true, Some(table)) = (own, last) {
            // A table of large clusters maps more than the machine has memory.
            let most = (BEYOND_BYTES_MAX / self.cluster_bytes()) as usize;
            for index in (clusters % entries..entries).take(most) {
                if !clusters.is_multiple_of(entries) && self.random.chance(300) {
                    self.tables[table].cells[index as usize] = self.garbage_cell();
                }
            }
        }
        for _ in 0..self.wanted.spare_l1_entries.min(3) {
            if self.random.chance(300) {
                disk.l1.push(None);
                continue;
            }
            let mut cells = vec![L2Words::default(); entries as usize];
            for _ in 0..self.random.between(1, 4) {
                let at = self.random.index(cells.len());
                cells[at] = self.garbage_cell();
            }
            let host = self.allocate(1);
            self.tables.push(L2Table { host, cells });
            disk.l1.push(Some(self.tables.len() - 1));
        }
    }

    /// A cell whose cluster holds what no guest may ever see.
    fn garbage_cell(&mut self) -> L2Words {
        L2Words {
            entry: self.garbage_cluster(),
            bitmap: if self.shape().extended {
                0xffff_ffff
            } else {
                0
            },
        }
    }

    /// A new content for one guest cluster.
    fn cell(&mut self, disk: &mut Disk, cluster: u64) -> L2Words {
        if self.random.chance(self.wanted.compressed_per_mille)
            && let Some(cell) = self.compressed_cell(disk, cluster)
        {
            return cell;
        }
        if self.shape().extended {
            return self.extended_cell(disk, cluster);
        }
        let zeroes = self.shape().version == 3 && self.random.chance(200);
        if zeroes {
            self.describe(disk, cluster, 0..1, 1, Some(ZERO));
            let host = if self.random.chance(500) {
                self.garbage_cluster()
            } else {
                0
            };
            return L2Words {
                entry: host | ZERO_FLAG,
                bitmap: 0,
            };
        }
        let value = self.value();
        let host = self.allocate(1);
        self.write_part(host, cluster, 0..1, 1, value);
        self.describe(disk, cluster, 0..1, 1, Some(value));
        L2Words {
            entry: host,
            bitmap: 0,
        }
    }

    fn extended_cell(&mut self, disk: &mut Disk, cluster: u64) -> L2Words {
        let allocated = self.random.chance(800);
        let host = if allocated { self.garbage_cluster() } else { 0 };
        let mut bitmap = 0;
        let mut subcluster = 0;
        while subcluster < 32 {
            let run = self.random.between(1, 12).min(32 - subcluster);
            let part = subcluster..subcluster + run;
            let bits = part.clone().map(|bit| 1_u64 << bit).sum::<u64>();
            match self.random.below(3) {
                0 if allocated => {
                    let value = self.value();
                    self.write_part(host, cluster, part.clone(), 32, value);
                    self.describe(disk, cluster, part, 32, Some(value));
                    bitmap |= bits;
                }
                1 => {
                    self.describe(disk, cluster, part, 32, Some(ZERO));
                    bitmap |= bits << 32;
                }
                _ => self.describe(disk, cluster, part, 32, None),
            }
            subcluster += run;
        }
        L2Words {
            entry: host,
            bitmap,
        }
    }

    fn compressed_cell(&mut self, disk: &mut Disk, cluster: u64) -> Option<L2Words> {
        let bytes = self.cluster_bytes();
        let value = self.value();
        let plain = self.script.bytes_of(value, cluster * bytes, bytes);
        let packed = miniz_oxide::deflate::compress_to_vec(&plain, 6);
        let len = packed.len() as u64;
        if len >= bytes {
            return None;
        }
        let offset = self.compressed_space(len);
        self.write(offset, &packed);
        self.describe(disk, cluster, 0..1, 1, Some(value));
        Some(L2Words {
            entry: self.shape().compressed_entry(offset, len),
            bitmap: 0,
        })
    }

    /// Room for `len` compressed bytes: behind the last ones, as far as refcounts allow sharing.
    fn compressed_space(&mut self, len: u64) -> u64 {
        if let Some(room) = self.compressed
            && room.left > 0
            && room.at + len <= room.end
        {
            self.compressed = Some(CompressedRoom {
                at: room.at + len,
                left: room.left - 1,
                ..room
            });
            return room.at;
        }
        // Now and then two clusters in a row, so that one compressed cluster lies in both.
        let count = if self.random.chance(300) { 2 } else { 1 };
        let start = self.allocate(count);
        let skip = if count == 2 {
            self.cluster_bytes() - len / 2
        } else {
            0
        };
        let bearable = self.shape().refcount_max() / u64::from(self.wanted.snapshots + 1);
        let end = start + count * self.cluster_bytes();
        let left = bearable.saturating_sub(1).min(8);
        self.compressed = Some(CompressedRoom {
            at: start + skip + len,
            end,
            left,
        });
        start + skip
    }

    /// A host cluster with content that no guest may ever see.
    fn garbage_cluster(&mut self) -> u64 {
        let host = self.allocate(1);
        self.fill_with_garbage(host);
        host
    }

    fn fill_with_garbage(&mut self, host: u64) {
        let value = self.value();
        let bytes = self.script.bytes_of(value, host, self.cluster_bytes());
        self.write(host, &bytes);
    }

    /// Writes `value` into `part` of the host cluster, counted in `parts`ths of it.
    fn write_part(
        &mut self,
        host: u64,
        cluster: u64,
        part: std::ops::Range<u64>,
        parts: u64,
        value: Value,
    ) {
        let share = self.cluster_bytes() / parts;
        let guest = cluster * self.cluster_bytes() + part.start * share;
        let mut bytes = self
            .script
            .bytes_of(value, guest, (part.end - part.start) * share);
        let host = host + part.start * share;
        if let Some(encryption) = self.wanted.encryption {
            encryption.encrypt(host, &mut bytes);
        }
        self.write(host, &bytes);
    }

    /// Notes what `part` of a guest cluster holds from now on.
    fn describe(
        &self,
        disk: &mut Disk,
        cluster: u64,
        part: std::ops::Range<u64>,
        parts: u64,
        value: Option<Value>,
    ) {
        let share = self.cluster_bytes() / parts;
        let start =
            (cluster * self.cluster_bytes() + part.start * share) / self.script.unit_bytes();
        let end = (cluster * self.cluster_bytes() + part.end * share) / self.script.unit_bytes();
        let len = disk.content.len();
        let units = (start as usize).min(len)..(end as usize).min(len);
        disk.content[units].fill(value);
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.file.write(offset, bytes);
    }

    fn count(&mut self, host: u64, len: u64) {
        let bytes = self.cluster_bytes();
        for cluster in host / bytes..(host + len).div_ceil(bytes) {
            *self.refcounts.entry(cluster).or_default() += 1;
        }
    }

    /// Counts what an L1 table names: its tables, and what their cells name.
    fn count_disk(&mut self, disk: &Disk) {
        let bytes = self.cluster_bytes();
        for index in disk.l1.iter().flatten() {
            self.count(self.tables[*index].host, bytes);
            for cell in self.tables[*index].cells.clone() {
                if cell.entry & COMPRESSED != 0 {
                    let range = self.shape().compressed_range(cell.entry);
                    self.count(range.start, range.end - range.start);
                } else if cell.entry & OFFSET_MASK != 0 {
                    self.count(cell.entry & OFFSET_MASK, bytes);
                }
            }
        }
    }

    /// Lays out tables, snapshots, refcounts and the header.
    fn finish(mut self, active: &Disk, snapshots: &[Disk]) -> FileImage {
        let bytes = self.cluster_bytes();
        self.count(0, bytes);
        self.count_disk(active);
        snapshots
            .iter()
            .for_each(|snapshot| self.count_disk(snapshot));
        let mut snapshot_l1 = Vec::new();
        for snapshot in snapshots {
            snapshot_l1.push(self.place_l1(snapshot.l1.len()));
        }
        let active_l1 = self.place_l1(self.l1_entries(active) as usize);
        let table = self.snapshot_table(snapshots, &snapshot_l1);
        if !table.is_empty() {
            self.count(table_offset(&table), table.len() as u64 - 8);
        }
        let luks = self.place_luks();
        let bitmaps = self.place_bitmaps();
        let reftable = self.place_refcounts();
        for (snapshot, &offset) in snapshots.iter().zip(&snapshot_l1) {
            self.write_l1(snapshot, offset, false);
        }
        self.write_l1(active, active_l1, true);
        self.write_tables(active);
        let places = TableOffsets {
            l1: active_l1,
            reftable,
            bitmaps,
            luks,
        };
        let header = self.header(active, &places, &table, snapshots.len());
        self.write(0, &header);
        if !table.is_empty() {
            self.write(table_offset(&table), &table[8..]);
        }
        let len = self.file.len_bytes().next_multiple_of(bytes);
        self.file.set_len(len);
        self.file
    }

    /// Entries of the active L1 table.
    fn l1_entries(&self, active: &Disk) -> u64 {
        let needed = self.shape().l1_entries(self.wanted.guest_bytes);
        (needed + self.wanted.spare_l1_entries).max(active.l1.len() as u64)
    }

    /// Lays out bitmaps with a bit for 64 KiB each; their number, and offset and length of the directory.
    fn place_bitmaps(&mut self) -> Option<(u32, u64, u64)> {
        let worth = self.wanted.bitmaps?;
        let bytes = self.cluster_bytes();
        let bits = self.wanted.guest_bytes.div_ceil(1 << 16);
        let entries = bits.div_ceil(8).div_ceil(bytes).max(1);
        let count = self.random.between(1, 3) as u32;
        let mut directory = Vec::new();
        for number in 0..count {
            let table = self.allocate((entries * 8).div_ceil(bytes));
            let mut cells = Vec::new();
            for _ in 0..entries {
                let stored = match worth {
                    Bitmaps::Valid => self.random.chance(700),
                    Bitmaps::Stale => false,
                };
                let cell = match stored {
                    true => self.garbage_cluster(),
                    false => self.random.below(2),
                };
                if stored {
                    self.count(cell, bytes);
                }
                cells.extend(cell.to_be_bytes());
            }
            cells.resize((entries * 8).next_multiple_of(bytes) as usize, 0);
            self.write(table, &cells);
            let name = format!("bitmap {number}");
            directory.extend(table.to_be_bytes());
            directory.extend((entries as u32).to_be_bytes());
            directory.extend(2_u32.to_be_bytes()); // records all writes
            directory.extend([1, 16]); // tracks changes, of 64 KiB
            directory.extend((name.len() as u16).to_be_bytes());
            directory.extend([0; 4]);
            directory.extend(name.bytes());
            directory.resize(directory.len().next_multiple_of(8), 0);
            if worth == Bitmaps::Valid {
                self.count(table, entries * 8);
            }
        }
        let len = directory.len() as u64;
        let offset = self.allocate(len.div_ceil(bytes));
        self.write(offset, &directory);
        if worth == Bitmaps::Valid {
            self.count(offset, len);
        }
        Some((count, offset, len))
    }

    fn place_luks(&mut self) -> Option<(u64, u64)> {
        let area = self.wanted.encryption?.area();
        let len = area.len() as u64;
        let offset = self.allocate(len.div_ceil(self.cluster_bytes()));
        self.count(offset, len);
        self.write(offset, area);
        Some((offset, len))
    }

    fn place_l1(&mut self, entries: usize) -> u64 {
        let len = (entries as u64 * 8).max(1);
        let offset = self.allocate(len.div_ceil(self.cluster_bytes()));
        self.count(offset, len);
        offset
    }

    fn refcount(&self, host: u64) -> u64 {
        self.refcounts
            .get(&(host / self.cluster_bytes()))
            .copied()
            .unwrap_or(0)
    }

    fn copied(&self, host: u64) -> u64 {
        if self.refcount(host) == 1 { COPIED } else { 0 }
    }

    fn write_l1(&mut self, disk: &Disk, offset: u64, active: bool) {
        for (index, table) in disk.l1.iter().enumerate() {
            let entry = match table {
                Some(table) => {
                    let host = self.tables[*table].host;
                    host | if active { self.copied(host) } else { 0 }
                }
                None => 0,
            };
            self.write(offset + index as u64 * 8, &entry.to_be_bytes());
        }
    }

    fn write_tables(&mut self, active: &Disk) {
        for index in 0..self.tables.len() {
            let own = active.l1.contains(&Some(index));
            let table = self.tables[index].clone();
            let mut bytes = Vec::new();
            for cell in &table.cells {
                let host = cell.entry & OFFSET_MASK;
                let plain = cell.entry & COMPRESSED == 0 && host != 0;
                let copied = if plain && own { self.copied(host) } else { 0 };
                bytes.extend((cell.entry | copied).to_be_bytes());
                if self.shape().extended {
                    bytes.extend(cell.bitmap.to_be_bytes());
                }
            }
            self.write(table.host, &bytes);
        }
    }

    /// The snapshot table behind 8 bytes that say where it goes; nothing without snapshots.
    fn snapshot_table(&mut self, snapshots: &[Disk], l1: &[u64]) -> Vec<u8> {
        if snapshots.is_empty() {
            return Vec::new();
        }
        let mut table = vec![0; 8];
        for (number, (snapshot, offset)) in snapshots.iter().zip(l1).enumerate() {
            let (id, name) = (
                format!("{}", number + 1),
                format!("snapshot {}", number + 1),
            );
            table.extend(offset.to_be_bytes());
            table.extend((snapshot.l1.len() as u32).to_be_bytes());
            table.extend((id.len() as u16).to_be_bytes());
            table.extend((name.len() as u16).to_be_bytes());
            table.extend([0; 20]); // date, clock, state
            table.extend(24_u32.to_be_bytes());
            table.extend(0_u64.to_be_bytes());
            table.extend(self.wanted.guest_bytes.to_be_bytes());
            table.extend(u64::MAX.to_be_bytes());
            table.extend(id.bytes());
            table.extend(name.bytes());
            table.resize(table.len().next_multiple_of(8), 0);
        }
        let offset = self.allocate((table.len() as u64 - 8).div_ceil(self.cluster_bytes()));
        table[..8].copy_from_slice(&offset.to_be_bytes());
        table
    }

    /// Writes refcount table and blocks; the table's offset and length in clusters.
    fn place_refcounts(&mut self) -> (u64, u64) {
        let bytes = self.cluster_bytes();
        let per_block = self.shape().block_entries();
        let (mut blocks, mut table_clusters) = (1, 1 + self.wanted.spare_refcount_clusters);
        // Both cover themselves.
        let table_offset = loop {
            let total = self.next + blocks + table_clusters;
            let needed = total.div_ceil(per_block);
            let needed_clusters = (needed * 8).div_ceil(bytes);
            if needed <= blocks && needed_clusters <= table_clusters {
                break self.next * bytes;
            }
            (blocks, table_clusters) = (needed.max(blocks), needed_clusters.max(table_clusters));
        };
        let first_block = table_offset + table_clusters * bytes;
        self.next += blocks + table_clusters;
        self.count(table_offset, (blocks + table_clusters) * bytes);
        self.holes.sort_unstable();
        for hole in std::mem::take(&mut self.holes) {
            self.fill_with_garbage(hole * bytes);
            if self.wanted.leaks && self.random.chance(500) {
                self.count(hole * bytes, 1);
            }
        }
        for block in 0..blocks {
            let mut content = vec![0; bytes as usize];
            for (&cluster, &count) in self
                .refcounts
                .range(block * per_block..(block + 1) * per_block)
            {
                self.wanted
                    .shape
                    .set_refcount(&mut content, cluster % per_block, count);
            }
            let host = first_block + block * bytes;
            self.file.write(host, &content);
            self.file
                .write(table_offset + block * 8, &host.to_be_bytes());
        }
        self.file.write(
            table_offset + blocks * 8,
            &vec![0; (table_clusters * bytes - blocks * 8) as usize],
        );
        (table_offset, table_clusters)
    }

    fn header(
        &self,
        active: &Disk,
        places: &TableOffsets,
        table: &[u8],
        snapshots: usize,
    ) -> Vec<u8> {
        let TableOffsets { l1, reftable, .. } = *places;
        let shape = self.shape();
        let mut header = Vec::from(*b"QFI\xfb");
        header.extend(shape.version.to_be_bytes());
        header.extend([0; 12]); // the backing file's name, filled in below
        header.extend(shape.cluster_bits.to_be_bytes());
        header.extend(self.wanted.guest_bytes.to_be_bytes());
        header.extend((2 * u32::from(places.luks.is_some())).to_be_bytes());
        let l1_entries = self.l1_entries(active);
        header.extend((l1_entries as u32).to_be_bytes());
        header.extend(l1.to_be_bytes());
        header.extend(reftable.0.to_be_bytes());
        header.extend((reftable.1 as u32).to_be_bytes());
        header.extend((snapshots as u32).to_be_bytes());
        let table = if table.is_empty() {
            0
        } else {
            table_offset(table)
        };
        header.extend(table.to_be_bytes());
        if shape.version == 3 {
            header.extend((u64::from(shape.extended) << 4).to_be_bytes());
            header.extend(u64::from(self.wanted.lazy_refcounts).to_be_bytes());
            // An unknown autoclear bit: every writer clears it.
            let bitmaps = u64::from(self.wanted.bitmaps == Some(Bitmaps::Valid));
            header.extend((1_u64 << 40 | bitmaps).to_be_bytes());
            header.extend(shape.refcount_order.to_be_bytes());
            header.extend(112_u32.to_be_bytes());
            header.extend(0_u64.to_be_bytes());
        }
        push_extension(&mut header, UNKNOWN_EXTENSION, b"keep me as I am");
        if let Some((offset, len)) = places.luks {
            let data = [offset.to_be_bytes(), len.to_be_bytes()].concat();
            push_extension(&mut header, LUKS_EXTENSION, &data);
        }
        if let Some((count, directory, len)) = places.bitmaps {
            if shape.cluster_bits >= 12 {
                // As QEMU has them: what comes next is not in the first sector.
                push_extension(&mut header, FEATURE_NAMES_EXTENSION, &[0; 8 * 48]);
            }
            let mut data = Vec::from(count.to_be_bytes());
            data.extend([0; 4]);
            data.extend(len.to_be_bytes());
            data.extend(directory.to_be_bytes());
            push_extension(&mut header, BITMAPS_EXTENSION, &data);
        }
        if let Some(policy) = self.wanted.allocation {
            push_extension(&mut header, ALLOCATION_EXTENSION, &allocation_data(policy));
        }
        if let Some((name, format)) = &self.wanted.backing {
            push_extension(&mut header, 0xe279_2aca, format.as_bytes());
            header.extend([0; 8]);
            let offset = header.len() as u64;
            header[8..16].copy_from_slice(&offset.to_be_bytes());
            header[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
            header.extend(name.bytes());
        } else {
            header.extend([0; 8]);
        }
        header.resize(self.cluster_bytes() as usize, 0);
        header
    }
}

/// What the header leads to beside the snapshots.
struct TableOffsets {
    l1: u64,
    /// Offset and length in clusters.
    reftable: (u64, u64),
    /// Number, and offset and length of the directory.
    bitmaps: Option<(u32, u64, u64)>,
    /// Offset and length.
    luks: Option<(u64, u64)>,
}

/// Most bytes behind the end of a disk that may be mapped.
const BEYOND_BYTES_MAX: u64 = 1 << 30;
/// Most clusters that a crowded image leaks.
const CROWD_MAX: u64 = 1 << 15;

fn table_offset(table: &[u8]) -> u64 {
    table
        .first_chunk::<8>()
        .map_or(0, |bytes| u64::from_be_bytes(*bytes))
}
