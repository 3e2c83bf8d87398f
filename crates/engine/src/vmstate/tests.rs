//! States against a model: what is read back, what the checker says, what is left behind.

use gaur_block::{Device, Payload, Request, Source, Target};
use gaur_format::Version;
use gaur_format::plan::CreateOptions;

use super::{BlockOn, VmStateReader, VmStateSave};
use crate::base::ImageFiles;
use crate::chain::open;
use crate::create::create;
use crate::error::ImageError;
use crate::job::Job;
use crate::options::OpenOptions;
use crate::queue::Queue;
use crate::references::References;
use crate::snapshot::{NewSnapshot, Snapshot};
use crate::test_file::{Random, TestFile, TestHost, block_on, cached_limits, check_clean};

mod hostile;
mod positional;
mod space;
mod stream;

const MIB: usize = 1 << 20;
const DISK: u64 = 2 << 20;

/// An image, the file it lies in, and what opened it.
struct Bench {
    host: TestHost,
    file: TestFile,
    queue: Queue<TestFile>,
}

/// Waits for futures of the tests' files.
#[derive(Clone, Copy)]
struct Polls;

impl BlockOn for Polls {
    fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        block_on(future)
    }
}

/// Threads share a save.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<VmStateSave>();
};

fn shapes() -> Vec<CreateOptions> {
    let base = CreateOptions {
        size_bytes: DISK,
        ..CreateOptions::default()
    };
    let with = |cluster_bits, extended_l2| CreateOptions {
        cluster_bits,
        extended_l2,
        ..base.clone()
    };
    let old = CreateOptions {
        version: Version::V2,
        ..base.clone()
    };
    vec![
        base.clone(),
        old,
        with(9, false),
        with(12, false),
        with(14, true),
        with(16, true),
        with(21, false),
    ]
}

fn named(name: &str) -> NewSnapshot {
    NewSnapshot {
        name: name.to_owned(),
        ..NewSnapshot::default()
    }
}

impl Bench {
    fn new(options: &CreateOptions) -> Bench {
        Bench::on(options, TestFile::new(Vec::new(), cached_limits()))
    }

    fn on(options: &CreateOptions, file: TestFile) -> Bench {
        Bench::over(options, file, None)
    }

    fn over(options: &CreateOptions, file: TestFile, backing: Option<TestFile>) -> Bench {
        block_on(create(&file, options, &Job::default())).unwrap();
        let mut host = TestHost::default();
        host.add("disk", file.clone());
        if let Some(backing) = backing {
            host.add("base", backing);
        }
        let queue = opened(&host, &OpenOptions::new(References::Any));
        Bench { host, file, queue }
    }

    /// Closes the image and opens it again.
    fn next_process(self) -> Bench {
        block_on(self.queue.close()).unwrap();
        check_clean(&self.file);
        let queue = opened(&self.host, &OpenOptions::new(References::Any));
        Bench { queue, ..self }
    }

    /// The next process opens the image.
    fn reopen(&mut self, options: &OpenOptions) {
        self.queue = opened(&self.host, options);
    }

    /// Another queue on the same image.
    fn another_queue(&self) -> Queue<TestFile> {
        let files = ImageFiles {
            own: vec![self.file.clone()],
            ..self.queue.files.clone()
        };
        self.queue.image().queue(files)
    }

    fn begin(&self) -> std::sync::Arc<VmStateSave> {
        VmStateSave::begin(self.queue.image()).unwrap()
    }

    fn finish(
        &self,
        save: &std::sync::Arc<VmStateSave>,
        name: &str,
    ) -> Result<Snapshot, ImageError> {
        block_on(save.finish(&self.queue, &named(name), &Job::default()))
    }

    /// The whole state of a snapshot, read in order in pieces of odd sizes.
    fn state(&self, name: &str) -> Vec<u8> {
        let mut reader = block_on(VmStateReader::open(&self.queue, name)).unwrap();
        let mut random = Random::new(reader.size_bytes() + 1);
        let mut state = Vec::new();
        loop {
            let mut piece = vec![0xaa; 1 + random.below(300_000) as usize];
            let count = block_on(reader.read(&mut piece)).unwrap();
            state.extend_from_slice(&piece[..count]);
            if count < piece.len() {
                assert_eq!(state.len() as u64, reader.size_bytes());
                return state;
            }
        }
    }

    fn assert_state(&self, name: &str, expected: &[u8]) {
        let state = self.state(name);
        assert_eq!(state.len(), expected.len(), "length of {name}");
        let differs = state.iter().zip(expected).position(|(one, two)| one != two);
        assert_eq!(differs, None, "first byte of {name} that differs");
        let reader = block_on(VmStateReader::open(&self.queue, name)).unwrap();
        let mut all = vec![0xaa; expected.len() + 10];
        assert_eq!(
            block_on(reader.read_at(0, &mut all)).unwrap(),
            expected.len()
        );
        assert!(all[..expected.len()] == *expected, "by position");
    }

    fn write(&self, offset_bytes: u64, len: usize, byte: u8) {
        let memory = vec![byte; len];
        let request = Request::Write {
            offset_bytes,
            fua: false,
        };
        let payload = Payload::Write(Source::memory(&memory));
        block_on(self.queue.submit(request, payload)).unwrap();
    }

    fn disk(&self) -> Vec<u8> {
        let mut memory = vec![0xee; self.queue.size_bytes() as usize];
        let request = Request::Read { offset_bytes: 0 };
        let payload = Payload::Read(Target::memory(&mut memory));
        block_on(self.queue.submit(request, payload)).unwrap();
        memory
    }

    /// Deletes the snapshots, closes the image, and has it checked before and after: nothing leaks.
    fn close(mut self) {
        let names = block_on(self.queue.snapshots()).unwrap();
        block_on(self.queue.close()).unwrap();
        check_clean(&self.file);
        self.queue = opened(&self.host, &OpenOptions::new(References::Any));
        for one in &names {
            let name = String::from_utf8_lossy(&one.id).into_owned();
            block_on(self.queue.delete_snapshot(&name, &Job::default())).unwrap();
        }
        block_on(self.queue.close()).unwrap();
        check_clean(&self.file);
    }
}

fn opened(host: &TestHost, options: &OpenOptions) -> Queue<TestFile> {
    let opened = block_on(open(host, "disk", options)).unwrap();
    opened.image.queue(opened.files)
}

/// A stream as a machine monitor sends it: headers of 8 bytes, and pages, some of which are zeros and
/// sent as one byte.
fn page_stream(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut stream = Vec::with_capacity(len + 4104);
    while stream.len() < len {
        stream.extend_from_slice(&random.next().to_be_bytes());
        if random.below(5) == 0 {
            stream.push(0);
        } else {
            let words = std::iter::repeat_with(|| random.next().to_le_bytes());
            stream.extend(words.take(512).flatten());
        }
    }
    stream.truncate(len);
    stream
}

/// Cuts a stream as its writer would: header, page, header, page.
fn pieces(stream: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = stream;
    let mut header = false;
    std::iter::from_fn(move || {
        header = !header;
        let count = if header { 8 } else { 4096 }.min(rest.len());
        let (piece, after) = rest.split_at(count);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}
