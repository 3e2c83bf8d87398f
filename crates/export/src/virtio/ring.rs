//! The device's side of a split virtqueue (virtio 1.3, section 2.7).
//!
//! Every request popped is pushed to the used ring once; pushed entries are seen by the driver when
//! they are published, many at a time. Invariant: `used` + `pushed` + what is in flight = `next`,
//! all modulo 2^16.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};

use super::memory::{Access, GuestMemory};
use super::violation::Violation;
use super::wire::{self, RING_MAX};

/// Where the three parts of a ring are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: NonNull<u8>,
    pub(crate) available: NonNull<u8>,
    pub(crate) used: NonNull<u8>,
    /// Number of descriptors.
    pub(crate) size: u16,
}

// SAFETY: addresses in mapped memory; the memory travels with them in `Ring`'s owner.
unsafe impl Send for RingAddresses {}

impl RingAddresses {
    /// Checks the size of a ring and finds its parts with `find` (address, bytes, access), which
    /// answers only for memory that holds all the bytes in one run.
    pub(crate) fn find(
        size: u32,
        [descriptors, available, used]: [u64; 3],
        find: impl Fn(u64, usize, Access) -> Option<NonNull<u8>>,
    ) -> Result<RingAddresses, String> {
        let size = u16::try_from(size)
            .ok()
            .filter(|size| size.is_power_of_two() && *size <= RING_MAX)
            .ok_or_else(|| {
                format!("a ring of {size} entries, not a power of two up to {RING_MAX}")
            })?;
        let entries = usize::from(size);
        let part = |name: &str, address: u64, len: usize, align: usize, access| {
            find(address, len, access)
                .filter(|start| start.as_ptr().align_offset(align) == 0)
                .ok_or_else(|| {
                    format!(
                        "the {name} at {address:#x} is not in the guest's memory or not aligned"
                    )
                })
        };
        Ok(RingAddresses {
            descriptors: part(
                "descriptor table",
                descriptors,
                entries * wire::descriptor::BYTES,
                16,
                Access::Read,
            )?,
            available: part(
                "available ring",
                available,
                6 + 2 * entries,
                2,
                Access::Read,
            )?,
            used: part("used ring", used, 6 + 8 * entries, 4, Access::Write)?,
            size,
        })
    }
}

/// A descriptor as the driver wrote it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
    pub(super) next: u16,
}

impl Descriptor {
    pub(super) fn from_bytes(bytes: [u8; 16]) -> Descriptor {
        let raw = u128::from_le_bytes(bytes);
        Descriptor {
            address: raw as u64,
            len: (raw >> 64) as u32,
            flags: (raw >> 96) as u16,
            next: (raw >> 112) as u16,
        }
    }
}

/// A ring that runs.
pub(super) struct Ring {
    addresses: RingAddresses,
    /// Keeps the addresses mapped.
    _memory: Arc<dyn GuestMemory>,
    event_idx: bool,
    /// The next entry of the available ring.
    next: u16,
    /// The driver's available index as last seen.
    seen: u16,
    /// The used index as the driver sees it.
    used: u16,
    /// Entries behind it that the driver does not see yet.
    pushed: u16,
}

impl Ring {
    /// The ring at `addresses`, which are in `memory`; the next request is `next`, or whatever comes
    /// after those that were used and `in_flight` more.
    pub(super) fn new(
        addresses: RingAddresses,
        memory: Arc<dyn GuestMemory>,
        event_idx: bool,
        next: Option<u16>,
        in_flight: u16,
    ) -> Ring {
        let mut ring = Ring {
            addresses,
            _memory: memory,
            event_idx,
            next: 0,
            seen: 0,
            used: 0,
            pushed: 0,
        };
        ring.used = ring.used_index().load(Ordering::Acquire);
        ring.next = next.unwrap_or_else(|| ring.used.wrapping_add(in_flight));
        ring.seen = ring.next;
        ring
    }

    pub(super) fn size(&self) -> u16 {
        self.addresses.size
    }

    /// Length of the used ring in bytes.
    pub(super) fn used_bytes(&self) -> usize {
        6 + 8 * usize::from(self.addresses.size)
    }

    /// The next entry of the available ring.
    pub(super) fn next(&self) -> u16 {
        self.next
    }

    /// The used index as the driver sees it.
    pub(super) fn used(&self) -> u16 {
        self.used
    }

    /// The head of the next request; `None` when there is none yet.
    pub(super) fn pop(&mut self) -> Result<Option<u16>, Violation> {
        if self.next == self.seen {
            self.seen = u16::from_le(self.available_index().load(Ordering::Acquire));
            let count = self.seen.wrapping_sub(self.next);
            if count > self.addresses.size {
                let (seen, next) = (self.seen, self.next);
                self.seen = self.next;
                return Err(Violation::AvailIndex { seen, next });
            }
            if count == 0 {
                return Ok(None);
            }
        }
        let at = usize::from(self.next & (self.addresses.size - 1));
        // SAFETY: an entry of the available ring, inside its run and aligned to 2.
        let head = unsafe {
            let entries = self.addresses.available.as_ptr().add(4).cast::<u16>();
            u16::from_le(entries.add(at).read_volatile())
        };
        self.check(head)?;
        self.next = self.next.wrapping_add(1);
        Ok(Some(head))
    }

    /// Reads a descriptor.
    pub(super) fn descriptor(&self, index: u16) -> Result<Descriptor, Violation> {
        self.check(index)?;
        // SAFETY: the index is inside the table, whose run is aligned to 16.
        let bytes = unsafe {
            let table = self.addresses.descriptors.as_ptr().cast::<[u8; 16]>();
            table.add(usize::from(index)).read_volatile()
        };
        Ok(Descriptor::from_bytes(bytes))
    }

    fn check(&self, index: u16) -> Result<(), Violation> {
        let count = self.addresses.size;
        if index < count {
            Ok(())
        } else {
            Err(Violation::Descriptor { index, count })
        }
    }

    /// Enters a request that is done; the driver sees it after [`Ring::publish`].
    pub(super) fn push(&mut self, head: u16, written: u32) {
        let index = self.used.wrapping_add(self.pushed);
        let at = usize::from(index & (self.addresses.size - 1));
        // SAFETY: an entry of the used ring, inside its run, which is aligned to 4.
        unsafe {
            let entries = self.addresses.used.as_ptr().add(4).cast::<u32>();
            let entry = entries.add(2 * at);
            entry.write_volatile(u32::from(head).to_le());
            entry.add(1).write_volatile(written.to_le());
        }
        self.pushed = self.pushed.wrapping_add(1);
    }

    /// How many entries wait to be published.
    pub(super) fn pushed(&self) -> u16 {
        self.pushed
    }

    /// Lets the driver see what was pushed.
    pub(super) fn publish(&mut self) {
        self.used = self.used.wrapping_add(self.pushed);
        self.pushed = 0;
        let used = self.used.to_le();
        self.used_index().store(used, Ordering::Release);
    }

    /// Whether the driver wants an interrupt for the `count` entries published last.
    pub(super) fn wants_interrupt(&self, count: u16) -> bool {
        // The driver changes its mind first and looks at the used index then; this is the other side.
        fence(Ordering::SeqCst);
        if !self.event_idx {
            let flags = self
                .half(self.addresses.available, 0)
                .load(Ordering::Relaxed);
            return u16::from_le(flags) & wire::AVAIL_NO_INTERRUPT == 0;
        }
        let end = 4 + 2 * usize::from(self.addresses.size);
        let event = self
            .half(self.addresses.available, end)
            .load(Ordering::Relaxed);
        let behind = self.used.wrapping_sub(u16::from_le(event)).wrapping_sub(1);
        behind < count
    }

    /// Asks the driver for no notifications (kicks).
    pub(super) fn disable_notification(&self) {
        if !self.event_idx {
            let flags = self.half(self.addresses.used, 0);
            flags.store(wire::USED_NO_NOTIFY.to_le(), Ordering::Relaxed);
        }
        // With event indices the last one asked for is in the past as soon as it was reached.
    }

    /// Asks for a notification when there is a request; `false` when there is one already.
    pub(super) fn enable_notification(&self) -> bool {
        if self.event_idx {
            let end = 4 + 8 * usize::from(self.addresses.size);
            let event = self.half(self.addresses.used, end);
            event.store(self.next.to_le(), Ordering::Relaxed);
        } else {
            self.half(self.addresses.used, 0)
                .store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        u16::from_le(self.available_index().load(Ordering::Acquire)) == self.next
    }

    fn available_index(&self) -> &AtomicU16 {
        self.half(self.addresses.available, 2)
    }

    fn used_index(&self) -> &AtomicU16 {
        self.half(self.addresses.used, 2)
    }

    /// A 16-bit field of one of the two rings.
    fn half(&self, part: NonNull<u8>, offset: usize) -> &AtomicU16 {
        // SAFETY: callers pass offsets inside the part's run, which is aligned to 2 at least and
        // mapped while `_memory` lives.
        unsafe { AtomicU16::from_ptr(part.as_ptr().add(offset).cast()) }
    }
}
