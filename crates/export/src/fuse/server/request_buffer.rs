//! The buffer of one request: as it came from the kernel, and then its answer.
//!
//! The payload starts at a page. In front of it stands either the header of a write, which the kernel
//! sends in one piece with the payload, or the header of a read's answer, which goes the same way. So
//! one call moves both, and the disk sees memory that is aligned.

use std::rc::Rc;

use gaur_block::Errno;
use memmap2::{Advice, MmapMut, MmapRaw, UncheckedAdvice};

use crate::fuse::proto::wire::{OUT_HEADER_LEN, PAGE_LEN, PAYLOAD_MAX, WRITE_PAYLOAD_AT};

/// A page for headers and the longest payload, in bytes.
const BUFFER_LEN: usize = PAGE_LEN + PAYLOAD_MAX;

/// Memory of the system, which takes up room only where it was touched.
pub(super) struct RequestBuffer {
    memory: Rc<MmapRaw>,
}

impl RequestBuffer {
    pub(super) fn new() -> Result<RequestBuffer, Errno> {
        let memory = MmapMut::map_anon(BUFFER_LEN).map_err(|_| Errno::ENOMEM)?;
        // Huge pages would make small requests take up all of it. A hint, so its result is not.
        let _ = memory.advise(Advice::NoHugePage);
        Ok(RequestBuffer {
            memory: Rc::new(memory.into()),
        })
    }

    /// Where its memory is.
    pub(super) fn pages(&self) -> Pages {
        Pages(self.memory.clone())
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is this long, zeroed by the kernel, and [`Pages`] does not look into it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr(), BUFFER_LEN) }
    }

    /// Where a request is received.
    pub(super) fn request(&mut self) -> &mut [u8] {
        &mut self.bytes()[PAGE_LEN - WRITE_PAYLOAD_AT..]
    }

    /// The payload, as long as the longest.
    pub(super) fn payload(&mut self) -> &mut [u8] {
        &mut self.bytes()[PAGE_LEN..]
    }

    /// Puts a header in front of the first `len` bytes of the payload; both together.
    pub(super) fn answer(&mut self, header: &[u8], len: usize) -> &[u8] {
        debug_assert_eq!(header.len(), OUT_HEADER_LEN, "an answer with a payload");
        let start = PAGE_LEN - header.len();
        let bytes = self.bytes();
        bytes[start..PAGE_LEN].copy_from_slice(header);
        &bytes[start..PAGE_LEN + len]
    }
}

/// The memory of a buffer, to give it back to the kernel while the buffer holds nothing.
pub(super) struct Pages(Rc<MmapRaw>);

impl Pages {
    /// Has the kernel take the memory until it is touched again.
    ///
    /// # Safety
    /// What the buffer holds is not needed any more.
    pub(super) unsafe fn give_back(&self) {
        // It stays when memory is locked.
        // SAFETY: the mapping of the buffer, of which nothing is in use.
        let _ = unsafe { self.0.unchecked_advise(UncheckedAdvice::DontNeed) };
    }
}
