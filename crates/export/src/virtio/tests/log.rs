//! What a killed server leaves, and what the next one makes of it.

use std::sync::Arc;

use super::driver::{RING, shared};
use crate::virtio::inflight::{InflightLog, log_bytes};
use crate::virtio::memory::Mapping;

fn open(mapping: &Arc<Mapping>) -> InflightLog {
    InflightLog::open(mapping, 0, RING).expect("a log of the right size")
}

fn blank() -> Arc<Mapping> {
    Arc::new(shared(log_bytes(RING)).0)
}

#[test]
fn in_flight_requests_are_recovered_in_order() {
    let memory = blank();
    let mut log = open(&memory);
    assert!(log.recover(0).is_empty());
    for head in [5, 3, 9, 0, 15] {
        log.popped(head);
    }
    log.pushed(3);
    log.pushed(15);
    log.before_publish();
    log.published(2);
    assert_eq!(open(&memory).recover(2), [5, 9, 0]);
    // Nothing has changed by looking, and a counter goes on behind the old ones.
    let mut log = open(&memory);
    assert_eq!(log.recover(2), [5, 9, 0]);
    log.popped(1);
    assert_eq!(open(&memory).recover(2), [5, 9, 0, 1]);
}

#[test]
fn a_published_batch_is_not_redone() {
    let memory = blank();
    let mut log = open(&memory);
    assert!(log.recover(65_534).is_empty());
    for head in [1, 2, 3, 4] {
        log.popped(head);
    }
    for head in [4, 1, 3] {
        log.pushed(head);
    }
    log.before_publish();
    // Killed here: before the used index was written ...
    assert_eq!(open(&memory).recover(65_534), [1, 2, 3, 4]);
    // ... or after it.
    assert_eq!(open(&memory).recover(1), [2]);
    assert_eq!(open(&memory).recover(1), [2]);
}

#[test]
fn a_foreign_inflight_log_is_refused() {
    let memory = blank();
    open(&memory);
    let refused = |size| {
        InflightLog::open(&memory, 0, size)
            .err()
            .unwrap_or_default()
    };
    assert!(refused(RING / 2).contains("for 16 descriptors, the ring has 8"));
    assert!(refused(RING * 2).contains("shorter than its rings need"));
    let run = memory.run(8, 2).expect("inside");
    run.copy_from(&9_u16.to_ne_bytes());
    assert!(refused(RING).contains("version 9"));
}

#[test]
fn noise_in_a_log_is_harmless() {
    let memory = blank();
    open(&memory);
    let len = log_bytes(RING) - 16;
    for seed in 0..64_u8 {
        let noise: Vec<u8> = (0..len)
            .map(|at| (at as u8).wrapping_mul(seed | 1) ^ seed)
            .collect();
        memory.run(16, len).expect("inside").copy_from(&noise);
        memory.run(12, 4).expect("inside").copy_from(&[seed; 4]);
        let heads = open(&memory).recover(u16::from(seed) * 3);
        assert!(heads.len() <= usize::from(RING) && heads.iter().all(|head| *head < RING));
    }
}
