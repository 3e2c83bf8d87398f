//! Compact encodings of L2 slices.
//!
//! Most slices say little: clusters written one after another are one run, and clusters written at
//! random differ in a few bits of their offset. A slice is kept in the smallest of three forms, each
//! of which gives back every entry bit by bit, also entries that make no sense:
//!
//! * *raw*: the entries, one word each, or two if they are extended;
//! * *runs*: one item for each run of entries that are equal, or whose clusters follow each other;
//! * *packed*: the number of each entry's cluster, less the smallest, in as few bits as the largest
//!   needs, if all clusters have the same flags. Two numbers stand for "unallocated" and "zeros".
//!   Extended entries have their bitmaps beside it: one word if all are equal.
//!
//! Units: an index counts entries of the slice; words have 64 bits in the processor's order.

use gaur_format::l1::OFFSET_MASK;
use gaur_format::l2::{COMPRESSED, ZERO};

/// What all slices of a cache have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Entries of a slice.
    pub(crate) entries: usize,
    /// Entries have a bitmap.
    pub(crate) extended: bool,
    /// Cluster size as a power of two.
    pub(crate) cluster_bits: u32,
}

/// How a slice is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Form {
    /// As it is on disk.
    #[default]
    Raw,
    /// Runs of entries.
    Runs,
    /// Cluster numbers of few bits.
    Packed,
}

/// An entry: its first word, and its bitmap (0 if entries are not extended).
pub(crate) type Entry = (u64, u64);

/// In the first word of a run: clusters follow each other.
const STEP: u64 = 1 << 63;
/// In the first word of a packed slice: one bitmap for all.
const UNIFORM: u64 = 1 << 63;
const WIDTH_SHIFT: u32 = 56;
const BASE_MASK: u64 = (1 << WIDTH_SHIFT) - 1;
/// Words of a packed slice before the numbers.
const PACKED_WORDS: usize = 2;
/// Bits that numbers have to spare in a slice that is being changed.
const HEADROOM_BITS: u32 = 2;
/// Entries below this are without a cluster, and a packed slice has numbers for them, counted down
/// from the largest: unallocated, and zeros.
const SPECIAL: u64 = ZERO + 1;

/// The words of a slice in raw form, in memory or as on disk.
pub(crate) trait Words {
    /// Word `at`, which is less than the number of words of the slice.
    fn word(&self, at: usize) -> u64;
}

impl Words for [u64] {
    #[inline]
    fn word(&self, at: usize) -> u64 {
        word(self, at)
    }
}

/// A slice as it is on disk.
pub(crate) struct OnDisk<'a>(pub(crate) &'a [u8]);

impl Words for OnDisk<'_> {
    #[inline]
    fn word(&self, at: usize) -> u64 {
        let bytes = self.0.get(at * 8..at * 8 + 8);
        let bytes = bytes.and_then(|bytes| bytes.first_chunk::<8>());
        bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }
}

/// What packing a slice would need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    pub(crate) form: Form,
    pub(crate) words: usize,
    base: u64,
    flags: u64,
    width: u32,
    uniform: bool,
}

impl Shape {
    /// Words of an entry in raw form.
    fn entry_words(&self) -> usize {
        if self.extended { 2 } else { 1 }
    }

    /// Words of a slice in raw form.
    pub(crate) fn raw_words(&self) -> usize {
        self.entries * self.entry_words()
    }

    /// Words of a run.
    fn run_words(&self) -> usize {
        1 + self.entry_words()
    }

    /// Number of runs in `words` words of them.
    pub(crate) fn runs_in(&self, words: usize) -> usize {
        words / self.run_words()
    }

    /// Entry `index` of a slice kept in `body`; zeros beyond its end.
    #[inline]
    pub(crate) fn get(&self, form: Form, body: &[u64], index: usize) -> Entry {
        match form {
            Form::Raw => self.get_raw(body, index),
            Form::Runs => self.get_run(body, index),
            Form::Packed => self.get_packed(body, index),
        }
    }

    #[inline]
    fn get_raw(&self, body: &(impl Words + ?Sized), index: usize) -> Entry {
        if self.extended {
            (body.word(2 * index), body.word(2 * index + 1))
        } else {
            (body.word(index), 0)
        }
    }

    /// Up to which entry a slice kept in `body` is known to go on as entry `index`: with clusters that follow each
    /// other (`true`), or with equal entries.
    pub(crate) fn run(&self, form: Form, body: &[u64], index: usize) -> (usize, bool) {
        if form != Form::Runs {
            return (index + 1, false);
        }
        let at = self.run_place(body, index);
        let next = body.get(at + self.run_words());
        let end = next.map_or(self.entries, |next| (next & !STEP) as usize);
        (end, word(body, at) & STEP != 0)
    }

    /// Where the item is that has entry `index`.
    #[inline]
    fn run_place(&self, body: &[u64], index: usize) -> usize {
        let words = self.run_words();
        let (mut low, mut high) = (0, body.len() / words);
        // The last run that starts at or before the index.
        while high - low > 1 {
            let middle = low.midpoint(high);
            if word(body, middle * words) & !STEP <= index as u64 {
                low = middle;
            } else {
                high = middle;
            }
        }
        low * words
    }

    #[inline]
    fn get_run(&self, body: &[u64], index: usize) -> Entry {
        let at = self.run_place(body, index);
        let start = word(body, at);
        let steps = if start & STEP != 0 {
            (index as u64).wrapping_sub(start & !STEP)
        } else {
            0
        };
        let first = word(body, at + 1).wrapping_add(steps << self.cluster_bits);
        let bitmap = if self.extended { word(body, at + 2) } else { 0 };
        (first, bitmap)
    }

    #[inline]
    fn get_packed(&self, body: &[u64], index: usize) -> Entry {
        let head = word(body, 0);
        let width = (head & !UNIFORM) >> WIDTH_SHIFT;
        let numbers = (self.entries * width as usize).div_ceil(64);
        let bit = index * width as usize;
        let (at, shift) = (PACKED_WORDS + bit / 64, (bit % 64) as u32);
        let mut number = word(body, at) >> shift;
        if shift as u64 + width > 64 {
            number |= word(body, at + 1) << (64 - shift);
        }
        let mask = ones(width as u32);
        number &= mask;
        let first = if mask - number < SPECIAL {
            mask - number
        } else {
            ((head & BASE_MASK) + number) << self.cluster_bits | word(body, 1)
        };
        let bitmap = match (self.extended, head & UNIFORM != 0) {
            (false, _) => 0,
            (true, true) => word(body, PACKED_WORDS + numbers),
            (true, false) => word(body, PACKED_WORDS + numbers + index),
        };
        (first, bitmap)
    }

    /// Changes entry `index` of a slice in raw form.
    pub(crate) fn set_raw(&self, body: &mut [u64], index: usize, entry: Entry) {
        let at = index * self.entry_words();
        if let Some(word) = body.get_mut(at) {
            *word = entry.0;
        }
        if self.extended
            && let Some(word) = body.get_mut(at + 1)
        {
            *word = entry.1;
        }
    }

    /// Changes entry `index` of a slice kept in `body` where it is; false if the form cannot say it.
    pub(crate) fn set(&self, form: Form, body: &mut [u64], index: usize, entry: Entry) -> bool {
        match form {
            Form::Raw => {
                self.set_raw(body, index, entry);
                true
            }
            Form::Runs => false,
            Form::Packed => self.set_packed(body, index, entry),
        }
    }

    fn set_packed(&self, body: &mut [u64], index: usize, (first, bitmap): Entry) -> bool {
        let head = word(body, 0);
        let width = ((head & !UNIFORM) >> WIDTH_SHIFT) as u32;
        let numbers = (self.entries * width as usize).div_ceil(64);
        let uniform = head & UNIFORM != 0;
        if self.extended && uniform && word(body, PACKED_WORDS + numbers) != bitmap {
            return false;
        }
        let number = match special(first, width) {
            Some(number) => number,
            None => {
                let offset = first & OFFSET_MASK;
                let number = (offset >> self.cluster_bits).wrapping_sub(head & BASE_MASK);
                let same = first & !OFFSET_MASK == word(body, 1) && first & COMPRESSED == 0;
                let aligned = offset & ((1 << self.cluster_bits) - 1) == 0;
                if !same || !aligned || number > ones(width) - SPECIAL {
                    return false;
                }
                number
            }
        };
        put_bits(body, index, width, number);
        if self.extended && !uniform {
            let at = PACKED_WORDS + numbers + index;
            if let Some(out) = body.get_mut(at) {
                *out = bitmap;
            }
        }
        true
    }

    /// Writes a slice kept in `body` to `raw` in raw form.
    pub(crate) fn unpack(&self, form: Form, body: &[u64], raw: &mut [u64]) {
        match form {
            Form::Raw => raw.copy_from_slice(&body[..raw.len()]),
            Form::Runs => self.unpack_runs(body, raw),
            Form::Packed => self.unpack_numbers(body, raw),
        }
    }

    fn unpack_runs(&self, body: &[u64], raw: &mut [u64]) {
        let words = self.run_words();
        for (number, run) in body.chunks_exact(words).enumerate() {
            let start = (run[0] & !STEP) as usize;
            let next = body.get((number + 1) * words);
            let end = next.map_or(self.entries, |next| (next & !STEP) as usize);
            let step = if run[0] & STEP != 0 {
                1 << self.cluster_bits
            } else {
                0
            };
            let mut first = run[1];
            for index in start..end {
                self.set_raw(raw, index, (first, run.get(2).copied().unwrap_or(0)));
                first = first.wrapping_add(step);
            }
        }
    }

    fn unpack_numbers(&self, body: &[u64], raw: &mut [u64]) {
        let (head, flags) = (word(body, 0), word(body, 1));
        let width = ((head & !UNIFORM) >> WIDTH_SHIFT) as u32;
        let (base, mask) = (head & BASE_MASK, ones(width));
        let bitmaps = PACKED_WORDS + (self.entries * width as usize).div_ceil(64);
        let stride = usize::from(head & UNIFORM == 0);
        let mut bit = 0;
        for (index, entry) in raw.chunks_exact_mut(self.entry_words()).enumerate() {
            let (at, shift) = (PACKED_WORDS + bit / 64, (bit % 64) as u32);
            let mut number = word(body, at) >> shift;
            if shift + width > u64::BITS {
                number |= word(body, at + 1) << (u64::BITS - shift);
            }
            number &= mask;
            entry[0] = if mask - number < SPECIAL {
                mask - number
            } else {
                (base + number) << self.cluster_bits | flags
            };
            if let Some(bitmap) = entry.get_mut(1) {
                *bitmap = word(body, bitmaps + index * stride);
            }
            bit += width as usize;
        }
    }

    /// The smallest form of a slice given in raw form.
    pub(crate) fn plan(&self, raw: &(impl Words + ?Sized)) -> Packing {
        let none = self.unpacked();
        let packed = self.plan_packed(raw, 0).unwrap_or(none);
        let most = packed.words.min(none.words - 1);
        let runs = self.count_runs(raw, most / self.run_words()) * self.run_words();
        if runs <= most {
            let form = Form::Runs;
            return Packing {
                form,
                words: runs,
                ..none
            };
        }
        if packed.words < none.words {
            packed
        } else {
            none
        }
    }

    /// A form of a slice given in raw form in which its entries can be changed: to clusters with the
    /// same flags and numbers up to about four times as large, or to anything.
    pub(crate) fn plan_changing(&self, raw: &[u64]) -> Packing {
        let words = self.raw_words();
        if let Some(mut plan) = self.plan_packed(raw, HEADROOM_BITS) {
            if self.extended && plan.uniform {
                plan.uniform = false;
                plan.words += self.entries - 1;
            }
            if plan.words <= words / 4 * 3 {
                return plan;
            }
        }
        self.unpacked()
    }

    /// A slice in raw form.
    fn unpacked(&self) -> Packing {
        Packing {
            form: Form::Raw,
            words: self.raw_words(),
            base: 0,
            flags: 0,
            width: 0,
            uniform: false,
        }
    }

    /// Number of runs, or any larger number than `most` if there are more.
    fn count_runs(&self, raw: &(impl Words + ?Sized), most: usize) -> usize {
        let mut runs = 0;
        self.each_run(raw, |_, _, _| {
            runs += 1;
            runs <= most
        });
        runs
    }

    /// Calls `visit` with the first index of every run, whether it steps, and its first entry, until
    /// that returns `false`.
    fn each_run(
        &self,
        raw: &(impl Words + ?Sized),
        mut visit: impl FnMut(usize, bool, Entry) -> bool,
    ) {
        let mut start = 0;
        while start < self.entries {
            let first = self.get_raw(raw, start);
            let mut len = 1;
            let mut steps = None;
            while start + len < self.entries {
                let next = self.get_raw(raw, start + len);
                let follows = has_cluster(first.0)
                    && next
                        == (
                            first.0.wrapping_add((len as u64) << self.cluster_bits),
                            first.1,
                        );
                let same = next == first;
                let step = match (steps, follows, same) {
                    (None | Some(true), true, _) => true,
                    (None | Some(false), _, true) => false,
                    _ => break,
                };
                steps = Some(step);
                len += 1;
            }
            if !visit(start, steps == Some(true), first) {
                return;
            }
            start += len;
        }
    }

    fn plan_packed(&self, raw: &(impl Words + ?Sized), headroom: u32) -> Option<Packing> {
        let firsts = || (0..self.entries).map(|index| self.get_raw(raw, index).0);
        let flags = firsts().find(|first| *first >= SPECIAL);
        let flags = flags.map_or(0, |first| first & !OFFSET_MASK);
        // Bits in which a cluster's entry may differ from another's.
        let number_bits = OFFSET_MASK & !((1 << self.cluster_bits) - 1);
        let (mut low, mut high, mut odd) = (u64::MAX, 0, flags & COMPRESSED);
        for first in firsts() {
            if first >= SPECIAL {
                odd |= (first ^ flags) & !number_bits;
                let number = first & number_bits;
                (low, high) = (low.min(number), high.max(number));
            }
        }
        if odd != 0 {
            return None;
        }
        let bitmap = self.get_raw(raw, 0).1;
        let uniform =
            !self.extended || (0..self.entries).all(|index| self.get_raw(raw, index).1 == bitmap);
        let (low, high) = (low >> self.cluster_bits, high >> self.cluster_bits);
        // A slice that will be changed may get any cluster.
        let base = if headroom > 0 { 0 } else { low.min(high) };
        // Numbers up to `high - base`, and above them the special ones.
        let largest = high - base + SPECIAL;
        let width = u64::BITS - largest.leading_zeros() + headroom;
        let bitmaps = match (self.extended, uniform) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => self.entries,
        };
        let numbers = (self.entries * width as usize).div_ceil(64);
        Some(Packing {
            form: Form::Packed,
            words: PACKED_WORDS + numbers + bitmaps,
            base,
            flags,
            width,
            uniform,
        })
    }

    /// Writes a slice given in raw form to `body` as planned; `body` is as long as the plan says.
    pub(crate) fn pack(&self, plan: &Packing, raw: &(impl Words + ?Sized), body: &mut [u64]) {
        match plan.form {
            Form::Raw => {
                for (at, out) in body.iter_mut().enumerate() {
                    *out = raw.word(at);
                }
            }
            Form::Runs => self.pack_runs(raw, body),
            Form::Packed => self.pack_numbers(plan, raw, body),
        }
    }

    fn pack_runs(&self, raw: &(impl Words + ?Sized), body: &mut [u64]) {
        let mut items = body.chunks_exact_mut(self.run_words());
        self.each_run(raw, |start, steps, (first, bitmap)| {
            let Some(item) = items.next() else {
                return false;
            };
            item[0] = start as u64 | if steps { STEP } else { 0 };
            item[1] = first;
            if let Some(out) = item.get_mut(2) {
                *out = bitmap;
            }
            true
        });
    }

    fn pack_numbers(&self, plan: &Packing, raw: &(impl Words + ?Sized), body: &mut [u64]) {
        let width = plan.width as usize;
        let uniform = if plan.uniform { UNIFORM } else { 0 };
        body[0] = plan.base | (width as u64) << WIDTH_SHIFT | uniform;
        body[1] = plan.flags;
        let (numbers, bitmaps) =
            body[PACKED_WORDS..].split_at_mut((self.entries * width).div_ceil(64));
        let mut out = numbers.iter_mut();
        let (mut word, mut bits) = (0, 0);
        for index in 0..self.entries {
            let (first, _) = self.get_raw(raw, index);
            let number = match special(first, plan.width) {
                Some(number) => number,
                None => ((first & OFFSET_MASK) >> self.cluster_bits) - plan.base,
            };
            word |= number << bits;
            bits += plan.width;
            if bits >= u64::BITS {
                if let Some(out) = out.next() {
                    *out = word;
                }
                bits -= u64::BITS;
                word = number.checked_shr(plan.width - bits).unwrap_or(0);
            }
        }
        if let Some(out) = out.next() {
            *out = word;
        }
        for (index, out) in bitmaps.iter_mut().enumerate() {
            *out = self.get_raw(raw, index).1;
        }
    }
}

/// The number that stands for an entry without a cluster.
fn special(first: u64, width: u32) -> Option<u64> {
    (first < SPECIAL).then(|| ones(width) - first)
}

/// Writes number `index` of a packed slice.
fn put_bits(body: &mut [u64], index: usize, width: u32, number: u64) {
    let bit = index * width as usize;
    let (at, shift) = (PACKED_WORDS + bit / 64, (bit % 64) as u32);
    body[at] = body[at] & !(ones(width) << shift) | number << shift;
    if shift + width > u64::BITS {
        let low = u64::BITS - shift;
        body[at + 1] = body[at + 1] & !(ones(width) >> low) | number >> low;
    }
}

/// Whether an entry is a plain cluster with a place in the file.
fn has_cluster(first: u64) -> bool {
    first & COMPRESSED == 0 && first & OFFSET_MASK != 0
}

fn ones(width: u32) -> u64 {
    u64::MAX >> (u64::BITS - width)
}

#[inline]
fn word(words: &[u64], at: usize) -> u64 {
    words.get(at).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPIED: u64 = 1 << 63;
    const STANDARD: Shape = Shape {
        entries: 512,
        extended: false,
        cluster_bits: 16,
    };
    const EXTENDED: Shape = Shape {
        entries: 256,
        extended: true,
        cluster_bits: 17,
    };

    /// Packs, compares every entry, and says in which form and how many words.
    fn round_trip(shape: Shape, entry: impl Fn(usize) -> Entry) -> (Form, usize) {
        let mut raw = vec![0; shape.raw_words()];
        for index in 0..shape.entries {
            shape.set_raw(&mut raw, index, entry(index));
        }
        let plan = shape.plan(&raw[..]);
        let mut body = vec![0xdead_beef; plan.words];
        shape.pack(&plan, &raw[..], &mut body);
        for index in 0..shape.entries {
            assert_eq!(
                shape.get(plan.form, &body, index),
                entry(index),
                "entry {index} of {:?}",
                plan.form
            );
            let (end, steps) = shape.run(plan.form, &body, index);
            assert!(index < end && end <= shape.entries);
            for later in index..end {
                let (first, bitmap) = entry(index);
                let step = u64::from(steps) * (later - index) as u64;
                assert_eq!(entry(later), (first + (step << shape.cluster_bits), bitmap));
            }
        }
        let mut unpacked = vec![1; shape.raw_words()];
        shape.unpack(plan.form, &body, &mut unpacked);
        assert_eq!(unpacked, raw);
        (plan.form, plan.words)
    }

    /// A number that looks random, the same for the same index.
    fn scattered(index: usize) -> u64 {
        (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    #[test]
    fn contiguous_clusters_pack_to_one_run() {
        let entry = |index: usize| (COPIED | (index as u64 + 7) << 16, 0);
        assert_eq!(round_trip(STANDARD, entry), (Form::Runs, 2));
        let entry = |index: usize| (COPIED | (index as u64 + 7) << 17, 0xffff_ffff);
        assert_eq!(round_trip(EXTENDED, entry), (Form::Runs, 3));
        assert_eq!(round_trip(STANDARD, |_| (0, 0)), (Form::Runs, 2));
    }

    #[test]
    fn a_run_ends_where_the_next_entry_differs() {
        let entry = |index: usize| match index {
            0..100 => (COPIED | (index as u64 + 7) << 16, 0),
            100..200 => (0, 0),
            200..300 => (ZERO, 0),
            300..400 => (COPIED | (index as u64) << 16, 0),
            _ => ((index as u64) << 16, 0),
        };
        assert_eq!(round_trip(STANDARD, entry), (Form::Runs, 10));
    }

    #[test]
    fn scattered_clusters_take_the_bits_of_their_offsets() {
        let entry = |index: usize| (COPIED | (100 + scattered(index) % 65_000) << 16, 0);
        let (form, words) = round_trip(STANDARD, entry);
        assert_eq!((form, words), (Form::Packed, 2 + 512 * 16 / 64));
        let holes = |index: usize| match index % 3 {
            0 => (0, 0),
            1 => (ZERO, 0),
            _ => entry(index),
        };
        assert_eq!(round_trip(STANDARD, holes).0, Form::Packed);
        let uniform = |index: usize| (COPIED | (scattered(index) % 1000) << 17, 0xffff_ffff);
        assert_eq!(round_trip(EXTENDED, uniform), (Form::Packed, 2 + 40 + 1));
        let bitmaps = |index: usize| (uniform(index).0, scattered(index));
        assert_eq!(round_trip(EXTENDED, bitmaps), (Form::Packed, 2 + 40 + 256));
    }

    #[test]
    fn packing_round_trips_at_every_width() {
        for bits in 0..39 {
            let entry = |index: usize| (COPIED | (scattered(index) & ((1 << bits) - 1)) << 16, 0);
            round_trip(STANDARD, entry);
        }
    }

    #[test]
    fn a_packed_slice_takes_what_fits_its_numbers() {
        for shape in [STANDARD, EXTENDED] {
            let bits = shape.cluster_bits;
            let mut raw = vec![0; shape.raw_words()];
            for index in (0..shape.entries).step_by(3) {
                let cluster = 1000 + scattered(index) % 1000;
                shape.set_raw(&mut raw, index, (COPIED | cluster << bits, 0));
            }
            let plan = shape.plan_changing(&raw);
            assert_eq!(plan.form, Form::Packed);
            let mut body = vec![0; plan.words];
            shape.pack(&plan, &raw[..], &mut body);
            for step in 0..5000 {
                let index = scattered(step) as usize % shape.entries;
                let entry = match scattered(step + 7) % 8 {
                    0 => (0, 0),
                    1 => (ZERO, 0),
                    2 => (COPIED | 1 << 50, 0),
                    3 => ((scattered(step) % 1000) << bits, 0),
                    4 => (COMPRESSED | 77, 0),
                    5 => (COPIED | 512, 0),
                    _ => (COPIED | (scattered(step) % 8000) << bits, 0),
                };
                let bitmap = if shape.extended { scattered(step) } else { 0 };
                let entry = (entry.0, bitmap);
                if shape.set(plan.form, &mut body, index, entry) {
                    shape.set_raw(&mut raw, index, entry);
                }
                let number = entry.0 & OFFSET_MASK;
                let simple = entry.0 == 0 || entry.0 >> 62 == 2 && number.is_multiple_of(1 << bits);
                let fits = simple && number >> bits < 8000;
                assert_eq!(
                    shape.get(plan.form, &body, index) == entry,
                    fits || { shape.get_raw(&raw[..], index) == entry }
                );
            }
            let mut unpacked = vec![1; shape.raw_words()];
            shape.unpack(plan.form, &body, &mut unpacked);
            assert_eq!(unpacked, raw);
        }
    }

    #[test]
    fn packing_round_trips_invalid_entries() {
        let compressed = |index: usize| (COMPRESSED | scattered(index) >> 2, 0);
        assert_eq!(round_trip(STANDARD, compressed).0, Form::Raw);
        assert_eq!(
            round_trip(STANDARD, |index| (scattered(index), 0)).0,
            Form::Raw
        );
        let garbage = |index: usize| (scattered(index), scattered(index + 1));
        assert_eq!(round_trip(EXTENDED, garbage).0, Form::Raw);
        let wraps = |index: usize| (OFFSET_MASK & !0xffff | index as u64 & 1, 0);
        round_trip(STANDARD, wraps);
        let flags = |index: usize| (((index as u64) & 1) << 63 | (scattered(index) % 9) << 16, 0);
        round_trip(STANDARD, flags);
    }

    #[test]
    fn packing_round_trips_random_slices() {
        for seed in 0..200 {
            let entry = |index: usize| match scattered(index / (seed % 17 + 1) + seed) % 5 {
                0 => (0, 0),
                1 => (ZERO, scattered(seed)),
                2 => (COPIED | (index as u64) << 17, u64::from(u32::MAX)),
                3 => (COPIED | (scattered(index) % 1000) << 17, 3),
                _ => (scattered(index), scattered(index + seed)),
            };
            round_trip(EXTENDED, entry);
            round_trip(STANDARD, |index| (entry(index).0, 0));
        }
    }
}
