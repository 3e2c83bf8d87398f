//! The snapshot table.
//!
//! Entries of varying length, each padded to a multiple of eight: 40 bytes of fields, extra data, the
//! id, the name. The header says how many there are, not how long the table is: [`table_len`] tells
//! how much to read.
//!
//! Crash rule: a table is never changed in place. A new one goes to free clusters and is flushed,
//! then number and offset in the header change in one write of 12 bytes, then the old one is freed.

use alloc::vec::Vec;

use crate::addr::HostOffset;
use crate::bytes;
use crate::error::{Error, ErrorKind};
use crate::geometry::Geometry;
use crate::limit;

const STRUCTURE: &str = "snapshot table";

/// Bytes of the fixed fields of an entry.
const FIXED_BYTES: usize = 40;

/// Bytes of the extra data this crate knows: state size, disk size, instruction count.
const KNOWN_EXTRA_BYTES: usize = 24;

/// The instruction count that says there is none.
const NO_ICOUNT: u64 = u64::MAX;

/// One internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Where its L1 table starts.
    pub l1_table_offset: HostOffset,
    /// Entries of its L1 table.
    pub l1_size: u32,
    /// Unique id, a number in decimal by custom.
    pub id: Vec<u8>,
    /// The name people use; not unique.
    pub name: Vec<u8>,
    /// When it was taken, in seconds of Unix time.
    pub date_sec: u32,
    /// Nanoseconds to add to the date.
    pub date_nsec: u32,
    /// Time the guest had run, in nanoseconds.
    pub vm_clock_nsec: u64,
    /// Bytes of machine state stored after the end of the disk; 0 for a disk-only snapshot.
    pub vm_state_size: u64,
    /// Size of the virtual disk in bytes when it was taken. `None` in old images: the size of today.
    pub disk_size: Option<u64>,
    /// Instructions the guest had executed, where that was recorded. Needs `disk_size`.
    pub icount: Option<u64>,
    /// Extra data beyond what this crate knows, kept as it is. Needs `disk_size`.
    pub unknown_extra: Vec<u8>,
}

/// How far [`table_len`] got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The table is at least this many bytes long, more than was given: read that much, come again.
    Need(u64),
    /// The table is exactly this many bytes long, and all of it was given.
    Len(u64),
}

/// The fixed fields of the entry at `at`, and how long each of its parts is.
struct Entry<'a> {
    fixed: &'a [u8],
    extra_len: usize,
    id_len: usize,
    name_len: usize,
}

impl<'a> Entry<'a> {
    fn at(bytes: &'a [u8], at: usize) -> Option<Entry<'a>> {
        let fixed = bytes::slice(bytes, at, FIXED_BYTES)?;
        Some(Entry {
            fixed,
            extra_len: bytes::u32_at(fixed, 36)? as usize,
            id_len: usize::from(bytes::u16_at(fixed, 12)?),
            name_len: usize::from(bytes::u16_at(fixed, 14)?),
        })
    }

    /// Length with padding; the parts are below 2^32, so nothing can overflow.
    fn len(&self) -> usize {
        FIXED_BYTES
            .saturating_add(self.extra_len)
            .saturating_add(self.id_len)
            .saturating_add(self.name_len)
            .next_multiple_of(8)
    }
}

fn check_count(count: u32) -> Result<(), Error> {
    if count > limit::SNAPSHOTS_MAX {
        return Err(
            Error::new(ErrorKind::TooLarge, STRUCTURE, "too many snapshots")
                .found(count)
                .allowed("up to 65536"),
        );
    }
    Ok(())
}

fn check_len(len: usize, at: usize) -> Result<(), Error> {
    if len as u64 > limit::SNAPSHOT_TABLE_BYTES_MAX {
        return Err(
            Error::new(ErrorKind::TooLarge, STRUCTURE, "table is too long")
                .at(at as u64)
                .allowed("up to 64 MiB"),
        );
    }
    Ok(())
}

fn check_extra(entry: &Entry<'_>, at: usize) -> Result<(), Error> {
    if entry.extra_len > limit::SNAPSHOT_EXTRA_BYTES_MAX as usize {
        return Err(
            Error::new(ErrorKind::TooLarge, STRUCTURE, "too much extra data")
                .at((at as u64).saturating_add(36))
                .found(format_args!("{} bytes", entry.extra_len))
                .allowed("up to 1024 bytes"),
        );
    }
    Ok(())
}

/// How long the table of `count` snapshots is, of which `bytes` is the beginning.
pub fn table_len(bytes: &[u8], count: u32) -> Result<Progress, Error> {
    check_count(count)?;
    let mut at = 0usize;
    for done in 0..count {
        let Some(entry) = Entry::at(bytes, at) else {
            let rest = (count.saturating_sub(done) as usize).saturating_mul(FIXED_BYTES);
            let needed = at.saturating_add(rest);
            check_len(needed, at)?;
            return Ok(Progress::Need(needed as u64));
        };
        check_extra(&entry, at)?;
        let end = at.saturating_add(entry.len());
        check_len(end, at)?;
        at = end;
    }
    Ok(if at > bytes.len() {
        Progress::Need(at as u64)
    } else {
        Progress::Len(at as u64)
    })
}

/// Parses a table of `count` snapshots from the start of `bytes`; also gives its length in bytes.
/// Their L1 tables are checked, see [`Snapshot::check`].
pub fn parse_table(
    bytes: &[u8],
    count: u32,
    geometry: &Geometry,
) -> Result<(Vec<Snapshot>, u64), Error> {
    let (snapshots, len) = parse_entries(bytes, count)?;
    for snapshot in &snapshots {
        snapshot.check(geometry)?;
    }
    Ok((snapshots, len))
}

/// Like [`parse_table`] without looking at where the L1 tables are, for the checker.
pub(crate) fn parse_entries(bytes: &[u8], count: u32) -> Result<(Vec<Snapshot>, u64), Error> {
    check_count(count)?;
    let mut snapshots = Vec::new();
    let mut at = 0usize;
    for _ in 0..count {
        let parsed = Entry::at(bytes, at).map(|entry| (parse_entry(bytes, at, &entry), entry));
        let Some((parsed, entry)) = parsed else {
            return Err(truncated(at, bytes.len()));
        };
        check_extra(&entry, at)?;
        let end = at.saturating_add(entry.len());
        check_len(end, at)?;
        snapshots.push(parsed.ok_or_else(|| truncated(at, bytes.len()))?);
        at = end;
    }
    Ok((snapshots, at as u64))
}

/// An entry of a table that may be damaged.
pub(crate) enum Salvaged {
    /// This many bytes of the table are needed to tell.
    Need(u64),
    /// An entry that can be told from those around it.
    Entry {
        snapshot: Snapshot,
        /// There was more extra data than any entry may have, and it was cut to what is known.
        cut: bool,
        /// Where the next entry begins.
        end: usize,
    },
    /// Where this entry ends cannot be known.
    Lost,
}

/// The entry at `at` of a damaged table, of which `bytes` is the beginning; the file has `room` bytes from the
/// start of the table on.
pub(crate) fn salvage_entry(bytes: &[u8], at: usize, room: u64) -> Salvaged {
    let Some(entry) = Entry::at(bytes, at) else {
        let needed = at.saturating_add(FIXED_BYTES);
        return match check_len(needed, at) {
            Ok(()) => Salvaged::Need(needed as u64),
            Err(_) => Salvaged::Lost,
        };
    };
    let end = at.saturating_add(entry.len());
    let cut = check_extra(&entry, at).is_err();
    if check_len(end, at).is_err() || cut && end as u64 > room {
        return Salvaged::Lost;
    }
    match parse_entry(bytes, at, &entry) {
        None => Salvaged::Need(end as u64),
        Some(mut snapshot) => {
            if cut {
                snapshot.unknown_extra.clear();
            }
            Salvaged::Entry { snapshot, cut, end }
        }
    }
}

fn truncated(at: usize, len: usize) -> Error {
    Error::new(ErrorKind::Truncated, STRUCTURE, "entry ends too early")
        .at(at as u64)
        .found(format_args!("{len} bytes of table"))
}

fn parse_entry(bytes: &[u8], at: usize, entry: &Entry<'_>) -> Option<Snapshot> {
    let extra_at = at.saturating_add(FIXED_BYTES);
    let extra = bytes::slice(bytes, extra_at, entry.extra_len)?;
    let id_at = extra_at.saturating_add(entry.extra_len);
    let id = bytes::slice(bytes, id_at, entry.id_len)?;
    let name = bytes::slice(bytes, id_at.saturating_add(entry.id_len), entry.name_len)?;
    let fixed = entry.fixed;
    Some(Snapshot {
        l1_table_offset: HostOffset(bytes::u64_at(fixed, 0)?),
        l1_size: bytes::u32_at(fixed, 8)?,
        id: id.to_vec(),
        name: name.to_vec(),
        date_sec: bytes::u32_at(fixed, 16)?,
        date_nsec: bytes::u32_at(fixed, 20)?,
        vm_clock_nsec: bytes::u64_at(fixed, 24)?,
        vm_state_size: match bytes::u64_at(extra, 0) {
            Some(large) => large,
            None => u64::from(bytes::u32_at(fixed, 32)?),
        },
        disk_size: bytes::u64_at(extra, 8),
        icount: bytes::u64_at(extra, 16).filter(|icount| *icount != NO_ICOUNT),
        unknown_extra: extra.get(KNOWN_EXTRA_BYTES..).unwrap_or(&[]).to_vec(),
    })
}

/// The table for `snapshots`, padded to a multiple of eight. A name or id beyond 65535 bytes is cut
/// off; [`Snapshot::check`] refuses it before.
pub fn encode_table(snapshots: &[Snapshot]) -> Vec<u8> {
    let mut out = Vec::new();
    for snapshot in snapshots {
        snapshot.encode(&mut out);
    }
    out
}

impl Snapshot {
    /// Checks that the L1 table is where and as long as one can be, and that the entry can be
    /// encoded.
    pub fn check(&self, geometry: &Geometry) -> Result<(), Error> {
        let wrong = |kind, what| {
            let name = alloc::string::String::from_utf8_lossy(&self.name);
            Error::new(
                kind,
                STRUCTURE,
                alloc::format!("snapshot '{}': {what}", name.escape_debug()),
            )
        };
        if u64::from(self.l1_size) > limit::L1_ENTRIES_MAX {
            return Err(wrong(ErrorKind::TooLarge, "l1 table is too long")
                .found(format_args!("{} entries", self.l1_size))
                .allowed(alloc::format!("up to {} entries", limit::L1_ENTRIES_MAX)));
        }
        let end = u64::from(self.l1_size)
            .saturating_mul(8)
            .saturating_add(self.l1_table_offset.0);
        let in_header = self.l1_table_offset.0 == 0 && self.l1_size > 0;
        if !geometry.is_aligned(self.l1_table_offset) || end > limit::HOST_END || in_header {
            return Err(wrong(ErrorKind::Malformed, "bad l1 table offset")
                .found(format_args!("{:#x}", self.l1_table_offset))
                .allowed("a multiple of the cluster size below 2^56, not 0"));
        }
        let most = usize::from(u16::MAX);
        if self.id.len() > most || self.name.len() > most {
            return Err(wrong(ErrorKind::InvalidInput, "id or name is too long")
                .allowed("up to 65535 bytes"));
        }
        if self.unknown_extra.len().saturating_add(KNOWN_EXTRA_BYTES)
            > limit::SNAPSHOT_EXTRA_BYTES_MAX as usize
        {
            return Err(wrong(ErrorKind::InvalidInput, "too much extra data"));
        }
        Ok(())
    }

    /// Whether it is what bytes that are all zeros say: no snapshot at all.
    pub(crate) fn is_blank(&self) -> bool {
        let numbers = [
            self.l1_table_offset.0,
            u64::from(self.l1_size),
            u64::from(self.date_sec),
            self.vm_state_size,
        ];
        numbers == [0; 4] && self.id.is_empty() && self.name.is_empty()
    }

    fn encode_extra(&self) -> Vec<u8> {
        let mut extra = Vec::new();
        if let Some(disk_size) = self.disk_size {
            extra.extend_from_slice(&self.vm_state_size.to_be_bytes());
            extra.extend_from_slice(&disk_size.to_be_bytes());
            extra.extend_from_slice(&self.icount.unwrap_or(NO_ICOUNT).to_be_bytes());
            extra.extend_from_slice(&self.unknown_extra);
        } else if self.vm_state_size > u64::from(u32::MAX) {
            extra.extend_from_slice(&self.vm_state_size.to_be_bytes());
        }
        extra
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let cut = |text: &[u8]| text.get(..usize::from(u16::MAX)).unwrap_or(text).to_vec();
        let (id, name, extra) = (cut(&self.id), cut(&self.name), self.encode_extra());
        // What does not fit in 32 bits is written as 0 there: to old readers a disk-only snapshot.
        let small_state = u32::try_from(self.vm_state_size).unwrap_or(0);
        out.extend_from_slice(&self.l1_table_offset.0.to_be_bytes());
        out.extend_from_slice(&self.l1_size.to_be_bytes());
        out.extend_from_slice(&(id.len() as u16).to_be_bytes());
        out.extend_from_slice(&(name.len() as u16).to_be_bytes());
        out.extend_from_slice(&self.date_sec.to_be_bytes());
        out.extend_from_slice(&self.date_nsec.to_be_bytes());
        out.extend_from_slice(&self.vm_clock_nsec.to_be_bytes());
        out.extend_from_slice(&small_state.to_be_bytes());
        out.extend_from_slice(&(extra.len() as u32).to_be_bytes());
        for part in [&extra, &id, &name] {
            out.extend_from_slice(part);
        }
        bytes::pad_to_8(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    fn snapshot(name: &str) -> Snapshot {
        Snapshot {
            l1_table_offset: HostOffset(0x30000),
            l1_size: 1,
            id: b"1".to_vec(),
            name: name.as_bytes().to_vec(),
            date_sec: 1,
            date_nsec: 2,
            vm_clock_nsec: 3,
            vm_state_size: 4,
            disk_size: Some(5),
            icount: Some(6),
            unknown_extra: vec![],
        }
    }

    #[test]
    fn snapshot_entries_with_short_extra_data_are_read() {
        let mut old = snapshot("old");
        (old.disk_size, old.icount) = (None, None);
        let table = encode_table(core::slice::from_ref(&old));
        assert_eq!(
            table.len(),
            48,
            "40 bytes, no extra data, 4 bytes of text, padding"
        );
        assert_eq!(table[36..40], [0; 4]);
        let parsed = parse_table(&table, 1, &Geometry::FALLBACK).unwrap();
        assert_eq!(parsed, (vec![old], 48));
    }

    #[test]
    fn vm_state_size_above_4_gib_is_zero_in_32_bit_field() {
        let mut large = snapshot("large");
        large.vm_state_size = 1 << 32;
        let table = encode_table(core::slice::from_ref(&large));
        assert_eq!(table[32..36], [0; 4]);
        assert_eq!(
            parse_table(&table, 1, &Geometry::FALLBACK).unwrap().0,
            vec![large]
        );
    }

    #[test]
    fn missing_icount_is_encoded_as_minus_one() {
        let mut plain = snapshot("plain");
        plain.icount = None;
        let table = encode_table(core::slice::from_ref(&plain));
        assert_eq!(table[56..64], [0xff; 8]);
        assert_eq!(
            parse_table(&table, 1, &Geometry::FALLBACK).unwrap().0,
            vec![plain]
        );
    }

    #[test]
    fn snapshot_table_len_from_any_prefix() {
        let all = [snapshot("a"), snapshot("a longer name"), snapshot("")];
        let table = encode_table(&all);
        for given in 0..=table.len() {
            match table_len(&table[..given], 3).unwrap() {
                Progress::Need(needed) => {
                    assert!(needed > given as u64 && needed <= table.len() as u64);
                }
                Progress::Len(len) => assert_eq!((len, given), (table.len() as u64, given)),
            }
        }
        assert_eq!(table_len(&[], 0), Ok(Progress::Len(0)));
    }

    #[test]
    fn hostile_tables_are_refused() {
        assert_eq!(
            table_len(&[], u32::MAX).unwrap_err().kind(),
            ErrorKind::TooLarge
        );
        let mut table = encode_table(&[snapshot("x")]);
        table[36..40].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(
            table_len(&table, 1).unwrap_err().kind(),
            ErrorKind::TooLarge
        );
        let geometry = Geometry::FALLBACK;
        assert_eq!(
            parse_table(&table, 1, &geometry).unwrap_err().kind(),
            ErrorKind::TooLarge
        );
        let cut = encode_table(&[snapshot("x")]);
        let cut = &cut[..cut.len() - 8];
        assert_eq!(
            parse_table(cut, 1, &geometry).unwrap_err().kind(),
            ErrorKind::Truncated
        );
        type Edit = fn(&mut Snapshot);
        let edits: [Edit; 5] = [
            |entry| entry.l1_table_offset = HostOffset(0x30200),
            |entry| entry.l1_table_offset = HostOffset(0),
            |entry| entry.l1_table_offset = HostOffset(u64::MAX << 16),
            |entry| entry.l1_size = u32::MAX,
            |entry| entry.unknown_extra = vec![0; 1024],
        ];
        for edit in edits {
            let mut entry = snapshot("x");
            edit(&mut entry);
            assert!(parse_table(&encode_table(&[entry]), 1, &geometry).is_err());
        }
    }
}
