//! Shard of the L2 cache: slices of any form in one piece of memory.
//!
//! The memory is a ring. New slices go in at its tail; room is made at its head, by moving the oldest
//! slice to the tail, over what is void. When slices fill the ring, the oldest is evicted instead,
//! unless a request used it since it came by last, or changed it and the disk does not have it yet; one
//! that stays is packed on its way, if no request is changing it. So nothing is allocated or freed while
//! slices come and go, no space is lost to fragments, and what is held is known to the byte.
//!
//! Lookups need shared access only: usage and pins are atomic. If nothing at all can be evicted the
//! ring grows past its budget until [`Shard::settle`].

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::packed::{Entry, Form, OnDisk, Shape};
use super::slice_index::SliceIndex;
use crate::statistics::CacheStatistics;

/// The part.
#[derive(Debug)]
pub(crate) struct Shard {
    shape: Shape,
    budget_bytes: usize,
    /// Every item starts with a word: the host offset of its slice, or [`VOID`] and its length.
    words: Vec<u64>,
    /// Most words.
    capacity: usize,
    /// Where the oldest item starts.
    head: usize,
    /// Where the next item goes.
    tail: usize,
    /// Words between head and tail.
    used: usize,
    /// Of those, the words that hold slices.
    live: usize,
    index: SliceIndex,
    /// A slice in raw form, for a moment.
    scratch: Vec<u64>,
    dirty: usize,
    dirty_words: usize,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// Where a slice is, and its state.
#[derive(Debug, Default)]
pub(crate) struct SliceSlot {
    /// Host offset of the slice.
    pub(crate) offset: u64,
    pub(crate) at: u32,
    /// Words with the header.
    pub(crate) len: u32,
    pub(crate) pins: AtomicU32,
    pub(crate) used: AtomicBool,
    pub(crate) form: Form,
    /// It is in its smallest form.
    pub(crate) tight: bool,
    pub(crate) dirty: bool,
    pub(crate) writing: bool,
}

/// A slice to look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    shape: Shape,
    form: Form,
    body: &'a [u64],
}

/// In the first word of a piece of the ring that holds nothing; its length follows.
const VOID: u64 = 1;
const VOID_SHIFT: u32 = 1;
/// The ring gets memory in steps of this many words at least.
const STEP_WORDS: usize = 2048;
/// Runs are few if they take this many times less memory than the entries.
const FEW: usize = 16;
/// Raw slices a ring has room for, whatever its budget.
const RAW_SLICES_MIN: usize = 2;

impl View<'_> {
    /// Entry `index`.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Entry {
        self.shape.get(self.form, self.body, index)
    }

    /// Up to which entry the slice is known to go on as entry `index`, and whether clusters follow each other there.
    pub(crate) fn run(&self, index: usize) -> (usize, bool) {
        self.shape.run(self.form, self.body, index)
    }

    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.shape.entries
    }
}

impl SliceSlot {
    fn busy(&mut self) -> bool {
        self.dirty || self.writing || *self.pins.get_mut() > 0
    }
}

impl Shard {
    /// A part that holds `budget_bytes` at most, or a few slices if that is more.
    pub(crate) fn new(shape: Shape, budget_bytes: usize) -> Shard {
        let mut shard = Shard {
            shape,
            budget_bytes,
            words: Vec::new(),
            capacity: 0,
            head: 0,
            tail: 0,
            used: 0,
            live: 0,
            index: SliceIndex::default(),
            scratch: Vec::new(),
            dirty: 0,
            dirty_words: 0,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        };
        shard.capacity = shard.nominal(0);
        shard
    }

    /// Words of the ring when the index takes `index_bytes`; more while the index grows.
    fn nominal(&self, index_bytes: usize) -> usize {
        let scratch = self.scratch.capacity() * 8;
        let left = self
            .budget_bytes
            .saturating_sub(index_bytes * 3 / 2 + scratch);
        (left / 8).max(RAW_SLICES_MIN * (self.shape.raw_words() + 1))
    }

    /// Most bytes that are held: the budget, or what a few slices need if that is more.
    fn bound_bytes(&self) -> usize {
        let scratch = self.shape.raw_words() * 8;
        let ring = RAW_SLICES_MIN * (self.shape.raw_words() + 1) * 8;
        let index = 2 * SliceIndex::default().bytes_grown();
        self.budget_bytes.max(ring + scratch + index)
    }

    /// The slice at host offset `offset`, if cached.
    #[inline]
    pub(crate) fn get(&self, offset: u64) -> Option<View<'_>> {
        let Some(slot) = self.index.get(offset) else {
            self.misses.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        self.hits.fetch_add(1, Ordering::Relaxed);
        if !slot.used.load(Ordering::Relaxed) {
            slot.used.store(true, Ordering::Relaxed);
        }
        Some(self.view(slot))
    }

    #[inline]
    fn view(&self, slot: &SliceSlot) -> View<'_> {
        let (start, end) = (slot.at as usize + 1, (slot.at + slot.len) as usize);
        View {
            shape: self.shape,
            form: slot.form,
            body: self.words.get(start..end).unwrap_or(&[]),
        }
    }

    /// Whether the slice is cached; no use of it.
    pub(crate) fn contains(&self, offset: u64) -> bool {
        self.index.get(offset).is_some()
    }

    /// Keeps the slice in the cache until `unpin`; false if it is not cached.
    pub(crate) fn pin(&self, offset: u64) -> bool {
        match self.index.get(offset) {
            Some(slot) => {
                slot.pins.fetch_add(1, Ordering::Relaxed);
                true
            }
            None => false,
        }
    }

    /// Takes one pin back.
    pub(crate) fn unpin(&self, offset: u64) {
        if let Some(slot) = self.index.get(offset) {
            let before = slot.pins.fetch_sub(1, Ordering::Relaxed);
            debug_assert!(before > 0, "a pin is taken back once");
        }
    }

    /// Puts a slice as read from disk into the cache; one that is there already wins. An `optional`
    /// slice is left out unless it is a few runs. Returns whether it is.
    pub(crate) fn insert(&mut self, offset: u64, bytes: &[u8], optional: bool) -> bool {
        if self.index.get(offset).is_some() {
            return false;
        }
        let raw = OnDisk(bytes);
        let plan = self.shape.plan(&raw);
        let few = plan.form == Form::Runs && plan.words * FEW <= self.shape.raw_words();
        if !optional || few {
            let len = plan.words + 1;
            self.reserve_index();
            let at = self.room(len);
            self.words[at] = offset;
            self.shape
                .pack(&plan, &raw, &mut self.words[at + 1..at + len]);
            let slot = SliceSlot {
                offset,
                at: at as u32,
                len: len as u32,
                pins: AtomicU32::new(0),
                used: AtomicBool::new(!optional),
                form: plan.form,
                tight: true,
                dirty: false,
                writing: false,
            };
            self.index.insert(slot);
            self.live += len;
        }
        few
    }

    /// Changes entry `index` of the slice at `offset`, which is dirty from now on; false if it is not
    /// cached.
    pub(crate) fn update(
        &mut self,
        offset: u64,
        index: usize,
        change: impl FnOnce(Entry) -> Entry,
    ) -> bool {
        let Some(slot) = self.index.get_mut(offset) else {
            return false;
        };
        let (start, end) = (slot.at as usize + 1, (slot.at + slot.len) as usize);
        let body = self.words.get_mut(start..end).unwrap_or_default();
        let entry = change(self.shape.get(slot.form, body, index));
        if !self.shape.set(slot.form, body, index, entry) {
            self.reshape(offset, index, entry);
        }
        let Some(slot) = self.index.get_mut(offset) else {
            return false;
        };
        slot.tight = false;
        if !slot.dirty {
            slot.dirty = true;
            self.dirty += 1;
            self.dirty_words += if slot.writing { 0 } else { slot.len as usize };
        }
        true
    }

    /// Changes an entry to something that the form of its slice cannot say: gives it another form.
    fn reshape(&mut self, offset: u64, index: usize, entry: Entry) {
        let Some(slot) = self.index.get(offset) else {
            return;
        };
        // Making room must not evict it.
        slot.pins.fetch_add(1, Ordering::Relaxed);
        self.get_scratch();
        self.unpack(offset);
        self.shape.set_raw(&mut self.scratch, index, entry);
        let plan = self.shape.plan_changing(&self.scratch[..]);
        let len = plan.words + 1;
        let at = self.room(len);
        self.words[at] = offset;
        // The scratch memory may have served others meanwhile.
        self.unpack(offset);
        self.shape.set_raw(&mut self.scratch, index, entry);
        let out = &mut self.words[at + 1..at + len];
        self.shape.pack(&plan, &self.scratch[..], out);
        let Some(slot) = self.index.get_mut(offset) else {
            debug_assert!(false, "a pinned slice stays");
            return;
        };
        *slot.pins.get_mut() -= 1;
        let (old, old_len) = (slot.at as usize, slot.len as usize);
        if slot.dirty || slot.writing {
            self.dirty_words = self.dirty_words + len - old_len;
        }
        (slot.at, slot.len, slot.form) = (at as u32, len as u32, plan.form);
        self.live = self.live + len - old_len;
        self.words[old] = void(old_len);
    }

    /// Gets the scratch memory, at the expense of the ring. Who only reads does without.
    fn get_scratch(&mut self) {
        if self.scratch.is_empty() {
            self.scratch.reserve_exact(self.shape.raw_words());
            self.scratch.resize(self.shape.raw_words(), 0);
            let nominal = self.nominal(self.index.bytes());
            if nominal < self.capacity {
                self.rebuild(nominal, nominal);
            }
        }
    }

    /// Writes the slice to the scratch memory.
    fn unpack(&mut self, offset: u64) {
        if let Some(slot) = self.index.get(offset) {
            let (start, end) = (slot.at as usize + 1, (slot.at + slot.len) as usize);
            let body = self.words.get(start..end).unwrap_or(&[]);
            self.shape.unpack(slot.form, body, &mut self.scratch);
        }
    }

    /// Forgets the slice, dirty or not.
    pub(crate) fn remove(&mut self, offset: u64) {
        if let Some(slot) = self.index.remove(offset) {
            self.dirty -= usize::from(slot.dirty);
            if slot.dirty || slot.writing {
                self.dirty_words -= slot.len as usize;
            }
            self.live -= slot.len as usize;
            self.words[slot.at as usize] = void(slot.len as usize);
        }
    }

    /// Number of dirty slices.
    pub(crate) fn dirty(&self) -> usize {
        self.dirty
    }

    /// Whether most of the memory is dirty, or the budget is exceeded.
    pub(crate) fn pressed(&self) -> bool {
        let over = self.capacity > self.nominal(self.index.bytes());
        self.dirty_words > self.capacity / 8 * 7 || (over && self.dirty > 0)
    }

    /// Adds the offsets of all dirty slices to `list`.
    pub(crate) fn list_dirty(&self, list: &mut Vec<u64>) {
        if self.dirty > 0 {
            let dirty = self.index.iter().filter(|slot| slot.dirty);
            list.extend(dirty.map(|slot| slot.offset));
        }
    }

    /// Calls `stage` with the slice, if it is dirty, as it is on disk. It is clean afterwards, but
    /// stays until [`Shard::written`].
    pub(crate) fn stage(&mut self, offset: u64, bytes: &mut [u8]) -> bool {
        self.get_scratch();
        let Some(slot) = self.index.get_mut(offset) else {
            return false;
        };
        if !slot.dirty {
            return false;
        }
        slot.dirty = false;
        slot.writing = true;
        self.dirty -= 1;
        let (start, end) = (slot.at as usize + 1, (slot.at + slot.len) as usize);
        let body = self.words.get(start..end).unwrap_or(&[]);
        if slot.form == Form::Raw {
            put_words(body, bytes);
        } else {
            self.shape.unpack(slot.form, body, &mut self.scratch);
            put_words(&self.scratch, bytes);
        }
        true
    }

    /// The staged slice is on disk as staged.
    pub(crate) fn written(&mut self, offset: u64) {
        if let Some(slot) = self.index.get_mut(offset)
            && slot.writing
        {
            slot.writing = false;
            if !slot.dirty {
                self.dirty_words -= slot.len as usize;
            }
        }
    }

    /// Goes back to the budget if it was exceeded.
    pub(crate) fn settle(&mut self) {
        let nominal = self.nominal(self.index.bytes());
        if self.capacity > nominal {
            self.rebuild(nominal, nominal);
        }
    }

    /// Evicts what was not used since the last call, and gives the memory back.
    pub(crate) fn clean(&mut self) {
        let mut at = 0;
        self.rebuild(usize::MAX, self.capacity);
        while at < self.used {
            let first = self.words[at];
            let Some(slot) = self.index.get_mut(first) else {
                break;
            };
            let len = slot.len as usize;
            if !slot.busy() && !std::mem::take(slot.used.get_mut()) {
                self.index.remove(first);
                self.words[at] = void(len);
                self.live -= len;
            }
            at += len;
        }
        self.index.shrink();
        self.scratch = Vec::new();
        let nominal = self.nominal(self.index.bytes());
        self.rebuild(nominal, nominal);
        self.words.truncate(self.tail);
        self.words.shrink_to_fit();
    }

    /// Adds how this part is doing.
    pub(crate) fn add_statistics(&self, sum: &mut CacheStatistics) {
        let held = (self.words.capacity() + self.scratch.capacity()) * 8;
        let slices = self.index.len() as u64;
        sum.hits += self.hits.load(Ordering::Relaxed);
        sum.misses += self.misses.load(Ordering::Relaxed);
        sum.budget_bytes += self.bound_bytes() as u64;
        sum.held_bytes += (held + self.index.bytes()) as u64;
        sum.covered_bytes += slices * self.shape.raw_words() as u64 * 8;
        sum.slices += slices;
        for slot in self.index.iter().filter(|slot| slot.form == Form::Runs) {
            sum.run_slices += 1;
            sum.runs += self.shape.runs_in(slot.len as usize - 1) as u64;
        }
    }

    /// Makes room for one more slot in the index, at the expense of the ring.
    fn reserve_index(&mut self) {
        if self.index.len() < self.index.capacity() {
            return;
        }
        let grown = self.index.bytes_grown();
        let nominal = self.nominal(grown);
        if grown * 4 > self.budget_bytes {
            // Memory is better spent on slices than on knowing where they are.
            self.rebuild(self.live - self.live / 8, self.capacity);
        }
        if self.index.len() < self.index.capacity() {
            return;
        }
        if nominal < self.capacity {
            self.rebuild(nominal, nominal);
        }
        self.index.grow();
    }

    /// Where `len` words can be written at the tail; they count as used.
    fn room(&mut self, len: usize) -> usize {
        // Every item may come by twice: once used, once not.
        let mut patience = 2 * self.used;
        // With a little space void, what has to be moved for a new slice is a few times its length.
        let most = self.capacity - self.capacity / 8;
        loop {
            if self.used == 0 {
                (self.head, self.tail) = (0, 0);
            }
            let wrapped = self.tail < self.head || (self.used > 0 && self.tail == self.head);
            let end = if wrapped { self.head } else { self.capacity };
            if end - self.tail >= len {
                let at = self.tail;
                self.tail += len;
                self.used += len;
                self.extend(self.tail);
                return at;
            }
            if wrapped && patience == 0 {
                // Everything is dirty or pinned.
                let enough = self.used + len + self.capacity / 8;
                self.rebuild(enough, enough);
            } else if wrapped {
                let before = self.head;
                self.pass_head(self.live + len > most);
                patience = patience.saturating_sub(self.head - before);
            } else {
                let rest = self.capacity - self.tail;
                if rest > 0 {
                    self.extend(self.capacity);
                    self.words[self.tail] = void(rest);
                    self.used += rest;
                }
                self.tail = 0;
            }
            if self.head == self.capacity {
                self.head = 0;
            }
        }
    }

    /// Moves the oldest item to the tail, or evicts it if space is short. The tail is before the head.
    fn pass_head(&mut self, short: bool) {
        let first = self.words[self.head];
        if first & VOID != 0 {
            let len = (first >> VOID_SHIFT) as usize;
            self.head += len;
            self.used -= len;
            return;
        }
        let Some(slot) = self.index.get_mut(first) else {
            debug_assert!(false, "every slice of the ring is in the index");
            self.head += 1;
            self.used -= 1;
            return;
        };
        let len = slot.len as usize;
        let short = short && !slot.busy();
        if short && !std::mem::take(slot.used.get_mut()) {
            self.index.remove(first);
            self.live -= len;
            self.head += len;
            self.used -= len;
            return;
        }
        let gap = self.head - self.tail;
        let mut moved = len;
        if short && !slot.tight && !self.scratch.is_empty() {
            slot.tight = true;
            let (free, rest) = self.words.split_at_mut(self.head);
            self.shape
                .unpack(slot.form, &rest[1..len], &mut self.scratch);
            let plan = self.shape.plan(&self.scratch[..]);
            // A little less is not worth being reshaped at the next change.
            if plan.words < len / 4 * 3 && plan.words < gap {
                let out = &mut free[self.tail + 1..self.tail + 1 + plan.words];
                self.shape.pack(&plan, &self.scratch[..], out);
                free[self.tail] = first;
                slot.form = plan.form;
                moved = plan.words + 1;
            }
        }
        if moved == len && gap > 0 {
            self.words
                .copy_within(self.head..self.head + len, self.tail);
        }
        slot.at = self.tail as u32;
        slot.len = moved as u32;
        self.head += len;
        self.tail += moved;
        self.used -= len - moved;
        self.live -= len - moved;
    }

    /// Gives the ring memory up to word `end`.
    fn extend(&mut self, end: usize) {
        if end > self.words.len() {
            let step = STEP_WORDS.max(self.words.len() / 4);
            let len = (self.words.len() + step).clamp(end, self.capacity.max(end));
            self.words.reserve_exact(len - self.words.len());
            self.words.resize(len, 0);
        }
    }

    /// Moves all items to the start of the ring, evicts the oldest until `live` words are left, and
    /// gives the ring `capacity` words, or as many as slices need that cannot be evicted.
    fn rebuild(&mut self, live: usize, capacity: usize) {
        self.words.rotate_left(self.head);
        let mut excess = self.live.saturating_sub(live);
        let (mut from, mut to) = (0, 0);
        while from < self.used {
            let first = self.words[from];
            let len = match self.index.get_mut(first) {
                _ if first & VOID != 0 => {
                    from += (first >> VOID_SHIFT) as usize;
                    continue;
                }
                None => {
                    debug_assert!(false, "every slice of the ring is in the index");
                    break;
                }
                Some(slot) => {
                    let len = slot.len as usize;
                    if excess > 0 && !slot.busy() {
                        excess = excess.saturating_sub(len);
                        self.index.remove(first);
                        from += len;
                        continue;
                    }
                    slot.at = to as u32;
                    len
                }
            };
            self.words.copy_within(from..from + len, to);
            from += len;
            to += len;
        }
        (self.head, self.tail, self.used, self.live) = (0, to, to, to);
        self.capacity = capacity.max(to);
        if self.words.len() > self.capacity {
            self.words.truncate(self.capacity);
            self.words.shrink_to_fit();
        }
    }
}

fn void(len: usize) -> u64 {
    VOID | (len as u64) << VOID_SHIFT
}

/// Writes words as they are on disk.
fn put_words(words: &[u64], bytes: &mut [u8]) {
    for (word, out) in words.iter().zip(bytes.chunks_exact_mut(8)) {
        out.copy_from_slice(&word.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::super::packed::Words;
    use super::*;

    const SHAPE: Shape = Shape {
        entries: 64,
        extended: false,
        cluster_bits: 16,
    };
    const SLICE_BYTES: usize = 512;
    const COPIED: u64 = 1 << 63;

    /// The slice with this number, as on disk: scattered clusters that do not pack.
    fn scattered(number: u64) -> Vec<u8> {
        let entry = |index: u64| match index % 2 {
            0 => COPIED | (number + index * 77) << 16,
            _ => (number + index * 131) << 16,
        };
        (0..64)
            .flat_map(|index| entry(index).to_be_bytes())
            .collect()
    }

    /// The slice with this number, as on disk: one run.
    fn run(number: u64) -> Vec<u8> {
        let entry = |index: u64| COPIED | (number * 64 + index) << 16;
        (0..64)
            .flat_map(|index| entry(index).to_be_bytes())
            .collect()
    }

    fn offset(number: u64) -> u64 {
        number * SLICE_BYTES as u64
    }

    fn word_of(bytes: &[u8], index: usize) -> u64 {
        OnDisk(bytes).word(index)
    }

    fn held(shard: &Shard) -> CacheStatistics {
        let mut sum = CacheStatistics::default();
        shard.add_statistics(&mut sum);
        sum
    }

    #[test]
    fn memory_stays_within_the_budget() {
        for budget in [8 << 10, 20 << 10, 100 << 10] {
            let mut shard = Shard::new(SHAPE, budget);
            for round in 0..3 {
                for number in 0..3000 {
                    let bytes = match (number / 100 + round) % 3 {
                        0 => scattered(number),
                        _ => run(number),
                    };
                    shard.insert(offset(number), &bytes, false);
                    let view = shard.get(offset(number)).expect("just inserted");
                    for index in 0..64 {
                        assert_eq!(view.get(index).0, word_of(&bytes, index));
                    }
                    let sum = held(&shard);
                    assert!(
                        sum.held_bytes <= budget as u64,
                        "{} of {budget} after {number}",
                        sum.held_bytes
                    );
                }
            }
        }
    }

    #[test]
    fn runs_cover_many_times_the_budget() {
        let shape = Shape {
            entries: 512,
            ..SHAPE
        };
        let mut shard = Shard::new(shape, 128 << 10);
        for number in 0..2000 {
            let entry = |index: u64| COPIED | (number * 512 + index) << 16;
            let bytes: Vec<u8> = (0..512)
                .flat_map(|index| entry(index).to_be_bytes())
                .collect();
            shard.insert(number << 12, &bytes, false);
        }
        let sum = held(&shard);
        assert_eq!((sum.run_slices, sum.runs), (sum.slices, sum.slices));
        assert!(sum.covered_bytes > 20 * sum.budget_bytes, "{sum:?}");
        assert!(sum.held_bytes <= sum.budget_bytes);
    }

    #[test]
    fn dirty_slices_are_not_evicted() {
        let mut shard = Shard::new(SHAPE, 16 << 10);
        for number in 0..4 {
            shard.insert(offset(number), &scattered(number), false);
        }
        assert!(shard.update(offset(0), 5, |_| (COPIED | 9 << 16, 0)));
        assert!(shard.update(offset(1), 6, |_| (COPIED | 8 << 16, 0)));
        let mut bytes = [0; SLICE_BYTES];
        assert!(shard.stage(offset(1), &mut bytes));
        assert_eq!(word_of(&bytes, 6), COPIED | 8 << 16);
        assert!(!shard.stage(offset(2), &mut bytes), "it is clean");
        assert!(shard.pin(offset(2)));
        for number in 100..400 {
            shard.insert(offset(number), &scattered(number), false);
        }
        assert!(shard.contains(offset(0)) && shard.contains(offset(1)));
        assert!(shard.contains(offset(2)));
        assert!(!shard.contains(offset(3)));
        assert_eq!(
            shard.get(offset(0)).map(|view| view.get(5).0),
            Some(COPIED | 9 << 16)
        );
        shard.written(offset(1));
        shard.unpin(offset(2));
        for number in 400..700 {
            shard.insert(offset(number), &scattered(number), false);
        }
        assert!(shard.contains(offset(0)));
        assert!(!shard.contains(offset(1)) && !shard.contains(offset(2)));
    }

    #[test]
    fn dirty_slices_beyond_the_budget_are_kept_and_request_a_pass() {
        let budget = 8 << 10;
        let mut shard = Shard::new(SHAPE, budget);
        for number in 0..50 {
            shard.insert(offset(number), &scattered(number), false);
            assert!(shard.update(offset(number), 1, |_| (number << 20, 0)));
        }
        assert!(shard.pressed());
        assert!(held(&shard).held_bytes > budget as u64);
        let mut list = Vec::new();
        shard.list_dirty(&mut list);
        assert_eq!(list.len(), 50);
        for slice in list {
            let mut bytes = [0; SLICE_BYTES];
            assert!(shard.stage(slice, &mut bytes));
            assert_eq!(word_of(&bytes, 1), (slice / 512) << 20);
            shard.written(slice);
        }
        shard.settle();
        assert!(!shard.pressed());
        assert!(held(&shard).held_bytes <= budget as u64);
    }

    #[test]
    fn a_slice_is_changed_in_any_form() {
        let mut shard = Shard::new(SHAPE, 64 << 10);
        shard.insert(0, &[0; SLICE_BYTES], false);
        let mut expected = [0; 64];
        for step in 0..2000_u64 {
            let index = (step * 37 % 64) as usize;
            let entry = match step % 900 {
                0..500 => COPIED | (step + 3) << 16,
                500..600 => 0,
                600..800 => 1 << 62 | step,
                _ => (step << 16) | (step % 2),
            };
            assert!(shard.update(0, index, |old| {
                assert_eq!(old.0, expected[index]);
                (entry, 0)
            }));
            expected[index] = entry;
        }
        shard.remove(0);
        assert_eq!(shard.dirty(), 0);
        assert!(!shard.pressed() && !shard.contains(0));
    }

    #[test]
    fn cleaning_gives_back_what_was_not_used() {
        let mut shard = Shard::new(SHAPE, 256 << 10);
        for number in 0..200 {
            shard.insert(offset(number), &scattered(number), false);
        }
        shard.clean();
        assert!(shard.get(offset(7)).is_some(), "everything was new");
        let before = held(&shard).held_bytes;
        shard.clean();
        let sum = held(&shard);
        assert_eq!(sum.slices, 1);
        assert!(
            sum.held_bytes * 10 < before,
            "{} of {before}",
            sum.held_bytes
        );
        assert_eq!(
            shard.get(offset(7)).map(|view| view.get(3).0),
            Some(word_of(&scattered(7), 3))
        );
    }
}
