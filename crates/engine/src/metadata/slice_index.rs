//! Index of the cached L2 slices of a shard: host offset to slot in its memory.
//!
//! A hash table that takes a known amount of memory until [`SliceIndex::grow`] is called: entries
//! that go leave nothing behind, so coming and going costs no growth, and nothing is allocated.

use super::l2_shard::SliceSlot;

/// The table.
#[derive(Debug, Default)]
pub(crate) struct SliceIndex {
    /// A power of two of them, or none. A slot of length 0 is vacant.
    slots: Vec<SliceSlot>,
    len: usize,
}

/// Fewest slots of a table that is not empty.
const SLOTS_MIN: usize = 4;

impl SliceIndex {
    /// Number of slots.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Slots there is room for.
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len() / 4 * 3
    }

    /// Bytes that the table takes.
    pub(crate) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<SliceSlot>()
    }

    /// Bytes that it would take with twice the room.
    pub(crate) fn bytes_grown(&self) -> usize {
        (self.slots.len() * 2).max(SLOTS_MIN) * size_of::<SliceSlot>()
    }

    /// Doubles the room.
    pub(crate) fn grow(&mut self) {
        self.resize((self.slots.len() * 2).max(SLOTS_MIN));
    }

    /// Gives back the room that is not needed.
    pub(crate) fn shrink(&mut self) {
        let needed = (self.len * 4).div_ceil(3).next_power_of_two();
        if self.len == 0 {
            self.slots = Vec::new();
        } else if needed.max(SLOTS_MIN) < self.slots.len() {
            self.resize(needed.max(SLOTS_MIN));
        }
    }

    fn resize(&mut self, slots: usize) {
        let mut grown = Vec::new();
        grown.reserve_exact(slots);
        grown.resize_with(slots, SliceSlot::default);
        let old = std::mem::replace(&mut self.slots, grown);
        self.len = 0;
        for slot in old.into_iter().filter(|slot| slot.len > 0) {
            self.insert(slot);
        }
    }

    /// Where the search for `offset` begins.
    #[inline]
    fn home(&self, offset: u64) -> usize {
        let mixed = offset.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & self.slots.len().wrapping_sub(1)
    }

    #[inline]
    fn find(&self, offset: u64) -> Option<usize> {
        let mut at = self.home(offset);
        loop {
            // An empty table has no slot; any other has a vacant one.
            let slot = self.slots.get(at)?;
            if slot.len == 0 {
                return None;
            }
            if slot.offset == offset {
                return Some(at);
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// The slot of the slice at `offset`.
    #[inline]
    pub(crate) fn get(&self, offset: u64) -> Option<&SliceSlot> {
        self.slots.get(self.find(offset)?)
    }

    /// The same, to be changed; its offset and whether its length is 0 stay.
    #[inline]
    pub(crate) fn get_mut(&mut self, offset: u64) -> Option<&mut SliceSlot> {
        let at = self.find(offset)?;
        self.slots.get_mut(at)
    }

    /// Adds a slot that is not there yet, for which there is room.
    pub(crate) fn insert(&mut self, new: SliceSlot) {
        let mut at = self.home(new.offset);
        while let Some(slot) = self.slots.get_mut(at) {
            if slot.len == 0 {
                *slot = new;
                self.len += 1;
                return;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// Takes out the slot of the slice at `offset`.
    pub(crate) fn remove(&mut self, offset: u64) -> Option<SliceSlot> {
        let mut hole = self.find(offset)?;
        let removed = std::mem::take(&mut self.slots[hole]);
        self.len -= 1;
        // A slot that would no longer be found across the hole moves into it.
        let mask = self.slots.len() - 1;
        let mut at = (hole + 1) & mask;
        while self.slots[at].len > 0 {
            let home = self.home(self.slots[at].offset);
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.slots.swap(hole, at);
                hole = at;
            }
            at = (at + 1) & mask;
        }
        Some(removed)
    }

    /// All slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &SliceSlot> {
        self.slots.iter().filter(|slot| slot.len > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(offset: u64, at: u32) -> SliceSlot {
        SliceSlot {
            offset,
            at,
            len: 1,
            ..SliceSlot::default()
        }
    }

    #[test]
    fn inserted_slices_are_found_until_removed() {
        let mut index = SliceIndex::default();
        assert!(index.get(0).is_none());
        let mut model = std::collections::BTreeMap::new();
        let mut random = 1_u64;
        for step in 0..20_000_u32 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let offset = (random >> 40) % 300 * 512;
            if random >> 33 & 1 == 0 || model.contains_key(&offset) {
                let removed = index.remove(offset).map(|slot| slot.at);
                assert_eq!(removed, model.remove(&offset));
            } else {
                if index.len() == index.capacity() {
                    index.grow();
                }
                index.insert(slot(offset, step));
                model.insert(offset, step);
            }
            assert_eq!(index.len(), model.len());
            let probe = (random >> 20) % 300 * 512;
            let found = index.get(probe).map(|slot| slot.at);
            assert_eq!(found, model.get(&probe).copied());
        }
        assert!(index.bytes() <= 512 * size_of::<SliceSlot>());
        let at = |index: &SliceIndex| index.iter().map(|slot| slot.offset).collect::<Vec<_>>();
        let mut found = at(&index);
        found.sort_unstable();
        assert_eq!(found, model.keys().copied().collect::<Vec<_>>());
        for offset in found.iter().skip(5) {
            index.remove(*offset);
        }
        index.shrink();
        assert_eq!((index.len(), index.capacity()), (5, 6));
    }
}
