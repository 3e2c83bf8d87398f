//! What `gaur_block::File` promises, tried on a real file; the same for every host.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::IoSliceMut;

use gaur_block::{Errno, File, Segment, Segments, SegmentsMut, Source, Target};

/// A pattern in which every byte tells its place.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let step = |state: &mut u64| {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 24) as u8
    };
    (0..len).map(|_| step(&mut state)).collect()
}

/// Reads into memory as the file wants it.
pub async fn read<F: File>(file: &F, offset: u64, len: usize) -> Vec<u8> {
    let mut buffer = file.buffer(len);
    buffer.fill(0xee);
    file.read_at(offset, Target::memory(&mut buffer))
        .await
        .expect("the read succeeds");
    buffer.to_vec()
}

/// Writes from memory as the file wants it.
pub async fn write<F: File>(file: &F, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
    let mut buffer = file.buffer(bytes.len());
    buffer.copy_from_slice(bytes);
    file.write_at(offset, Source::memory(&buffer)).await
}

/// What a writable file of at least 1 MiB owes. `unit` divides every offset and length used.
pub async fn transfers<F: File>(file: &F, unit: usize) {
    let limits = file.limits();
    assert_eq!(unit % limits.request_alignment as usize, 0);
    assert!(limits.memory_alignment.is_power_of_two());
    assert_eq!(limits.max_transfer % limits.request_alignment, 0);
    assert_eq!(
        file.buffer(unit).as_ptr() as usize % limits.memory_alignment as usize,
        0
    );
    assert!(file.id().is_some());

    let bytes = pattern(1, 128 * unit);
    write(file, unit as u64, &bytes).await.unwrap();
    assert_eq!(read(file, unit as u64, bytes.len()).await, bytes);
    assert_eq!(
        read(file, 5 * unit as u64, unit).await,
        bytes[4 * unit..5 * unit]
    );
    file.flush().await.unwrap();

    let mut first = file.buffer(unit);
    let mut second = file.buffer(3 * unit);
    first.copy_from_slice(&pattern(2, unit));
    second.copy_from_slice(&pattern(3, 3 * unit));
    let parts = [&first[..], &second[..], &first[..]].map(Segment::from);
    let source = Source::Memory(Segments::new(&parts));
    file.write_at(2 * unit as u64, source).await.unwrap();
    let expected = [&first[..], &second[..], &first[..]].concat();
    assert_eq!(read(file, 2 * unit as u64, 5 * unit).await, expected);

    // More pieces than the kernel takes at once, of which the second call takes a part.
    let many: Vec<_> = (0..1500).map(|_| Segment::from(&first[..])).collect();
    let source = Segments::new(&many).split_at(1400 * unit).0;
    file.write_at(0, Source::Memory(source)).await.unwrap();
    let last = 1399 * unit as u64;
    assert_eq!(read(file, last, unit).await, first[..]);
    let nothing = Source::Memory(Segments::new(&[]));
    assert_eq!(file.write_at(0, nothing).await, Ok(()));
    scattered_reads(file, unit).await;
    assert_eq!(write(file, u64::MAX - 10, &bytes).await, Err(Errno::EINVAL));
}

/// Reads into many pieces of memory, the last of which the file ends in.
async fn scattered_reads<F: File>(file: &F, unit: usize) {
    if !file.limits().resizable {
        return;
    }
    let bytes = pattern(5, 1500 * unit);
    write(file, 0, &bytes).await.unwrap();
    file.set_len(bytes.len() as u64).await.unwrap();
    let mut buffers: Vec<_> = (0..1500).map(|_| file.buffer(2 * unit)).collect();
    for buffer in &mut buffers {
        buffer.fill(0xee);
    }
    let pieces = buffers
        .iter_mut()
        .map(|one| IoSliceMut::new(&mut one[..unit]));
    let mut list: Vec<_> = pieces.collect();
    let target = Target::Memory(SegmentsMut::from(&mut list[..]));
    file.read_at(2 * unit as u64, target).await.unwrap();
    let found: Vec<u8> = list
        .iter()
        .flat_map(|piece| piece.iter().copied())
        .collect();
    assert_eq!(found[..1498 * unit], bytes[2 * unit..]);
    assert!(found[1498 * unit..].iter().all(|byte| *byte == 0));
    assert!(
        buffers
            .iter()
            .all(|one| one[unit..].iter().all(|byte| *byte == 0xee))
    );
}

/// Zeroing and discarding of ranges that end anywhere, against a model of the content.
pub async fn zeroing<F: File>(file: &F, unit: usize) {
    let len = 64 * 4096;
    let mut model = pattern(4, len);
    write(file, 0, &model).await.unwrap();
    let ranges = [
        (0, 1),
        (unit, unit),
        (3 * 4096 + 7, 1),
        (5 * 4096 - 3, 6),
        (7 * 4096 + 100, 3 * 4096),
        (20 * 4096 + 1, 4094),
        (24 * 4096, 8 * 4096),
        (40 * 4096 - 1, 4096 + 2),
        (50 * 4096 + 500, 13),
        (60 * 4096 + 1000, 0),
        (63 * 4096 + 4095, 1),
    ];
    for (index, (offset, len)) in ranges.into_iter().enumerate() {
        let may_unmap = index % 2 == 0;
        match file
            .write_zeroes_at(offset as u64, len as u64, may_unmap)
            .await
        {
            Ok(()) => model[offset..offset + len].fill(0),
            Err(errno) => assert_eq!(errno, Errno::EOPNOTSUPP, "range {offset}+{len}"),
        }
        assert!(
            read(file, 0, model.len()).await == model,
            "after zeroing {offset}+{len}"
        );
    }
    if file.limits().discard_zeroes {
        file.discard_at(32 * 4096 + 10, 2 * 4096).await.unwrap();
        model[32 * 4096 + 10..34 * 4096 + 10].fill(0);
        assert!(
            read(file, 0, model.len()).await == model,
            "after discarding"
        );
    } else {
        let _ = file.discard_at(32 * 4096 + 10, 2 * 4096).await;
    }
}

/// The end of a regular file: reads past it are zeros, `set_len` gives zeros, extents stop there.
pub async fn ends<F: File>(file: &F, unit: usize) {
    file.set_len(0).await.unwrap();
    assert_eq!(file.len().await, Ok(0));
    assert!(read(file, 0, unit).await.iter().all(|byte| *byte == 0));

    let bytes = pattern(5, 3 * unit);
    write(file, 0, &bytes).await.unwrap();
    assert_eq!(file.len().await, Ok(3 * unit as u64));
    let expected = [&bytes[unit..], &vec![0; 6 * unit]].concat();
    assert_eq!(read(file, unit as u64, 8 * unit).await, expected);
    assert!(
        read(file, 100 * unit as u64, unit)
            .await
            .iter()
            .all(|byte| *byte == 0)
    );

    // A length that is no multiple of anything.
    file.set_len(2 * unit as u64 + 77).await.unwrap();
    let expected = [&bytes[..2 * unit + 77], &vec![0; 2 * unit - 77]].concat();
    assert_eq!(read(file, 0, 4 * unit).await, expected);

    file.set_len(1 << 20).await.unwrap();
    let tail = read(file, 2 * unit as u64, 2 * unit).await;
    assert_eq!(tail[..77], bytes[2 * unit..2 * unit + 77]);
    assert!(tail[77..].iter().all(|byte| *byte == 0));

    // The run of data ends somewhere, and a hole reaches the end of the file.
    let data = file.extent_at(0).await.unwrap();
    assert!(data.data && data.len >= 2 * unit as u64 + 77);
    let hole = file.extent_at((1 << 20) - 4096).await.unwrap();
    assert_eq!((hole.len, hole.data), (4096, false));
    assert_eq!(file.extent_at(1 << 20).await, Err(Errno::EINVAL));

    // Taking space changes neither the length nor a byte.
    match file.allocate_at(unit as u64, (2 << 20) - unit as u64).await {
        Ok(()) => {}
        Err(errno) => assert_eq!(errno, Errno::EOPNOTSUPP),
    }
    assert_eq!(file.len().await, Ok(1 << 20));
    let expected = [&bytes[..2 * unit + 77], &vec![0; (1 << 20) - 2 * unit - 77]].concat();
    assert!(read(file, 0, 1 << 20).await == expected);
}
