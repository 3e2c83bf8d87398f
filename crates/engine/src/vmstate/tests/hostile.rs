//! VM states written by other programs, and hostile ones.

use flate2::{Compress, Compression, FlushCompress};
use gaur_format::snapshot::{encode_table, parse_table};

use super::*;
use crate::error::ErrorKind;

/// An image with a state, and where the state's L2 table is in it.
fn saved(options: &CreateOptions, state: &[u8]) -> (Bench, usize) {
    let bench = Bench::new(options);
    let save = bench.begin();
    block_on(save.writer(&bench.queue).write(state)).unwrap();
    let snapshot = bench.finish(&save, "one").unwrap();
    let index = bench.queue.image().layers()[0]
        .qcow2
        .as_ref()
        .unwrap()
        .geometry
        .l1_entries_for(DISK);
    let at = (snapshot.l1_table_offset.0 + index * 8) as usize;
    let table = u64_at(&bench.file.bytes(), at) as usize;
    drop(save);
    (bench.next_process(), table)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The same image with some bytes changed, opened read-only.
fn changed(bench: &Bench, change: impl FnOnce(&mut Vec<u8>)) -> Bench {
    let mut bytes = bench.file.bytes();
    change(&mut bytes);
    let file = TestFile::new(bytes, cached_limits());
    let mut host = TestHost::default();
    host.add("disk", file.clone());
    let read_only = OpenOptions {
        read_only: true,
        ..OpenOptions::new(References::Any)
    };
    let queue = opened(&host, &read_only);
    Bench { host, file, queue }
}

fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// Changes the only snapshot's entry in the snapshot table.
fn edit(bytes: &mut [u8], edit: impl FnOnce(&mut Snapshot)) {
    let at = u64_at(bytes, 64) as usize;
    let geometry = gaur_format::header::Header::parse(bytes)
        .unwrap()
        .geometry();
    let (mut all, _) = parse_table(&bytes[at..], 1, &geometry).unwrap();
    edit(&mut all[0]);
    let table = encode_table(&all);
    bytes[at..at + table.len()].copy_from_slice(&table);
}

#[test]
fn clusters_of_every_kind_are_read() {
    let options = &shapes()[0];
    let stream = page_stream(3, 8 * 65536);
    let (bench, table) = saved(options, &stream);
    let plain = vec![0x5a; 65536];
    let mut packed = Vec::with_capacity(65536);
    Compress::new(Compression::best(), false)
        .compress_vec(&plain, &mut packed, FlushCompress::Finish)
        .unwrap();
    let mut expected = stream.clone();
    let changed = changed(&bench, |bytes| {
        // Zeros, zeros with space, nothing, a compressed cluster, two clusters swapped.
        put(bytes, table, 1);
        let second = u64_at(bytes, table + 8);
        put(bytes, table + 8, second | 1);
        put(bytes, table + 16, 0);
        let end = bytes.len() as u64;
        bytes.extend_from_slice(&packed);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        let sectors = (packed.len() as u64 - 1) / 512;
        put(bytes, table + 24, 1 << 62 | sectors << 54 | end);
        let (fifth, sixth) = (u64_at(bytes, table + 32), u64_at(bytes, table + 40));
        put(bytes, table + 32, sixth);
        put(bytes, table + 40, fifth);
    });
    expected[..3 * 65536].fill(0);
    expected[3 * 65536..4 * 65536].fill(0x5a);
    expected[4 * 65536..5 * 65536].copy_from_slice(&stream[5 * 65536..6 * 65536]);
    expected[5 * 65536..6 * 65536].copy_from_slice(&stream[4 * 65536..5 * 65536]);
    changed.assert_state("one", &expected);
}

#[test]
fn subclusters_of_every_kind_are_read() {
    let options = &shapes()[4];
    let stream = page_stream(3, 4 * 16384);
    let (bench, table) = saved(options, &stream);
    let changed = changed(&bench, |bytes| {
        // Every second subcluster is data, of the others half are zeros and half are nothing.
        put(
            bytes,
            table + 16 + 8,
            0x4444_4444 << 32 | 0x5555_5555 & !0x4444_4444,
        );
    });
    let mut expected = stream.clone();
    for sub in 0..32 {
        if 0x1111_1111_u32 >> sub & 1 == 0 {
            expected[16384 + sub * 512..16384 + (sub + 1) * 512].fill(0);
        }
    }
    changed.assert_state("one", &expected);
}

#[test]
fn sizes_beyond_the_l1_table_are_corruption() {
    let (bench, _) = saved(&shapes()[0], b"state");
    for size in [1 << 63, u64::MAX, (512 << 20) + 1] {
        let changed = changed(&bench, |bytes| edit(bytes, |one| one.vm_state_size = size));
        let error = block_on(VmStateReader::open(&changed.queue, "one")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:#}");
    }
    for size in [1 << 63, u64::MAX] {
        let changed = changed(&bench, |bytes| {
            edit(bytes, |one| one.disk_size = Some(size));
        });
        let error = block_on(VmStateReader::open(&changed.queue, "one")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:#}");
    }
}

#[test]
fn an_l1_table_outside_the_file_is_corruption_and_takes_no_memory() {
    let (bench, _) = saved(&shapes()[0], b"state");
    let changed = changed(&bench, |bytes| {
        edit(bytes, |one| {
            one.l1_table_offset.0 = 1 << 50;
            one.l1_size = 4 << 20;
            one.vm_state_size = 1 << 50;
        });
    });
    let error = block_on(VmStateReader::open(&changed.queue, "one")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:#}");
}

#[test]
fn corrupt_entries_are_errors() {
    for options in [&shapes()[0], &shapes()[4], &shapes()[2]] {
        let stream = page_stream(3, 4 * 65536);
        let (bench, table) = saved(options, &stream);
        let mut random = Random::new(5);
        for _ in 0..100 {
            let changed = changed(&bench, |bytes| {
                for _ in 0..1 + random.below(4) {
                    let at = table + 8 * random.below(8) as usize;
                    let flags = [0, 1, 1 << 62, 1 << 63, 3 << 62][random.below(5) as usize];
                    let value = random.next() >> random.below(64);
                    put(bytes, at, value & !511 | flags);
                }
            });
            let reader = block_on(VmStateReader::open(&changed.queue, "one")).unwrap();
            let mut out = vec![0; stream.len()];
            let result = block_on(reader.read_at(0, &mut out));
            assert!(result.is_err() || result.unwrap() == stream.len());
        }
    }
}
