//! A count for each cluster, in little memory and by runs.
//!
//! Most neighbours have the same count, so a page of 4096 counts is one number while they all do. Else it
//! has a bit for each, and is widened when a count does not fit. A page that gets whole becomes one number
//! again.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::Range;

use crate::refcount;

/// Counts of a page, as a power of two.
const PAGE_BITS: u32 = 12;
/// Counts of a page.
pub(super) const PAGE: u64 = 1 << PAGE_BITS;
/// Bytes of a page of bits.
const BIT_BYTES: usize = (PAGE / 8) as usize;
/// Memory of a page without cells, and of cells without their bytes.
const PAGE_MEMORY: u64 = size_of::<Page>() as u64;
const CELLS_MEMORY: u64 = size_of::<Cells>() as u64;

/// Widths a page grows through, as refcount orders: 1, 2, 8, 16 and 64 bits.
const ORDERS: [u32; 5] = [0, 1, 3, 4, 6];

#[derive(Clone, Debug)]
struct Cells {
    order: u32,
    /// How many of a page of bits are set.
    set: u64,
    bytes: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
struct Page {
    /// What every count is, unless there are cells.
    same: u64,
    cells: Option<Box<Cells>>,
}

impl Cells {
    /// Cells wide enough for `value`, at least of `order`; all counts are 0.
    fn new(order: u32, value: u64) -> Cells {
        let fits = |order: &u32| value <= u64::MAX.wrapping_shr(64u32.wrapping_sub(1 << order));
        let order = ORDERS.into_iter().find(fits).unwrap_or(6).max(order);
        Cells {
            order,
            set: 0,
            bytes: alloc::vec![0; BIT_BYTES.wrapping_shl(order)],
        }
    }

    fn get(&self, index: u64) -> u64 {
        refcount::get(&self.bytes, self.order, index)
    }

    /// Sets a count; `false` when it does not fit.
    fn set(&mut self, index: u64, value: u64) -> bool {
        let old = if self.order == 0 { self.get(index) } else { 0 };
        let fits = refcount::set(&mut self.bytes, self.order, index, value).is_ok();
        if fits && self.order == 0 {
            self.set = self.set.saturating_add(value).saturating_sub(old);
        }
        fits
    }

    /// Sets a run of bits of a page of them, all of which must be clear; `false` when they are not.
    fn set_bits(&mut self, run: Range<u64>) -> bool {
        let clear =
            |(at, mask): (usize, u8)| self.bytes.get(at).is_some_and(|byte| byte & mask == 0);
        if self.order != 0 || !masks(run.clone()).all(clear) {
            return false;
        }
        for (at, mask) in masks(run.clone()) {
            if let Some(byte) = self.bytes.get_mut(at) {
                *byte |= mask;
            }
        }
        self.set = self.set.saturating_add(run.end.saturating_sub(run.start));
        true
    }

    /// How many counts of a run are 1.
    fn ones(&self, run: Range<u64>) -> u64 {
        if self.order != 0 {
            return run.filter(|index| self.get(*index) == 1).count() as u64;
        }
        masks(run)
            .filter_map(|(at, mask)| Some((self.bytes.get(at)? & mask).count_ones()))
            .fold(0, |sum, ones| sum.saturating_add(u64::from(ones)))
    }
}

/// The bytes that hold a run of bits, and which bits of each.
fn masks(run: Range<u64>) -> impl Iterator<Item = (usize, u8)> {
    let (first, last) = (run.start / 8, run.end.div_ceil(8));
    (first..last).map(move |at| {
        let start = run.start.saturating_sub(at.wrapping_shl(3)).min(8);
        let end = run.end.saturating_sub(at.wrapping_shl(3)).min(8);
        let mask = 0xff_u64.wrapping_shl(start as u32) & !(0xff_u64.wrapping_shl(end as u32));
        (at as usize, mask as u8)
    })
}

impl Page {
    fn get(&self, index: u64) -> u64 {
        self.cells
            .as_ref()
            .map_or(self.same, |cells| cells.get(index))
    }

    fn is_zero(&self) -> bool {
        self.cells.is_none() && self.same == 0
    }

    fn memory_bytes(&self) -> u64 {
        self.cells.as_ref().map_or(0, |cells| {
            CELLS_MEMORY.saturating_add(cells.bytes.len() as u64)
        })
    }

    /// A page of cells that hold `value` and what is there.
    fn widened(&self, value: u64) -> Page {
        let order = self.cells.as_ref().map_or(0, |cells| cells.order);
        let mut cells = Cells::new(order, value.max(self.same));
        if !self.is_zero() {
            for index in 0..PAGE {
                // The new width is no smaller than the old one.
                let _ = cells.set(index, self.get(index));
            }
        }
        Page {
            same: 0,
            cells: Some(Box::new(cells)),
        }
    }

    fn set(&mut self, index: u64, value: u64) {
        if self.cells.is_none() && self.same == value {
            return;
        }
        let fits = match &mut self.cells {
            Some(cells) => cells.set(index, value),
            None => false,
        };
        if !fits {
            *self = self.widened(value);
            if let Some(cells) = &mut self.cells {
                let _ = cells.set(index, value);
            }
        }
        self.fold();
    }

    /// Cells that are all ones are one number.
    fn fold(&mut self) {
        if self.cells.as_ref().is_some_and(|cells| cells.set == PAGE) {
            *self = Page {
                same: 1,
                cells: None,
            };
        }
    }

    /// Adds to a run of counts at once; `false` when it has to be done one by one.
    fn add(&mut self, run: Range<u64>, times: u64, most: u64) -> bool {
        let sum = self.same.saturating_add(times);
        if self.cells.is_none() && run == (0..PAGE) && sum <= most {
            self.same = sum;
            return true;
        }
        if times != 1 || (self.cells.is_none() && self.same != 0) {
            return false;
        }
        let cells = self.cells.get_or_insert_with(|| Box::new(Cells::new(0, 1)));
        let done = cells.set_bits(run);
        self.fold();
        done
    }

    /// Adds the counts of another at once; `false` when it has to be done one by one.
    fn join(&mut self, other: &Page) -> bool {
        if self.is_zero() {
            *self = other.clone();
            return true;
        }
        let (Some(cells), Some(added)) = (&mut self.cells, &other.cells) else {
            return false;
        };
        let pairs = || cells.bytes.iter().zip(&added.bytes);
        if cells.order != 0 || added.order != 0 || pairs().any(|(one, other)| one & other != 0) {
            return false;
        }
        for (byte, added) in cells.bytes.iter_mut().zip(&added.bytes) {
            *byte |= added;
        }
        cells.set = cells.set.saturating_add(added.set);
        self.fold();
        true
    }

    /// The page that a part of a refcount block as long as a page says, unless it needs more than bits.
    fn of_block(block: &[u8], order: u32) -> Option<Page> {
        let same = refcount::get(block, order, 0);
        if all_same(block, order) {
            return Some(Page { same, cells: None });
        }
        let mut cells = Cells::new(0, 1);
        for (at, byte) in (0_u64..).zip(&mut cells.bytes) {
            let first = at.wrapping_shl(3);
            for bit in 0..8_u64 {
                let value = refcount::get(block, order, first | bit);
                if value > 1 {
                    return None;
                }
                *byte |= (value as u8).wrapping_shl(bit as u32);
            }
        }
        cells.set = cells.ones(0..PAGE);
        Some(Page {
            same: 0,
            cells: Some(Box::new(cells)),
        })
    }
}

/// Whether all refcounts of a piece of a block are the same.
fn all_same(block: &[u8], order: u32) -> bool {
    let first = refcount::get(block, order, 0);
    let width = 1_usize.wrapping_shl(order.saturating_sub(3));
    let in_byte = 8_u64.wrapping_shr(order);
    (1..in_byte).all(|index| refcount::get(block, order, index) == first)
        && block.get(width..) == block.get(..block.len().saturating_sub(width))
}

/// Counts by cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    pages: Vec<Page>,
    bytes: u64,
}

impl Counts {
    fn page(&self, cluster: u64) -> Option<&Page> {
        self.pages.get(usize::try_from(cluster >> PAGE_BITS).ok()?)
    }

    /// Changes the page of a cluster. The caller bounds the cluster.
    fn change<T>(&mut self, cluster: u64, change: impl FnOnce(&mut Page) -> T) -> Option<T> {
        let at = (cluster >> PAGE_BITS) as usize;
        if at >= self.pages.len() {
            let more = at.saturating_add(1).saturating_sub(self.pages.len());
            let more = (more as u64).saturating_mul(PAGE_MEMORY);
            self.bytes = self.bytes.saturating_add(more);
            self.pages.resize_with(at.saturating_add(1), Page::default);
        }
        let page = self.pages.get_mut(at)?;
        let before = page.memory_bytes();
        let changed = change(page);
        let grown = self.bytes.saturating_add(page.memory_bytes());
        self.bytes = grown.saturating_sub(before);
        Some(changed)
    }

    /// The count of a cluster, 0 when it was never set.
    pub(super) fn get(&self, cluster: u64) -> u64 {
        self.page(cluster)
            .map_or(0, |page| page.get(cluster & (PAGE - 1)))
    }

    /// Sets the count of a cluster. The caller bounds the cluster.
    pub(super) fn set(&mut self, cluster: u64, value: u64) {
        self.change(cluster, |page| page.set(cluster & (PAGE - 1), value));
    }

    /// Adds `times` to the counts of the clusters from `first` on, as far as they are in one page and at most
    /// `count`, none of which may get larger than `most`. Tells how many those are, and whether it was done: if not
    /// they have to be counted one by one.
    pub(super) fn add(&mut self, first: u64, count: u64, times: u64, most: u64) -> (u64, bool) {
        let run = in_page(first, count);
        let len = run.end.saturating_sub(run.start);
        let done = self.change(first, |page| page.add(run, times, most));
        (len, done.unwrap_or(false))
    }

    /// How many of the `count` clusters from `first` on have a count of 1.
    pub(super) fn ones(&self, first: u64, count: u64) -> u64 {
        let (mut at, mut left, mut ones) = (first, count, 0_u64);
        while left > 0 {
            let run = in_page(at, left);
            let len = run.end.saturating_sub(run.start);
            let found = match self.page(at) {
                Some(Page {
                    cells: Some(cells), ..
                }) => cells.ones(run),
                Some(page) if page.same == 1 => len,
                _ => 0,
            };
            ones = ones.saturating_add(found);
            at = at.saturating_add(len);
            left = left.saturating_sub(len);
        }
        ones
    }

    /// Adds the counts of `other` where that can be done by pages, and returns the clusters that have to be counted one by
    /// one.
    pub(super) fn join(&mut self, other: &Counts) -> Vec<u64> {
        let mut single = Vec::new();
        let mut next = 0;
        while let Some(first) = other.next_used(next) {
            next = (first | (PAGE - 1)).saturating_add(1);
            let Some(added) = other.page(first) else {
                break;
            };
            let done = self.change(first, |page| page.join(added));
            if done != Some(true) {
                single.extend((first..next).filter(|cluster| other.get(*cluster) != 0));
            }
        }
        single
    }

    /// Takes over the first `count` refcounts of a block; its first is that of cluster `first`. Nothing was
    /// set there before.
    pub(super) fn load(&mut self, first: u64, count: u64, block: &[u8], order: u32) {
        let page_bytes = BIT_BYTES.wrapping_shl(order);
        let mut index = 0;
        while index < count {
            let cluster = first.saturating_add(index);
            let run = in_page(cluster, count.saturating_sub(index));
            let len = run.end.saturating_sub(run.start);
            let start = (index.wrapping_shl(order) / 8) as usize;
            let piece = block.get(start..start.saturating_add(page_bytes));
            let whole = piece.filter(|_| len == PAGE);
            match whole.and_then(|piece| Page::of_block(piece, order)) {
                Some(page) if page.is_zero() => {}
                Some(page) => drop(self.change(cluster, |old| *old = page)),
                None => {
                    for index in index..index.saturating_add(len) {
                        let value = refcount::get(block, order, index);
                        if value != 0 {
                            self.set(first.saturating_add(index), value);
                        }
                    }
                }
            }
            index = index.saturating_add(len);
        }
    }

    /// Whether both have the same counts in the page of `cluster`, as far as that is seen at a glance.
    pub(super) fn same_page(&self, other: &Counts, cluster: u64) -> bool {
        let none = Page::default();
        let [one, other] = [self, other].map(|counts| counts.page(cluster).unwrap_or(&none));
        match (&one.cells, &other.cells) {
            (None, None) => one.same == other.same,
            (Some(one), Some(other)) => one.order == other.order && one.bytes == other.bytes,
            _ => false,
        }
    }

    /// The last cluster in the page of `cluster` with a count.
    pub(super) fn last_in_page(&self, cluster: u64) -> Option<u64> {
        let page = self.page(cluster)?;
        let index = (0..PAGE).rev().find(|index| page.get(*index) != 0)?;
        Some((cluster & !(PAGE - 1)).saturating_add(index))
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.bytes
    }

    /// The first cluster from `cluster` on that lies in a page with counts, `None` after the last.
    pub(super) fn next_used(&self, cluster: u64) -> Option<u64> {
        let first = usize::try_from(cluster >> PAGE_BITS).ok()?;
        let rest = self.pages.get(first..)?;
        let skipped = rest.iter().position(|page| !page.is_zero())?;
        let page = (first as u64).saturating_add(skipped as u64);
        Some((page << PAGE_BITS).max(cluster))
    }
}

/// The part of `count` clusters from `first` on that is in the page of the first, counted from the page's start.
fn in_page(first: u64, count: u64) -> Range<u64> {
    let start = first & (PAGE - 1);
    start..start.saturating_add(count).min(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_survive_every_widening_of_their_page() {
        let mut counts = Counts::default();
        let values = [1, 3, 2, 255, 256, 65535, 65536, u64::MAX, 0];
        for (number, value) in values.into_iter().enumerate() {
            counts.set(number as u64 * 7, value);
            for (earlier, value) in values.into_iter().enumerate().take(number + 1) {
                assert_eq!(counts.get(earlier as u64 * 7), value);
            }
            assert_eq!(counts.get(number as u64 * 7 + 1), 0);
        }
    }

    #[test]
    fn a_page_of_bits_that_is_full_is_one_number() {
        let mut counts = Counts::default();
        (0..PAGE - 1).for_each(|cluster| counts.set(cluster, 1));
        assert_eq!(counts.memory_bytes(), PAGE_MEMORY + CELLS_MEMORY + PAGE / 8);
        counts.set(PAGE - 1, 1);
        assert_eq!(counts.memory_bytes(), PAGE_MEMORY);
        counts.set(7, 2);
        assert_eq!(counts.ones(0, PAGE), PAGE - 1);
        assert_eq!((counts.get(6), counts.get(7)), (1, 2));
    }

    #[test]
    fn runs_count_as_their_clusters_do_one_by_one() {
        let (mut runs, mut singles) = (Counts::default(), Counts::default());
        let added = [
            (0, 3 * PAGE, 1, true),
            (PAGE, PAGE, 2, true),
            (3 * PAGE + 5, 100, 1, true),
            (3 * PAGE + 104, 2, 1, false),
            (4 * PAGE - 3, 3, 1, false),
            (5 * PAGE + 1, 9, 2, false),
            (6 * PAGE, 17, 1, true),
            (6 * PAGE + 17, PAGE - 17, 1, true),
            (6 * PAGE, PAGE, 3, true),
            (6 * PAGE, PAGE, 1, false),
        ];
        for (first, count, times, at_once) in added {
            let (mut at, end) = (first, first + count);
            while at < end {
                let (len, done) = runs.add(at, end - at, times, 4);
                assert_eq!(done, at_once, "{first} {count} {times}");
                if !done {
                    (at..at + len).for_each(|at| runs.set(at, runs.get(at) + times));
                }
                at += len;
            }
            (first..end).for_each(|at| singles.set(at, singles.get(at) + times));
            (0..8 * PAGE).for_each(|at| assert_eq!(runs.get(at), singles.get(at), "{at}"));
        }
        let ones = |first: u64, count: u64| {
            (first..first + count)
                .filter(|at| singles.get(*at) == 1)
                .count() as u64
        };
        for (first, count) in [
            (0, 8 * PAGE),
            (3, 7),
            (PAGE - 1, PAGE + 2),
            (3 * PAGE + 1, 109),
        ] {
            assert_eq!(runs.ones(first, count), ones(first, count));
        }
    }

    #[test]
    fn joined_counts_are_sums() {
        let filled = |values: &[(u64, u64)]| {
            let mut counts = Counts::default();
            for (cluster, value) in values {
                counts.set(*cluster, *value);
            }
            counts
        };
        let one = filled(&[(1, 1), (2, 1), (PAGE + 1, 1), (3 * PAGE, 2), (4 * PAGE, 1)]);
        let other = filled(&[(3, 1), (PAGE + 1, 1), (2 * PAGE, 7), (3 * PAGE + 1, 1)]);
        let mut sum = one.clone();
        let single = sum.join(&other);
        assert_eq!(single, [PAGE + 1, 3 * PAGE + 1]);
        for cluster in single {
            sum.set(cluster, sum.get(cluster) + other.get(cluster));
        }
        for at in 0..5 * PAGE {
            assert_eq!(sum.get(at), one.get(at) + other.get(at), "{at}");
        }
    }

    #[test]
    fn blocks_of_every_width_are_loaded_as_they_read() {
        for order in 0..=6 {
            let largest = u64::MAX >> (64 - (1 << order));
            let mut block = alloc::vec![0; (2 * PAGE as usize + 64) << order >> 3];
            for index in 0..PAGE {
                refcount::set(&mut block, order, index, 1).unwrap();
            }
            let marked = [(PAGE + 3, 1), (PAGE + 9, largest), (2 * PAGE + 5, 1)];
            for case in 0..=marked.len() {
                let mut counts = Counts::default();
                counts.load(3 * PAGE, 2 * PAGE + 64, &block, order);
                for index in 0..2 * PAGE + 64 {
                    let stored = refcount::get(&block, order, index);
                    assert_eq!(counts.get(3 * PAGE + index), stored, "{order} {index}");
                }
                if let Some((index, value)) = marked.get(case) {
                    refcount::set(&mut block, order, *index, *value).unwrap();
                }
            }
        }
    }

    #[test]
    fn next_used_skips_pages_without_counts() {
        let mut counts = Counts::default();
        counts.set(10 * PAGE + 5, 1);
        assert_eq!(counts.next_used(0), Some(10 * PAGE));
        assert_eq!(counts.next_used(10 * PAGE + 7), Some(10 * PAGE + 7));
        assert_eq!(counts.next_used(11 * PAGE), None);
    }
}
