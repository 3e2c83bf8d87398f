//! A file as a map of 512-byte sectors; missing ones are zeros.

use std::collections::BTreeMap;

use gaur_format::check::{Check, Report, Step};
use gaur_format::plan::Plan;
use gaur_format::{ClusterIndex, Error, Header, refcount};
use proptest::sample::Index;

const SECTOR: u64 = 512;

/// An image file in memory.
pub struct Image {
    sectors: BTreeMap<u64, Vec<u8>>,
    len: u64,
}

impl Image {
    /// The file that executing a plan makes.
    pub fn of_plan(plan: &Plan) -> Image {
        let mut image = Image {
            sectors: BTreeMap::new(),
            len: plan.len_bytes,
        };
        for (offset, bytes) in &plan.writes {
            for (number, sector) in (offset.0 / SECTOR..).zip(bytes.chunks(SECTOR as usize)) {
                let earlier = image.sectors.insert(number, sector.to_vec());
                assert!(earlier.is_none(), "writes of a plan do not overlap");
            }
        }
        image
    }

    /// Length of the file in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of the file; zeros after its end.
    pub fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let first = offset / SECTOR;
        let last = offset.saturating_add(len).div_ceil(SECTOR);
        for (number, sector) in self.sectors.range(first..last) {
            for (index, byte) in (number * SECTOR..).zip(sector) {
                if (offset..offset + len).contains(&index) {
                    bytes[(index - offset) as usize] = *byte;
                }
            }
        }
        bytes
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        for (index, byte) in (offset..).zip(bytes) {
            let sector = self
                .sectors
                .entry(index / SECTOR)
                .or_insert_with(|| vec![0; 512]);
            sector[(index % SECTOR) as usize] = *byte;
        }
    }

    /// Overwrites eight bytes somewhere in what was written.
    pub fn scribble(&mut self, at: Index, value: u64) {
        let sectors: Vec<u64> = self.sectors.keys().copied().collect();
        let word = at.index(sectors.len() * 64);
        self.write(
            sectors[word / 64] * SECTOR + word as u64 % 64 * 8,
            &value.to_be_bytes(),
        );
    }

    /// Sets a refcount, wherever its block is.
    pub fn set_refcount(&mut self, cluster: u64, value: u64) {
        let header = Header::parse(&self.read(0, 2 << 20)).unwrap();
        let geometry = header.geometry();
        let cluster = ClusterIndex(cluster);
        let entry = header.refcount_table_offset.0 + 8 * geometry.refcount_table_index(cluster);
        let block = u64::from_be_bytes(self.read(entry, 8).try_into().unwrap());
        // Only the sector that the refcount lies in.
        let order = geometry.refcount_order();
        let index = geometry.refcount_block_index(cluster);
        let per_sector = (SECTOR * 8) >> order;
        let sector = block + index / per_sector * SECTOR;
        let mut bytes = self.read(sector, SECTOR);
        refcount::set(&mut bytes, order, index % per_sector, value).unwrap();
        self.write(sector, &bytes);
    }

    /// Runs the checker.
    pub fn check(&self) -> Result<Report, Error> {
        let mut check = Check::new(&self.read(0, 2 << 20), self.len)?;
        loop {
            match check.next() {
                Step::Need { offset, len } => check.feed(&self.read(offset, len)),
                Step::Done(report) => return Ok(report),
            }
        }
    }

    /// Runs the checker with the L2 tables in parts, as threads would.
    pub fn check_in_parts(&self, parts: usize) -> Result<Report, Error> {
        let mut check = Check::new(&self.read(0, 2 << 20), self.len)?;
        loop {
            let step = check.next();
            let mut taken = check.split(parts);
            if !taken.is_empty() {
                // No order among threads.
                for part in taken.iter_mut().rev() {
                    while let Some((offset, len)) = part.next() {
                        part.feed(&self.read(offset, len));
                    }
                }
                check.join(taken);
                continue;
            }
            match step {
                Step::Need { offset, len } => check.feed(&self.read(offset, len)),
                Step::Done(report) => return Ok(report),
            }
        }
    }
}
