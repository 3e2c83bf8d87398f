//! A file in memory for the tests of this crate, and the smallest executors that can drive it.
//!
//! It checks that every request obeys its limits, takes effect at a random moment between its start
//! and its end, and can be told to fail.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gaur_block::{
    Access, Errno, Extent, File, FileId, FileLimits, Host, OpenError, Segments, Source, Target,
    Within,
};
use gaur_format::check::{Check, Report, Step};

/// No file gets longer than this many bytes: the limit a system sets on the size of files.
const LEN_MAX: usize = 80 << 20;

/// Runs one future whose wakers do not matter: it is polled until it is done.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut polls = 0_u64;
    loop {
        if let Poll::Ready(value) = future
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            return value;
        }
        polls += 1;
        assert!(polls < 100_000_000, "the future never ends");
    }
}

/// Runs tasks side by side, polling one of them at random each time.
pub(crate) fn run_shuffled(mut random: Random, tasks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>>) {
    let mut tasks = tasks;
    let mut polls = 0_u64;
    while !tasks.is_empty() {
        let index = random.below(tasks.len() as u64) as usize;
        let context = &mut Context::from_waker(Waker::noop());
        if tasks[index].as_mut().poll(context).is_ready() {
            drop(tasks.swap_remove(index));
        }
        polls += 1;
        assert!(
            polls < 10_000_000,
            "{} tasks wait for each other",
            tasks.len()
        );
    }
}

/// A reproducible source of numbers (xorshift).
#[derive(Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 16) % bound
    }
}

/// Limits of a cached regular file.
pub(crate) fn cached_limits() -> FileLimits {
    FileLimits {
        request_alignment: 1,
        memory_alignment: 1,
        max_transfer: 1 << 30,
        resizable: true,
        discard_zeroes: true,
        read_only: false,
    }
}

/// Limits of a regular file opened with O_DIRECT.
pub(crate) fn direct_limits(alignment: u32) -> FileLimits {
    FileLimits {
        request_alignment: alignment,
        memory_alignment: alignment,
        ..cached_limits()
    }
}

/// What happened to a [`TestFile`], in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Read { offset: u64, len: usize },
    Write { offset: u64, len: usize },
    Zero { offset: u64, len: u64 },
    Allocate { offset: u64, len: u64 },
    Discard { offset: u64, len: u64 },
    SetLen(u64),
    Flush,
}

struct State {
    bytes: Vec<u8>,
    limits: FileLimits,
    id: Option<FileId>,
    random: Random,
    /// Most times a request lets others run before and after it takes effect.
    jitter: u64,
    zeroes_unsupported: bool,
    events: Vec<Event>,
    buffers_made: usize,
    /// Every request from this one on (counted in `events`) fails.
    fail_from: Option<(usize, Errno)>,
    /// Writes store so many bytes and then fail.
    torn_at: Option<usize>,
}

/// A file in memory. Clones are other handles on the same file.
#[derive(Clone)]
pub(crate) struct TestFile(Rc<RefCell<State>>);

impl TestFile {
    pub(crate) fn new(bytes: Vec<u8>, limits: FileLimits) -> TestFile {
        TestFile(Rc::new(RefCell::new(State {
            bytes,
            limits,
            id: None,
            random: Random::new(1),
            jitter: 0,
            zeroes_unsupported: false,
            events: Vec::new(),
            buffers_made: 0,
            fail_from: None,
            torn_at: None,
        })))
    }

    pub(crate) fn with_id(self, inode: u64) -> TestFile {
        self.0.borrow_mut().id = Some(FileId { device: 1, inode });
        self
    }

    pub(crate) fn with_jitter(self, seed: u64, jitter: u64) -> TestFile {
        self.0.borrow_mut().random = Random::new(seed);
        self.0.borrow_mut().jitter = jitter;
        self
    }

    pub(crate) fn without_write_zeroes(self) -> TestFile {
        self.0.borrow_mut().zeroes_unsupported = true;
        self
    }

    pub(crate) fn fail_from(&self, event: usize, errno: Errno) {
        self.0.borrow_mut().fail_from = Some((event, errno));
    }

    /// Writes store `len_bytes` bytes and then fail, until this is called with `None`.
    pub(crate) fn tear_writes(&self, len_bytes: Option<usize>) {
        self.0.borrow_mut().torn_at = len_bytes;
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.borrow().bytes.clone()
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.0.borrow().events.clone()
    }

    pub(crate) fn forget_events(&self) {
        self.0.borrow_mut().events.clear();
    }

    pub(crate) fn buffers_made(&self) -> usize {
        self.0.borrow().buffers_made
    }

    /// Notes the request, runs `effect` at some moment, and comes back later still.
    async fn request<T>(
        &self,
        event: Event,
        effect: impl FnOnce(&mut State) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let (before, after, failure) = {
            let mut state = self.0.borrow_mut();
            state.events.push(event);
            let count = state.events.len();
            let jitter = state.jitter + 1;
            let failure = state.fail_from.filter(|(from, _)| count > *from);
            (
                state.random.below(jitter),
                state.random.below(jitter),
                failure,
            )
        };
        yield_times(before).await;
        if let Some((_, errno)) = failure {
            return Err(errno);
        }
        let result = effect(&mut self.0.borrow_mut());
        yield_times(after).await;
        result
    }

    fn check_shape(&self, offset: u64, len: usize) {
        let limits = self.limits();
        let alignment = u64::from(limits.request_alignment);
        assert!(
            offset.is_multiple_of(alignment),
            "offset {offset} is not a multiple of {alignment}"
        );
        assert!(
            (len as u64).is_multiple_of(alignment),
            "length {len} is not a multiple"
        );
        assert!(
            len <= limits.max_transfer as usize,
            "length {len} is more than one transfer"
        );
        assert!(len > 0, "an empty request reached the file");
    }

    fn check_memory(&self, memory: Segments<'_>) {
        let limits = self.limits();
        let (address, len) = (limits.memory_alignment, limits.request_alignment);
        assert!(
            memory.is_aligned(address as usize, address.max(len) as usize),
            "memory is not aligned"
        );
    }
}

async fn yield_times(times: u64) {
    for _ in 0..times {
        let mut yielded = false;
        std::future::poll_fn(|context| {
            if std::mem::replace(&mut yielded, true) {
                Poll::Ready(())
            } else {
                // Combinators poll only what was woken.
                context.waker().wake_by_ref();
                Poll::Pending
            }
        })
        .await;
    }
}

impl State {
    fn store(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        if self.limits.read_only {
            return Err(Errno::EROFS);
        }
        let start = usize::try_from(offset).map_err(|_| Errno::EFBIG)?;
        let stored = self.torn_at.unwrap_or(usize::MAX).min(bytes.len());
        let end = start.checked_add(bytes.len()).ok_or(Errno::EFBIG)?;
        if end > self.bytes.len() {
            if !self.limits.resizable {
                return Err(Errno::ENOSPC);
            }
            if end > LEN_MAX {
                return Err(Errno::EFBIG);
            }
            self.bytes.resize(end, 0);
        }
        self.bytes[start..start + stored].copy_from_slice(&bytes[..stored]);
        if stored < bytes.len() {
            return Err(Errno::EIO);
        }
        Ok(())
    }

    fn zero(&mut self, offset: u64, len: u64) -> Result<(), Errno> {
        self.store(offset, &vec![0; len as usize])
    }
}

/// Memory at the alignment that a [`TestFile`] asks for.
pub(crate) struct TestBuffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Deref for TestBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }
}

impl DerefMut for TestBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

impl File for TestFile {
    type Buffer = TestBuffer;

    fn limits(&self) -> FileLimits {
        self.0.borrow().limits
    }

    fn id(&self) -> Option<FileId> {
        self.0.borrow().id
    }

    fn buffer(&self, len_bytes: usize) -> TestBuffer {
        let mut state = self.0.borrow_mut();
        state.buffers_made += 1;
        let alignment = state.limits.memory_alignment as usize;
        let memory = vec![0; len_bytes + alignment];
        let start = memory.as_ptr().addr().next_multiple_of(alignment) - memory.as_ptr().addr();
        TestBuffer {
            memory,
            start,
            len: len_bytes,
        }
    }

    async fn len(&self) -> Result<u64, Errno> {
        Ok(self.0.borrow().bytes.len() as u64)
    }

    async fn read_at(&self, offset: u64, target: Target<'_>) -> Result<(), Errno> {
        self.check_shape(offset, target.len());
        let Target::Memory(memory) = target else {
            return Ok(());
        };
        self.check_memory(*memory);
        let len = memory.len();
        self.request(Event::Read { offset, len }, |state| {
            let start = usize::try_from(offset).unwrap().min(state.bytes.len());
            let there = len.min(state.bytes.len() - start);
            let (data, beyond) = memory.split_at(there);
            data.copy_from(&state.bytes[start..start + there]);
            beyond.fill_zeros();
            Ok(())
        })
        .await
    }

    async fn write_at(&self, offset: u64, source: Source<'_>) -> Result<(), Errno> {
        self.check_shape(offset, source.len());
        let event = Event::Write {
            offset,
            len: source.len(),
        };
        match source {
            Source::Memory(memory) => {
                self.check_memory(memory);
                self.request(event, |state| {
                    let mut bytes = vec![0; memory.len()];
                    memory.copy_to(&mut bytes);
                    state.store(offset, &bytes)
                })
                .await
            }
            Source::Registered(_) => self.request(event, |_| Ok(())).await,
        }
    }

    async fn write_zeroes_at(&self, offset: u64, len: u64, _unmap: bool) -> Result<(), Errno> {
        if self.0.borrow().zeroes_unsupported {
            return Err(Errno::EOPNOTSUPP);
        }
        self.request(Event::Zero { offset, len }, |state| state.zero(offset, len))
            .await
    }

    async fn allocate_at(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.request(Event::Allocate { offset, len }, |_| Ok(()))
            .await
    }

    async fn discard_at(&self, offset: u64, len: u64) -> Result<(), Errno> {
        self.request(Event::Discard { offset, len }, |state| {
            state.zero(offset, len)
        })
        .await
    }

    async fn flush(&self) -> Result<(), Errno> {
        self.request(Event::Flush, |_| Ok(())).await
    }

    async fn set_len(&self, len: u64) -> Result<(), Errno> {
        if !self.limits().resizable {
            return Err(Errno::EOPNOTSUPP);
        }
        let event = Event::SetLen(len);
        self.request(event, |state| {
            let len = usize::try_from(len).ok().filter(|len| *len <= LEN_MAX);
            state.bytes.resize(len.ok_or(Errno::EFBIG)?, 0);
            Ok(())
        })
        .await
    }

    async fn extent_at(&self, offset: u64) -> Result<Extent, Errno> {
        let len = self.0.borrow().bytes.len() as u64;
        Ok(Extent {
            len: len - offset,
            data: true,
        })
    }
}

/// A file system in memory.
#[derive(Default)]
pub(crate) struct TestHost {
    files: BTreeMap<String, Result<TestFile, OpenError>>,
    locked: BTreeSet<String>,
    /// What was opened, in order.
    pub(crate) opened: RefCell<Vec<(String, Access)>>,
}

impl TestHost {
    pub(crate) fn add(&mut self, name: &str, file: TestFile) {
        self.files.insert(name.to_owned(), Ok(file));
    }

    /// Opening `name` with locks fails from now on.
    pub(crate) fn lock(&mut self, name: &str) {
        self.locked.insert(name.to_owned());
    }

    pub(crate) fn refuse(&mut self, name: &str, errno: Errno, reason: &str) {
        let error = OpenError {
            errno,
            reason: reason.to_owned(),
        };
        self.files.insert(name.to_owned(), Err(error));
    }
}

impl Host for TestHost {
    type File = TestFile;

    async fn open_within(
        &self,
        name: &Path,
        within: Within<'_>,
        access: Access,
    ) -> Result<TestFile, OpenError> {
        if !within.admits(name) {
            return Err(within.refused());
        }
        let name = &*name.to_string_lossy();
        self.opened.borrow_mut().push((name.to_owned(), access));
        if access.lock && self.locked.contains(name) {
            let reason = "write lock is held by another process".to_owned();
            return Err(OpenError {
                errno: Errno::EAGAIN,
                reason,
            });
        }
        let missing = OpenError {
            errno: Errno::ENOENT,
            reason: "no such file or directory".to_owned(),
        };
        self.files.get(name).cloned().unwrap_or(Err(missing))
    }
}

/// What the checker says of an image.
pub(crate) fn checked(file: &TestFile) -> Report {
    let bytes = file.bytes();
    let mut check = Check::new(&bytes, bytes.len() as u64).unwrap();
    loop {
        match check.next() {
            Step::Need { offset, len } => {
                let start = (offset as usize).min(bytes.len());
                let end = ((offset + len) as usize).min(bytes.len());
                check.feed(&bytes[start..end]);
            }
            Step::Done(report) => return report,
        }
    }
}

/// Nothing wrong with the image, and nothing leaked.
pub(crate) fn check_clean(file: &TestFile) {
    let report = checked(file);
    assert!(report.is_clean(), "{report:#?}");
}
