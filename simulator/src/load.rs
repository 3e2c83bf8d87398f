//! Guest workload: tasks that send requests to the queues of an image and judge every answer at once.
//!
//! Any number of requests are in flight, on several queues; ranges overlap and touch. What a request
//! may see and what it leaves is kept in the [`Model`]. The first answer that is wrong is kept and
//! ends the run.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::ops::Range;
use std::rc::Rc;

use gaur_block::{Device, Errno, Payload, Request, Segments, SegmentsMut, Source, Target};
use gaur_engine::{DetectZeroes, ErrorKind, Job, Queue};
use gaur_format::plan::Preallocation;
use gaur_sim::{Handle, Random, SimBuffer, SimFile, SimHost};

use crate::config::Config;
use crate::content::{Value, ZERO};
use crate::judge::Expectations;
use crate::model::{Model, PendingChange};
use crate::stats::Stats;
use memory::GuestMemory;

mod checks;
mod memory;
mod packed;
mod snapshots;
mod states;
mod streams;

pub(crate) use snapshots::check_list;
pub(crate) use states::compare_state;

/// Largest disk that is preallocated when it grows.
const PREALLOCATED_BYTES_MAX: u64 = 16 << 20;

/// What the tasks of an epoch share.
pub struct Load {
    config: Config,
    handle: Handle,
    host: SimHost,
    expectations: Expectations,
    /// Flushes that the host had failed before.
    flushes_failed: u64,
    /// The disk as it should be.
    pub model: RefCell<Model>,
    /// The number of the last request that wrote something.
    pub next_value: Cell<Value>,
    /// The first wrong answer.
    pub failure: RefCell<Option<String>>,
    /// What was done.
    pub stats: RefCell<Stats>,
    /// Requests may fail: something is wrong with the host's file.
    pub may_fail: Cell<bool>,
    /// A flush has failed: the image must refuse writes.
    poisoned: Cell<bool>,
    /// A resize waits for the others to end, or runs.
    exclusive: Cell<bool>,
    /// A resize that the others need not wait for runs.
    growing: Cell<bool>,
    /// The disk is being set to a shorter snapshot: requests may find themselves beyond its end.
    shrinking: Cell<bool>,
    /// The last request that may have been in flight then.
    shrunk_at: Cell<u32>,
    /// States of virtual machines being saved.
    pub saving: Cell<u32>,
    /// Requests in flight.
    active: Cell<u32>,
    /// The last one.
    tag: Cell<u32>,
}

/// What a task does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Read,
    Write,
    Zero,
    Discard,
    Flush,
    Status,
    Resize,
    Beyond,
}

const KINDS: [RequestKind; 8] = [
    RequestKind::Read,
    RequestKind::Write,
    RequestKind::Zero,
    RequestKind::Discard,
    RequestKind::Flush,
    RequestKind::Status,
    RequestKind::Resize,
    RequestKind::Beyond,
];

impl Load {
    /// The load of `config` on a disk that is as `model` says.
    pub fn new(
        config: &Config,
        handle: Handle,
        host: &SimHost,
        expectations: &Expectations,
        model: Model,
        next_value: Value,
    ) -> Rc<Load> {
        Rc::new(Load {
            config: config.clone(),
            handle,
            host: host.clone(),
            expectations: expectations.clone(),
            flushes_failed: host.flushes_failed(),
            model: RefCell::new(model),
            next_value: Cell::new(next_value),
            failure: RefCell::new(None),
            stats: RefCell::default(),
            may_fail: Cell::new(false),
            poisoned: Cell::new(false),
            exclusive: Cell::new(false),
            growing: Cell::new(false),
            shrinking: Cell::new(false),
            saving: Cell::new(0),
            shrunk_at: Cell::new(0),
            active: Cell::new(0),
            tag: Cell::new(0),
        })
    }

    /// One task: sends `requests` requests to `queue`, one after the other.
    pub async fn work(
        self: Rc<Self>,
        queue: Rc<Queue<SimFile>>,
        mut random: Random,
        requests: u32,
    ) {
        let weights = self.config.weights;
        let weights = [
            weights.read,
            weights.write,
            weights.zero,
            weights.discard,
            weights.flush,
            weights.status,
            weights.resize,
            weights.beyond,
        ];
        for _ in 0..requests {
            if self.failure.borrow().is_some() {
                return;
            }
            let kind = KINDS[random.weighted(&weights)];
            while self.exclusive.get() {
                self.handle.sleep(3_000).await;
            }
            self.active.set(self.active.get() + 1);
            self.one(&queue, kind, &mut random).await;
            self.active.set(self.active.get() - 1);
            if random.chance(100) {
                self.handle.sleep(random.below(20_000)).await;
            }
        }
        self.handle.doing("done".to_owned());
    }

    async fn one(&self, queue: &Queue<SimFile>, kind: RequestKind, random: &mut Random) {
        match kind {
            RequestKind::Read => self.read(queue, random).await,
            RequestKind::Write => self.write(queue, random).await,
            RequestKind::Zero => self.zero(queue, random).await,
            RequestKind::Discard => self.discard(queue, random).await,
            RequestKind::Flush => self.flush(queue).await,
            RequestKind::Status => self.status(queue, random).await,
            RequestKind::Resize => self.resize(queue, random).await,
            RequestKind::Beyond => self.beyond(queue, random).await,
        }
    }

    fn unit_bytes(&self) -> u64 {
        self.config.unit_bytes
    }

    /// A range of the disk, in units.
    fn range(&self, random: &mut Random) -> Range<u32> {
        let end = self.model.borrow().len_units();
        let hot = random.chance(self.config.hot_per_mille);
        let limit = if hot { end.div_ceil(8) } else { end };
        let first = random.below(limit.into()) as u32;
        let len = random.between(1, self.config.longest_units.into()) as u32;
        let range = first..first.saturating_add(len).min(end);
        let grain = match random.below(6) {
            0 => self.config.image.shape.cluster_bytes(),
            1 => self.config.image.shape.cluster_bytes() / self.config.image.shape.subclusters(),
            _ => return range,
        };
        // Whole clusters or subclusters, as file systems write them.
        let grain = (grain / self.unit_bytes()).max(1) as u32;
        let first = range.start / grain * grain;
        let end = range.end.next_multiple_of(grain).min(end);
        first..end
    }

    fn bytes(&self, units: &Range<u32>) -> Range<u64> {
        u64::from(units.start) * self.unit_bytes()..u64::from(units.end) * self.unit_bytes()
    }

    fn next_value(&self) -> Value {
        self.next_value.set(self.next_value.get() + 1);
        self.next_value.get()
    }

    /// Memory of the request that begins next.
    fn memory(&self, units: &Range<u32>, random: &mut Random) -> GuestMemory {
        let len = u64::from(units.end - units.start) * self.unit_bytes();
        let alignment = random.pick(&[1, 512, 4096]);
        // Drawn apart, so that loads without scattered memory are what they were.
        let mut apart = Random::new(u64::from(self.tag.get() + 1) ^ 0x6a09_e667_f3bc_c908);
        match apart.chance(self.config.scattered_per_mille) {
            true => GuestMemory::scattered(len as usize, &mut apart),
            false => GuestMemory::whole(len as usize, alignment),
        }
    }

    /// A request begins; its tag.
    fn begin(&self, what: impl Display) -> u32 {
        self.tag.set(self.tag.get() + 1);
        let tag = self.tag.get();
        let what = format!("{what} tag {tag}");
        let bytes = what
            .bytes()
            .fold(0_u64, |sum, byte| sum.wrapping_mul(31) + u64::from(byte));
        self.handle
            .trace()
            .record(&[4, u64::from(tag), bytes], || format!("guest  {what}"));
        self.handle.doing(what);
        self.stats.borrow_mut().requests += 1;
        tag
    }

    fn note(&self, tag: u32, result: &Result<(), Errno>) {
        let code = result.map_or_else(|errno| errno.raw() as u64, |()| 0);
        self.handle.trace().record(&[5, u64::from(tag), code], || {
            format!("answer {tag}: {result:?}")
        });
        if let Err(errno) = result {
            self.stats.borrow_mut().errors += 1;
            let beyond = [Errno::ENOSPC, Errno::EINVAL].contains(errno)
                && (self.shrinking.get() || tag <= self.shrunk_at.get());
            if !self.may_fail.get() && !beyond {
                self.fail(format!(
                    "request {tag} fails with {errno:?} on a healthy disk"
                ));
            }
        }
    }

    fn fail(&self, what: String) {
        self.failure.borrow_mut().get_or_insert(what);
    }

    async fn read(&self, queue: &Queue<SimFile>, random: &mut Random) {
        let units = self.range(random);
        let bytes = self.bytes(&units);
        let mut memory = self.memory(&units, random);
        memory.fill_from(&vec![0xa5; (bytes.end - bytes.start) as usize]);
        let tag = self.begin(format_args!("read {units:?}"));
        let reading = self.model.borrow_mut().read();
        let request = Request::Read {
            offset_bytes: bytes.start,
        };
        let mut list = memory.target();
        let payload = Payload::Read(Target::Memory(SegmentsMut::from(&mut list[..])));
        let result = queue.submit(request, payload).await;
        self.note(tag, &result);
        let mut model = self.model.borrow_mut();
        if self.host.flushes_failed() > self.flushes_failed {
            model.shake();
        }
        if result.is_ok()
            && let Err(wrong) = model.check_read(&reading, units.start, &memory.bytes())
        {
            self.fail(format!("read {tag}: {wrong}"));
        }
        model.end_read(reading);
    }

    async fn write(&self, queue: &Queue<SimFile>, random: &mut Random) {
        let units = self.range(random);
        if let Some(clusters) = self.clusters_to_pack(&units) {
            return self.write_packed(queue, clusters).await;
        }
        let value = self.next_value();
        let mut memory = self.memory(&units, random);
        let script = self.model.borrow().script();
        let mut bytes = memory.bytes();
        script.encode_run(value, units.start, &mut bytes);
        memory.fill_from(&bytes);
        let fua = random.chance(self.config.fua_per_mille);
        let kind = if fua { "write fua" } else { "write" };
        let tag = self.begin(format_args!("{kind} {units:?} value {value}"));
        let issued = self.model.borrow_mut().write(units.clone(), value);
        let request = Request::Write {
            offset_bytes: self.bytes(&units).start,
            fua,
        };
        let list = memory.source();
        let payload = Payload::Write(Source::Memory(Segments::new(&list)));
        self.change(queue, tag, issued, (request, payload)).await;
    }

    /// Sends a request that changes the disk.
    async fn change(
        &self,
        queue: &Queue<SimFile>,
        tag: u32,
        issued: PendingChange,
        (request, payload): (Request, Payload<'_>),
    ) {
        let fua = match request {
            Request::Write { fua, .. } | Request::WriteZeroes { fua, .. } => Some(fua),
            _ => None,
        };
        let poisoned = self.poisoned.get() && fua.is_some();
        let result = queue.submit(request, payload).await;
        self.changed(tag, issued, &result, (poisoned, fua.unwrap_or(false)));
    }

    /// A request has ended that changes the disk; whether it had to fail, and whether it is durable now.
    fn changed(
        &self,
        tag: u32,
        issued: PendingChange,
        result: &Result<(), Errno>,
        (must_fail, durable): (bool, bool),
    ) {
        self.note(tag, result);
        if must_fail && result.is_ok() {
            self.fail(format!("request {tag} goes well after a flush has failed"));
        }
        let mut model = self.model.borrow_mut();
        model.end(issued, result.is_ok(), durable);
    }

    async fn zero(&self, queue: &Queue<SimFile>, random: &mut Random) {
        let units = self.range(random);
        let bytes = self.bytes(&units);
        let (fua, may_unmap) = (random.chance(self.config.fua_per_mille), random.chance(500));
        let tag = self.begin(format_args!("zero {units:?} fua {fua} unmap {may_unmap}"));
        let issued = self.model.borrow_mut().write(units, ZERO);
        if self.config.space.detect_zeroes != DetectZeroes::Off {
            // The guest writes them, and the engine finds out.
            let zeros = vec![0; (bytes.end - bytes.start) as usize];
            let offset_bytes = bytes.start;
            let write = Request::Write { offset_bytes, fua };
            let payload = Payload::Write(Source::memory(&zeros));
            self.change(queue, tag, issued, (write, payload)).await;
            return;
        }
        let request = Request::WriteZeroes {
            offset_bytes: bytes.start,
            len_bytes: bytes.end - bytes.start,
            fua,
            may_unmap,
        };
        self.change(queue, tag, issued, (request, Payload::None))
            .await;
    }

    async fn discard(&self, queue: &Queue<SimFile>, random: &mut Random) {
        let units = self.range(random);
        let bytes = self.bytes(&units);
        let tag = self.begin(format_args!("discard {units:?}"));
        let issued = self.model.borrow_mut().discard(units);
        let request = Request::Discard {
            offset_bytes: bytes.start,
            len_bytes: bytes.end - bytes.start,
        };
        self.change(queue, tag, issued, (request, Payload::None))
            .await;
    }

    async fn flush(&self, queue: &Queue<SimFile>) {
        let tag = self.begin("flush");
        let flushing = self.model.borrow_mut().flush();
        let result = queue.submit(Request::Flush, Payload::None).await;
        self.note(tag, &result);
        self.poisoned.set(self.poisoned.get() || result.is_err());
        self.model.borrow_mut().end_flush(flushing, result.is_ok());
    }

    async fn status(&self, queue: &Queue<SimFile>, random: &mut Random) {
        let units = self.range(random);
        let bytes = self.bytes(&units);
        let asked = bytes.end - bytes.start;
        let tag = self.begin(format_args!("status {units:?}"));
        let reading = self.model.borrow_mut().read();
        let result = queue.status(bytes.start, asked).await;
        self.note(tag, &result.map(drop));
        let mut model = self.model.borrow_mut();
        if let Ok(status) = result {
            if status.len_bytes == 0 || status.len_bytes > asked {
                self.fail(format!(
                    "status {} of {asked} bytes covers {}",
                    tag, status.len_bytes
                ));
            }
            let whole = (status.len_bytes.min(asked) / self.unit_bytes()) as u32;
            let covered = units.start..units.start + whole;
            if status.zero
                && let Err(wrong) = model.check_zero(&reading, covered)
            {
                self.fail(format!("status {tag} says zeros: {wrong}"));
            }
        }
        model.end_read(reading);
    }

    /// A resize with a flush behind it. One that shrinks the disk runs alone, as does every other
    /// one that grows it.
    async fn resize(&self, queue: &Queue<SimFile>, random: &mut Random) {
        if self.exclusive.get() || self.growing.get() {
            return;
        }
        if self.config.image.shape.version == 2 && self.has_snapshots() {
            return self.resize_with_snapshots(queue).await;
        }
        let old = self.model.borrow().len_units();
        let usual = 3 * self.config.image.guest_bytes;
        let longest = self.config.longest_disk_bytes;
        let most = longest.filter(|_| random.chance(400)).unwrap_or(usual) / self.unit_bytes();
        let per_sector = 512 / self.unit_bytes();
        let new = (random.between(1, most / per_sector) * per_sector) as u32;
        if new > old && random.chance(500) {
            self.growing.set(true);
            self.resize_now(queue, old, new, random).await;
            self.growing.set(false);
            return;
        }
        self.exclusive.set(true);
        while self.active.get() > 1 {
            self.handle.sleep(3_000).await;
        }
        // Others may have made a snapshot, or set the disk to one, before they came to rest.
        let old = self.model.borrow().len_units();
        if self.config.image.shape.version == 2 && self.has_snapshots() {
            self.resize_with_snapshots(queue).await;
        } else {
            self.resize_now(queue, old, new, random).await;
        }
        self.exclusive.set(false);
    }

    fn has_snapshots(&self) -> bool {
        let model = self.model.borrow();
        !model.saved().is_empty() || model.is_changing()
    }

    /// Version 2 has no place for the size of a snapshot's disk.
    async fn resize_with_snapshots(&self, queue: &Queue<SimFile>) {
        if self.model.borrow().is_changing() {
            return;
        }
        self.growing.set(true);
        let tag = self.begin("resize with snapshots");
        let result = queue
            .resize(queue.size_bytes() + 512, false, &Job::default())
            .await;
        if result.is_ok() {
            self.fail(format!("resize {tag} of version 2 goes well"));
        }
        self.growing.set(false);
    }

    async fn resize_now(&self, queue: &Queue<SimFile>, old: u32, new: u32, random: &mut Random) {
        let tag = self.begin(format_args!("resize {old} to {new} units"));
        let cut = self.model.borrow_mut().resize(new);
        let bytes = u64::from(new) * self.unit_bytes();
        let cancel = random.chance(self.config.cancelled_resizes_per_mille);
        let job = self.impatient_job(cancel, random);
        // Of the size, so that no draw changes the load of a seed.
        let how = match new % 8 {
            1 if bytes <= PREALLOCATED_BYTES_MAX => Preallocation::Metadata,
            2 if bytes <= PREALLOCATED_BYTES_MAX => Preallocation::Falloc,
            3 if bytes <= PREALLOCATED_BYTES_MAX => Preallocation::Full,
            _ => Preallocation::Off,
        };
        let how = if new > old { how } else { Preallocation::Off };
        let result = queue.resize_preallocated(bytes, new < old, how, &job).await;
        let cancelled =
            cancel && matches!(&result, Err(error) if error.kind() == ErrorKind::Cancelled);
        if let Err(error) = &result
            && !self.may_fail.get()
            && !cancelled
        {
            self.fail(format!("resize {tag} fails on a healthy disk: {error:#}"));
        }
        let well = result.is_ok();
        if !cancelled {
            self.note(tag, &result.map_err(|error| error.errno()));
        }
        self.model.borrow_mut().end_resize(cut, new, well);
        let (now, bytes) = match cancelled {
            true => (old, u64::from(old) * self.unit_bytes()),
            false => (new, bytes),
        };
        if (well || cancelled) && queue.size_bytes() != bytes {
            self.fail(format!(
                "after resize {} the size is {}",
                tag,
                queue.size_bytes()
            ));
        }
        if well || cancelled {
            self.flush(queue).await;
        }
        if (well || cancelled) && !self.poisoned.get() {
            self.model.borrow_mut().settle_size(now);
        } else {
            // The size is unknown now: this was the last request of the epoch.
            self.fail_quietly();
        }
    }

    /// A job that is cancelled after a while, if it is to be.
    pub(super) fn impatient_job(&self, cancel: bool, random: &mut Random) -> Rc<Job> {
        let job = Rc::new(Job::default());
        if cancel {
            let after = random.pick(&[5_000, 100_000, 1_000_000]);
            let (handle, job) = (self.handle.clone(), Rc::clone(&job));
            let after = random.below(after);
            self.handle.spawn("impatience", async move {
                handle.sleep(after).await;
                job.cancel();
            });
        }
        job
    }

    /// Ends the load without a verdict.
    fn fail_quietly(&self) {
        self.failure.borrow_mut().get_or_insert_with(String::new);
    }

    async fn beyond(&self, queue: &Queue<SimFile>, random: &mut Random) {
        if self.config.snapshot_load.is_some() && self.growing.get() {
            // While others make it wait the end may move.
            return;
        }
        let size = queue.size_bytes();
        let len = self.unit_bytes() as usize;
        let offset_bytes = match random.below(3) {
            0 => size,
            1 => size - self.unit_bytes() / 2,
            _ => u64::MAX - random.below(2 * len as u64),
        };
        let tag = self.begin(format_args!("beyond the end at {offset_bytes}"));
        let mut memory = SimBuffer::new(len, 512);
        let (result, expected) = if random.chance(500) {
            let payload = Payload::Read(Target::memory(&mut memory));
            (
                queue.submit(Request::Read { offset_bytes }, payload).await,
                Errno::EINVAL,
            )
        } else {
            let payload = Payload::Write(Source::memory(&memory));
            let request = Request::Write {
                offset_bytes,
                fua: false,
            };
            (queue.submit(request, payload).await, Errno::ENOSPC)
        };
        if result != Err(expected) && !self.may_fail.get() {
            self.fail(format!("request {tag} beyond the end gives {result:?}"));
        }
    }
}
