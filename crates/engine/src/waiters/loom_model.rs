//! Models of waiting: no wake-up is lost, and one task at a time holds a key. A wake-up that is lost shows
//! as a deadlock.

use std::sync::Arc;

use gaur_model::{Strength, block_on, check, check_fully, check_weakened, thread};

use super::*;

/// A condition that comes true, and the event that says so.
#[derive(Default)]
struct Condition {
    holds: AtomicBool,
    waiters: Waiters,
}

impl Condition {
    fn wait(&self) {
        block_on(async {
            loop {
                let ticket = self.waiters.ticket();
                if self.holds.load(Ordering::Relaxed) {
                    return;
                }
                self.waiters.wait(ticket).await;
            }
        });
    }

    fn fulfil(&self) {
        self.holds.store(true, Ordering::Relaxed);
        self.waiters.notify();
    }
}

fn one_waits_for_another() {
    let condition = Arc::new(Condition::default());
    let waiting = thread::spawn({
        let condition = Arc::clone(&condition);
        move || condition.wait()
    });
    condition.fulfil();
    waiting.join().unwrap();
}

#[test]
fn a_notification_after_the_ticket_ends_the_wait() {
    check_fully(one_waits_for_another);
}

#[test]
#[should_panic = "deadlock"]
fn waiter_and_notifier_may_miss_each_other_without_sequential_consistency() {
    check_weakened(Strength::AcquireRelease, one_waits_for_another);
}

/// One event for two conditions, as claims share theirs: who is woken by the other's notification
/// waits again, while the flag is being reset.
#[test]
fn an_event_of_two_conditions_wakes_both_waiters() {
    check(|| {
        let waiters = Arc::new(Waiters::default());
        let holds = Arc::new([AtomicBool::default(), AtomicBool::default()]);
        let wait = |which: usize| {
            let (waiters, holds) = (Arc::clone(&waiters), Arc::clone(&holds));
            move || {
                block_on(async {
                    loop {
                        let ticket = waiters.ticket();
                        if holds[which].load(Ordering::Relaxed) {
                            return;
                        }
                        waiters.wait(ticket).await;
                    }
                });
            }
        };
        let waiting = [thread::spawn(wait(0)), thread::spawn(wait(1))];
        for condition in &*holds {
            condition.store(true, Ordering::Relaxed);
            waiters.notify();
        }
        for thread in waiting {
            thread.join().unwrap();
        }
    });
}

/// Reads and writes without any ordering of their own: two who are inside at once, or who do not see
/// what the one before them did, lose a count.
#[derive(Default)]
struct Guarded(AtomicU64);

impl Guarded {
    fn count(&self) {
        let before = self.0.load(Ordering::Relaxed);
        self.0.store(before + 1, Ordering::Relaxed);
    }
}

/// As slices are loaded: a task that finds one missing takes its key, looks again, and loads it.
#[test]
fn work_under_a_key_is_done_once() {
    check(|| {
        let keys = Arc::new(KeyLocks::default());
        let done = Arc::new((AtomicBool::default(), Guarded::default()));
        let work = || {
            let (keys, done) = (Arc::clone(&keys), Arc::clone(&done));
            move || {
                block_on(async {
                    while !done.0.load(Ordering::Acquire) {
                        let Some(_held) = keys.lock_or_wait(7).await else {
                            continue;
                        };
                        if !done.0.load(Ordering::Acquire) {
                            done.1.count();
                            done.0.store(true, Ordering::Release);
                        }
                    }
                });
            }
        };
        let other = thread::spawn({
            let keys = Arc::clone(&keys);
            move || {
                let held = block_on(keys.lock_or_wait(8));
                assert!(held.is_some(), "no other task wants this one");
            }
        });
        let thread = thread::spawn(work());
        work()();
        thread.join().unwrap();
        other.join().unwrap();
        assert_eq!(done.1.0.load(Ordering::Relaxed), 1);
    });
}
