//! Models of the L1 table: readers see whole entries and what stands behind them while it grows and
//! changes, and every change is staged.

use std::sync::Arc;

use gaur_format::addr::HostOffset;
use gaur_model::{Strength, check, check_fully, check_weakened, thread};

use super::*;

const OLD_OFFSET: u64 = 1 << 16;
const NEW_OFFSET: u64 = 2 << 16;
const OLD: u64 = 3 << 16;

/// An entry that is set in the part by which the table has grown.
const INDEX: u64 = SEGMENT_ENTRIES + 1;

fn entry() -> L1Ref {
    L1Ref {
        offset: HostOffset(5 << 16),
        copied: true,
    }
}

fn new_table() -> Arc<L1Table> {
    Arc::new(L1Table::new(OLD_OFFSET, &[OLD, 0]))
}

fn a_reader_of_a_growing_table() {
    let table = new_table();
    // Stands for the L2 table, which is complete before its entry is set.
    let complete = Arc::new(AtomicU64::new(0));
    let changing = thread::spawn({
        let (table, complete) = (Arc::clone(&table), Arc::clone(&complete));
        move || {
            table.grow(NEW_OFFSET, INDEX + 1);
            complete.store(1, Ordering::Relaxed);
            table.set(INDEX, Some(entry()));
        }
    });
    let len = table.len();
    let seen = table.get(INDEX);
    let is_complete = complete.load(Ordering::Relaxed);
    let offset = table.offset();
    let old = (table.get(0), table.get(1));
    changing.join().unwrap();
    if seen != 0 {
        assert_eq!(seen, l1::encode(Some(entry())));
        assert_eq!(is_complete, 1, "half an L2 table");
    }
    if len > INDEX {
        assert_eq!(offset, NEW_OFFSET);
    }
    assert_eq!(old, (OLD, 0));
    assert_eq!(table.get(INDEX), l1::encode(Some(entry())));
}

#[test]
fn a_reader_sees_an_entry_and_what_is_behind_it_while_the_table_grows() {
    check_fully(a_reader_of_a_growing_table);
}

#[test]
#[should_panic = "half an L2 table"]
fn entries_need_their_orderings() {
    check_weakened(Strength::Relaxed, a_reader_of_a_growing_table);
}

#[test]
fn a_change_is_staged_by_the_pass_or_by_the_next() {
    check(|| {
        let table = new_table();
        let changing = thread::spawn({
            let table = Arc::clone(&table);
            move || {
                table.set(1, Some(entry()));
                table.set(0, None);
            }
        });
        let mut disk = [OLD, 0];
        let mut pass = || {
            table.stage_dirty(|offset, bytes| {
                assert_eq!(offset, OLD_OFFSET);
                for (word, out) in bytes.chunks_exact(8).zip(&mut disk) {
                    *out = u64::from_be_bytes(word.try_into().unwrap());
                }
            });
            disk
        };
        let first = pass();
        assert!(first != [0, 0], "the second change without the first");
        changing.join().unwrap();
        assert_eq!(pass(), [0, l1::encode(Some(entry()))]);
        assert!(table.is_clean());
    });
}
