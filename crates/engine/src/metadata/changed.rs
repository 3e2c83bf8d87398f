//! Host clusters whose counts or references change while a check of the image runs.
//!
//! A change is noted before it can be seen: under the lock under which it is made, or before it is made. So whoever has
//! seen it finds its cluster here. Nothing is noted, and next to nothing done, while no check runs.
//!
//! L2 tables that the active image gives up are held back meanwhile, because the check may still be about to read
//! them; nothing else that it reads is used for something else.

use gaur_format::check::Changes;

use crate::range::ClusterRange;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, OnceLock, RwLock};
use std::sync::Arc;

/// Words of a page of bits.
const PAGE_WORDS: usize = 64;
/// Clusters of a page.
const PAGE: u64 = PAGE_WORDS as u64 * 64;

type Page = Box<[AtomicU64; PAGE_WORDS]>;

/// A set of clusters of a file, a bit for each; what has none takes next to no memory.
#[derive(Debug)]
pub(crate) struct ClusterMarks {
    pages: Box<[OnceLock<Page>]>,
}

impl ClusterMarks {
    /// No clusters of a file that has `clusters`. Those behind them are not noted.
    pub(crate) fn new(clusters: u64) -> ClusterMarks {
        let pages = clusters.div_ceil(PAGE);
        ClusterMarks {
            pages: (0..pages).map(|_| OnceLock::new()).collect(),
        }
    }

    pub(crate) fn set(&self, cluster: u64) {
        if let Some(page) = self.pages.get((cluster / PAGE) as usize) {
            let page = page.get_or_init(|| Box::new(std::array::from_fn(|_| AtomicU64::new(0))));
            let word = (cluster % PAGE / 64) as usize;
            page[word].fetch_or(1 << (cluster % 64), Ordering::Release);
        }
    }

    pub(crate) fn contains(&self, cluster: u64) -> bool {
        let page = self.pages.get((cluster / PAGE) as usize);
        page.and_then(OnceLock::get).is_some_and(|page| {
            let word = page[(cluster % PAGE / 64) as usize].load(Ordering::Acquire);
            word & (1 << (cluster % 64)) != 0
        })
    }

    /// Number of clusters.
    pub(crate) fn count(&self) -> u64 {
        let ones = |page: &Page| -> u64 {
            let words = page.iter().map(|word| word.load(Ordering::Acquire));
            words.map(|word| u64::from(word.count_ones())).sum()
        };
        self.pages.iter().filter_map(OnceLock::get).map(ones).sum()
    }

    /// Removes what `other` does not have.
    pub(crate) fn keep_only(&self, other: &ClusterMarks) {
        for (index, page) in self.pages.iter().enumerate() {
            let kept = other.pages.get(index).and_then(OnceLock::get);
            for (at, word) in page
                .get()
                .into_iter()
                .flat_map(|page| page.iter().enumerate())
            {
                let kept = kept.map_or(0, |page| page[at].load(Ordering::Acquire));
                word.fetch_and(kept, Ordering::AcqRel);
            }
        }
    }
}

/// What a round of a check is to say nothing about: what changes, and what an earlier round has judged.
#[derive(Debug)]
pub(crate) struct Unsettled {
    pub(crate) changed: Arc<ClusterMarks>,
    /// What is left to be judged; all in the first round.
    pub(crate) left: Option<Arc<ClusterMarks>>,
}

impl Changes for Unsettled {
    fn has_changed(&self, cluster: u64) -> bool {
        let judged = |left: &Arc<ClusterMarks>| !left.contains(cluster);
        self.changed.contains(cluster) || self.left.as_ref().is_some_and(judged)
    }
}

/// Where changes are noted, if a check runs.
#[derive(Debug, Default)]
pub(crate) struct ChangeWatch {
    on: AtomicBool,
    marks: RwLock<Option<Arc<ClusterMarks>>>,
    held_back: Mutex<Vec<ClusterRange>>,
}

impl ChangeWatch {
    /// Begins to note changes in `marks`. No request is inside.
    pub(crate) fn begin(&self, marks: Arc<ClusterMarks>) {
        *self.marks.write() = Some(marks);
        self.on.store(true, Ordering::SeqCst);
    }

    /// Ends that; the clusters that were held back.
    pub(crate) fn end(&self) -> Vec<ClusterRange> {
        let mut held = self.held_back.lock();
        self.on.store(false, Ordering::SeqCst);
        *self.marks.write() = None;
        std::mem::take(&mut *held)
    }

    /// Whether changes are noted.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::SeqCst)
    }

    /// The count of these clusters, or a reference to them, is about to change.
    #[inline]
    pub(crate) fn note(&self, clusters: ClusterRange) {
        if self.is_on() {
            self.note_watched(clusters);
        }
    }

    #[cold]
    fn note_watched(&self, clusters: ClusterRange) {
        if let Some(marks) = &*self.marks.read() {
            clusters.numbers().for_each(|cluster| marks.set(cluster));
        }
    }

    /// Keeps the clusters of a table that lost its reference until the check has ended; `false` if none runs.
    pub(crate) fn hold_back(&self, clusters: ClusterRange) -> bool {
        let mut held = self.held_back.lock();
        let on = self.is_on();
        if on {
            held.push(clusters);
        }
        on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_a_set_of_the_clusters_of_a_file() {
        let (one, two) = (ClusterMarks::new(10_000), ClusterMarks::new(20_000));
        for cluster in [0, 63, 64, 4095, 4096, 9999, 30_000] {
            one.set(cluster);
        }
        assert_eq!(one.count(), 6, "what is behind the file is not noted");
        assert!(one.contains(4095) && !one.contains(4094) && !one.contains(30_000));
        for cluster in [63, 4096, 5000, 19_999] {
            two.set(cluster);
        }
        one.keep_only(&two);
        assert_eq!(one.count(), 2);
        assert!(one.contains(63) && one.contains(4096));
    }

    #[test]
    fn changes_are_noted_while_somebody_watches() {
        let watch = ChangeWatch::default();
        let range = ClusterRange::new(5, 2);
        watch.note(range);
        assert!(!watch.hold_back(range));
        let marks = Arc::new(ClusterMarks::new(100));
        watch.begin(Arc::clone(&marks));
        watch.note(range);
        assert!(watch.hold_back(range));
        let left = Arc::new(ClusterMarks::new(100));
        left.set(5);
        left.set(8);
        let unsettled = Unsettled {
            changed: Arc::clone(&marks),
            left: Some(left),
        };
        let told: Vec<u64> = (0..10).filter(|at| !unsettled.has_changed(*at)).collect();
        assert_eq!(told, [8], "5 changes, and the others were judged before");
        assert_eq!(watch.end(), [range]);
        watch.note(ClusterRange::new(50, 1));
        assert_eq!(marks.count(), 2);
    }
}
