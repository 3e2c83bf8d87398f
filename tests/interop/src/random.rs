//! Seeded numbers (SplitMix64): the same seed gives the same test on every machine.

/// A stream of numbers from a seed.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The stream of this seed.
    pub fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Bytes that do not compress.
    pub fn bytes(&mut self, len_bytes: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len_bytes + 8);
        while bytes.len() < len_bytes {
            bytes.extend_from_slice(&self.number().to_le_bytes());
        }
        bytes.truncate(len_bytes);
        bytes
    }
}
