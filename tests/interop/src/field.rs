//! Fields of an image file by their place, for tests that break them on purpose.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

/// A field of the file: where, and how many bytes, most significant first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// What the format calls it.
    pub name: &'static str,
    /// First byte.
    pub offset: u64,
    /// 1, 2, 4 or 8.
    pub len: usize,
}

/// The header's fields of version 3, in order.
pub const HEADER: &[Field] = &[
    Field {
        name: "magic",
        offset: 0,
        len: 4,
    },
    Field {
        name: "version",
        offset: 4,
        len: 4,
    },
    Field {
        name: "backing_file_offset",
        offset: 8,
        len: 8,
    },
    Field {
        name: "backing_file_size",
        offset: 16,
        len: 4,
    },
    Field {
        name: "cluster_bits",
        offset: 20,
        len: 4,
    },
    Field {
        name: "size",
        offset: 24,
        len: 8,
    },
    Field {
        name: "crypt_method",
        offset: 32,
        len: 4,
    },
    Field {
        name: "l1_size",
        offset: 36,
        len: 4,
    },
    Field {
        name: "l1_table_offset",
        offset: 40,
        len: 8,
    },
    Field {
        name: "refcount_table_offset",
        offset: 48,
        len: 8,
    },
    Field {
        name: "refcount_table_clusters",
        offset: 56,
        len: 4,
    },
    Field {
        name: "nb_snapshots",
        offset: 60,
        len: 4,
    },
    Field {
        name: "snapshots_offset",
        offset: 64,
        len: 8,
    },
    Field {
        name: "incompatible_features",
        offset: 72,
        len: 8,
    },
    Field {
        name: "compatible_features",
        offset: 80,
        len: 8,
    },
    Field {
        name: "autoclear_features",
        offset: 88,
        len: 8,
    },
    Field {
        name: "refcount_order",
        offset: 96,
        len: 4,
    },
    Field {
        name: "header_length",
        offset: 100,
        len: 4,
    },
    Field {
        name: "compression_type",
        offset: 104,
        len: 1,
    },
    Field {
        name: "first_extension_type",
        offset: 112,
        len: 4,
    },
    Field {
        name: "first_extension_length",
        offset: 116,
        len: 4,
    },
];

/// The header's field of that name.
pub fn header(name: &str) -> Field {
    *HEADER
        .iter()
        .find(|field| field.name == name)
        .expect("a field of the header")
}

impl Field {
    /// Its value in an image file.
    pub fn get(&self, image: &str) -> u64 {
        let file = OpenOptions::new()
            .read(true)
            .open(image)
            .expect("the image opens");
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes[8 - self.len..], self.offset)
            .expect("the field is there");
        u64::from_be_bytes(bytes)
    }

    /// Stores a value in an image file; bits that do not fit are cut off.
    pub fn set(&self, image: &str, value: u64) {
        let file = OpenOptions::new()
            .write(true)
            .open(image)
            .expect("the image opens");
        let bytes = value.to_be_bytes();
        file.write_all_at(&bytes[8 - self.len..], self.offset)
            .expect("the image is writable");
    }

    /// Values that a field with this true value should never have, or only by chance.
    pub fn hostile_values(&self, truth: u64, file_len: u64) -> Vec<u64> {
        let all = u64::MAX >> (64 - 8 * self.len);
        let top = 1 << (8 * self.len - 1);
        let mut values = vec![
            0,
            1,
            2,
            9,
            22,
            63,
            64,
            255,
            all,
            all - 1,
            top,
            top - 1,
            all & !0x1ff,
            all & !0xffff,
            truth + 1,
            truth.wrapping_sub(1),
            truth ^ 0x200,
            truth ^ 0x1_0000,
            truth ^ top,
            file_len,
            file_len.next_multiple_of(65536),
            file_len.next_multiple_of(65536) << 8,
            0x0fff_ffff,
            1 << 40,
            (1 << 56) - 512,
        ];
        for value in &mut values {
            *value &= all;
        }
        values.sort_unstable();
        values.dedup();
        values.retain(|value| *value != truth);
        values
    }
}
