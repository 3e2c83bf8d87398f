//! Descriptor: the text that names the files of a disk, and says how each is laid out.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::error::Error;
use crate::limit;

/// A descriptor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// How the disk is laid out, `monolithicSparse` for one.
    pub create_type: String,
    /// A number that changes with the disk.
    pub cid: u32,
    /// The parts of the disk, one after the other.
    pub extents: Vec<Part>,
}

/// A part of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Length in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// Where its bytes are.
    pub layout: Layout,
}

/// How a part of a disk is laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Zeros, in no file.
    Zero,
    /// In one piece, in this file from this host offset on.
    Flat(Vec<u8>, u64),
    /// In this sparse file.
    Sparse(Vec<u8>),
}

/// The value of a descriptor without a parent.
const NO_PARENT: u32 = u32::MAX;

impl Descriptor {
    /// Reads a descriptor; what follows a zero byte is padding.
    pub fn parse(bytes: &[u8]) -> Result<Descriptor, Error> {
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        let mut found = Descriptor::default();
        let mut parent = NO_PARENT;
        for line in text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii) {
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            if let Some(part) = extent(line)? {
                if found.extents.len() >= limit::EXTENTS_MAX {
                    let text = format!(
                        "VMDK of more than {} extents is not supported",
                        limit::EXTENTS_MAX
                    );
                    return Err(Error::unsupported(text));
                }
                found.extents.push(part);
                continue;
            }
            let mut sides = line.splitn(2, |byte| *byte == b'=').map(<[u8]>::trim_ascii);
            let (Some(key), Some(value)) = (sides.next(), sides.next()) else {
                continue;
            };
            let value = unquoted(value);
            let number =
                || u32::from_str_radix(core::str::from_utf8(value).unwrap_or_default(), 16);
            if key.eq_ignore_ascii_case(b"createType") {
                found.create_type = String::from_utf8_lossy(value).into_owned();
            } else if key.eq_ignore_ascii_case(b"CID") {
                found.cid = number().unwrap_or_default();
            } else if key.eq_ignore_ascii_case(b"parentCID") {
                parent = number().unwrap_or_default();
            }
        }
        if parent != NO_PARENT {
            let text = "VMDK is a snapshot of another, which is not supported; \
                        'vmware-vdiskmanager -r' makes a whole one";
            return Err(Error::unsupported(text));
        }
        Ok(found)
    }

    /// Length of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        let add = |sum: u64, part: &Part| sum.saturating_add(part.size_bytes);
        self.extents.iter().fold(0, add)
    }
}

/// Without the quotes around it.
fn unquoted(value: &[u8]) -> &[u8] {
    let inside = value
        .strip_prefix(b"\"")
        .and_then(|rest| rest.strip_suffix(b"\""));
    inside.unwrap_or(value)
}

/// Reads a line like `RW 4192256 SPARSE "disk-s001.vmdk"`; `None` if it is none.
fn extent(line: &[u8]) -> Result<Option<Part>, Error> {
    let mut words = line.splitn(4, |byte| *byte == b' ');
    let access = words.next().unwrap_or_default();
    if ![&b"RW"[..], b"RDONLY", b"NOACCESS"].contains(&access) {
        return Ok(None);
    }
    let shown = || String::from_utf8_lossy(line).trim().to_owned();
    let broken = || Error::damaged(format!("VMDK extent {:?} cannot be read", shown()));
    let number = |bytes: &[u8]| {
        core::str::from_utf8(bytes)
            .ok()
            .and_then(|text| text.parse::<u64>().ok())
    };
    let sectors = words.next().and_then(number).ok_or_else(broken)?;
    let kind = words.next().ok_or_else(broken)?;
    let size_bytes = sectors.saturating_mul(512);
    if size_bytes > limit::DISK_BYTES_MAX {
        return Err(broken());
    }
    let rest = words.next().unwrap_or_default();
    // The name may have spaces, and what follows it is a sector.
    let mut quoted = rest.splitn(3, |byte| *byte == b'"');
    let (before, name, after) = (quoted.next(), quoted.next(), quoted.next());
    let named = || {
        let name = name.filter(|name| !name.is_empty() && before == Some(b""));
        name.zip(after).ok_or_else(broken)
    };
    let layout = match kind {
        b"ZERO" => Layout::Zero,
        b"SPARSE" => Layout::Sparse(named()?.0.to_vec()),
        b"FLAT" | b"VMFS" => {
            let (name, after) = named()?;
            let start = match after.trim_ascii() {
                b"" => 0,
                text => number(text).ok_or_else(broken)?,
            };
            Layout::Flat(name.to_vec(), start.saturating_mul(512))
        }
        _ => {
            return Err(Error::unsupported(format!(
                "VMDK extent {:?} is not supported",
                shown()
            )));
        }
    };
    Ok(Some(Part { size_bytes, layout }))
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn descriptor_lists_its_extents_in_order() {
        let text = b"# Disk DescriptorFile\r\nversion=1\r\nCID=0a1b2c3d\r\nparentCID=FFFFFFFF\r\n\
            createType = \"custom\"\r\n\r\n# Extent description\r\nRW 2048 SPARSE \"a disk-s001.vmdk\"\r\n\
            RDONLY 100 ZERO\r\nNOACCESS 8 FLAT \"b.bin\" 63\r\nRW 8 VMFS \"c-flat.vmdk\"\r\n\
            ddb.geometry.sectors = \"63\"\r\n\0\0RW 8 ZERO\n";
        let found = Descriptor::parse(text).expect("a descriptor");
        assert_eq!((found.cid, &*found.create_type), (0x0a1b_2c3d, "custom"));
        let layouts: Vec<Layout> = found
            .extents
            .iter()
            .map(|part| part.layout.clone())
            .collect();
        assert_eq!(
            layouts,
            [
                Layout::Sparse(b"a disk-s001.vmdk".to_vec()),
                Layout::Zero,
                Layout::Flat(b"b.bin".to_vec(), 63 * 512),
                Layout::Flat(b"c-flat.vmdk".to_vec(), 0),
            ]
        );
        assert_eq!(found.size_bytes(), (2048 + 100 + 8 + 8) * 512);
    }

    #[test]
    fn parents_and_broken_extents_are_refused() {
        for (text, word) in [
            ("parentCID=12345678\n", "snapshot of another"),
            ("parentCID=none\n", "snapshot of another"),
            ("RW\n", "cannot be read"),
            ("RW 8\n", "cannot be read"),
            ("RW -8 ZERO\n", "cannot be read"),
            ("RW 99999999999999999999 ZERO\n", "cannot be read"),
            ("RW 9999999999999999999 ZERO\n", "cannot be read"),
            ("RW 8 FLAT \"unclosed\n", "cannot be read"),
            ("RW 8 FLAT \"\" 0\n", "cannot be read"),
            ("RW 8 FLAT \"a\" x\n", "cannot be read"),
            ("RW 8 SESPARSE \"a\"\n", "not supported"),
        ] {
            let error = Descriptor::parse(text.as_bytes())
                .expect_err(text)
                .to_string();
            assert!(error.contains(word) && !error.contains('\n'), "{error}");
        }
    }
}
