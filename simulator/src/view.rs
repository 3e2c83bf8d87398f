//! An independent image reader: slow, simple, made from [`crate::shape`] alone, not from the engine.
//!
//! It reads the guest's view through any L1 table of a qcow2 file, so that the content of internal
//! snapshots can be judged. What lies below the file never changes and is given as plain bytes.

use std::collections::BTreeMap;

use gaur_sim::FileImage;

use crate::encryption::Encryption;
use crate::shape::{COMPRESSED, COPIED, OFFSET_MASK, Shape, ZERO_FLAG};

/// The files of a machine.
pub type Files = BTreeMap<String, FileImage>;

/// An L1 table somewhere in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L1 {
    /// Its host offset.
    pub offset: u64,
    /// Its entries.
    pub entries: u64,
    /// Bytes of the disk that it maps.
    pub disk_bytes: u64,
}

/// An internal snapshot as the file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its L1 table and the size of its disk.
    pub l1: L1,
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Bytes of the virtual machine's state.
    pub state_bytes: u64,
    /// When it was made, and the guest's clocks then.
    pub times: Times,
}

/// When a snapshot was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Seconds and nanoseconds of Unix time.
    pub date: (u32, u32),
    /// Nanoseconds the guest had run.
    pub vm_clock_nsec: u64,
    /// Instructions it had executed.
    pub icount: Option<u64>,
}

/// A qcow2 file over a disk that never changes.
pub struct View<'a> {
    file: &'a FileImage,
    /// Where its data clusters lie, each at its guest offset.
    data: Option<&'a FileImage>,
    below: &'a [u8],
    encryption: Option<Encryption>,
    shape: Shape,
    /// The L1 table of the active disk.
    pub active: L1,
    /// The internal snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
}

impl<'a> View<'a> {
    /// Opens `file`; what it leaves to its backing file is in `below`.
    pub fn open(file: &'a FileImage, below: &'a [u8]) -> Result<View<'a>, String> {
        let header = Header::read(file)?;
        let snapshots = header.snapshots(file)?;
        Ok(View {
            file,
            data: None,
            below,
            encryption: Encryption::of(file)?,
            shape: header.shape,
            active: header.l1,
            snapshots,
        })
    }

    /// The same with an external data file, if there is one.
    pub fn with_data(self, data: Option<&'a FileImage>) -> View<'a> {
        View { data, ..self }
    }

    /// Clusters beyond the end of the file that have a refcount. Nothing refers to them (the checker
    /// would say so), and the checker does not count them: they are leaks that show when the file
    /// grows. A power cut that takes back the length of a file, but not its refcounts, makes them.
    pub fn leaks_beyond_end(&self) -> u64 {
        let shape = self.shape;
        let first = self.file.len_bytes().div_ceil(shape.cluster_bytes());
        let blocks = (word(self.file, 56) >> 32) * shape.cluster_bytes() / 8;
        let mut count = 0;
        for index in first / shape.block_entries()..blocks {
            let host = word(self.file, self.refcount_table() + index * 8);
            if host == 0 {
                continue;
            }
            let block = self.file.bytes(host, shape.cluster_bytes() as usize);
            let base = index * shape.block_entries();
            let beyond = (0..shape.block_entries()).filter(|entry| base + entry >= first);
            count += beyond
                .filter(|&entry| shape.refcount(&block, entry) > 0)
                .count() as u64;
        }
        count
    }

    /// Where the refcount table is.
    pub fn refcount_table(&self) -> u64 {
        word(self.file, 48)
    }

    /// The whole disk behind an L1 table.
    pub fn read_disk(&self, l1: L1) -> Result<Vec<u8>, String> {
        self.read(l1, 0, l1.disk_bytes)
    }

    /// The state of the virtual machine that a snapshot holds. It lies behind the last L1 entry that
    /// the disk needs.
    pub fn read_state(&self, snapshot: &Snapshot) -> Result<Vec<u8>, String> {
        let shape = self.shape;
        let l1 = snapshot.l1;
        let start = shape.l1_entries(l1.disk_bytes) * shape.entries() * shape.cluster_bytes();
        self.read(l1, start, snapshot.state_bytes)
    }

    /// What is read of the image: the disk, and the disk and the state of each snapshot.
    pub fn contents(&self) -> Result<Vec<Vec<u8>>, String> {
        let mut all = vec![self.read_disk(self.active)?];
        for snapshot in &self.snapshots {
            all.push(self.read_disk(snapshot.l1)?);
            all.push(self.read_state(snapshot)?);
        }
        Ok(all)
    }

    /// Reads from the start of a cluster on.
    fn read(&self, l1: L1, start: u64, len: u64) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; len as usize];
        let share = self.shape.cluster_bytes() / self.shape.subclusters();
        for (number, target) in bytes.chunks_mut(share as usize).enumerate() {
            self.fill(l1, start + number as u64 * share, target)?;
        }
        Ok(bytes)
    }

    /// Fills `target`, a subcluster or the part of one that the disk has.
    fn fill(&self, l1: L1, guest: u64, target: &mut [u8]) -> Result<(), String> {
        match cell(self.file, self.shape, l1, guest, self.data.is_some())? {
            Mapping::Below => {
                let below = self.below.get(guest as usize..).unwrap_or(&[]);
                let len = below.len().min(target.len());
                target[..len].copy_from_slice(&below[..len]);
                target[len..].fill(0);
            }
            Mapping::Zero => target.fill(0),
            Mapping::At(host) => {
                let file = self.data.unwrap_or(self.file);
                match self.encryption {
                    None => file.read(host, target),
                    Some(encryption) => encryption.read(file, host, target),
                }
            }
            Mapping::Compressed(_) if self.encryption.is_some() => {
                return Err("a compressed cluster in an encrypted image".to_owned());
            }
            Mapping::Compressed(range) => {
                let plain = inflate(self.file, self.shape, range, guest)?;
                let start = (guest % self.shape.cluster_bytes()) as usize;
                target.copy_from_slice(&plain[start..start + target.len()]);
            }
        }
        Ok(())
    }
}

enum Mapping {
    Below,
    Zero,
    At(u64),
    Compressed(std::ops::Range<u64>),
}

fn word(file: &FileImage, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read(offset, &mut bytes);
    u64::from_be_bytes(bytes)
}

/// Where the byte at `guest` is; `apart` if data clusters are in a file of their own.
fn cell(
    file: &FileImage,
    shape: Shape,
    l1: L1,
    guest: u64,
    apart: bool,
) -> Result<Mapping, String> {
    let cluster = guest / shape.cluster_bytes();
    let index = cluster / shape.entries();
    if index >= l1.entries {
        return Err(format!("guest offset {guest} lies behind the L1 table"));
    }
    let table = word(file, l1.offset + index * 8) & OFFSET_MASK;
    if table == 0 {
        return Ok(Mapping::Below);
    }
    check_host(file, shape, table, guest)?;
    let at = table + cluster % shape.entries() * shape.entry_bytes();
    let entry = word(file, at);
    if entry & COMPRESSED != 0 {
        return Ok(Mapping::Compressed(shape.compressed_range(entry)));
    }
    let host = entry & OFFSET_MASK;
    let (allocated, zero) = if shape.extended {
        let bitmap = word(file, at + 8);
        let bit = guest % shape.cluster_bytes() / (shape.cluster_bytes() / 32);
        (bitmap >> bit & 1 == 1, bitmap >> (32 + bit) & 1 == 1)
    } else {
        let there = host != 0 || (apart && entry & COPIED != 0);
        (there, shape.version == 3 && entry & ZERO_FLAG != 0)
    };
    if zero {
        return Ok(Mapping::Zero);
    }
    if !allocated {
        return Ok(Mapping::Below);
    }
    if apart && host + guest % shape.cluster_bytes() != guest {
        return Err(format!(
            "guest offset {guest} is mapped to {host} in its data file"
        ));
    }
    if !apart {
        check_host(file, shape, host, guest)?;
    }
    Ok(Mapping::At(host + guest % shape.cluster_bytes()))
}

fn check_host(file: &FileImage, shape: Shape, host: u64, guest: u64) -> Result<(), String> {
    if host == 0 || !host.is_multiple_of(shape.cluster_bytes()) || host >= file.len_bytes() {
        let len = file.len_bytes();
        return Err(format!(
            "guest offset {guest} is mapped to {host} in a file of {len} bytes"
        ));
    }
    Ok(())
}

fn inflate(
    file: &FileImage,
    shape: Shape,
    range: std::ops::Range<u64>,
    guest: u64,
) -> Result<Vec<u8>, String> {
    let packed = file.bytes(range.start, (range.end - range.start) as usize);
    let mut plain = vec![0; shape.cluster_bytes() as usize];
    let mut state = Box::<miniz_oxide::inflate::core::DecompressorOxide>::default();
    let flags = miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (_, _, len) =
        miniz_oxide::inflate::core::decompress(&mut state, &packed, &mut plain, 0, flags);
    if len != plain.len() {
        return Err(format!(
            "the compressed cluster at guest offset {guest} is damaged"
        ));
    }
    Ok(plain)
}

/// More snapshots than a load ever makes.
const SNAPSHOTS_MAX: u32 = 64;

/// What of a header matters here.
struct Header {
    shape: Shape,
    l1: L1,
    snapshots_offset: u64,
    snapshots: u32,
}

impl Header {
    fn read(file: &FileImage) -> Result<Header, String> {
        let half = |offset: u64| (word(file, offset) >> 32) as u32;
        let version = half(4);
        if half(0) != 0x5146_49fb || !(2..=3).contains(&version) {
            return Err("the header is not that of a qcow2 image".to_owned());
        }
        let shape = Shape {
            version,
            cluster_bits: half(20).clamp(9, 21),
            extended: version == 3 && word(file, 72) & 16 != 0,
            refcount_order: if version == 3 { half(96) } else { 4 },
        };
        let l1 = L1 {
            offset: word(file, 40),
            entries: half(36).into(),
            disk_bytes: word(file, 24),
        };
        if l1.disk_bytes > 1 << 30 {
            return Err(format!(
                "the header says that the disk has {} bytes",
                l1.disk_bytes
            ));
        }
        let (snapshots, snapshots_offset) = (half(60), word(file, 64));
        Ok(Header {
            shape,
            l1,
            snapshots_offset,
            snapshots,
        })
    }

    fn snapshots(&self, file: &FileImage) -> Result<Vec<Snapshot>, String> {
        let half = |offset: u64| (word(file, offset) >> 32) as u32;
        let text = |at: u64, len: u32| {
            let bytes = file.bytes(at, len as usize);
            String::from_utf8(bytes).map_err(|_| "a snapshot has a name of garbage".to_owned())
        };
        if self.snapshots > SNAPSHOTS_MAX {
            return Err(format!("the header tells of {} snapshots", self.snapshots));
        }
        let mut at = self.snapshots_offset;
        let mut found = Vec::new();
        for _ in 0..self.snapshots {
            let (id_len, name_len) = (half(at + 12) >> 16, half(at + 12) & 0xffff);
            let extra = half(at + 36);
            let has = |bytes: u32, offset: u64, otherwise: u64| {
                if extra >= bytes {
                    word(file, at + offset)
                } else {
                    otherwise
                }
            };
            let disk_bytes = has(16, 48, self.l1.disk_bytes);
            let state_bytes = has(8, 40, half(at + 32).into());
            if disk_bytes > 1 << 30 || state_bytes > 1 << 30 {
                return Err(format!(
                    "a snapshot of {disk_bytes} bytes and {state_bytes} of state"
                ));
            }
            let names = at + 40 + u64::from(extra);
            found.push(Snapshot {
                l1: L1 {
                    offset: word(file, at),
                    entries: half(at + 8).into(),
                    disk_bytes,
                },
                id: text(names, id_len)?,
                name: text(names + u64::from(id_len), name_len)?,
                state_bytes,
                times: Times {
                    date: (half(at + 16), half(at + 20)),
                    vm_clock_nsec: word(file, at + 24),
                    icount: Some(has(24, 56, u64::MAX)).filter(|&count| count != u64::MAX),
                },
            });
            at += u64::from(40 + extra + id_len + name_len).next_multiple_of(8);
        }
        Ok(found)
    }
}
