//! Content of guest data: which request wrote it, and at which offset it belongs.
//!
//! Guest space is divided into units, the smallest thing that a request of the workload covers. A
//! unit holds a *value*: zeros, or the number of the request that wrote it. A value is spelled out
//! as lines of 16 bytes that carry the number, the unit's own place and a hash over both and the
//! seed; so bytes that turn up in the wrong place, from an earlier life of a cluster, or from half a
//! request can be distinguished from the right ones, and the report names their request.

use gaur_sim::Random;

/// Number of the request that wrote a unit; [`ZERO`] for zeros.
pub type Value = u32;

/// The value of a unit that reads as zeros.
pub const ZERO: Value = 0;

const LINE_BYTES: usize = 16;

/// What bytes turn out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// This value, in its place.
    Value(Value),
    /// A value that was written, but to this unit.
    Misplaced(Value, u32),
    /// Bytes that no request wrote.
    Garbage,
}

impl std::fmt::Display for Found {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Found::Value(ZERO) => out.write_str("zeros"),
            Found::Value(value) => write!(out, "write #{value}"),
            Found::Misplaced(value, unit) => write!(out, "write #{value} of unit {unit}"),
            Found::Garbage => out.write_str("bytes that no request wrote"),
        }
    }
}

/// The script in which values are written: one per seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueEncoding {
    seed: u64,
    unit_bytes: usize,
}

impl ValueEncoding {
    /// The script of a seed. A unit is a power of two from 16 to 512 bytes.
    pub fn new(seed: u64, unit_bytes: u64) -> ValueEncoding {
        assert!(
            unit_bytes.is_power_of_two() && (16..=512).contains(&unit_bytes),
            "a unit is between a line and a sector"
        );
        ValueEncoding {
            seed: Random::new(seed ^ 0x5c21_97a0).number(),
            unit_bytes: unit_bytes as usize,
        }
    }

    /// Bytes of a unit.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes as u64
    }

    /// Writes `value` as the content of `unit` into `target`, one unit long.
    pub fn encode(&self, value: Value, unit: u32, target: &mut [u8]) {
        if value == ZERO {
            target.fill(0);
            return;
        }
        let name = (u64::from(value) << 32) | u64::from(unit);
        let hash = self.hash(name);
        for (number, line) in target.chunks_exact_mut(LINE_BYTES).enumerate() {
            let (head, tail) = line.split_at_mut(8);
            head.copy_from_slice(&name.to_le_bytes());
            tail.copy_from_slice(&hash.wrapping_add(number as u64).to_le_bytes());
        }
    }

    /// Writes `value` into `target`, which starts at the unit `first` and is whole units long.
    pub fn encode_run(&self, value: Value, first: u32, target: &mut [u8]) {
        for (number, unit) in target.chunks_exact_mut(self.unit_bytes).enumerate() {
            self.encode(value, first + number as u32, unit);
        }
    }

    /// `len` bytes of `value` from the byte `start` of the disk on.
    pub fn bytes_of(&self, value: Value, start: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.encode_run(value, (start / self.unit_bytes()) as u32, &mut bytes);
        bytes
    }

    /// The bytes of a disk whose units hold `values`.
    pub fn encode_disk(&self, values: &[Value]) -> Vec<u8> {
        let mut disk = vec![0; values.len() * self.unit_bytes];
        let units = disk.chunks_exact_mut(self.unit_bytes).zip(values);
        for (unit, (target, &value)) in units.enumerate() {
            self.encode(value, unit as u32, target);
        }
        disk
    }

    /// What the bytes of `unit` are.
    pub fn decode(&self, unit: u32, bytes: &[u8]) -> Found {
        let name = match bytes.first_chunk::<8>() {
            Some(head) => u64::from_le_bytes(*head),
            None => return Found::Garbage,
        };
        let (value, place) = ((name >> 32) as Value, name as u32);
        if value == ZERO {
            let zeros = bytes.iter().all(|&byte| byte == 0);
            return if zeros {
                Found::Value(ZERO)
            } else {
                Found::Garbage
            };
        }
        let hash = self.hash(name);
        let written = bytes
            .chunks_exact(LINE_BYTES)
            .enumerate()
            .all(|(number, line)| {
                let (head, tail) = line.split_at(8);
                head == name.to_le_bytes() && tail == hash.wrapping_add(number as u64).to_le_bytes()
            });
        match written {
            false => Found::Garbage,
            true if place == unit => Found::Value(value),
            true => Found::Misplaced(value, place),
        }
    }

    fn hash(&self, name: u64) -> u64 {
        // The finaliser of MurmurHash3 (Appleby): every bit of the input moves every bit of the
        // output. The low byte is left free for the number of the line.
        let mut bits = name ^ self.seed;
        bits = (bits ^ (bits >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        bits = (bits ^ (bits >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        (bits ^ (bits >> 33)) & !0xff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_names_its_writer_and_offset() {
        let script = ValueEncoding::new(5, 64);
        let mut bytes = vec![0; 128];
        script.encode_run(7, 3, &mut bytes);
        assert_eq!(script.decode(3, &bytes[..64]), Found::Value(7));
        assert_eq!(script.decode(4, &bytes[64..]), Found::Value(7));
        assert_eq!(script.decode(9, &bytes[..64]), Found::Misplaced(7, 3));
        assert_eq!(
            ValueEncoding::new(6, 64).decode(3, &bytes[..64]),
            Found::Garbage
        );
        bytes[40] ^= 1;
        assert_eq!(script.decode(3, &bytes[..64]), Found::Garbage);
        assert_eq!(script.decode(3, &[0; 64]), Found::Value(ZERO));
    }
}
