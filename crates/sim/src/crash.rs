//! Power cuts: which unflushed sectors and lengths survive.

use std::collections::BTreeMap;

use crate::disk::{Disk, Sector, Version};
use crate::random::spread;
use crate::{FileImage, Random, SECTOR_BYTES};

/// How a power cut chooses among the unflushed versions of the sectors.
///
/// Every choice is one that a real disk may make. They differ in how the sectors hang together,
/// because what breaks an image is often one write that is lost among many that are kept, or the
/// other way round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survivors {
    /// Nothing that was not flushed.
    Nothing,
    /// Everything, and all of what was in flight.
    Everything,
    /// Each sector on its own: one of its versions, this often in a thousand.
    Sectors(u32),
    /// Each write as a whole, this often in a thousand.
    Writes(u32),
}

impl Survivors {
    /// One of the ways, by chance.
    pub fn draw(random: &mut Random) -> Survivors {
        match random.below(8) {
            0 => Survivors::Nothing,
            1 => Survivors::Everything,
            2 | 3 => Survivors::Sectors(random.pick(&[100, 500, 900])),
            _ => Survivors::Writes(random.pick(&[100, 300, 500, 700, 900])),
        }
    }
}

/// A draw of survivors: the choice for each sector, and for each write as a whole.
struct Draw<'a> {
    survivors: Survivors,
    salt: u64,
    random: &'a mut Random,
}

impl Draw<'_> {
    fn keeps_write(&self, request: u64, per_mille: u32) -> bool {
        spread(self.salt ^ spread(request)) % 1000 < u64::from(per_mille)
    }

    /// Index of the version that survives among `requests`, oldest first; `None`: the durable value.
    fn choose(&mut self, requests: &[u64]) -> Option<usize> {
        match self.survivors {
            Survivors::Nothing => None,
            Survivors::Everything => requests.len().checked_sub(1),
            Survivors::Sectors(per_mille) => {
                let some = !requests.is_empty() && self.random.chance(per_mille);
                some.then(|| self.random.index(requests.len()))
            }
            Survivors::Writes(per_mille) => requests
                .iter()
                .rposition(|&request| self.keeps_write(request, per_mille)),
        }
    }
}

/// The content of `disk` after a power cut now. The disk itself goes on.
pub(crate) fn image_after(disk: &Disk, survivors: Survivors, random: &mut Random) -> FileImage {
    let salt = random.number();
    let unapplied = unapplied(disk, random);
    let mut draw = Draw {
        survivors,
        salt,
        random,
    };
    let mut image = disk.image.clone();
    image.set_len(surviving_len(disk, &mut draw));
    let mut sectors: Vec<u64> = disk.dirty.keys().chain(unapplied.keys()).copied().collect();
    sectors.sort_unstable();
    sectors.dedup();
    for sector in sectors {
        let late = unapplied.get(&sector).map_or(&[][..], Vec::as_slice);
        let applied = disk.dirty.get(&sector);
        let versions = applied.map_or(&[][..], |dirty| dirty.versions.as_slice());
        let requests: Vec<u64> = versions
            .iter()
            .map(|version: &Version| version.request)
            .chain(late.iter().map(|(request, _)| *request))
            .collect();
        let bytes = match (draw.choose(&requests), applied) {
            (None, None) => continue,
            (None, Some(dirty)) => &dirty.durable,
            (Some(index), _) => {
                let version = versions.get(index).map(|version| &version.bytes);
                version.unwrap_or_else(|| &late[index - versions.len()].1)
            }
        };
        store(&mut image, sector, bytes);
    }
    image
}

/// A writer that was killed: what it had in flight ends up on the disk or not, and nothing else
/// changes.
pub(crate) fn abandon(disk: &mut Disk, random: &mut Random) {
    for (_, change) in std::mem::take(&mut disk.in_flight) {
        let share = random.pick(&[0, 500, 1000]);
        for sector in change.take_all() {
            if random.chance(share) {
                disk.apply(&change, sector, random);
            }
        }
        disk.complete(change.request, change.sectors());
    }
    disk.writers = 0;
}

type LateWrites = BTreeMap<u64, Vec<(u64, Box<Sector>)>>;

/// What the writes in flight have not applied yet, but might.
fn unapplied(disk: &Disk, random: &mut Random) -> LateWrites {
    let mut late = LateWrites::new();
    for change in disk.in_flight.values() {
        for sector in change.remaining() {
            let bytes = disk.changed(change, sector, random);
            late.entry(sector)
                .or_default()
                .push((change.request, bytes));
        }
    }
    late
}

fn surviving_len(disk: &Disk, draw: &mut Draw<'_>) -> u64 {
    let requests: Vec<u64> = disk.lens.iter().map(|version| version.request).collect();
    draw.choose(&requests)
        .map_or(disk.durable_len, |index| disk.lens[index].len_bytes)
}

fn store(image: &mut FileImage, sector: u64, bytes: &Sector) {
    let start = sector * SECTOR_BYTES;
    let len = image.len_bytes().saturating_sub(start).min(SECTOR_BYTES) as usize;
    if len > 0 {
        image.write(start, &bytes[..len]);
    }
}
