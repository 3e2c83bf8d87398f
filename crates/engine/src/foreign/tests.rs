//! Images made here byte by byte, whole and damaged.

use gaur_block::{Device, Errno, Payload, Request, Target};
use gaur_foreign::Format;

use super::PAGES_MAX;
use crate::chain::open;
use crate::error::ErrorKind;
use crate::options::{Format as AnyFormat, OpenOptions};
use crate::queue::Queue;
use crate::references::References;
use crate::test_file::{Random, TestFile, TestHost, block_on, cached_limits, direct_limits};

/// Bytes of a block of most images here.
const BLOCK: usize = 4096;
/// Bytes of a block of VHDX, the smallest that it can have.
const BLOCK_VHDX: usize = 1 << 20;
/// Their blocks: which of those in the file each is, if any; some follow each other, some not.
const BLOCKS: [Option<usize>; 9] = [
    Some(2),
    Some(3),
    None,
    None,
    Some(0),
    Some(1),
    None,
    Some(4),
    Some(5),
];

/// An image, the disk that is in it, and where its metadata is.
struct Sample {
    format: Format,
    image: Vec<u8>,
    disk: Vec<u8>,
    block: usize,
    metadata: Vec<(usize, usize)>,
    /// Files besides the image, by name.
    more: Vec<(&'static str, Vec<u8>)>,
}

/// Bytes that tell which block of the file they are.
fn block(number: usize) -> Vec<u8> {
    block_of(number, BLOCK)
}

fn block_of(number: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (at / 7 + number * 31) as u8 | 1)
        .collect()
}

/// The disk, which ends inside its last block.
fn disk() -> Vec<u8> {
    disk_of(BLOCK)
}

fn disk_of(len: usize) -> Vec<u8> {
    let bytes = |number: &Option<usize>| number.map_or(vec![0; len], |n| block_of(n, len));
    let mut disk: Vec<u8> = BLOCKS.iter().flat_map(bytes).collect();
    disk.truncate(disk.len() - 1024);
    disk
}

fn put(image: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    image.resize(image.len().max(end), 0);
    image[at..end].copy_from_slice(bytes);
}

fn vdi() -> Sample {
    let mut image = Vec::new();
    for (at, value) in [
        (64, 0xbeda_107f_u32),
        (68, 0x0001_0001),
        (76, 1),
        (340, 512),
        (344, 1024),
        (360, 512),
        (368, disk().len() as u32),
        (376, BLOCK as u32),
        (384, BLOCKS.len() as u32),
        (508, 0),
    ] {
        put(&mut image, at, &value.to_le_bytes());
    }
    for (index, place) in BLOCKS.iter().enumerate() {
        let entry = place.map_or(u32::MAX - (index % 2) as u32, |place| place as u32);
        put(&mut image, 512 + 4 * index, &entry.to_le_bytes());
    }
    for number in 0..6 {
        put(&mut image, 1024 + number * BLOCK, &block(number));
    }
    Sample {
        format: Format::Vdi,
        image,
        disk: disk(),
        block: BLOCK,
        more: Vec::new(),
        metadata: vec![(64, 16), (340, 64), (512, 4 * BLOCKS.len())],
    }
}

fn with_checksum(mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
    let sum: u32 = bytes.iter().map(|byte| u32::from(*byte)).sum();
    bytes[at..at + 4].copy_from_slice(&(!sum).to_be_bytes());
    bytes
}

fn vhd_footer(kind: u32, data: u64) -> Vec<u8> {
    let mut footer = b"conectix\0\0\0\x02\0\x01\0\0".to_vec();
    put(&mut footer, 16, &data.to_be_bytes());
    put(&mut footer, 28, b"win ");
    put(&mut footer, 48, &(disk().len() as u64).to_be_bytes());
    put(&mut footer, 60, &kind.to_be_bytes());
    footer.resize(512, 0);
    with_checksum(footer, 64)
}

fn vhd_fixed() -> Sample {
    let image = [disk(), vhd_footer(2, u64::MAX)].concat();
    Sample {
        format: Format::Vhd,
        metadata: vec![(disk().len(), 512)],
        image,
        disk: disk(),
        block: BLOCK,
        more: Vec::new(),
    }
}

fn vhd_dynamic() -> Sample {
    let footer = vhd_footer(3, 512);
    let mut header = b"cxsparse".to_vec();
    put(&mut header, 16, &1536_u64.to_be_bytes());
    put(&mut header, 28, &(BLOCKS.len() as u32).to_be_bytes());
    put(&mut header, 32, &(BLOCK as u32).to_be_bytes());
    header.resize(1024, 0);
    let mut image = [footer.clone(), with_checksum(header, 36)].concat();
    // A sector with the map of a block's sectors stands before it.
    let start = |number: usize| 2048 + number * (BLOCK + 512);
    for (index, place) in BLOCKS.iter().enumerate() {
        let entry = place.map_or(u32::MAX, |place| (start(place) / 512) as u32);
        put(&mut image, 1536 + 4 * index, &entry.to_be_bytes());
    }
    for number in 0..6 {
        put(&mut image, start(number), &[0xff; 512]);
        put(&mut image, start(number) + 512, &block(number));
    }
    image.extend(footer);
    Sample {
        format: Format::Vhd,
        image,
        disk: disk(),
        block: BLOCK,
        more: Vec::new(),
        metadata: vec![(0, 1536), (1536, 4 * BLOCKS.len())],
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| crc >> 1 ^ (0x82f6_3b78 * (crc & 1));
    let add = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), step);
    !bytes.iter().fold(u32::MAX, add)
}

/// Checksums of the structures of a VHDX that begin like this.
fn repair_crcs(image: &mut [u8]) {
    for (start, len) in VHDX_CHECKED {
        if let Some(part) = image.get_mut(start..start + len) {
            part[4..8].fill(0);
            let sum = crc32c(part).to_le_bytes();
            part[4..8].copy_from_slice(&sum);
        }
    }
}

/// Headers, region tables, and the entry of a log.
const VHDX_CHECKED: [(usize, usize); 5] = [
    (64 << 10, 4096),
    (128 << 10, 4096),
    (192 << 10, 64 << 10),
    (256 << 10, 64 << 10),
    (LOG, 8192),
];

/// Where the log of a VHDX is, behind its blocks.
const LOG: usize = 16 << 20;

fn vhdx() -> Sample {
    let disk = disk_of(BLOCK_VHDX);
    let mut image = b"vhdxfile".to_vec();
    let (metadata, bat, data) = (1 << 20, 2 << 20, 3 << 20);
    for (at, sequence) in [(64 << 10, 7_u64), (128 << 10, 8)] {
        put(&mut image, at, b"head");
        put(&mut image, at + 8, &sequence.to_le_bytes());
        put(&mut image, at + 66, &[1, 0]);
    }
    let region = |guid: [u8; 16], offset: u64| {
        let place = [offset.to_le_bytes(), [0, 0, 16, 0, 1, 0, 0, 0]].concat();
        [guid.to_vec(), place].concat()
    };
    let regions = [
        region(
            *b"\x66\x77\xc2\x2d\x23\xf6\x00\x42\x9d\x64\x11\x5e\x9b\xfd\x4a\x08",
            bat,
        ),
        region(
            *b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e",
            metadata,
        ),
    ]
    .concat();
    for at in [192 << 10, 256 << 10] {
        put(&mut image, at, b"regi\0\0\0\0\x02");
        put(&mut image, at + 16, &regions);
    }
    let metadata = metadata as usize;
    put(&mut image, metadata, b"metadata\0\0\x03");
    let items: [([u8; 16], Vec<u8>); 3] = [
        (
            *b"\x37\x67\xa1\xca\x36\xfa\x43\x4d\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b",
            [(BLOCK_VHDX as u32).to_le_bytes(), [0; 4]].concat(),
        ),
        (
            *b"\x24\x42\xa5\x2f\x1b\xcd\x76\x48\xb2\x11\x5d\xbe\xd8\x3b\xf4\xb8",
            (disk.len() as u64).to_le_bytes().to_vec(),
        ),
        (
            *b"\x1d\xbf\x41\x81\x6f\xa9\x09\x47\xba\x47\xf2\x33\xa8\xfa\xab\x5f",
            512_u32.to_le_bytes().to_vec(),
        ),
    ];
    for (number, (guid, value)) in items.iter().enumerate() {
        let at = (64 << 10) + 16 * number;
        let entry = [&guid[..], &(at as u32).to_le_bytes(), &[8, 0, 0, 0, 4]].concat();
        put(&mut image, metadata + 32 + 32 * number, &entry);
        put(&mut image, metadata + at, value);
    }
    for (index, place) in BLOCKS.iter().enumerate() {
        let entry = place.map_or(index as u64 % 4, |place| (data + (place << 20) as u64) | 6);
        put(&mut image, bat as usize + 8 * index, &entry.to_le_bytes());
    }
    for number in 0..6 {
        let bytes = block_of(number, BLOCK_VHDX);
        put(&mut image, data as usize + (number << 20), &bytes);
    }
    repair_crcs(&mut image);
    Sample {
        format: Format::Vhdx,
        image,
        disk,
        block: BLOCK_VHDX,
        more: Vec::new(),
        metadata: vec![
            (64 << 10, 80),
            (128 << 10, 80),
            (192 << 10, 80),
            (1 << 20, 128),
            ((1 << 20) + (64 << 10), 48),
            (2 << 20, 8 * BLOCKS.len()),
        ],
    }
}

/// Grains of a table.
const GRAINS: usize = 4;

/// A sparse VMDK with these blocks, as the guest's disk of `size` bytes; where its metadata is.
fn vmdk_file(
    blocks: &[Option<usize>],
    size: usize,
    packed: bool,
) -> (Vec<u8>, Vec<(usize, usize)>) {
    let mut head = b"KDMV".to_vec();
    let flags: u32 = if packed { 0x3_0005 } else { 5 };
    put(&mut head, 4, &1_u32.to_le_bytes());
    put(&mut head, 8, &flags.to_le_bytes());
    put(&mut head, 12, &(size as u64 / 512).to_le_bytes());
    put(&mut head, 20, &(BLOCK as u64 / 512).to_le_bytes());
    put(&mut head, 44, &(GRAINS as u32).to_le_bytes());
    put(&mut head, 77, &u16::from(packed).to_le_bytes());
    head.resize(512, 0);
    let mut image = head.clone();
    put(&mut image, 56, &[if packed { 0xff } else { 0 }; 8]);
    // Sector 1 would be a grain of zeros.
    image.resize(1024, 0);
    let mut places = [None; 6];
    for (index, number) in blocks.iter().enumerate() {
        let Some(number) = *number else { continue };
        places[number] = Some(image.len() / 512);
        match packed {
            false => image.extend(block(number)),
            true => {
                let bytes = zlib(&block(number));
                image.extend((index as u64 * BLOCK as u64 / 512).to_le_bytes());
                image.extend((bytes.len() as u32).to_le_bytes());
                image.extend(bytes);
            }
        }
        image.resize(image.len().next_multiple_of(512), 0);
    }
    let mut directory = Vec::new();
    let mut metadata = vec![(0, 80)];
    for (table, blocks) in blocks.chunks(GRAINS).enumerate() {
        directory.extend((image.len() as u32 / 512).to_le_bytes());
        metadata.push((image.len(), 4 * GRAINS));
        for (index, number) in blocks.iter().enumerate() {
            let place = number.and_then(|number| places[number]);
            // Nothing, or a grain of zeros.
            let entry = place.unwrap_or((table + index) % 2) as u32;
            image.extend(entry.to_le_bytes());
        }
        image.resize(image.len().next_multiple_of(512), 0);
    }
    let at = image.len() as u64 / 512;
    metadata.push((image.len(), directory.len()));
    image.extend(directory);
    image.resize(image.len().next_multiple_of(512), 0);
    put(&mut head, 56, &at.to_le_bytes());
    match packed {
        false => put(&mut image, 0, &head),
        true => {
            metadata.push((image.len() + 512, 80));
            image.resize(image.len() + 512, 0);
            image.extend(head);
            image.resize(image.len() + 512, 0);
        }
    }
    (image, metadata)
}

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() * 2);
    let mut encoder = flate2::Compress::new(flate2::Compression::best(), true);
    let flush = flate2::FlushCompress::Finish;
    encoder.compress_vec(bytes, &mut out, flush).unwrap();
    out
}

fn vmdk(packed: bool) -> Sample {
    let (image, mut metadata) = vmdk_file(&BLOCKS, disk().len(), packed);
    if packed {
        // Its grains are metadata, too: markers and streams.
        metadata.push((1024, 2048));
    }
    Sample {
        format: Format::Vmdk,
        image,
        disk: disk(),
        block: BLOCK,
        more: Vec::new(),
        metadata,
    }
}

/// A disk in two files, with zeros between.
fn vmdk_in_files() -> Sample {
    let disk = disk();
    let sectors = |bytes: usize| bytes / 512;
    let (flat, rest) = (3 * BLOCK, disk.len() - 4 * BLOCK);
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"custom\"\n\
         RW {} FLAT \"flat\" 1\nRW {} ZERO\nRW {} SPARSE \"a sparse file\"\nddb.adapterType = \"ide\"\n",
        sectors(flat),
        sectors(BLOCK),
        sectors(rest)
    );
    let (sparse, _) = vmdk_file(&BLOCKS[4..], rest, false);
    Sample {
        format: Format::Vmdk,
        metadata: vec![(0, text.len())],
        image: text.into_bytes(),
        block: BLOCK,
        more: vec![
            ("flat", [vec![0xee; 512], disk[..flat].to_vec()].concat()),
            ("a sparse file", sparse),
        ],
        disk,
    }
}

/// A VHDX whose table of blocks is in its log alone.
fn vhdx_with_log() -> Sample {
    let mut sample = vhdx();
    let bat: usize = 2 << 20;
    for at in [64 << 10, 128 << 10] {
        put(&mut sample.image, at + 48, &[1; 16]);
        put(&mut sample.image, at + 68, &(1_u32 << 20).to_le_bytes());
        put(&mut sample.image, at + 72, &(LOG as u64).to_le_bytes());
    }
    let mut data = sample.image[bat..bat + 4096].to_vec();
    sample.image[bat..bat + 4096].fill(0xff);
    let file_len = (LOG as u64 + (1 << 20)).to_le_bytes();
    let entry = [
        &b"loge\0\0\0\0"[..],
        &8192_u64.to_le_bytes(),
        &5_u64.to_le_bytes(),
        &2_u64.to_le_bytes(),
        &[1; 16],
        &file_len,
        &file_len,
        b"zero\0\0\0\0",
        &4096_u64.to_le_bytes(),
        &(bat as u64).to_le_bytes(),
        &5_u64.to_le_bytes(),
        b"desc",
        &data[4092..],
        &data[..8],
        &(bat as u64).to_le_bytes(),
        &5_u64.to_le_bytes(),
    ]
    .concat();
    put(&mut sample.image, LOG, &entry);
    data[..8].copy_from_slice(b"data\0\0\0\0");
    data[4092..].copy_from_slice(&5_u32.to_le_bytes());
    put(&mut sample.image, LOG + 4096, &data);
    put(&mut sample.image, LOG + (1 << 20) - 1, &[0]);
    repair_crcs(&mut sample.image);
    sample.metadata.extend([(LOG, 128), (LOG + 4096, 4096)]);
    sample
}

fn samples() -> Vec<Sample> {
    vec![
        vdi(),
        vhd_fixed(),
        vhd_dynamic(),
        vhdx(),
        vhdx_with_log(),
        vmdk(false),
        vmdk(true),
        vmdk_in_files(),
    ]
}

/// Which of them is in one piece.
const FIXED: usize = 1;

/// The image and what it names.
fn host(sample: &Sample, image: &[u8], alignment: Option<u32>) -> TestHost {
    let mut host = TestHost::default();
    let image = [("image", image.to_vec())];
    for (inode, (name, bytes)) in image.into_iter().chain(sample.more.clone()).enumerate() {
        let limits = alignment.map_or(cached_limits(), direct_limits);
        let len = bytes
            .len()
            .next_multiple_of(alignment.unwrap_or(1) as usize);
        let mut bytes = bytes;
        bytes.resize(len, 0);
        host.add(name, TestFile::new(bytes, limits).with_id(inode as u64));
    }
    host
}

fn opened(
    sample: &Sample,
    image: &[u8],
    format: Option<Format>,
    alignment: Option<u32>,
) -> Result<Queue<TestFile>, crate::ImageError> {
    let options = OpenOptions {
        format: format.map(AnyFormat::Foreign),
        read_only: true,
        ..OpenOptions::new(References::Beside)
    };
    let host = host(sample, image, alignment);
    let opened = block_on(open(&host, "image", &options))?;
    Ok(opened.image.queue(opened.files))
}

fn read(queue: &Queue<TestFile>, offset_bytes: u64, len: usize) -> Result<Vec<u8>, Errno> {
    let mut memory = vec![0xaa; len];
    let payload = Payload::Read(Target::memory(&mut memory));
    block_on(queue.submit(Request::Read { offset_bytes }, payload))?;
    Ok(memory)
}

#[test]
fn each_format_shows_its_disk_in_requests_of_any_size() {
    for (index, sample) in samples().iter().enumerate() {
        for (format, alignment) in [(Some(sample.format), None), (None, Some(512))] {
            let queue = opened(sample, &sample.image, format, alignment).expect("a sound image");
            assert_eq!(queue.size_bytes(), sample.disk.len() as u64);
            let (block, all) = (sample.block, sample.disk.len());
            // Small ones are many.
            let small = [512, 1000].map(|len| len * (block / BLOCK));
            for len in [small[0], small[1], block, 3 * block, all] {
                for start in (0..sample.disk.len()).step_by(len) {
                    let end = sample.disk.len().min(start + len);
                    let bytes = read(&queue, start as u64, end - start).expect("readable");
                    assert!(
                        bytes == sample.disk[start..end],
                        "sample {index} at {start}+{len}"
                    );
                }
            }
        }
    }
}

/// What `map` calls zeros are zeros, and what it calls data is where it says.
#[test]
fn the_map_of_each_format_tells_zeros_and_places() {
    for (index, sample) in samples().iter().enumerate() {
        let queue =
            opened(sample, &sample.image, Some(sample.format), None).expect("a sound image");
        let (mut at, mut runs, mut zeros) = (0, 0, 0);
        while at < sample.disk.len() {
            let extent = block_on(queue.map(at as u64, u64::MAX)).expect("mapped");
            let len = extent.len_bytes as usize;
            let expected = &sample.disk[at..at + len];
            if extent.zero {
                zeros += len;
                assert!(
                    expected.iter().all(|byte| *byte == 0),
                    "sample {index} at {at}"
                );
            } else if let Some(host) = extent.host_offset.filter(|_| sample.more.is_empty()) {
                let host = host as usize;
                assert!(
                    &sample.image[host..host + len] == expected,
                    "sample {index} at {at}"
                );
            }
            (at, runs) = (at + len, runs + 1);
        }
        let in_pieces = sample.more.is_empty() && index != FIXED;
        if in_pieces {
            assert_eq!(zeros, 3 * sample.block, "sample {index}");
        }
        assert!(runs <= BLOCKS.len(), "sample {index}: {runs} runs");
    }
}

#[test]
fn foreign_formats_are_not_opened_for_writing() {
    for sample in samples() {
        for (told, kind, word) in [
            (Some(sample.format), ErrorKind::Unsupported, "is a"),
            (None, ErrorKind::ForeignFormat, "looks like a"),
        ] {
            let host = host(&sample, &sample.image, None);
            let options = OpenOptions {
                format: told.map(AnyFormat::Foreign),
                ..OpenOptions::new(References::Any)
            };
            let error = block_on(open(&host, "image", &options))
                .map(|_| ())
                .expect_err("not for writing");
            assert_eq!(error.kind(), kind);
            let name = sample.format.shown();
            let line = format!("image: {word} {name} image, which can only be read");
            assert!(format!("{error:#}").starts_with(&line), "{error:#}");
        }
    }
}

fn damage(sample: &Sample, random: &mut Random) -> Vec<u8> {
    let mut image = sample.image.clone();
    for _ in 0..=random.below(3) {
        let (start, len) = sample.metadata[random.below(sample.metadata.len() as u64) as usize];
        let at = start + random.below(len as u64) as usize;
        match random.below(4) {
            0 => image[at] = random.next() as u8,
            1 => image[at] ^= 1 << random.below(8),
            2 => image[at] = 0xff,
            _ => {
                let word = at & !3;
                let value = (random.next() as u32) >> random.below(32);
                let bytes = match random.below(2) {
                    0 => value.to_le_bytes(),
                    _ => value.to_be_bytes(),
                };
                put(&mut image, word, &bytes);
            }
        }
    }
    if random.below(8) == 0 {
        image.truncate(random.below(image.len() as u64) as usize);
    }
    // Else most damage would end at a checksum.
    match sample.format {
        Format::Vhd if random.below(4) > 0 => repair_checksums(&mut image),
        Format::Vhdx if random.below(4) > 0 => repair_crcs(&mut image),
        _ => {}
    }
    image
}

fn repair_checksums(image: &mut [u8]) {
    for (start, len, at) in [
        (0, 512, 64),
        (512, 1024, 36),
        (image.len().saturating_sub(512), 512, 64),
    ] {
        let Some(part) = image.get_mut(start..start + len) else {
            continue;
        };
        part[at..at + 4].fill(0);
        let whole = with_checksum(part.to_vec(), at);
        part.copy_from_slice(&whole);
    }
}

/// Whatever bytes the metadata holds: opening and requests end with success or an error, and memory is bounded.
#[test]
fn requests_on_damaged_foreign_images_end_with_success_or_an_error() {
    for (index, sample) in samples().iter().enumerate() {
        let (mut openable, mut wrong) = (0, 0);
        // Its images are long.
        let rounds = if sample.block > BLOCK { 60 } else { 1500 };
        for seed in 0..rounds {
            let mut random = Random::new(index as u64 * 10_000 + seed);
            let image = damage(sample, &mut random);
            let Ok(queue) = opened(sample, &image, Some(sample.format), None) else {
                continue;
            };
            openable += 1;
            let size = queue.size_bytes();
            assert!(size <= gaur_foreign::limit::DISK_BYTES_MAX && size % 512 == 0);
            for _ in 0..12 {
                let reach = [size, sample.disk.len() as u64][random.below(2) as usize].min(size);
                let at = random.below(reach.max(1));
                let len = (1 + random.below(20_000)).min(size - at.min(size)) as usize;
                wrong += usize::from(read(&queue, at, len).is_err());
                if size > at {
                    let _ = block_on(queue.map(at, u64::MAX));
                }
            }
            let foreign = queue.image().top.foreign.as_ref().expect("foreign");
            assert!(foreign.pages.lock().kept.len() <= PAGES_MAX, "seed {seed}");
        }
        assert!(openable > 10, "sample {index}: {openable} could be opened");
        // A disk in one piece has no table that could be damaged.
        let is_flat = index == FIXED || !sample.more.is_empty();
        assert!(
            wrong > 10 || is_flat,
            "sample {index}: {wrong} requests failed"
        );
    }
}

#[test]
fn a_damaged_entry_is_reported_with_its_place() {
    let mut sample = vdi();
    put(&mut sample.image, 512 + 16, &1000_u32.to_le_bytes());
    let queue = opened(&sample, &sample.image, None, None).expect("the header is whole");
    assert!(
        read(&queue, 0, 4 * BLOCK).is_ok(),
        "the blocks before it are"
    );
    assert_eq!(read(&queue, 4 * BLOCK as u64, 512), Err(Errno::EIO));
    let report = queue.image().corruption().expect("a report");
    assert_eq!(
        report.to_string(),
        "image: block table at offset 528: it leads to offset 4097024, behind the end of the file"
    );
}

/// The names of extents come out of an image, like those of backing files.
#[test]
fn extents_are_opened_where_references_lead_and_no_file_twice() {
    let descriptor =
        |extent: &str| format!("version=1\nparentCID=ffffffff\n{extent}\n").into_bytes();
    for (extent, kind, word) in [
        (
            "RW 8 FLAT \"../flat\" 0",
            ErrorKind::ReferenceRefused,
            "extent of",
        ),
        (
            "RW 8 FLAT \"/etc/passwd\" 0",
            ErrorKind::ReferenceRefused,
            "extent of",
        ),
        (
            "RW 8 FLAT \"ssh://host/x\" 0",
            ErrorKind::Unsupported,
            "extent of",
        ),
        (
            "RW 8 SPARSE \"image\"",
            ErrorKind::InvalidInput,
            "in it already",
        ),
        (
            "RW 8 FLAT \"flat\" 0\nRW 8 SPARSE \"flat\"",
            ErrorKind::Corrupt,
            "descriptor",
        ),
        (
            "RW 999999 FLAT \"flat\" 0",
            ErrorKind::Corrupt,
            "does not hold",
        ),
        ("RW 8 FLAT flat 0", ErrorKind::Corrupt, "cannot be read"),
        ("RW x FLAT \"flat\" 0", ErrorKind::Corrupt, "cannot be read"),
        (
            "RW 8 VMFSRDM \"flat\"",
            ErrorKind::Unsupported,
            "not supported",
        ),
        (
            "parentCID=12345678\nRW 8 FLAT \"flat\"",
            ErrorKind::Unsupported,
            "snapshot",
        ),
        ("CID=1", ErrorKind::Corrupt, "no descriptor"),
    ] {
        let sample = vmdk_in_files();
        let image = descriptor(extent);
        let error = opened(&sample, &image, Some(Format::Vmdk), None)
            .map(|_| ())
            .expect_err(extent);
        assert_eq!(error.kind(), kind, "{error:#}");
        assert!(format!("{error:#}").contains(word), "{error:#}");
    }
    let many = "RW 8 ZERO\n".repeat(gaur_foreign::limit::EXTENTS_MAX + 1);
    let error = opened(
        &vmdk_in_files(),
        &descriptor(&many),
        Some(Format::Vmdk),
        None,
    );
    assert_eq!(
        error.map(|_| ()).expect_err("too many").kind(),
        ErrorKind::Unsupported
    );
    // Two parts in one file.
    let twice = descriptor("RW 8 FLAT \"flat\" 1\nRW 8 FLAT \"flat\" 9");
    let queue = opened(&vmdk_in_files(), &twice, Some(Format::Vmdk), None).expect("legal");
    assert!(read(&queue, 0, 2 * BLOCK).expect("readable") == disk()[..2 * BLOCK]);
}

/// Markers of grains and streams that lie.
#[test]
fn damaged_compressed_grains_are_errors() {
    let sample = vmdk(true);
    // The sector, the length (none, too long, too short), the stream's head and its middle.
    for (at, bytes) in [
        (1024, &[1][..]),
        (1032, &[0; 4]),
        (1032, &[0xff; 4]),
        (1032, &[9, 0]),
        (1036, &[0xff]),
        (1100, &[0xff; 40]),
    ] {
        let mut image = sample.image.clone();
        put(&mut image, at, bytes);
        let queue = opened(&sample, &image, None, None).expect("the tables are whole");
        assert_eq!(read(&queue, 0, 512), Err(Errno::EIO), "byte {at}");
        let whole = read(&queue, BLOCK as u64, BLOCK).expect("the next grain is whole");
        assert!(whole == sample.disk[BLOCK..2 * BLOCK]);
    }
}
