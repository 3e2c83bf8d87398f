//! Clusters: whose they are after an end of any sort, and what is in those that were used before.

use gaur_block::Errno;

use super::*;
use crate::error::ErrorKind;
use crate::test_file::Event;

#[test]
fn abort_leaves_nothing_behind() {
    for options in shapes() {
        for by_drop in [false, true] {
            let bench = Bench::new(&options);
            bench.write(0, 300_000, 1);
            let disk = bench.disk();
            let save = bench.begin();
            let mut writer = save.writer(&bench.queue);
            block_on(writer.write(&page_stream(1, 3 * MIB + 5))).unwrap();
            if by_drop {
                drop(writer);
            } else {
                block_on(writer.flush()).unwrap();
                block_on(save.abort(&bench.queue));
                let late = block_on(writer.write(b"late")).unwrap_err();
                assert_eq!(late.kind(), ErrorKind::InvalidInput);
                drop(writer);
            }
            drop(save);
            assert!(bench.disk() == disk);
            assert_eq!(block_on(bench.queue.snapshots()).unwrap().len(), 0);
            bench.write(100_000, 300_000, 2);
            bench.close();
        }
    }
}

#[test]
fn abort_frees_space_only_after_writes_in_flight() {
    let file = TestFile::new(Vec::new(), cached_limits()).with_jitter(3, 200);
    let bench = Bench::on(&shapes()[0], file);
    let other = bench.another_queue();
    let save = bench.begin();
    let mut writer = save.writer(&other);
    block_on(writer.write(&page_stream(1, 4 * MIB))).unwrap();
    block_on(save.abort(&bench.queue));
    bench.write(0, 2 * MIB, 3);
    let disk = bench.disk();
    let _ = block_on(writer.flush());
    drop(writer);
    drop(save);
    assert!(bench.disk() == disk, "no write came late");
    drop(other);
    bench.close();
}

#[test]
fn holes_in_reused_clusters_read_as_zeros() {
    for options in shapes() {
        let mut bench = Bench::new(&options);
        let keep = OpenOptions {
            discard: false,
            ..OpenOptions::new(References::Any)
        };
        bench.reopen(&keep);
        let save = bench.begin();
        block_on(save.writer(&bench.queue).write(&vec![0xee; 4 * MIB])).unwrap();
        bench.finish(&save, "old").unwrap();
        drop(save);
        block_on(bench.queue.delete_snapshot("old", &Job::default())).unwrap();
        let save = bench.begin();
        let mut writer = save.writer(&bench.queue);
        let mut expected = vec![0; 3 * MIB];
        for at in (0..3 * MIB - 100).step_by(300_000) {
            expected[at..at + 100].fill(7);
            block_on(writer.write_at(at as u64, &[7; 100])).unwrap();
        }
        drop(writer);
        save.extend_to(3 * MIB as u64).unwrap();
        bench.finish(&save, "new").unwrap();
        bench.assert_state("new", &expected);
        drop(save);
        bench.close();
    }
}

#[test]
fn a_file_that_cannot_grow_is_a_clear_error_and_giving_up_gives_all_of_it_back() {
    for options in shapes() {
        let mut bench = Bench::new(&options);
        bench.write(0, 100_000, 1);
        let save = bench.begin();
        let mut writer = save.writer(&bench.queue);
        let piece = vec![5; MIB];
        // The file takes 80 MiB.
        let results = (0..100).map(|_| block_on(writer.write(&piece)));
        let error = results.into_iter().find_map(Result::err).unwrap();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error:#}");
        let unfinished = bench.finish(&save, "no").map(|_| ());
        drop(writer);
        let unfinished = unfinished.and_then(|()| bench.finish(&save, "no").map(|_| ()));
        unfinished.unwrap_err();
        block_on(save.abort(&bench.queue));
        drop(save);
        bench = bench.next_process();
        let save = bench.begin();
        block_on(save.writer(&bench.queue).write(&piece)).unwrap();
        bench.finish(&save, "yes").unwrap();
        bench.assert_state("yes", &piece);
        drop(save);
        bench.close();
    }
}

#[test]
fn failed_writes_are_reported_later_and_repeated_at_finish() {
    let file = TestFile::new(Vec::new(), cached_limits()).with_jitter(5, 5);
    let bench = Bench::on(&shapes()[0], file);
    let save = bench.begin();
    let mut writer = save.writer(&bench.queue);
    let stream = page_stream(4, 20 * MIB);
    block_on(writer.write(&stream[..5 * MIB])).unwrap();
    let after = bench.file.events().len();
    bench.file.fail_from(after, Errno::EIO);
    let mut at = 5 * MIB;
    let failed = loop {
        match block_on(writer.write_at(at as u64, &stream[at..at + MIB / 2])) {
            Ok(()) => at += MIB / 2,
            Err(error) => break error,
        }
    };
    assert_eq!(failed.kind(), ErrorKind::Io);
    assert!(format!("{failed:#}").contains("state of the machine"));
    bench.file.fail_from(usize::MAX, Errno::EIO);
    block_on(writer.write_at(at as u64, &stream[at..])).unwrap();
    let _ = block_on(writer.flush());
    drop(writer);
    bench.finish(&save, "one").unwrap();
    bench.assert_state("one", &stream);
    drop(save);
    bench.close();
}

#[test]
fn beneath_holes_the_backing_file_does_not_show() {
    for options in shapes() {
        let backing = TestFile::new(vec![0xbb; 40 * MIB], cached_limits());
        let options = CreateOptions {
            backing_file: Some(b"base".to_vec()),
            backing_format: Some("raw".to_owned()),
            ..options.clone()
        };
        let file = TestFile::new(Vec::new(), cached_limits());
        let bench = Bench::over(&options, file, Some(backing));
        let save = bench.begin();
        let mut expected = vec![0; 33 * MIB];
        expected[3 * MIB + 5..3 * MIB + 9].fill(4);
        let mut writer = save.writer(&bench.queue);
        block_on(writer.write_at(3 * MIB as u64 + 5, &[4; 4])).unwrap();
        drop(writer);
        save.extend_to(33 * MIB as u64).unwrap();
        bench.finish(&save, "one").unwrap();
        bench.assert_state("one", &expected);
        drop(save);
        bench.close();
    }
}

#[test]
fn finish_is_the_first_reference_to_a_state_on_disk() {
    let bench = Bench::new(&shapes()[0]);
    bench.write(0, 100_000, 1);
    let flush = bench.queue.submit(Request::Flush, Payload::None);
    block_on(flush).unwrap();
    let header = bench.file.bytes()[..104].to_vec();
    let save = bench.begin();
    let mut writer = save.writer(&bench.queue);
    block_on(writer.write(&page_stream(1, 6 * MIB))).unwrap();
    block_on(writer.flush()).unwrap();
    drop(writer);
    assert_eq!(bench.file.bytes()[..104], header);
    bench.file.forget_events();
    bench.finish(&save, "one").unwrap();
    let events = bench.file.events();
    let switch = events.iter().position(
        |event| matches!(event, Event::Write { offset, len } if *offset < 104 && *len <= 512),
    );
    let switch = switch.unwrap();
    let flush_before = events[..switch]
        .iter()
        .rposition(|one| *one == Event::Flush);
    let write_before = events[..switch]
        .iter()
        .rposition(|one| matches!(one, Event::Write { .. }));
    assert!(flush_before > write_before, "what it leads to is durable");
    drop(save);
    bench.close();
}

#[test]
fn unused_reservations_make_no_file_longer() {
    for options in shapes() {
        let bench = Bench::new(&options);
        let save = bench.begin();
        let stream = page_stream(1, 5 * MIB);
        block_on(save.writer(&bench.queue).write(&stream)).unwrap();
        bench.finish(&save, "one").unwrap();
        drop(save);
        let bench = bench.next_process();
        let clusters = 40 << options.cluster_bits;
        let most = stream.len() + (stream.len() / 16).max(clusters);
        assert!(
            bench.file.bytes().len() < most,
            "{}",
            bench.file.bytes().len()
        );
        bench.assert_state("one", &stream);
        bench.close();
    }
}
