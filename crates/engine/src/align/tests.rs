use std::future::Future;
use std::io::IoSliceMut;
use std::pin::Pin;

use gaur_block::{Registered, Segment};

use super::*;
use crate::test_file::{
    Event, Random, TestFile, block_on, cached_limits, direct_limits, run_shuffled,
};

fn pattern(len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| (index * 7 + index / 251) as u8 | 1)
        .collect()
}

/// Limits that between them take every way through this file.
fn all_limits() -> Vec<FileLimits> {
    let mut all = vec![
        cached_limits(),
        FileLimits {
            memory_alignment: 64,
            ..cached_limits()
        },
    ];
    all.push(FileLimits {
        max_transfer: 700,
        ..cached_limits()
    });
    for alignment in [512, 4096] {
        let direct = direct_limits(alignment);
        all.push(direct);
        all.push(FileLimits {
            max_transfer: alignment,
            ..direct
        });
        all.push(FileLimits {
            max_transfer: 3 * alignment,
            memory_alignment: 1,
            ..direct
        });
        all.push(FileLimits {
            request_alignment: alignment,
            memory_alignment: 4,
            ..direct
        });
    }
    all
}

#[test]
fn a_request_that_obeys_the_limits_reaches_the_file_as_it_is() {
    let file = TestFile::new(pattern(1 << 16), direct_limits(512));
    let (pool, locks) = (Pool::new(), SectorLocks::default());
    let mut buffer = file.buffer(4096);
    block_on(async {
        read(&file, &pool, 512, Target::memory(&mut buffer))
            .await
            .unwrap();
        write(&file, &pool, &locks, 1024, Source::memory(&buffer))
            .await
            .unwrap();
        let parts = [&buffer[2048..2560], &buffer[512..2048]].map(Segment::from);
        let source = Source::Memory(Segments::new(&parts));
        write(&file, &pool, &locks, 8192, source).await.unwrap();
    });
    let expected = [
        Event::Read {
            offset: 512,
            len: 4096,
        },
        Event::Write {
            offset: 1024,
            len: 4096,
        },
        Event::Write {
            offset: 8192,
            len: 2048,
        },
    ];
    assert_eq!(file.events(), expected);
    assert_eq!(file.buffers_made(), 1, "no detour");
}

#[test]
fn any_read_gives_the_bytes_of_the_file_and_zeros_past_its_end() {
    let bytes = pattern(20_000);
    for limits in all_limits() {
        let file = TestFile::new(bytes.clone(), limits);
        let pool = Pool::new();
        let mut random = Random::new(7);
        for _ in 0..300 {
            let (offset, len) = (random.below(21_000), random.below(9000) as usize);
            let skew = random.below(9) as usize;
            let mut memory = vec![0xee; len + skew];
            let cut = random.below(len as u64 + 1) as usize;
            let (head, tail) = memory[skew..].split_at_mut(cut);
            let mut parts = [head, &mut [], tail].map(IoSliceMut::new);
            let target = Target::Memory(SegmentsMut::from(&mut parts[..]));
            block_on(read(&file, &pool, offset, target)).unwrap();
            let expected: Vec<u8> = (offset as usize..offset as usize + len)
                .map(|index| bytes.get(index).copied().unwrap_or(0))
                .collect();
            assert!(
                memory[skew..] == expected,
                "read {offset} {len} under {limits:?}"
            );
        }
    }
}

#[test]
fn any_write_stores_its_bytes_and_leaves_all_others() {
    for limits in all_limits() {
        let mut model = pattern(20_480);
        let file = TestFile::new(model.clone(), limits);
        let (pool, locks) = (Pool::new(), SectorLocks::default());
        let mut random = Random::new(9);
        for round in 0..400_u32 {
            let offset = random.below(20_000);
            let len = random.below(9000.min(20_480 - offset) + 1);
            let (from, to) = (offset as usize, (offset + len) as usize);
            let skew = random.below(9) as usize;
            let memory: Vec<u8> = (0..len as usize + skew)
                .map(|at| at as u8 ^ round as u8)
                .collect();
            let data = &memory[skew..];
            model[from..to].copy_from_slice(data);
            let result = match round % 4 {
                0 | 1 => block_on(write(&file, &pool, &locks, offset, Source::memory(data))),
                2 => {
                    let (head, rest) = data.split_at(random.below(len + 1) as usize);
                    let (middle, tail) = rest.split_at(rest.len() / 3);
                    let parts = [head, middle, tail].map(Segment::from);
                    let source = Source::Memory(Segments::new(&parts));
                    block_on(write(&file, &pool, &locks, offset, source))
                }
                _ => {
                    model[from..to].fill(0);
                    block_on(write_zero_bytes(&file, &pool, &locks, offset..offset + len))
                }
            };
            result.unwrap();
            assert!(
                file.bytes() == model,
                "write {offset} {len} under {limits:?}"
            );
        }
    }
}

type Task<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// One writer of the test below: it stores its own value over its range in some way.
fn writer<'a>(
    file: &'a TestFile,
    pool: &'a Pool<TestFile>,
    locks: &'a SectorLocks,
    (range, value): (Range<u64>, u8),
    aligned_memory: bool,
) -> Task<'a> {
    Box::pin(async move {
        let len = (range.end - range.start) as usize;
        let result = match value {
            0 => write_zeroes(file, pool, locks, range, true).await,
            1 => discard(file, locks, range).await,
            _ => {
                let mut buffer = file.buffer(len + 1);
                buffer.fill(value);
                let skew = usize::from(!aligned_memory);
                let source = Source::memory(&buffer[skew..skew + len]);
                write(file, pool, locks, range.start, source).await
            }
        };
        result.unwrap();
    })
}

/// The reason for the locks: without them a block written back takes along bytes that another
/// write had just replaced.
#[test]
fn concurrent_writes_to_one_block_from_several_queues_never_undo_each_other() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let alignment = [512, 4096][random.below(2) as usize];
        let blocks = 4;
        let size = blocks * u64::from(alignment);
        let limits = FileLimits {
            max_transfer: alignment * (1 + random.below(4) as u32),
            ..direct_limits(alignment)
        };
        let file = TestFile::new(vec![0xff; size as usize], limits).with_jitter(seed, 3);
        let file = if seed % 3 == 0 {
            file.without_write_zeroes()
        } else {
            file
        };
        let (pools, locks) = ([Pool::new(), Pool::new()], SectorLocks::default());
        let writers: Vec<(Range<u64>, u8)> = (0..8)
            .map(|index| {
                let unit = [1, 1, u64::from(alignment)][random.below(3) as usize];
                let start = random.below(size / unit) * unit;
                let end = start + unit * (1 + random.below((size - start) / unit));
                (start..end, index)
            })
            .collect();
        let tasks = writers
            .iter()
            .map(|one| {
                let pool = &pools[random.below(2) as usize];
                writer(&file, pool, &locks, one.clone(), random.below(2) == 0)
            })
            .collect();
        run_shuffled(random, tasks);
        for (at, byte) in file.bytes().into_iter().enumerate() {
            let over = writers
                .iter()
                .filter(|(range, _)| range.contains(&(at as u64)));
            let allowed: Vec<u8> = over
                .map(|&(_, value)| if value == 1 { 0 } else { value })
                .collect();
            let kept = allowed.is_empty() && byte == 0xff;
            assert!(
                kept || allowed.contains(&byte),
                "seed {seed}: byte {at} is {byte}: {allowed:?}"
            );
        }
    }
}

#[test]
fn a_failed_read_of_an_edge_fails_the_write_and_frees_its_blocks() {
    let file = TestFile::new(pattern(8192), direct_limits(4096));
    let (pool, locks) = (Pool::new(), SectorLocks::default());
    file.fail_from(0, Errno::EIO);
    let result = block_on(write(&file, &pool, &locks, 10, Source::memory(&[1; 10])));
    assert_eq!(result, Err(Errno::EIO));
    assert_eq!(
        file.events(),
        [Event::Read {
            offset: 0,
            len: 4096
        }]
    );
    assert!(locks.enter().is_some());
}

#[test]
fn registered_memory_is_split_but_never_realigned() {
    let limits = FileLimits {
        max_transfer: 1024,
        ..direct_limits(512)
    };
    let file = TestFile::new(Vec::new(), limits);
    let (pool, locks) = (Pool::new(), SectorLocks::default());
    let registered = |len| {
        Source::Registered(Registered {
            index: 0,
            offset: 0,
            len,
        })
    };
    block_on(write(&file, &pool, &locks, 512, registered(2560))).unwrap();
    let pieces = [(512, 1024), (1536, 1024), (2560, 512)];
    let expected = pieces.map(|(offset, len)| Event::Write { offset, len });
    assert_eq!(file.events(), expected);
    assert_eq!(
        block_on(write(&file, &pool, &locks, 1, registered(512))),
        Err(Errno::EOPNOTSUPP)
    );
    let target = Target::Registered(Registered {
        index: 0,
        offset: 0,
        len: 100,
    });
    assert_eq!(
        block_on(read(&file, &pool, 0, target)),
        Err(Errno::EOPNOTSUPP)
    );
}

#[test]
fn empty_requests_do_nothing_and_ranges_past_the_end_of_numbers_are_refused() {
    for limits in all_limits() {
        let file = TestFile::new(Vec::new(), limits);
        let (pool, locks) = (Pool::new(), SectorLocks::default());
        block_on(async {
            read(&file, &pool, 3, Target::memory(&mut []))
                .await
                .unwrap();
            write(&file, &pool, &locks, 3, Source::memory(&[]))
                .await
                .unwrap();
            let nothing = Source::Memory(Segments::new(&[]));
            write(&file, &pool, &locks, 3, nothing).await.unwrap();
            write_zeroes(&file, &pool, &locks, 3..3, true)
                .await
                .unwrap();
            discard(&file, &locks, 3..3).await.unwrap();
        });
        assert_eq!(file.events(), []);
        let data = vec![1; 4096];
        let last = u64::MAX - 5;
        let result = block_on(write(&file, &pool, &locks, last, Source::memory(&data)));
        assert_eq!(result, Err(Errno::EFBIG));
    }
}

/// A guest with badly aligned memory had a buffer of 1 MiB for each request that its rings held.
#[test]
fn bounce_buffers_of_many_requests_have_a_limit_and_all_requests_end() {
    const REQUESTS: usize = 50;
    let file = TestFile::new(pattern(2 << 20), direct_limits(512)).with_jitter(3, 4);
    let (pool, locks) = (Pool::new(), SectorLocks::default());
    let mut memory = vec![vec![0; 1 << 20]; REQUESTS];
    let tasks = memory.iter_mut().enumerate().map(|(number, memory)| {
        let (file, pool, locks) = (&file, &pool, &locks);
        Box::pin(async move {
            let at = number as u64 * 100 + 1;
            let done = match number % 5 {
                0 => write(file, pool, locks, at, Source::memory(&memory[..700])).await,
                _ => read(file, pool, at, Target::memory(memory)).await,
            };
            done.unwrap();
        }) as Task<'_>
    });
    run_shuffled(Random::new(8), tasks.collect());
    // 16 MiB: those of reads of 1 MiB, and some short ones.
    assert!(
        file.buffers_made() <= 15 + REQUESTS / 5,
        "{}",
        file.buffers_made()
    );
}

#[test]
fn after_warm_up_nothing_is_allocated() {
    let file = TestFile::new(pattern(1 << 16), direct_limits(4096));
    let (pool, locks) = (Pool::new(), SectorLocks::default());
    let mut data = vec![5; 30_000];
    for _ in 0..20 {
        block_on(async {
            write(&file, &pool, &locks, 1000, Source::memory(&data))
                .await
                .unwrap();
            read(&file, &pool, 2000, Target::memory(&mut data))
                .await
                .unwrap();
        });
    }
    assert_eq!(file.buffers_made(), 1);
}
