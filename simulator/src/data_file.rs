//! Seeds whose image has an external data file.
//!
//! The image is empty at first, and the data file, unless it is raw, holds garbage of an earlier life. The header does
//! not name the file; the options of the engine do.

use gaur_sim::{DiskProfile, FileImage, Random};

use crate::config::Config;
use crate::machine::{Machine, TOP};
use crate::shape::Shape;

/// Name of the data file on its machine.
pub const DATA: &str = "data.raw";

/// Whether the data file is the disk by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataFile {
    /// Its clusters count as far as they are mapped.
    Mapped,
    /// It is.
    Raw,
}

/// Bytes of the header with the bit of the data file, and with that of a raw one.
const INCOMPATIBLE_BYTE: u64 = 79;
const AUTOCLEAR_BYTE: u64 = 95;

/// Makes a configuration one with a data file: without what the format does not have then.
pub fn configure(config: &mut Config) -> DataFile {
    let mut random = Random::new(config.seed ^ 0x77f0_13c9_5ad2_e861);
    let image = &mut config.image;
    image.shape = Shape {
        version: 3,
        ..image.shape
    };
    image.snapshots = 0;
    image.filled_per_mille = 0;
    image.compressed_per_mille = 0;
    image.mapped_beyond = false;
    image.bitmaps = None;
    config.packed_per_mille = 0;
    config.snapshot_load = None;
    // What is encrypted is nobody's disk by itself.
    if random.chance(500) || config.image.encryption.is_some() {
        return DataFile::Mapped;
    }
    config.backing.clear();
    DataFile::Raw
}

/// Adds the data file to a machine.
pub fn add(machine: &mut Machine, config: &Config, kind: DataFile) {
    for (name, image, _) in &mut machine.files {
        if name == TOP {
            image.write(
                INCOMPATIBLE_BYTE,
                &[image.bytes(INCOMPATIBLE_BYTE, 1)[0] | 4],
            );
            let raw = u8::from(kind == DataFile::Raw) * 2;
            image.write(AUTOCLEAR_BYTE, &[image.bytes(AUTOCLEAR_BYTE, 1)[0] | raw]);
        }
    }
    let len = config.image.guest_bytes;
    let mut data = FileImage::new(len);
    if kind == DataFile::Mapped {
        let garbage = FileImage::device(len.next_multiple_of(1 << 20), config.seed);
        data.write(0, &garbage.bytes(0, len as usize));
    }
    let profile = DiskProfile {
        device: None,
        ..config.profile
    };
    machine.files.push((DATA.to_owned(), data, profile));
}
