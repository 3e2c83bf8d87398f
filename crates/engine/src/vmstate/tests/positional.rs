//! Several writers, each in places of its own.

use std::pin::Pin;

use super::*;
use crate::error::ErrorKind;
use crate::test_file::{direct_limits, run_shuffled};

/// Pieces of a state in some order: where each begins and ends.
fn layout(random: &mut Random, len: usize, holes: bool) -> Vec<(usize, usize)> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < len {
        let end = (at + 1 + random.below(9000) as usize).min(len);
        if !holes || random.below(4) > 0 {
            pieces.push((at, end));
        }
        at = end;
        if holes && random.below(60) == 0 {
            at += random.below(3 * MIB as u64) as usize;
        }
    }
    // Mixed, but as threads that go through memory would.
    for from in 0..pieces.len() {
        let window = (pieces.len() - from).min(50);
        pieces.swap(from, from + random.below(window as u64) as usize);
    }
    pieces
}

#[test]
fn writers_that_meet_inside_a_block_lose_no_bytes() {
    for (number, options) in (0..).zip(shapes()) {
        for holes in [false, true] {
            let file = TestFile::new(Vec::new(), direct_limits(512)).with_jitter(number, 4);
            let bench = Bench::on(&options, file);
            let mut random = Random::new(number + 1);
            let len = 4 * MIB + 1234;
            let stream = page_stream(number, len);
            let layout = layout(&mut random, len, holes);
            let mut expected = vec![0; layout.iter().map(|piece| piece.1).max().unwrap()];
            let save = bench.begin();
            let queues = [(); 3].map(|()| bench.another_queue());
            let mut tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
            for (lane, queue) in queues.iter().enumerate() {
                let mine: Vec<_> = layout.iter().skip(lane).step_by(3).copied().collect();
                let mut writer = save.writer(queue);
                let stream = &stream;
                tasks.push(Box::pin(async move {
                    for (at, end) in mine {
                        writer.write_at(at as u64, &stream[at..end]).await.unwrap();
                    }
                    writer.flush().await.unwrap();
                }));
            }
            run_shuffled(Random::new(number), tasks);
            for (at, end) in layout {
                expected[at..end].copy_from_slice(&stream[at..end]);
            }
            bench.finish(&save, "one").unwrap();
            bench.assert_state("one", &expected);
            drop((queues, save));
            bench.close();
        }
    }
}

#[test]
fn spilled_chunks_are_merged_on_disk() {
    let mut options = shapes()[3].clone();
    for extended_l2 in [false, true] {
        options.extended_l2 = extended_l2;
        options.cluster_bits = if extended_l2 { 14 } else { 12 };
        let file = TestFile::new(Vec::new(), cached_limits()).with_jitter(3, 3);
        let bench = Bench::on(&options, file);
        let save = bench.begin();
        let mut writer = save.writer(&bench.queue);
        let mut expected = vec![0; 100 * MIB];
        let mut random = Random::new(11);
        block_on(async {
            // Three rounds over a hundred chunks, each time beside what the last round wrote.
            for round in 0..3 {
                for chunk in 0..100 {
                    let at = chunk * MIB + 5000 + round * 999;
                    let byte = random.next() as u8 | 1;
                    expected[at..at + 999].fill(byte);
                    writer.write_at(at as u64, &[byte; 999]).await.unwrap();
                }
            }
            writer.flush().await.unwrap();
        });
        drop(writer);
        expected.truncate(99 * MIB + 5000 + 3 * 999);
        bench.finish(&save, "one").unwrap();
        bench.assert_state("one", &expected);
        drop(save);
        assert!(bench.file.bytes().len() < 70 * MIB, "holes take no space");
        bench.close();
    }
}

#[test]
fn bytes_for_a_chunk_in_flight_wait_for_no_other_writer() {
    let file = TestFile::new(Vec::new(), direct_limits(4096)).with_jitter(3, 200);
    let bench = Bench::on(&shapes()[0], file);
    let other = bench.another_queue();
    let save = bench.begin();
    let mut expected = page_stream(1, 3 * MIB);
    let mut one = save.writer(&bench.queue);
    let mut two = save.writer(&other);
    block_on(async {
        // The first writer is not polled from here on.
        one.write(&expected).await.unwrap();
        two.write_at(MIB as u64 + 17, b"patched").await.unwrap();
        two.flush().await.unwrap();
        // Neither does it keep the guest from its disk.
        bench.write(1000, 100, 7);
        bench.write(70_000, 100, 8);
    });
    expected[MIB + 17..MIB + 24].copy_from_slice(b"patched");
    let busy = bench.finish(&save, "too early").unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::InvalidInput);
    drop(one);
    bench.finish(&save, "one").unwrap();
    bench.assert_state("one", &expected);
    drop((two, save));
    drop(other);
    bench.close();
}

#[test]
fn what_was_written_and_flushed_can_be_written_again() {
    for options in shapes() {
        let file = TestFile::new(Vec::new(), direct_limits(512)).with_jitter(3, 3);
        let bench = Bench::on(&options, file);
        let save = bench.begin();
        let mut expected = page_stream(1, 3 * MIB + 100);
        let mut writer = save.writer(&bench.queue);
        let mut random = Random::new(8);
        block_on(async {
            writer.write(&expected).await.unwrap();
            for round in 0..60_u64 {
                let at = random.below(expected.len() as u64 - 5000) as usize;
                let end = at + 1 + random.below(5000) as usize;
                expected[at..end].fill(round as u8);
                let bytes = vec![round as u8; end - at];
                writer.write_at(at as u64, &bytes).await.unwrap();
                if round % 7 == 0 {
                    writer.flush().await.unwrap();
                }
            }
        });
        drop(writer);
        bench.finish(&save, "one").unwrap();
        bench.assert_state("one", &expected);
        drop(save);
        bench.close();
    }
}

#[test]
fn a_state_may_end_with_a_hole() {
    for options in shapes() {
        let bench = Bench::new(&options);
        let save = bench.begin();
        block_on(save.writer(&bench.queue).write_at(70_000, b"page")).unwrap();
        save.extend_to(9_999_999).unwrap();
        save.extend_to(5).unwrap();
        bench.finish(&save, "one").unwrap();
        let mut expected = vec![0; 9_999_999];
        expected[70_000..70_004].copy_from_slice(b"page");
        bench.assert_state("one", &expected);
        drop(save);
        bench.close();
    }
}

#[test]
fn a_state_longer_than_an_l1_table_allows_is_refused_at_once() {
    let mut options = shapes()[2].clone();
    options.size_bytes = 1 << 30;
    let bench = Bench::new(&options);
    let save = bench.begin();
    let mut writer = save.writer(&bench.queue);
    let room = (4 << 20) * (32 << 10) - (1 << 30);
    let beyond = block_on(writer.write_at(room, b"x")).unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::InvalidInput);
    assert_eq!(
        block_on(writer.write_at(u64::MAX, b"x"))
            .unwrap_err()
            .kind(),
        ErrorKind::InvalidInput
    );
    block_on(writer.write_at(room - 1, b"x")).unwrap();
    drop(writer);
    block_on(save.abort(&bench.queue));
    drop(save);
    bench.close();
}

#[test]
fn positions_beyond_4_gib_are_positions() {
    let bench = Bench::new(&shapes()[0]);
    let save = bench.begin();
    let far = (5_u64 << 30) + 3;
    let mut writer = save.writer(&bench.queue);
    block_on(writer.write_at(far, b"far")).unwrap();
    drop(writer);
    assert_eq!(bench.finish(&save, "one").unwrap().vm_state_size, far + 3);
    let reader = block_on(VmStateReader::open(&bench.queue, "one")).unwrap();
    let mut bytes = [9; 8];
    let count = block_on(reader.read_at(far - 5, &mut bytes)).unwrap();
    assert_eq!((count, &bytes), (8, b"\0\0\0\0\0far"));
    drop(reader);
    drop(save);
    bench.close();
}

#[test]
fn snapshots_come_and_go_beside_a_state_that_is_being_written() {
    // Large clusters want a longer file than these are.
    let shapes = shapes().into_iter().filter(|one| one.cluster_bits <= 16);
    for (number, options) in (0..).zip(shapes) {
        for seed in 0..4 {
            let file = TestFile::new(Vec::new(), cached_limits()).with_jitter(seed, 6);
            let bench = Bench::on(&options, file);
            bench.write(0, 500_000, 1);
            let (one, two) = (bench.another_queue(), bench.another_queue());
            let stream = page_stream(number, 5 * MIB + 77);
            let save = bench.begin();
            let job = Job::default();
            let mut writer = save.writer(&bench.queue);
            let tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = vec![
                Box::pin(async {
                    for piece in stream.chunks(100_000) {
                        writer.write(piece).await.unwrap();
                    }
                    writer.flush().await.unwrap();
                }),
                Box::pin(async {
                    for _ in 0..3 {
                        one.create_snapshot(&named("beside"), &job).await.unwrap();
                        one.delete_snapshot("beside", &job).await.unwrap();
                    }
                    one.create_snapshot(&named("stays"), &job).await.unwrap();
                }),
                Box::pin(async {
                    for at in 0..20_u64 {
                        let request = Request::Write {
                            offset_bytes: at * 70_000,
                            fua: at % 5 == 0,
                        };
                        let payload = Payload::Write(Source::memory(&[9; 3000]));
                        two.submit(request, payload).await.unwrap();
                    }
                }),
            ];
            run_shuffled(Random::new(seed + 10 * number), tasks);
            drop(writer);
            let disk = bench.disk();
            bench.finish(&save, "one").unwrap();
            bench.assert_state("one", &stream);
            assert!(bench.disk() == disk);
            drop((one, two, save));
            bench.close();
        }
    }
}
