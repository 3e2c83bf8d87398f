//! A reader of images that is not the engine: slow, simple, and made from [`crate::shape`] alone.
//!
//! It reads the guest's view through any L1 table, so that the content of internal snapshots can be
//! judged, and through a chain of backing files.

use std::collections::BTreeMap;

use gaur_sim::FileImage;

use crate::shape::{COMPRESSED, OFFSET_MASK, Shape, ZERO_FLAG};

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

/// One file of a chain.
struct Layer<'a> {
    file: &'a FileImage,
    /// `None` for a raw file.
    qcow2: Option<(Shape, L1)>,
    bytes: u64,
}

/// A chain of files.
pub struct View<'a> {
    layers: Vec<Layer<'a>>,
    /// L1 tables of the top image's internal snapshots, oldest first.
    pub snapshots: Vec<L1>,
}

impl<'a> View<'a> {
    /// Opens the chain whose top file is called `name`.
    pub fn open(files: &'a Files, name: &str) -> Result<View<'a>, String> {
        let mut view = View {
            layers: Vec::new(),
            snapshots: Vec::new(),
        };
        let mut next = Some((name.to_owned(), true));
        while let Some((name, qcow2)) = next.take() {
            let file = files
                .get(&name)
                .ok_or_else(|| format!("{name} is not there"))?;
            if !qcow2 {
                view.layers.push(Layer {
                    file,
                    qcow2: None,
                    bytes: file.len_bytes(),
                });
                break;
            }
            let header = Header::read(file)?;
            if view.layers.is_empty() {
                view.snapshots = header.snapshots(file)?;
            }
            let bytes = header.l1.disk_bytes;
            view.layers.push(Layer {
                file,
                qcow2: Some((header.shape, header.l1)),
                bytes,
            });
            next = header.backing;
        }
        Ok(view)
    }

    /// Size of the active disk.
    pub fn disk_bytes(&self) -> u64 {
        self.layers.first().map_or(0, |layer| layer.bytes)
    }

    /// The whole active disk.
    pub fn read_active(&self) -> Result<Vec<u8>, String> {
        match self.layers.first().and_then(|layer| layer.qcow2) {
            Some((_, l1)) => self.read_disk(l1),
            None => Ok(self
                .layers
                .first()
                .map_or_else(Vec::new, |top| top.file.bytes(0, top.bytes as usize))),
        }
    }

    /// The whole disk behind an L1 table of the top image.
    pub fn read_disk(&self, l1: L1) -> Result<Vec<u8>, String> {
        let Some((shape, _)) = self.layers.first().and_then(|layer| layer.qcow2) else {
            return Err("the top file is not qcow2".to_owned());
        };
        let mut disk = vec![0; l1.disk_bytes as usize];
        for (number, target) in disk.chunks_mut(shape.cluster_bytes() as usize).enumerate() {
            self.fill(0, l1, number as u64 * shape.cluster_bytes(), target)?;
        }
        Ok(disk)
    }

    /// Fills `target` from a layer; what that layer does not have comes from the ones below.
    fn fill(&self, depth: usize, l1: L1, guest: u64, target: &mut [u8]) -> Result<(), String> {
        let Some(layer) = self.layers.get(depth) else {
            target.fill(0);
            return Ok(());
        };
        let Some((shape, _)) = layer.qcow2 else {
            layer.file.read(guest, target);
            return Ok(());
        };
        let share = shape.cluster_bytes() / shape.subclusters();
        let mut done = 0;
        while done < target.len() {
            let at = guest + done as u64;
            let inside = (share - at % share) as usize;
            let len = inside.min(target.len() - done);
            let part = &mut target[done..done + len];
            done += len;
            if at >= l1.disk_bytes {
                part.fill(0);
                continue;
            }
            match cell(layer.file, shape, l1, at)? {
                Cell::Below => {
                    let below = self.layers.get(depth + 1).and_then(|layer| layer.qcow2);
                    let none = L1 {
                        offset: 0,
                        entries: 0,
                        disk_bytes: 0,
                    };
                    self.fill(depth + 1, below.map_or(none, |(_, l1)| l1), at, part)?;
                }
                Cell::Zero => part.fill(0),
                Cell::At(host) => layer.file.read(host, part),
                Cell::Compressed(range) => {
                    let plain = inflate(layer.file, shape, range, at)?;
                    let start = (at % shape.cluster_bytes()) as usize;
                    part.copy_from_slice(&plain[start..start + len]);
                }
            }
        }
        Ok(())
    }
}

enum Cell {
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

/// Where the byte at `guest` is.
fn cell(file: &FileImage, shape: Shape, l1: L1, guest: u64) -> Result<Cell, String> {
    let cluster = guest / shape.cluster_bytes();
    let index = cluster / shape.entries();
    if index >= l1.entries {
        return Err(format!("guest offset {guest} lies behind the L1 table"));
    }
    let table = word(file, l1.offset + index * 8) & OFFSET_MASK;
    if table == 0 {
        return Ok(Cell::Below);
    }
    check_host(file, shape, table, guest)?;
    let at = table + cluster % shape.entries() * shape.entry_bytes();
    let entry = word(file, at);
    if entry & COMPRESSED != 0 {
        return Ok(Cell::Compressed(shape.compressed_range(entry)));
    }
    let host = entry & OFFSET_MASK;
    let (allocated, zero) = if shape.extended {
        let bitmap = word(file, at + 8);
        let bit = guest % shape.cluster_bytes() / (shape.cluster_bytes() / 32);
        (bitmap >> bit & 1 == 1, bitmap >> (32 + bit) & 1 == 1)
    } else {
        (host != 0, shape.version == 3 && entry & ZERO_FLAG != 0)
    };
    if zero {
        return Ok(Cell::Zero);
    }
    if !allocated {
        return Ok(Cell::Below);
    }
    check_host(file, shape, host, guest)?;
    Ok(Cell::At(host + guest % shape.cluster_bytes()))
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

/// What of a header matters here.
struct Header {
    shape: Shape,
    l1: L1,
    backing: Option<(String, bool)>,
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
        let name_offset = word(file, 8);
        let backing = (name_offset != 0).then(|| {
            let name = file.bytes(name_offset, half(16).min(1023) as usize);
            let name = String::from_utf8_lossy(&name).into_owned();
            let qcow2 = !name.ends_with(".raw");
            (name, qcow2)
        });
        let (snapshots, snapshots_offset) = (half(60), word(file, 64));
        Ok(Header {
            shape,
            l1,
            backing,
            snapshots_offset,
            snapshots,
        })
    }

    fn snapshots(&self, file: &FileImage) -> Result<Vec<L1>, String> {
        let half = |offset: u64| (word(file, offset) >> 32) as u32;
        let mut at = self.snapshots_offset;
        let mut found = Vec::new();
        for _ in 0..self.snapshots.min(16) {
            let (id_len, name_len) = (half(at + 12) >> 16, half(at + 12) & 0xffff);
            let extra = half(at + 36);
            let disk_bytes = if extra >= 16 {
                word(file, at + 48)
            } else {
                self.l1.disk_bytes
            };
            if disk_bytes > 1 << 30 {
                return Err(format!("a snapshot of {disk_bytes} bytes"));
            }
            found.push(L1 {
                offset: word(file, at),
                entries: half(at + 8).into(),
                disk_bytes,
            });
            at += u64::from(40 + extra + id_len + name_len).next_multiple_of(8);
        }
        Ok(found)
    }
}
