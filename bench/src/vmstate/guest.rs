//! A machine whose memory is sent page by page.

use gaur_sim::Random;

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
        let mut random = Random::new(0);
        let mut memory = vec![0; bytes.next_multiple_of(PAGE)];
        let mut zero = Vec::with_capacity(memory.len() / PAGE);
        for page in memory.chunks_exact_mut(PAGE) {
            let is_zero = random.below(10) == 0;
            zero.push(is_zero);
            if !is_zero {
                for word in page.as_chunks_mut::<8>().0 {
                    *word = random.number().to_le_bytes();
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
