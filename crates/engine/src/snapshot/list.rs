//! The snapshots of an image that is open for writing, and what a new one may be called.

use gaur_format::geometry::Geometry;
use gaur_format::snapshot::{Snapshot, encode_table};
use gaur_format::{HostOffset, limit};

use super::NewSnapshot;
use crate::error::{ErrorKind, ImageError};
use crate::range::HostRange;

/// The table of snapshots as it is on the disk, and which of them have readers.
#[derive(Debug)]
pub(crate) struct SnapshotList {
    all: Vec<Snapshot>,
    /// Where it is; empty if there are no snapshots.
    pub(crate) place: HostRange,
    /// Ids of snapshots that are being read, once for each reader.
    held: Vec<Vec<u8>>,
}

impl SnapshotList {
    /// What was read when the image was opened.
    pub(crate) fn new(all: Vec<Snapshot>, place: HostRange) -> SnapshotList {
        SnapshotList {
            all,
            place,
            held: Vec::new(),
        }
    }

    /// The snapshots, in the order of the table.
    pub(crate) fn all(&self) -> &[Snapshot] {
        &self.all
    }

    /// The table is another one now.
    pub(crate) fn replace(&mut self, all: Vec<Snapshot>, place: HostRange) {
        (self.all, self.place) = (all, place);
    }

    /// A reader of the snapshot with this id begins.
    pub(crate) fn hold(&mut self, id: &[u8]) {
        self.held.push(id.to_vec());
    }

    /// One reader less.
    pub(crate) fn let_go(&mut self, id: &[u8]) {
        if let Some(at) = self.held.iter().position(|held| held == id) {
            self.held.swap_remove(at);
        }
    }

    /// Whether it has a reader.
    pub(crate) fn is_held(&self, id: &[u8]) -> bool {
        self.held.iter().any(|held| held == id)
    }
}

/// Refuses a name that would leave in doubt which snapshot is meant by it.
pub(crate) fn check_name(
    all: &[Snapshot],
    name: &str,
    id: Option<&[u8]>,
) -> Result<(), ImageError> {
    let invalid = |text| Err(ImageError::new(ErrorKind::InvalidInput, text));
    if name.is_empty() || name.len() > usize::from(u16::MAX) {
        return invalid("the name of a snapshot has 1 to 65535 bytes".to_owned());
    }
    for other in all {
        if Some(&other.id[..]) == id {
            continue;
        }
        if other.name == name.as_bytes() {
            return invalid(format!("there is a snapshot named {name:?} already"));
        }
        if other.id == name.as_bytes() {
            return invalid(format!("{name:?} is the id of another snapshot"));
        }
    }
    Ok(())
}

impl NewSnapshot {
    /// The entry for it, without its L1 table and any state.
    pub(crate) fn entry(&self, all: &[Snapshot], disk_size: u64) -> Result<Snapshot, ImageError> {
        check_name(all, &self.name, None)?;
        if all.len() as u64 >= u64::from(limit::SNAPSHOTS_MAX) {
            let text = format!("an image has at most {} snapshots", limit::SNAPSHOTS_MAX);
            return Err(ImageError::new(ErrorKind::Unsupported, text));
        }
        let id = match &self.id {
            None => next_id(all),
            Some(id) => self.checked_id(all, id)?,
        };
        Ok(Snapshot {
            l1_table_offset: HostOffset(0),
            l1_size: 0,
            id,
            name: self.name.clone().into_bytes(),
            date_sec: self.date_sec,
            date_nsec: self.date_nsec,
            vm_clock_nsec: self.vm_clock_nsec,
            vm_state_size: 0,
            disk_size: Some(disk_size),
            icount: self.icount,
            unknown_extra: Vec::new(),
        })
    }

    fn checked_id(&self, all: &[Snapshot], id: &str) -> Result<Vec<u8>, ImageError> {
        let invalid = |text| Err(ImageError::new(ErrorKind::InvalidInput, text));
        if id.is_empty() || id.len() > usize::from(u16::MAX) {
            return invalid("the id of a snapshot has 1 to 65535 bytes".to_owned());
        }
        let taken = |other: &Snapshot| other.id == id.as_bytes() || other.name == id.as_bytes();
        if all.iter().any(taken) {
            return invalid(format!("{id:?} is the id or name of another snapshot"));
        }
        Ok(id.as_bytes().to_vec())
    }
}

/// The number after the highest id, as QEMU counts; further on if some name is that number.
fn next_id(all: &[Snapshot]) -> Vec<u8> {
    let number = |snapshot: &Snapshot| {
        let digits = snapshot.id.iter().take_while(|byte| byte.is_ascii_digit());
        let add = |sum: u64, digit: &u8| {
            sum.saturating_mul(10)
                .saturating_add(u64::from(digit - b'0'))
        };
        digits.fold(0, add)
    };
    let mut next = all.iter().map(number).max().unwrap_or(0).saturating_add(1);
    loop {
        let id = next.to_string().into_bytes();
        if !all.iter().any(|other| other.name == id || other.id == id) {
            return id;
        }
        next = next.wrapping_add(1);
    }
}

/// The table's bytes; an error if it is longer than one may be.
pub(crate) fn encode(all: &[Snapshot], geometry: &Geometry) -> Result<Vec<u8>, ImageError> {
    for snapshot in all {
        snapshot.check(geometry).map_err(ImageError::format)?;
    }
    let bytes = encode_table(all);
    if bytes.len() as u64 > limit::SNAPSHOT_TABLE_BYTES_MAX {
        let most = limit::SNAPSHOT_TABLE_BYTES_MAX >> 20;
        let text = format!("the table of snapshots would be longer than {most} MiB");
        return Err(ImageError::new(ErrorKind::Unsupported, text));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(all: &[Snapshot], name: &str) -> Result<Snapshot, ImageError> {
        let new = NewSnapshot {
            name: name.to_owned(),
            ..NewSnapshot::default()
        };
        new.entry(all, 512)
    }

    #[test]
    fn new_ids_are_unused_numbers_and_names_are_unique() {
        let mut all = vec![named(&[], "a").unwrap()];
        assert_eq!(all[0].id, b"1");
        all[0].id = b"7x".to_vec();
        all.push(named(&all, "9").unwrap());
        assert_eq!(all[1].id, b"8");
        assert_eq!(named(&all, "b").unwrap().id, b"10", "9 is a name");
        for bad in ["a", "9", "8", ""] {
            let kind = named(&all, bad).unwrap_err().kind();
            assert_eq!(kind, ErrorKind::InvalidInput, "{bad:?}");
        }
        assert!(check_name(&all, "a", Some(b"7x")).is_ok(), "its own name");
        let long = "x".repeat(65536);
        assert!(named(&all, &long).is_err());
    }
}
