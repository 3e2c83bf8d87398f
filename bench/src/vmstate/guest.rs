//! A machine whose memory is sent page by page.

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;

/// Memory of a guest: pages that do not compress, and pages of zeros between them.
pub struct Guest {
    memory: Vec<u8>,
    zero: Vec<bool>,
}

/// What is sent of a page.
pub(super) struct PageMessage<'a> {
    pub(super) header: [u8; 8],
    /// The page, or one byte for a page of zeros.
    pub(super) body: &'a [u8],
}

impl Guest {
    /// `bytes` of memory, every tenth page of zeros on average.
    pub fn new(bytes: usize) -> Guest {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d)
        };
        let mut memory = vec![0; bytes.next_multiple_of(PAGE)];
        let mut zero = Vec::with_capacity(memory.len() / PAGE);
        for page in memory.chunks_exact_mut(PAGE) {
            let is_zero = (next() >> 32).is_multiple_of(10);
            zero.push(is_zero);
            if !is_zero {
                for word in page.as_chunks_mut::<8>().0 {
                    *word = next().to_le_bytes();
                }
            }
        }
        Guest { memory, zero }
    }

    /// Its pages, one after the other, from the start again when they are over.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageMessage<'_>> {
        let pages = self.memory.chunks_exact(PAGE).zip(&self.zero);
        (0_u64..)
            .zip(pages.cycle())
            .map(|(number, (page, zero))| PageMessage {
                header: (number * PAGE as u64).to_be_bytes(),
                body: if *zero { &[0] } else { page },
            })
    }
}
