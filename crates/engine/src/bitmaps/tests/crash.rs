//! What a process that was killed leaves: bitmaps in use, and the write-intent map that says what they lack.

use super::*;
use crate::error::ErrorKind;
use crate::test_file::{Event, direct_limits};

/// Bytes of a region of the map, for a disk of [`SIZE`].
const REGION: u64 = 128 << 10;
const MAP: &str = "gaur-write-intent-map";

/// The directory: names, and whether they are in use.
fn in_use(file: &TestFile) -> Vec<(String, bool)> {
    let entries = directory(file).into_iter();
    let entry = |one: Bitmap| (one_name(&one), one.has(bitmap::IN_USE));
    entries.map(entry).collect()
}

fn one_name(one: &Bitmap) -> String {
    String::from_utf8_lossy(&one.name).into_owned()
}

fn list(entries: &[(&str, bool)]) -> Vec<(String, bool)> {
    let entries = entries.iter();
    entries
        .map(|(name, in_use)| ((*name).to_owned(), *in_use))
        .collect()
}

fn inconsistent(queue: &Queue<TestFile>) -> Vec<bool> {
    let facts = block_on(queue.bitmaps()).unwrap();
    facts.iter().map(|one| one.is_inconsistent).collect()
}

#[test]
fn bitmaps_of_a_killed_process_have_the_regions_it_wrote_to() {
    for limits in [cached_limits(), direct_limits(4096)] {
        let file = TestFile::new(Vec::new(), limits);
        block_on(create(&file, &small(), &Job::default())).unwrap();
        let host = host_of(&file);
        let queue = opened(&host);
        change(&queue, "on", &[ADD]).unwrap();
        change(&queue, "off", &[ADD, BitmapAction::Disable]).unwrap();
        assert_eq!(in_use(&file), list(&[("on", false), ("off", false)]));
        write(&queue, 0, SECTOR);
        let expected = list(&[(MAP, false), ("on", true), ("off", false)]);
        assert_eq!(in_use(&file), expected, "before the disk was changed");
        write(&queue, 5 * REGION + SECTOR, SECTOR);
        drop(queue);
        let queue = opened(&host);
        assert_eq!(blocks(&queue, "on", 65536), BTreeSet::from([0, 1, 10, 11]));
        assert!(blocks(&queue, "off", 65536).is_empty());
        assert_eq!(inconsistent(&queue), [false, false]);
        // A second crash adds the second process's regions.
        write(&queue, SIZE - SECTOR, SECTOR);
        drop(queue);
        let queue = opened(&host);
        let found = BTreeSet::from([0, 1, 10, 11, 46, 47]);
        assert_eq!(blocks(&queue, "on", 65536), found);
        // What is stored from here on needs no map.
        change(&queue, "off", &[BitmapAction::Clear]).unwrap();
        assert_eq!(in_use(&file), list(&[("on", false), ("off", false)]));
        block_on(queue.close()).unwrap();
        assert_eq!(blocks(&opened(&host), "on", 65536), found);
    }
}

#[test]
fn a_recovered_bitmap_that_is_disabled_keeps_its_regions() {
    let (host, file) = after(|_, _| {});
    let queue = opened(&host);
    change(&queue, "on", &[BitmapAction::Disable]).unwrap();
    write(&queue, SIZE / 2, SECTOR);
    block_on(queue.close()).unwrap();
    assert_eq!(in_use(&file), list(&[("on", false), ("off", false)]));
    assert_eq!(blocks(&opened(&host), "on", 65536), BTreeSet::from([0, 1]));
}

/// A killed process' image, with one block written, after another program did something to it.
fn after(edit: impl Fn(&mut Vec<u8>, &Header)) -> (TestHost, TestFile) {
    let (host, file) = image(&small());
    let queue = opened(&host);
    change(&queue, "on", &[ADD]).unwrap();
    change(&queue, "off", &[ADD, BitmapAction::Disable]).unwrap();
    write(&queue, 0, SECTOR);
    drop(queue);
    let mut bytes = file.bytes();
    let header = Header::parse(&bytes).unwrap();
    edit(&mut bytes, &header);
    let file = TestFile::new(bytes, cached_limits());
    (host_of(&file), file)
}

/// Gives the first entry of the directory, the map, other flags.
fn flag_map(bytes: &mut [u8], header: &Header, flags: u32) {
    let at = header.bitmaps().unwrap().directory_offset.0 + bitmap::FLAGS_AT;
    bytes[at as usize..][..4].copy_from_slice(&flags.to_be_bytes());
}

#[test]
fn bitmaps_are_inconsistent_where_another_program_did_not_keep_the_map() {
    for flags in [bitmap::IN_USE | bitmap::AUTO, bitmap::IN_USE, 0] {
        let (host, file) = after(|bytes, header| flag_map(bytes, header, flags));
        let queue = opened(&host);
        assert_eq!(inconsistent(&queue), [true, false], "and no map is shown");
        for action in [BitmapAction::Clear, BitmapAction::Enable, named("off")] {
            let refused = change(&queue, "on", &[action]).unwrap_err();
            assert!(
                refused.to_string().contains("can only be removed"),
                "{refused}"
            );
        }
        let refused = change(&queue, "off", &[named("on")]).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Corrupt);
        write(&queue, 0, SECTOR);
        change(&queue, "on", &[BitmapAction::Remove, ADD]).unwrap();
        write(&queue, SIZE - SECTOR, SECTOR);
        block_on(queue.close()).unwrap();
        assert_eq!(in_use(&file), list(&[("off", false), ("on", false)]));
        let queue = opened(&host);
        assert_eq!(blocks(&queue, "on", 65536), BTreeSet::from([47]));
        assert!(blocks(&queue, "off", 65536).is_empty());
    }
    // One that knows no bitmaps clears the bit of the bitmaps.
    let (host, _) = after(|bytes, _| bytes[95] &= !1);
    assert!(inconsistent(&opened(&host)).is_empty());
}

#[test]
fn a_map_vouches_for_no_bitmap_that_was_inconsistent_before() {
    let (host, file) =
        after(|bytes, header| flag_map(bytes, header, bitmap::IN_USE | bitmap::AUTO));
    let queue = opened(&host);
    change(&queue, "off", &[BitmapAction::Enable]).unwrap();
    write(&queue, SIZE / 2, SECTOR);
    let expected = list(&[("on", true), (MAP, false), ("off", true)]);
    assert_eq!(in_use(&file), expected);
    drop(queue);
    let queue = opened(&host);
    assert_eq!(inconsistent(&queue), [true, false]);
    assert_eq!(blocks(&queue, "off", 65536), BTreeSet::from([24, 25]));
    let refused = change(&queue, MAP, &[ADD]).unwrap_err();
    assert!(refused.to_string().contains("write-intent"), "{refused}");
}

/// A map of small regions has no room for the disk that it becomes.
#[test]
fn a_resize_that_the_map_has_no_room_for_gets_another() {
    let options = CreateOptions {
        cluster_bits: 9,
        size_bytes: 1 << 20,
        ..small()
    };
    let (host, file) = image(&options);
    let queue = opened(&host);
    change(&queue, "a", &[add(1 << 20)]).unwrap();
    write(&queue, 0, SECTOR);
    let map = |file: &TestFile| directory(file)[0].clone();
    let small = map(&file);
    block_on(queue.resize(300 << 20, true, &Job::default())).unwrap();
    let large = map(&file);
    assert!(large.is_write_intent_map() && large.is_kept());
    assert!(large.granularity_bits > small.granularity_bits);
    // It is large enough for these.
    for size in [1 << 20, 300 << 20] {
        block_on(queue.resize(size, true, &Job::default())).unwrap();
        assert_eq!(map(&file), large);
    }
    write(&queue, 200 << 20, SECTOR);
    drop(queue);
    let queue = opened(&host);
    assert_eq!(blocks(&queue, "a", 1 << 20), (0..300).collect());
    block_on(queue.close()).unwrap();
    assert!(checked(&file).only_leaks());
}

#[test]
fn first_touch_of_a_whole_disk_takes_few_flushes() {
    let size = 64 << 30;
    let (host, file) = image(&CreateOptions {
        size_bytes: size,
        ..small()
    });
    let queue = opened(&host);
    change(&queue, "a", &[ADD]).unwrap();
    write(&queue, 0, SECTOR);
    file.forget_events();
    for region in 0..size >> 26 {
        write(&queue, region << 26, SECTOR);
    }
    let flushes = file.events();
    let flushes = flushes.iter().filter(|event| **event == Event::Flush);
    let flushes = flushes.count();
    assert!(flushes < 40, "{flushes} for 1024 regions");
    drop(queue);
    let queue = opened(&host);
    assert_eq!(blocks(&queue, "a", 65536).len() as u64, size >> 16);
}
