//! A count for each cluster, in little memory.
//!
//! Nearly all clusters have a count of 0 or 1, so a page of 4096 counts starts with one bit for each
//! and is widened when a count does not fit. Pages without counts take no space.

use alloc::vec::Vec;

use crate::refcount;

/// Counts of a page, as a power of two.
const PAGE_BITS: u32 = 12;
/// Counts of a page.
const PAGE: u64 = 1 << PAGE_BITS;

/// Widths a page grows through, as refcount orders: 1, 2, 8, 16 and 64 bits.
const ORDERS: [u32; 5] = [0, 1, 3, 4, 6];

#[derive(Clone, Debug, Default)]
struct Page {
    order: u32,
    bytes: Vec<u8>,
}

fn page_bytes(order: u32) -> usize {
    (PAGE / 8).wrapping_shl(order) as usize
}

impl Page {
    fn get(&self, index: u64) -> u64 {
        refcount::get(&self.bytes, self.order, index)
    }

    /// A copy with the next larger width that holds `value`.
    fn widened(&self, value: u64) -> Page {
        let fits = |order: &u32| value <= u64::MAX.wrapping_shr(64u32.wrapping_sub(1 << order));
        let order = ORDERS.into_iter().find(fits).unwrap_or(6).max(self.order);
        let mut page = Page {
            order,
            bytes: alloc::vec![0; page_bytes(order)],
        };
        if !self.bytes.is_empty() {
            for index in 0..PAGE {
                // The new width is no smaller than the old one.
                let _ = refcount::set(&mut page.bytes, order, index, self.get(index));
            }
        }
        page
    }
}

/// Counts by cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    pages: Vec<Page>,
    bytes: u64,
}

impl Counts {
    /// The count of a cluster, 0 when it was never set.
    pub(super) fn get(&self, cluster: u64) -> u64 {
        let page = usize::try_from(cluster >> PAGE_BITS)
            .ok()
            .and_then(|at| self.pages.get(at));
        page.map_or(0, |page| page.get(cluster & (PAGE - 1)))
    }

    /// Sets the count of a cluster. The caller bounds the cluster.
    pub(super) fn set(&mut self, cluster: u64, value: u64) {
        let (at, index) = ((cluster >> PAGE_BITS) as usize, cluster & (PAGE - 1));
        if at >= self.pages.len() {
            let more = at.saturating_add(1).saturating_sub(self.pages.len());
            self.bytes = self.bytes.saturating_add((more as u64).saturating_mul(32));
            self.pages.resize_with(at.saturating_add(1), Page::default);
        }
        let Some(page) = self.pages.get_mut(at) else {
            return;
        };
        if refcount::set(&mut page.bytes, page.order, index, value).is_ok() {
            return;
        }
        if page.bytes.is_empty() && value == 0 {
            return;
        }
        let mut wider = page.widened(value);
        let _ = refcount::set(&mut wider.bytes, wider.order, index, value);
        let grown = wider.bytes.len().saturating_sub(page.bytes.len());
        self.bytes = self.bytes.saturating_add(grown as u64);
        *page = wider;
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.bytes
    }

    /// The first cluster from `cluster` on that lies in a page with counts, `None` after the last.
    pub(super) fn next_used(&self, cluster: u64) -> Option<u64> {
        let first = usize::try_from(cluster >> PAGE_BITS).ok()?;
        let rest = self.pages.get(first..)?;
        let skipped = rest.iter().position(|page| !page.bytes.is_empty())?;
        let page = (first as u64).saturating_add(skipped as u64);
        Some((page << PAGE_BITS).max(cluster))
    }
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
    fn a_page_of_ones_takes_a_bit_for_each_count() {
        let mut counts = Counts::default();
        (0..PAGE).for_each(|cluster| counts.set(cluster, 1));
        assert_eq!(counts.memory_bytes(), 32 + PAGE / 8);
        assert_eq!(
            (0..PAGE).map(|cluster| counts.get(cluster)).sum::<u64>(),
            PAGE
        );
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
