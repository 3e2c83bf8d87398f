//! Models of the cache under several threads: a change is never lost. Either a pass has staged it, or
//! its slice is dirty.

use std::sync::Arc;

use gaur_model::{check, thread};

use super::*;

const SLICE_BYTES: u64 = 512;
const ENTRIES: u64 = SLICE_BYTES / 8;
const COPIED: u64 = 1 << 63;

/// A cache of one part that has room for four slices that do not pack.
fn small_cache() -> Arc<L2Cache> {
    let shape = Shape {
        entries: ENTRIES as usize,
        extended: false,
        cluster_bits: 16,
    };
    Arc::new(L2Cache::new(shape, SLICE_BYTES, 0))
}

/// A slice as on disk, of clusters that lie scattered.
fn scattered(slice: u64) -> Vec<u8> {
    let entry = |index: u64| match index % 2 {
        0 => COPIED | (slice + index * 77) << 16,
        _ => (slice + index * 131) << 16,
    };
    (0..ENTRIES)
        .flat_map(|index| entry(index).to_be_bytes())
        .collect()
}

fn word(bytes: &[u8], index: usize) -> u64 {
    let bytes = bytes.chunks_exact(8).nth(index).unwrap();
    u64::from_be_bytes(bytes.try_into().unwrap())
}

/// Loads so many slices that all others go that may, even those that were just used.
fn load_others(cache: &L2Cache) {
    for number in 1..10 {
        let slice = number * SLICE_BYTES;
        cache.insert(slice, &scattered(slice), false);
    }
}

/// One pass; what it finds dirty goes to `disk`, the slice at offset 0.
fn pass(cache: &L2Cache, disk: &mut [u8]) {
    let mut staged = false;
    cache.stage_dirty(|slice, fill| {
        assert_eq!(slice, 0);
        staged = fill(disk);
    });
    if staged {
        cache.written(0);
        cache.settle();
    }
}

fn entry(value: u64) -> Entry {
    (COPIED | value << 16, 0)
}

#[test]
fn a_slice_stays_while_it_is_pinned_and_while_it_is_dirty() {
    check(|| {
        let cache = small_cache();
        let mut disk = scattered(0);
        cache.insert(0, &disk, false);
        let loading = thread::spawn({
            let cache = Arc::clone(&cache);
            move || load_others(&cache)
        });
        let changing = thread::spawn({
            let cache = Arc::clone(&cache);
            move || {
                while !cache.pin(0) {
                    cache.insert(0, &scattered(0), false);
                }
                let done = cache.update(0, 5, |_| entry(1));
                assert!(done, "a pinned slice stays");
                cache.unpin(0);
            }
        });
        pass(&cache, &mut disk);
        changing.join().unwrap();
        loading.join().unwrap();
        let cached = cache.look(0, |view| view.get(5));
        assert_eq!(cached.map_or(word(&disk, 5), |cached| cached.0), entry(1).0);
        pass(&cache, &mut disk);
        assert_eq!(word(&disk, 5), entry(1).0);
        assert_eq!(cache.dirty(), 0);
    });
}

/// What the write path once did: it took a slice for there to stay because it had just looked at it.
#[test]
#[should_panic = "the change is lost"]
fn a_look_at_a_slice_does_not_keep_it() {
    check(|| {
        let cache = small_cache();
        cache.insert(0, &scattered(0), false);
        let loading = thread::spawn({
            let cache = Arc::clone(&cache);
            move || load_others(&cache)
        });
        let seen = cache.look(0, |view| view.get(5)).is_some();
        let done = seen && cache.update(0, 5, |_| entry(1));
        loading.join().unwrap();
        assert!(done || !seen, "the change is lost");
    });
}

#[test]
fn a_change_is_staged_by_the_pass_or_by_the_next() {
    check(|| {
        let cache = small_cache();
        let mut disk = scattered(0);
        cache.insert(0, &disk, false);
        let threads = [7, 8].map(|index| {
            let cache = Arc::clone(&cache);
            thread::spawn(move || {
                for value in [1, 2] {
                    assert!(cache.update(0, index, |_| entry(value)));
                }
            })
        });
        pass(&cache, &mut disk);
        pass(&cache, &mut disk);
        for thread in threads {
            thread.join().unwrap();
        }
        pass(&cache, &mut disk);
        assert_eq!([7, 8].map(|index| word(&disk, index)), [entry(2).0; 2]);
        assert_eq!(cache.dirty(), 0);
        assert!(!cache.pressed());
    });
}
