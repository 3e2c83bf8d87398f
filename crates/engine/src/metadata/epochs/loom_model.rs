//! Models of the epochs: a cluster is never given to another owner while a request that may have
//! found it through its old mapping is inside.

use std::sync::atomic::AtomicUsize;

use gaur_model::{Strength, check, check_fully, check_weakened, thread};

use super::*;
use crate::sync::atomic::AtomicBool;

const GUEST: u64 = 1;
const NEXT_OWNER: u64 = 2;

/// A host cluster that is mapped, until the mapping is removed and another owner gets the cluster. It is
/// mapped without a lock, as L2 tables are.
struct Cluster {
    mapped: AtomicBool,
    bytes: AtomicU64,
}

impl Cluster {
    fn new() -> Cluster {
        Cluster {
            mapped: AtomicBool::new(true),
            bytes: AtomicU64::new(0),
        }
    }

    /// A write in place: the mapping, and then the bytes.
    fn write(&self, epochs: &Epochs, handle: &EpochHandle) {
        let _guard = epochs.enter(handle);
        if self.mapped.load(Ordering::Acquire) {
            self.bytes.store(GUEST, Ordering::Relaxed);
        }
    }

    /// The mapping goes; when the epoch in which that was has drained, so does the cluster. Says
    /// whether it came to that.
    fn give_away(&self, epochs: &Epochs) -> bool {
        self.mapped.store(false, Ordering::Release);
        let Some(epoch) = epochs.advance() else {
            return false;
        };
        while !epochs.drained(epoch) {
            thread::yield_now();
        }
        self.bytes.store(NEXT_OWNER, Ordering::Relaxed);
        true
    }

    fn check(&self, given_away: bool) {
        if given_away {
            let bytes = self.bytes.load(Ordering::Relaxed);
            assert_eq!(bytes, NEXT_OWNER, "a late write hit the next owner");
        }
    }
}

fn a_write_in_place_and_a_pass() {
    let shared = Arc::new((Epochs::default(), Cluster::new()));
    let writer = thread::spawn({
        let shared = Arc::clone(&shared);
        let handle = shared.0.join();
        move || shared.1.write(&shared.0, &handle)
    });
    let given_away = shared.1.give_away(&shared.0);
    writer.join().unwrap();
    shared.1.check(given_away);
}

#[test]
fn a_cluster_outlives_the_requests_that_found_it() {
    check_fully(a_write_in_place_and_a_pass);
}

#[test]
#[should_panic = "a late write hit the next owner"]
fn the_epochs_need_sequential_consistency() {
    check_weakened(Strength::AcquireRelease, a_write_in_place_and_a_pass);
}

/// A pass that does not wait for the epoch it has ended, before the next one advances again: a request
/// from before both is in neither the new epoch nor the one that the second advance ended.
#[test]
fn an_epoch_does_not_end_while_the_one_before_it_has_not_drained() {
    check(|| {
        let shared = Arc::new((Epochs::default(), Cluster::new()));
        let writer = thread::spawn({
            let shared = Arc::clone(&shared);
            let handle = shared.0.join();
            move || shared.1.write(&shared.0, &handle)
        });
        let first = shared.0.advance();
        let given_away = shared.1.give_away(&shared.0);
        writer.join().unwrap();
        assert_eq!(first, Some(0));
        shared.1.check(given_away);
    });
}

/// Two clusters given away one after the other, so that both counters come into use again, and two
/// queues of which one comes when the passes are under way, and leaves.
#[test]
fn queues_come_and_go_while_the_epoch_advances() {
    let given_away = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&given_away);
    check(move || {
        let shared = Arc::new((Epochs::default(), [Cluster::new(), Cluster::new()]));
        let staying = thread::spawn({
            let shared = Arc::clone(&shared);
            let handle = shared.0.join();
            move || {
                shared.1[0].write(&shared.0, &handle);
                shared.1[1].write(&shared.0, &handle);
            }
        });
        let passing = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let handle = shared.0.join();
                shared.1[0].write(&shared.0, &handle);
                shared.0.leave(&handle);
            }
        });
        let given = shared.1.each_ref().map(|one| one.give_away(&shared.0));
        staying.join().unwrap();
        passing.join().unwrap();
        for (cluster, given) in shared.1.iter().zip(given) {
            cluster.check(given);
            count.fetch_add(usize::from(given), Ordering::Relaxed);
        }
    });
    assert!(given_away.load(Ordering::Relaxed) > 0);
}
