//! One writer after the other, one byte after the other.

use std::io::{IoSlice, Read, Seek, SeekFrom, Write};

use super::*;
use crate::error::ErrorKind;
use crate::test_file::{Event, direct_limits};

#[test]
fn a_stream_of_headers_and_pages_reads_back_on_every_geometry_and_file() {
    for (number, options) in (0..).zip(shapes()) {
        for (limits, jitter) in [
            (cached_limits(), 0),
            (direct_limits(512), 5),
            (direct_limits(4096), 2),
        ] {
            let file = TestFile::new(Vec::new(), limits).with_jitter(number, jitter);
            let bench = Bench::on(&options, file);
            bench.write(0, 100_000, 1);
            let stream = page_stream(number, 5 * MIB + 777);
            let save = bench.begin();
            let mut writer = save.writer(&bench.queue);
            block_on(async {
                for piece in pieces(&stream) {
                    writer.write(piece).await.unwrap();
                }
                writer.flush().await.unwrap();
            });
            drop(writer);
            bench.write(50_000, 100_000, 2);
            let disk = bench.disk();
            let snapshot = bench.finish(&save, "one").unwrap();
            assert_eq!(snapshot.vm_state_size, stream.len() as u64);
            bench.assert_state("one", &stream);
            assert!(bench.disk() == disk, "the disk is what it was");
            bench.close();
        }
    }
}

#[test]
fn unflushed_bytes_are_part_of_the_state() {
    let bench = Bench::new(&shapes()[0]);
    let save = bench.begin();
    let mut writer = save.writer(&bench.queue);
    block_on(writer.write(b"short")).unwrap();
    let snapshot = bench.finish(&save, "short").unwrap();
    assert_eq!(snapshot.vm_state_size, 5);
    let late = block_on(writer.write(b"late")).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::InvalidInput);
    let twice = bench.finish(&save, "twice").unwrap_err();
    assert_eq!(twice.kind(), ErrorKind::InvalidInput);
    drop(writer);
    bench.assert_state("short", b"short");
    bench.close();
}

#[test]
fn a_state_of_no_bytes_is_a_snapshot_of_the_disk() {
    let bench = Bench::new(&shapes()[0]);
    let save = bench.begin();
    assert_eq!(bench.finish(&save, "disk only").unwrap().vm_state_size, 0);
    assert_eq!(bench.state("disk only"), b"");
    drop(save);
    bench.close();
}

#[test]
fn a_disk_of_no_bytes_has_a_state_too() {
    for mut options in shapes() {
        options.size_bytes = 0;
        let bench = Bench::new(&options);
        let save = bench.begin();
        let stream = page_stream(1, MIB + 5);
        block_on(save.writer(&bench.queue).write_at(0, &stream)).unwrap();
        bench.finish(&save, "one").unwrap();
        bench.assert_state("one", &stream);
        drop(save);
        bench.close();
    }
}

#[test]
fn full_chunks_are_written_once_and_whole() {
    let file = TestFile::new(Vec::new(), direct_limits(4096));
    let bench = Bench::on(&shapes()[0], file);
    let stream = page_stream(3, 8 * MIB);
    let save = bench.begin();
    bench.file.forget_events();
    let mut writer = save.writer(&bench.queue);
    block_on(async {
        for piece in pieces(&stream) {
            writer.write(piece).await.unwrap();
        }
        writer.flush().await.unwrap();
    });
    drop(writer);
    let events = bench.file.events();
    let writes: Vec<u64> = events
        .iter()
        .filter_map(|event| match event {
            Event::Write { len, offset } if *len == MIB => Some(*offset),
            Event::Write { .. } | Event::Read { .. } => None,
            _ => None,
        })
        .collect();
    assert_eq!(writes.len(), 8, "{events:?}");
    let in_a_row = writes.windows(2).all(|two| two[0] + MIB as u64 == two[1]);
    assert!(in_a_row, "{writes:x?}");
    bench.finish(&save, "one").unwrap();
    bench.assert_state("one", &stream);
    drop(save);
    bench.close();
}

#[test]
fn full_chunks_stay_neither_in_memory_nor_in_buffers_of_the_queue() {
    let file = TestFile::new(Vec::new(), direct_limits(4096)).with_jitter(4, 4);
    let bench = Bench::on(&shapes()[0], file);
    let stream = page_stream(9, 13 * MIB + 5);
    let mut memory = bench.queue.pool.take(&bench.file, stream.len());
    memory.copy_from_slice(&stream);
    let save = bench.begin();
    let before = bench.file.buffers_made();
    let mut writer = save.writer(&bench.queue);
    block_on(writer.write(&memory[..8 * MIB])).unwrap();
    assert_eq!(save.open_chunks().len(), 0);
    // Not at the start of a chunk: the rest of it first.
    block_on(writer.write(&memory[8 * MIB..8 * MIB + 100])).unwrap();
    block_on(writer.write(&memory[8 * MIB + 100..])).unwrap();
    block_on(writer.flush()).unwrap();
    drop(writer);
    // One more for the header's sector, before the first change.
    assert!(bench.file.buffers_made() <= before + 2);
    bench.finish(&save, "one").unwrap();
    bench.assert_state("one", &stream);
    drop(save);
    bench.close();
}

#[test]
fn vectored_writes_take_any_number_of_parts() {
    let bench = Bench::new(&shapes()[4]);
    let stream = page_stream(2, 3 * MIB);
    let save = bench.begin();
    let mut writer = save.writer(&bench.queue);
    let parts: Vec<_> = pieces(&stream).map(IoSlice::new).collect();
    block_on(writer.write_vectored(&parts)).unwrap();
    assert_eq!(writer.position(), stream.len() as u64);
    drop(writer);
    bench.finish(&save, "one").unwrap();
    bench.assert_state("one", &stream);
    drop(save);
    bench.close();
}

#[test]
fn streams_of_the_standard_library_write_and_read_a_state() {
    let bench = Bench::new(&shapes()[0]);
    let stream = page_stream(5, 2 * MIB + 3);
    let save = bench.begin();
    let mut out = save.writer(&bench.queue).into_io(Polls);
    out.write_all(&stream).unwrap();
    out.seek(SeekFrom::Start(7)).unwrap();
    out.write_all(b"patched").unwrap();
    assert_eq!(out.seek(SeekFrom::End(0)).unwrap(), stream.len() as u64);
    assert!(
        out.seek(SeekFrom::Current(-(stream.len() as i64) - 1))
            .is_err()
    );
    out.flush().unwrap();
    drop(out);
    bench.finish(&save, "one").unwrap();
    let mut expected = stream.clone();
    expected[7..14].copy_from_slice(b"patched");
    let reader = block_on(VmStateReader::open(&bench.queue, "one")).unwrap();
    let mut input = reader.into_io(Polls);
    let mut state = Vec::new();
    input.read_to_end(&mut state).unwrap();
    assert!(state == expected);
    input.seek(SeekFrom::Start(8)).unwrap();
    let mut some = [0; 6];
    input.read_exact(&mut some).unwrap();
    assert_eq!(&some, b"atched");
    drop(input);
    bench.close();
}

#[test]
fn a_name_that_is_taken_leaves_the_state_to_be_finished_by_another() {
    let bench = Bench::new(&shapes()[5]);
    let save = bench.begin();
    bench.finish(&save, "taken").unwrap();
    let stream = page_stream(5, 2 * MIB + 3);
    let save = bench.begin();
    let mut writer = save.writer(&bench.queue);
    block_on(writer.write(&stream)).unwrap();
    block_on(writer.flush()).unwrap();
    bench.finish(&save, "taken").unwrap_err();
    block_on(writer.write(b"more")).unwrap();
    drop(writer);
    bench.finish(&save, "free").unwrap();
    bench.assert_state("free", &[&stream[..], b"more"].concat());
    drop(save);
    bench.close();
}

#[test]
fn readers_of_several_queues_may_seek() {
    let file = TestFile::new(Vec::new(), direct_limits(512)).with_jitter(8, 6);
    let bench = Bench::on(&shapes()[2], file);
    let stream = page_stream(6, 4 * MIB + 99);
    let save = bench.begin();
    block_on(save.writer(&bench.queue).write(&stream)).unwrap();
    bench.finish(&save, "one").unwrap();
    let other = bench.another_queue();
    let mut first = block_on(VmStateReader::open(&bench.queue, "1")).unwrap();
    let mut second = first.on(&other);
    let mut random = Random::new(7);
    for _ in 0..200 {
        let reader = if random.below(2) == 0 {
            &mut first
        } else {
            &mut second
        };
        if random.below(3) == 0 {
            reader.set_position(random.below(stream.len() as u64 + 1));
        }
        let at = reader.position() as usize;
        let mut piece = vec![0xaa; random.below(200_000) as usize];
        let count = block_on(reader.read(&mut piece)).unwrap();
        assert_eq!(count, piece.len().min(stream.len() - at));
        assert!(piece[..count] == stream[at..at + count], "at {at}");
    }
    assert_eq!(block_on(first.read_at(u64::MAX, &mut [0; 8])).unwrap(), 0);
    let held = block_on(bench.queue.delete_snapshot("one", &Job::default()));
    held.unwrap_err();
    drop((first, second));
    drop(other);
    drop(save);
    bench.close();
}

#[test]
fn a_state_is_read_from_an_image_that_is_open_read_only() {
    let mut bench = Bench::new(&shapes()[0]);
    let stream = page_stream(6, 2 * MIB + 99);
    let save = bench.begin();
    block_on(save.writer(&bench.queue).write(&stream)).unwrap();
    bench.finish(&save, "one").unwrap();
    drop(save);
    let read_only = OpenOptions {
        read_only: true,
        ..OpenOptions::new(References::Any)
    };
    bench.reopen(&read_only);
    bench.assert_state("one", &stream);
    let refused = VmStateSave::begin(bench.queue.image()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnly);
}
