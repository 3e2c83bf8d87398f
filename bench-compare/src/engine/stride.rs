//! Offsets for `qemu-img bench`, which knows no random mode: it adds a fixed step to the offset and
//! wraps around at the end of the disk.
//!
//! A step near the golden section of the disk scatters requests as evenly as can be, and an odd number
//! of pages comes by every page of the disk. But it treats a cache badly: no place is visited again
//! before nearly all others were, so an LRU cache of a fifth of the tables never hits, while with random
//! offsets it hits every fifth time. For tables about caches there is a step that has an LRU cache
//! of the given size hit exactly as often as random offsets would, so that the peer, whose cache
//! is one, is not made to look worse than it is.

use crate::engine::load::REQUEST_BYTES;

/// `qemu-img bench` takes steps below 2 GiB.
const STEP_PAGES_MAX: u64 = (2 << 30) / REQUEST_BYTES - 1;

/// A disk that is measured.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// Its size.
    pub size_bytes: u64,
}

/// A cache of L2 slices over a disk.
#[derive(Clone, Copy, Debug)]
pub struct Slices {
    /// Slices that the whole disk has.
    pub all: u64,
    /// Slices that fit into the cache.
    pub held: u64,
}

impl Disk {
    /// A disk of that size, a multiple of 4 KiB.
    pub fn new(size_bytes: u64) -> Disk {
        Disk { size_bytes }
    }

    fn pages(self) -> u64 {
        self.size_bytes / REQUEST_BYTES
    }

    /// The step that scatters best, in bytes.
    pub fn scattered_stride(self) -> u64 {
        const SMALLER_SECTION: f64 = 0.381_966_011_250_105;
        // Of a large disk 1 / (n + 0.618...) of it is the next best: its multiples spread as evenly.
        let mut fraction = SMALLER_SECTION;
        let mut parts = 2.0;
        while self.pages() as f64 * fraction > STEP_PAGES_MAX as f64 {
            parts += 1.0;
            fraction = 1.0 / (parts + 1.0 - SMALLER_SECTION);
        }
        let step = (self.pages() as f64 * fraction) as u64;
        coprime(step, self.pages()) * REQUEST_BYTES
    }

    /// A step in bytes with which an LRU cache hits as often as with random offsets, which is as
    /// often as a slice is in it. The best scattered one where the cache holds everything.
    pub fn fair_stride(self, slices: Slices) -> u64 {
        if slices.held >= slices.all {
            return self.scattered_stride();
        }
        // Every `lag` requests the offset comes by again, a bit before where it was: by so much that it
        // is in the same slice as often as wanted.
        let slice_pages = self.pages() as f64 / slices.all as f64;
        let wanted = slices.held as f64 / slices.all as f64;
        let before = slice_pages * (1.0 - wanted);
        let mut best = (f64::INFINITY, self.scattered_stride());
        for lag in (1..=slices.held).rev().take(8) {
            for turns in 1..=lag / 2 {
                if gcd(turns, lag) != 1 {
                    continue;
                }
                let step = (turns as f64 * self.pages() as f64 - before) / lag as f64;
                let step = coprime(step as u64, self.pages());
                if step > STEP_PAGES_MAX {
                    continue;
                }
                let off = (self.lru_hit_rate(step, slices) - wanted).abs();
                if off < best.0 {
                    best = (off, step * REQUEST_BYTES);
                }
            }
        }
        best.1
    }

    /// How often an LRU cache hits when every request is `step` pages after the one before.
    fn lru_hit_rate(self, step: u64, slices: Slices) -> f64 {
        const REQUESTS: u64 = 4000;
        let mut used = vec![None; slices.all as usize];
        let mut held = std::collections::BTreeMap::new();
        let mut hits = 0;
        for now in 0..REQUESTS {
            let page = now * step % self.pages();
            let slice = (page * slices.all / self.pages()) as usize;
            if let Some(last) = used[slice].replace(now) {
                hits += u64::from(held.remove(&last).is_some());
            }
            held.insert(now, slice);
            if held.len() as u64 > slices.held {
                held.pop_first();
            }
        }
        hits as f64 / REQUESTS as f64
    }
}

/// The next number from `step` on that shares no factor with `pages`: its multiples come by every page.
fn coprime(step: u64, pages: u64) -> u64 {
    (step.max(1)..)
        .find(|&step| gcd(step, pages) == 1)
        .unwrap_or(1)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scattered_stride_comes_by_every_page() {
        for size_bytes in [1 << 20, 4 << 30, 40 << 30, 8 << 40] {
            let disk = Disk::new(size_bytes);
            let stride = disk.scattered_stride();
            assert!(stride < 2 << 30, "{stride} is too large for qemu-img bench");
            assert_eq!(gcd(stride / REQUEST_BYTES, disk.pages()), 1);
        }
    }

    #[test]
    fn a_scattered_stride_meets_most_clusters_before_it_meets_one_again() {
        let disk = Disk::new(40 << 30);
        let pages_per_cluster = 512;
        let step = disk.scattered_stride() / REQUEST_BYTES;
        let clusters = disk.pages() / pages_per_cluster;
        let met: std::collections::BTreeSet<u64> = (0..clusters)
            .map(|request| request * step % disk.pages() / pages_per_cluster)
            .collect();
        // Random offsets meet 63 of a hundred.
        assert!(
            met.len() as u64 * 100 > clusters * 66,
            "{} of {clusters}",
            met.len()
        );
    }

    #[test]
    fn with_the_fair_stride_an_lru_cache_hits_as_often_as_with_random_offsets() {
        let disk = Disk::new(4 << 30);
        for (all, held) in [(128, 25), (128, 76), (32, 6), (32, 19), (8, 2), (8, 4)] {
            let slices = Slices { all, held };
            let step = disk.fair_stride(slices) / REQUEST_BYTES;
            let rate = disk.lru_hit_rate(step, slices);
            let random = held as f64 / all as f64;
            assert!((rate - random).abs() < 0.03, "{held} of {all}: {rate}");
            assert!(step <= STEP_PAGES_MAX);
            assert_eq!(gcd(step, disk.pages()), 1);
        }
    }

    #[test]
    fn with_the_scattered_stride_it_never_does() {
        let disk = Disk::new(4 << 30);
        let step = disk.scattered_stride() / REQUEST_BYTES;
        let slices = Slices { all: 128, held: 25 };
        assert_eq!(disk.lru_hit_rate(step, slices), 0.0);
    }
}
