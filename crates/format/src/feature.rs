//! The three sets of feature bits of a version 3 header, and their names.
//!
//! *Incompatible*: a reader that does not know a bit must refuse the image. *Compatible*: it may
//! ignore it. *Autoclear*: it may read the image, and must clear the bit before it writes.

use alloc::string::String;
use alloc::vec::Vec;

use crate::bytes;

/// Which of the three sets a feature name is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FeatureSet {
    /// Unknown bits forbid opening.
    Incompatible = 0,
    /// Unknown bits are ignored.
    Compatible = 1,
    /// Unknown bits are cleared before the first write.
    Autoclear = 2,
}

macro_rules! features {
    ($(#[$doc:meta])* $name:ident $(and $more:literal)?:
     $($(#[$bit_doc:meta])* $bit:ident = $number:literal;)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub u64);

        impl $name {
            $($(#[$bit_doc])* pub const $bit: $name = $name(1 << $number);)*

            /// Every bit this crate knows.
            pub const KNOWN: $name = $name(0 $(| $more)? $(| 1 << $number)*);

            /// Whether all bits of `bits` are set.
            #[inline]
            pub const fn has(self, bits: $name) -> bool {
                self.0 & bits.0 == bits.0
            }

            /// With the bits of `bits` set.
            #[inline]
            pub const fn with(self, bits: $name) -> $name {
                $name(self.0 | bits.0)
            }

            /// With the bits of `bits` clear.
            #[inline]
            pub const fn without(self, bits: $name) -> $name {
                $name(self.0 & !bits.0)
            }

            /// The bits this crate does not know.
            #[inline]
            pub const fn unknown(self) -> u64 {
                self.0 & !Self::KNOWN.0
            }
        }
    };
}

features! {
    /// Bits that change what the image means.
    Incompatible:
    /// Refcounts may be too low: the image was not closed, with lazy refcounts on.
    DIRTY = 0;
    /// A writer found structures damaged; the image is not to be written until it is repaired.
    CORRUPT = 1;
    /// Guest data lies in another file.
    DATA_FILE = 2;
    /// The compression type is not deflate.
    COMPRESSION_TYPE = 3;
    /// L2 entries are 16 bytes and have subclusters.
    EXTENDED_L2 = 4;
}

features! {
    /// Bits a reader may ignore.
    Compatible and 0xffff_ffff_ffff_0000:
    /// Refcount updates may be postponed, with the dirty bit set meanwhile.
    LAZY_REFCOUNTS = 0;
    /// Gaur's own, where an image has internal snapshots: as [`Autoclear::IN_USE`].
    IN_USE = 15;
}

impl Compatible {
    const OWN: u64 = u64::MAX << Compatible::IN_USE.0.trailing_zeros();

    /// The same as [`Autoclear::log_number`].
    pub const fn log_number(self) -> u64 {
        Autoclear(self.0).log_number()
    }

    /// These bits with Gaur's own as in `own`.
    pub const fn with_own(self, own: Autoclear) -> Compatible {
        Compatible(self.0 & !Self::OWN | own.0 & Self::OWN)
    }
}

features! {
    /// Bits a writer clears unless it keeps what they promise.
    Autoclear and 0xffff_ffff_ffff_0000:
    /// The dirty bitmaps are up to date with the data.
    BITMAPS = 0;
    /// The data file is a raw image of the disk.
    RAW_DATA_FILE = 1;
    /// Gaur's own: a process writes to the image, or was killed while it did.
    IN_USE = 15;
}

impl Autoclear {
    /// The bits from here on are Gaur's own as well: the number of the log of commits that the process
    /// which writes keeps, 0 for none.
    pub const LOG_SHIFT: u32 = 16;
    /// Largest number of a log.
    pub const LOG_MAX: u64 = u64::MAX >> Self::LOG_SHIFT;

    /// The number of the log that knows more than the image; 0 for none.
    pub const fn log_number(self) -> u64 {
        match self.has(Autoclear::IN_USE) {
            true => self.0 >> Self::LOG_SHIFT,
            false => 0,
        }
    }

    /// What a process sets that writes and keeps the log of this number.
    pub const fn in_use(log_number: u64) -> Autoclear {
        Autoclear(Autoclear::IN_USE.0 | log_number << Self::LOG_SHIFT)
    }
}

/// Bytes of one entry of the feature name table.
pub const NAME_ENTRY_BYTES: usize = 48;

/// The table of names that new images carry, in the words QEMU uses.
pub const NAMES: [(FeatureSet, u8, &str); 8] = [
    (FeatureSet::Incompatible, 0, "dirty bit"),
    (FeatureSet::Incompatible, 1, "corrupt bit"),
    (FeatureSet::Incompatible, 2, "external data file"),
    (FeatureSet::Incompatible, 3, "compression type"),
    (FeatureSet::Incompatible, 4, "extended L2 entries"),
    (FeatureSet::Compatible, 0, "lazy refcounts"),
    (FeatureSet::Autoclear, 0, "bitmaps"),
    (FeatureSet::Autoclear, 1, "raw external data"),
];

/// The data of a feature name table extension with [`NAMES`].
pub fn name_table() -> Vec<u8> {
    let mut table = Vec::with_capacity(NAMES.len().saturating_mul(NAME_ENTRY_BYTES));
    for (set, bit, name) in NAMES {
        let mut entry = [0; NAME_ENTRY_BYTES];
        bytes::put(&mut entry, 0, &[set as u8, bit]);
        bytes::put(&mut entry, 2, name.as_bytes());
        table.extend_from_slice(&entry);
    }
    table
}

/// The name of a bit in a feature name table, as far as it is text; control characters are shown
/// as `?`, since it ends up on a terminal.
fn name_in(table: &[u8], set: FeatureSet, bit: u8) -> Option<String> {
    let entries = table.as_chunks::<NAME_ENTRY_BYTES>().0;
    let entry = entries
        .iter()
        .find(|entry| entry.starts_with(&[set as u8, bit]))?;
    let name = entry.get(2..)?.split(|byte| *byte == 0).next()?;
    let clean = |c: char| if c.is_control() { '?' } else { c };
    let name: String = String::from_utf8_lossy(name).chars().map(clean).collect();
    (!name.is_empty()).then_some(name)
}

/// The bits of `bits`, by the names that the image's own `table` gives them: `"fancy feature, bit
/// 17"`.
pub(crate) fn describe(bits: u64, set: FeatureSet, table: Option<&[u8]>) -> String {
    let set_bits = (0u8..64).filter(|bit| bits & 1u64.wrapping_shl(u32::from(*bit)) != 0);
    let names = set_bits.map(|bit| {
        let own = table.and_then(|table| name_in(table, set, bit));
        own.unwrap_or_else(|| alloc::format!("bit {bit}"))
    });
    let names: Vec<String> = names.collect();
    names.join(", ")
}
