//! Models of the set: a cluster that was put into it before is never answered "no".

use std::sync::Arc;

use gaur_model::{check, thread};

use super::*;

/// Three clusters that share a word of hints: the first and the second have a bit each, the third
/// has that of the first.
fn sharing_a_word(set: &MetadataSet) -> [u64; 3] {
    let place = |cluster| {
        let (word, bit) = set.place(cluster);
        (std::ptr::from_ref(word), bit)
    };
    let first = place(0);
    let find = |wanted: &dyn Fn((*const AtomicU64, u64)) -> bool| {
        (1..100_000).find(|cluster| wanted(place(*cluster)))
    };
    let second = find(&|other| other.0 == first.0 && other.1 != first.1);
    let third = find(&|other| other == first);
    [0, second.unwrap(), third.unwrap()]
}

#[test]
fn inserted_clusters_are_found_by_other_threads() {
    check(|| {
        let set = Arc::new(MetadataSet::new(ClusterSet::default()));
        let [first, second, third] = sharing_a_word(&set);
        let table_is_visible = Arc::new(AtomicU64::new(0));
        let table = thread::spawn({
            let (set, visible) = (Arc::clone(&set), Arc::clone(&table_is_visible));
            move || {
                set.insert(ClusterRange::new(first, 1));
                visible.store(1, Ordering::Release);
            }
        });
        let others = thread::spawn({
            let set = Arc::clone(&set);
            move || {
                set.insert(ClusterRange::new(second, 1));
                set.insert(ClusterRange::new(third, 1));
                set.remove(ClusterRange::new(third, 1));
                assert!(set.contains(second));
                assert!(!set.contains(third));
            }
        });
        if table_is_visible.load(Ordering::Acquire) == 1 {
            assert!(set.contains(first));
        }
        table.join().unwrap();
        others.join().unwrap();
        assert_eq!(
            [first, second, third].map(|cluster| set.contains(cluster)),
            [true, true, false]
        );
    });
}
