//! Requests whose memory lies in many pieces, as a guest's pages do, on files of any alignment.

use std::io::IoSliceMut;
use std::ops::Range;

use gaur_block::{
    Device, File, FileLimits, Payload, Request, Segment, Segments, SegmentsMut, Source, Target,
};
use gaur_format::plan::CreateOptions;

use crate::chain::open;
use crate::create::create;
use crate::job::Job;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::test_file::{
    Event, Random, TestBuffer, TestFile, TestHost, block_on, cached_limits, check_clean,
    direct_limits,
};

const DISK_BYTES: usize = 4 << 20;

fn disk(limits: FileLimits, extended_l2: bool) -> (TestFile, Queue<TestFile>) {
    let file = TestFile::new(Vec::new(), limits);
    let options = CreateOptions {
        size_bytes: DISK_BYTES as u64,
        extended_l2,
        ..CreateOptions::default()
    };
    block_on(create(&file, &options, &Job::default())).unwrap();
    let mut host = TestHost::default();
    host.add("disk", file.clone());
    let opened = block_on(open(&host, "disk", &OpenOptions::new(References::Any))).unwrap();
    (file, opened.image.queue(opened.files))
}

/// A guest's memory: buffers, of which the first `skew` bytes are not used.
struct Scattered {
    buffers: Vec<TestBuffer>,
    skew: usize,
}

impl Scattered {
    /// Pieces that are multiples of `grain` long, except for the last.
    fn new(file: &TestFile, random: &mut Random, len: usize, grain: usize, skew: usize) -> Self {
        let mut buffers = Vec::new();
        let mut left = len;
        while left > 0 {
            let piece = left.min(grain * (1 + random.below(12) as usize));
            buffers.push(file.buffer(skew + piece));
            left -= piece;
        }
        Scattered { buffers, skew }
    }

    fn write(&mut self, queue: &Queue<TestFile>, offset_bytes: u64, bytes: &[u8]) {
        let mut rest = bytes;
        for buffer in &mut self.buffers {
            let (now, later) = rest.split_at(buffer.len() - self.skew);
            buffer[self.skew..].copy_from_slice(now);
            rest = later;
        }
        let pieces = self.buffers.iter().map(|one| &one[self.skew..]);
        let list: Vec<_> = pieces.map(Segment::from).collect();
        let payload = Payload::Write(Source::Memory(Segments::new(&list)));
        let fua = false;
        block_on(queue.submit(Request::Write { offset_bytes, fua }, payload)).unwrap();
    }

    fn read(&mut self, queue: &Queue<TestFile>, offset_bytes: u64) -> Vec<u8> {
        let pieces = self.buffers.iter_mut().map(|one| &mut one[self.skew..]);
        let mut list: Vec<_> = pieces.map(IoSliceMut::new).collect();
        let payload = Payload::Read(Target::Memory(SegmentsMut::from(&mut list[..])));
        block_on(queue.submit(Request::Read { offset_bytes }, payload)).unwrap();
        list.iter().flat_map(|piece| piece.to_vec()).collect()
    }
}

fn range(random: &mut Random, unit: usize) -> Range<usize> {
    let len = unit * (1 + random.below((600 << 10) / unit as u64) as usize);
    let at = unit * random.below(((DISK_BYTES - len) / unit) as u64) as usize;
    at..at + len
}

#[test]
fn scattered_memory_gives_and_gets_the_same_bytes_as_flat_memory() {
    for (number, alignment) in [1, 512, 4096].into_iter().enumerate() {
        let limits = match alignment {
            1 => cached_limits(),
            _ => direct_limits(alignment),
        };
        let (file, queue) = disk(limits, number == 1);
        let random = &mut Random::new(u64::from(alignment));
        let mut expected = vec![0; DISK_BYTES];
        for round in 0..80 {
            let unit = [1, 512, 4096][random.below(3) as usize];
            let grain = [1 << 10, 4096, 1000][random.below(3) as usize];
            let skew = random.below(2) as usize;
            let bytes = range(random, unit);
            let mut memory = Scattered::new(&file, random, bytes.len(), grain, skew);
            if round % 2 == 0 {
                for byte in &mut expected[bytes.clone()] {
                    *byte = random.next() as u8;
                }
                memory.write(&queue, bytes.start as u64, &expected[bytes]);
            } else {
                let found = memory.read(&queue, bytes.start as u64);
                assert!(
                    found == expected[bytes],
                    "{alignment} {unit} {grain} {skew}"
                );
            }
        }
        block_on(queue.close()).unwrap();
        check_clean(&file);
    }
}

/// The reason for lists: a guest's large request is pages, and they need neither a copy nor a transfer each.
#[test]
fn a_request_of_many_pages_is_one_transfer_of_the_file() {
    let (file, queue) = disk(direct_limits(512), false);
    let random = &mut Random::new(5);
    let len = 1 << 20;
    let mut memory = Scattered::new(&file, random, len, 4096, 0);
    assert!(memory.buffers.len() > 20);
    memory.write(&queue, 0, &vec![1; len]);
    file.forget_events();
    let made = file.buffers_made();
    memory.write(&queue, 0, &vec![2; len]);
    assert_eq!(memory.read(&queue, 0), vec![2; len]);
    let transfers = file.events();
    assert!(
        matches!(
            transfers[..],
            [
                Event::Write { len: 0x10_0000, .. },
                Event::Read { len: 0x10_0000, .. }
            ]
        ),
        "{transfers:?}"
    );
    assert_eq!(file.buffers_made(), made, "nothing is copied");
}
