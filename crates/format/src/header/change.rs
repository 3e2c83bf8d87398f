//! A change of the header's fields, its extensions and the backing file that it names: after a power cut the header is
//! the old one or the new one.
//!
//! The name goes to free space behind the header; then one sector, the first, switches to it. The extensions that
//! change lie in that sector too. Where the list of extensions is too long for that, the names of the features go,
//! which say nothing to a reader that knows them.

use alloc::vec::Vec;
use core::ops::Range;

use crate::bytes;
use crate::error::{Error, ErrorKind};
use crate::extension::{BACKING_FORMAT, Extension, FEATURE_NAMES, REMOVED};
use crate::header::{Header, field};
use crate::limit;

/// What is written whole or not at all.
const SECTOR: usize = 512;

/// The two writes of a change; a flush goes between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderChange {
    /// Offset and bytes of the name, where nothing lies that the old header uses; `None` if the sector has it.
    pub name: Option<(u64, Vec<u8>)>,
    /// The new first sector of the image.
    pub sector: Vec<u8>,
}

impl HeaderChange {
    /// Plans a change of the backing file. `backing` is the name; without one the image stands alone, and the format is
    /// of no interest.
    ///
    /// # Errors
    /// Those of [`HeaderChange::plan`].
    pub fn backing(
        cluster: &[u8],
        backing: Option<&[u8]>,
        format: Option<&str>,
    ) -> Result<HeaderChange, Error> {
        let mut new = Header::parse(cluster)?;
        new.backing_file_name = backing.map(<[u8]>::to_vec);
        let at = new.extensions.iter().position(is_format);
        new.extensions.retain(|extension| !is_format(extension));
        if let Some(format) = format.filter(|_| backing.is_some()) {
            let extension = Extension {
                kind: BACKING_FORMAT,
                data: format.as_bytes().to_vec(),
            };
            new.extensions.insert(at.unwrap_or(0), extension);
        }
        HeaderChange::plan(cluster, &new)
    }

    /// Plans the change to the header `new` of the image whose first cluster is `cluster`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a bad name, [`ErrorKind::TooLarge`] where there is no room for it, and
    /// [`ErrorKind::Unsupported`] where extensions of other programs leave none in the first sector.
    pub fn plan(cluster: &[u8], new: &Header) -> Result<HeaderChange, Error> {
        let old = Header::parse(cluster)?;
        let start = plan_start(cluster, new)?;
        let mut sector = alloc::vec![0; SECTOR];
        let shared = start.len().min(SECTOR);
        bytes::put(&mut sector, 0, start.get(..shared).unwrap_or_default());
        let Some(name) = new.backing_file() else {
            return Ok(HeaderChange { name: None, sector });
        };
        check_name(name)?;
        let kept = name_place(cluster, &old)
            .filter(|place| old.backing_file() == Some(name) && place.start >= start.len());
        let offset = match &kept {
            Some(place) => place.start,
            None => place(cluster, &old, start.len(), name.len())?,
        };
        bytes::put(
            &mut sector,
            field::BACKING_FILE_OFFSET as usize,
            &(offset as u64).to_be_bytes(),
        );
        bytes::put(
            &mut sector,
            field::BACKING_FILE_SIZE as usize,
            &(name.len() as u32).to_be_bytes(),
        );
        let inside = name.len().min(SECTOR.saturating_sub(offset));
        bytes::put(&mut sector, offset, name.get(..inside).unwrap_or_default());
        let is_there = kept.is_some() || inside == name.len();
        let name = (!is_there).then(|| (offset as u64, name.to_vec()));
        Ok(HeaderChange { name, sector })
    }
}

fn check_name(name: &[u8]) -> Result<(), Error> {
    let fits = !name.is_empty() && name.len() <= limit::BACKING_NAME_BYTES_MAX as usize;
    if fits && !name.contains(&0) {
        return Ok(());
    }
    let what = "bad backing file name";
    Err(Error::new(ErrorKind::InvalidInput, STRUCTURE, what)
        .found(format_args!("{} bytes", name.len()))
        .allowed("1 to 1023 bytes, none of them 0"))
}

const STRUCTURE: &str = "header";

/// The new header and its extensions, without a name. Behind the first sector it is what is there already.
fn plan_start(cluster: &[u8], new: &Header) -> Result<Vec<u8>, Error> {
    let mut new = new.clone();
    new.backing_file_name = None;
    let in_one_sector = |start: &Vec<u8>| {
        let rest = start.get(SECTOR..).unwrap_or_default();
        rest.is_empty() || cluster.get(SECTOR..start.len()) == Some(rest)
    };
    let whole = new.encode()?;
    if in_one_sector(&whole) {
        return Ok(whole);
    }
    new.extensions
        .retain(|extension| ![FEATURE_NAMES, REMOVED].contains(&extension.kind));
    new.extensions
        .sort_by_key(|extension| extension.kind != BACKING_FORMAT);
    let short = new.encode()?;
    if in_one_sector(&short) {
        return Ok(short);
    }
    let what = "has extensions beyond its first sector, and cannot be changed in one write";
    Err(Error::new(ErrorKind::Unsupported, STRUCTURE, what)
        .found(format_args!("{} bytes", short.len())))
}

fn is_format(extension: &Extension) -> bool {
    extension.kind == BACKING_FORMAT
}

/// Where the old name lies.
fn name_place(cluster: &[u8], old: &Header) -> Option<Range<usize>> {
    let name = old.backing_file()?;
    let at = bytes::u64_at(cluster, field::BACKING_FILE_OFFSET as usize)? as usize;
    Some(at..at.saturating_add(name.len()))
}

/// Where a name of `len` bytes can lie behind `start` bytes of header: in the first sector, or else where the old
/// header has nothing.
fn place(cluster: &[u8], old: &Header, start: usize, len: usize) -> Result<usize, Error> {
    if start.saturating_add(len) <= SECTOR {
        return Ok(start);
    }
    let old_name = name_place(cluster, old).unwrap_or_default();
    let mut without = old.clone();
    without.backing_file_name = None;
    let used = without.encode()?.len().max(start).max(SECTOR);
    let size = 1_usize.wrapping_shl(old.cluster_bits);
    for at in [used, used.max(old_name.end)] {
        let end = at.saturating_add(len);
        let overlaps = at < old_name.end && old_name.start < end;
        if end <= size && !overlaps {
            return Ok(at);
        }
    }
    let what = "has no room for another backing file name";
    Err(Error::new(ErrorKind::TooLarge, STRUCTURE, what)
        .found(format_args!("{len} bytes"))
        .allowed("a shorter name"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::String;
    use alloc::vec;

    use crate::plan::CreateOptions;

    /// The first cluster of an image that names `backing`, with extra extensions.
    fn cluster(bits: u32, backing: Option<&str>, extra: &[Extension]) -> Vec<u8> {
        let options = CreateOptions {
            size_bytes: 1 << 20,
            cluster_bits: bits,
            ..CreateOptions::default()
        };
        let plan = crate::plan::create(&options).unwrap();
        let mut header = Header::parse(&plan.writes.last().unwrap().1).unwrap();
        header.backing_file_name = backing.map(|name| name.as_bytes().to_vec());
        if backing.is_some() {
            header.extensions.insert(
                0,
                Extension {
                    kind: BACKING_FORMAT,
                    data: b"qcow2".to_vec(),
                },
            );
        }
        header.extensions.extend_from_slice(extra);
        let mut bytes = header.encode().unwrap();
        bytes.resize(1 << bits, 0);
        bytes
    }

    /// The cluster after the first write, and after both.
    fn apply(cluster: &[u8], change: &HeaderChange) -> [Vec<u8>; 2] {
        let mut first = cluster.to_vec();
        if let Some((at, name)) = &change.name {
            first[*at as usize..*at as usize + name.len()].copy_from_slice(name);
        }
        let mut second = first.clone();
        second[..SECTOR].copy_from_slice(&change.sector);
        [first, second]
    }

    fn named(cluster: &[u8]) -> (Option<Vec<u8>>, Option<String>) {
        let header = Header::parse(cluster).unwrap();
        let format = header.backing_format().map(String::from);
        (header.backing_file().map(<[u8]>::to_vec), format)
    }

    #[test]
    fn either_name_is_there_after_each_write_and_all_else_stays() {
        let long = "d/".repeat(500);
        let names = [None, Some("base"), Some("/a/b/c.qcow2"), Some(&long[..])];
        let unknown = Extension {
            kind: 0x1234_5678,
            data: vec![9; 40],
        };
        let mut planned = 0;
        for bits in [9, 12, 16] {
            for (old, new) in names.iter().flat_map(|old| names.map(|new| (*old, new))) {
                let long_there = [old, new].iter().flatten().any(|name| name.len() > 100);
                if bits == 9 && long_there {
                    continue;
                }
                let extra = if bits == 9 {
                    &[][..]
                } else {
                    &[unknown.clone()][..]
                };
                let before = cluster(bits, old, extra);
                for format in [Some("raw"), Some("qcow2"), None] {
                    let change =
                        HeaderChange::backing(&before, new.map(str::as_bytes), format).unwrap();
                    let [first, second] = apply(&before, &change);
                    assert_eq!(named(&first), named(&before), "{bits} {old:?} {new:?}");
                    let format = format.filter(|_| new.is_some()).map(String::from);
                    let name = new.map(|name| name.as_bytes().to_vec());
                    assert_eq!(named(&second), (name, format), "{bits} {old:?} {new:?}");
                    let mut after = Header::parse(&second).unwrap();
                    let mut whole = Header::parse(&before).unwrap();
                    for header in [&mut after, &mut whole] {
                        header.backing_file_name = None;
                        header
                            .extensions
                            .retain(|one| ![BACKING_FORMAT, FEATURE_NAMES].contains(&one.kind));
                    }
                    assert_eq!(after, whole, "{bits} {old:?} {new:?}");
                    planned += 1;
                }
            }
        }
        assert_eq!(planned, (9 + 2 * 16) * 3);
    }

    #[test]
    fn what_cannot_be_one_write_is_refused() {
        let large = Extension {
            kind: 0x1234_5678,
            data: vec![9; 600],
        };
        let before = cluster(16, None, &[large]);
        let refused = HeaderChange::backing(&before, Some(b"base"), Some("raw")).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        // Without a format nothing moves.
        assert!(HeaderChange::backing(&before, Some(b"base"), None).is_ok());
        for bad in [&b""[..], b"a\0b", &[b'a'; 1024]] {
            let refused = HeaderChange::backing(&before, Some(bad), None).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidInput);
        }
        let small = cluster(10, Some(&"n".repeat(600)), &[]);
        let refused = HeaderChange::backing(&small, Some(&[b'm'; 450]), Some("raw")).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::TooLarge);
    }
}
