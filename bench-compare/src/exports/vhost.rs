//! The load on a vhost-user block device, by a client of our own: fio has none.
//!
//! Each job is a thread with a queue. It keeps so many requests in flight and sleeps until the device
//! calls, as a guest's driver does. There is no kernel between it and the device, so its figures
//! compare with each other and not with those of block devices.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use gaur_bench::Random;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::load::{Run, block_bytes, warm_up};
use super::record::Cell;

/// Descriptors of a queue; a request has three.
const RING: u16 = 256;
/// Where the parts of a queue lie in its memory.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 4096;
const USED: u64 = 8192;
const HEADERS: u64 = 16384;
const STATES: u64 = 24576;
const DATA: u64 = 65536;

const HEADER_BYTES: u64 = 16;
const SECTOR: u64 = 512;
/// Kinds of requests, as virtio numbers them.
const READ: u32 = 0;
const WRITE: u32 = 1;
/// Flags of descriptors.
const NEXT: u16 = 1;
const DEVICE_WRITES: u16 = 2;
/// The device need not be kicked.
const NO_NOTIFY: u16 = 1;
/// `VIRTIO_F_VERSION_1`
const VERSION_1: u64 = 1 << 32;
/// `VIRTIO_BLK_F_FLUSH`: a driver without it has every write made durable at once.
const FLUSH: u64 = 1 << 9;

type Memory = GuestMemoryMmap<()>;

/// Runs a cell's load on the device behind a socket.
pub fn run(cell: &Cell, socket: &Path, seconds: u64, size_bytes: u64) -> Result<Run> {
    let (block, warm_up) = (block_bytes(cell), warm_up(cell));
    let queue_bytes = (DATA + u64::from(cell.depth) * block).next_multiple_of(1 << 21);
    let memory = Arc::new(memory(queue_bytes * u64::from(cell.jobs))?);
    let mut device = connect(socket, &memory.0, &memory.1, cell.jobs)?;
    let mut threads = Vec::new();
    for job in 0..cell.jobs {
        let queue = Queue {
            base: u64::from(job) * queue_bytes,
            memory: Arc::clone(&memory),
            kick: EventFd::new(0)?,
            call: EventFd::new(0)?,
            available: 0,
            used: 0,
        };
        queue.announce(&mut device, job as usize)?;
        let mut load = Load::new(cell, u64::from(job), size_bytes);
        let depth = cell.depth as u16;
        threads.push(std::thread::spawn(move || {
            queue.drive(&mut load, depth, warm_up, Duration::from_secs(seconds))
        }));
    }
    let mut times = Vec::new();
    for thread in threads {
        let part = thread
            .join()
            .map_err(|_| anyhow::anyhow!("a client thread panicked"))??;
        times.extend(part);
    }
    for job in 0..cell.jobs {
        device
            .get_vring_base(job as usize)
            .context("the queue does not stop")?;
    }
    times.sort_unstable_by(f64::total_cmp);
    let at = (times.len() * 99 / 100).min(times.len().saturating_sub(1));
    Ok(Run {
        iops: times.len() as f64 / seconds as f64,
        p99_us: times.get(at).copied().unwrap_or(0.0),
    })
}

/// Memory that a file backs, so that the device can map it.
fn memory(len: u64) -> Result<(Memory, std::fs::File)> {
    let path = format!("/dev/shm/gaur-bench-{}", std::process::id());
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    file.set_len(len)?;
    let region = (
        GuestAddress(0),
        len as usize,
        Some(FileOffset::new(file.try_clone()?, 0)),
    );
    Ok((Memory::from_ranges_with_files([region])?, file))
}

fn connect(socket: &Path, memory: &Memory, file: &std::fs::File, queues: u32) -> Result<Frontend> {
    let mut device = Frontend::connect(socket, u64::from(queues))?;
    device.set_owner()?;
    let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    let features = device.get_features()? & (VERSION_1 | FLUSH | protocol);
    device.set_features(features)?;
    if features & protocol != 0 {
        let wanted = VhostUserProtocolFeatures::MQ;
        let offered = device.get_protocol_features()?;
        device.set_protocol_features(offered & wanted)?;
    }
    let start = memory.get_host_address(GuestAddress(0))?;
    device.set_mem_table(&[VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: file.metadata()?.len(),
        userspace_addr: start as u64,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    }])?;
    Ok(device)
}

/// Draws requests.
struct Load {
    random: Random,
    blocks: u64,
    block: u64,
    /// The first block of this job, and how many it has.
    own: (u64, u64),
    next: u64,
    kind: String,
}

impl Load {
    fn new(cell: &Cell, job: u64, size_bytes: u64) -> Load {
        let block = block_bytes(cell);
        let blocks = size_bytes / block;
        let part = blocks / u64::from(cell.jobs);
        Load {
            random: Random::new(job),
            blocks,
            block,
            own: (job * part, part),
            next: 0,
            kind: cell.load.clone(),
        }
    }

    /// Kind and first byte of the next request.
    fn draw(&mut self) -> (u32, u64) {
        let in_order = matches!(self.kind.as_str(), "read" | "write");
        let block = match in_order {
            true => {
                let block = self.own.0 + self.next % self.own.1;
                self.next += 1;
                block
            }
            false => self.random.below(self.blocks),
        };
        let write = match self.kind.as_str() {
            "randwrite" | "write" => true,
            "mix" => self.random.below(10) >= 7,
            _ => false,
        };
        (if write { WRITE } else { READ }, block * self.block)
    }
}

struct Queue {
    base: u64,
    memory: Arc<(Memory, std::fs::File)>,
    kick: EventFd,
    call: EventFd,
    /// Requests ever made available, and ever taken back.
    available: u16,
    used: u16,
}

impl Queue {
    fn announce(&self, device: &mut Frontend, index: usize) -> Result<()> {
        let start = self.memory.0.get_host_address(GuestAddress(self.base))? as u64;
        device.set_vring_num(index, RING)?;
        let data = VringConfigData {
            queue_max_size: RING,
            queue_size: RING,
            flags: 0,
            desc_table_addr: start + DESCRIPTORS,
            used_ring_addr: start + USED,
            avail_ring_addr: start + AVAILABLE,
            log_addr: None,
        };
        device.set_vring_addr(index, &data)?;
        device.set_vring_base(index, 0)?;
        device.set_vring_call(index, &self.call)?;
        device.set_vring_kick(index, &self.kick)?;
        device.set_vring_enable(index, true)?;
        Ok(())
    }

    fn at(&self, offset: u64) -> GuestAddress {
        GuestAddress(self.base + offset)
    }

    fn put<T: vm_memory::ByteValued>(&self, offset: u64, value: T) -> Result<()> {
        Ok(self.memory.0.write_obj(value, self.at(offset))?)
    }

    /// Fills in what never changes about a slot.
    fn prepare(&self, slot: u16, block: u64) -> Result<()> {
        let at = |number: u16| DESCRIPTORS + u64::from(3 * slot + number) * 16;
        let slot64 = u64::from(slot);
        let parts = [
            (HEADERS + slot64 * HEADER_BYTES, HEADER_BYTES),
            (DATA + slot64 * block, block),
            (STATES + slot64, 1),
        ];
        for (number, (offset, len)) in (0..).zip(parts) {
            self.put(at(number), self.base + offset)?;
            self.put(at(number) + 8, len as u32)?;
            let flags = match number {
                0 => NEXT,
                1 => NEXT | DEVICE_WRITES,
                _ => DEVICE_WRITES,
            };
            self.put(at(number) + 12, flags)?;
            self.put(at(number) + 14, 3 * slot + number + 1)?;
        }
        Ok(())
    }

    fn submit(&mut self, slot: u16, (kind, offset): (u32, u64)) -> Result<()> {
        let header = HEADERS + u64::from(slot) * HEADER_BYTES;
        self.put(header, kind)?;
        self.put(header + 8, offset / SECTOR)?;
        self.put(STATES + u64::from(slot), 0xff_u8)?;
        let data = if kind == READ {
            NEXT | DEVICE_WRITES
        } else {
            NEXT
        };
        self.put(DESCRIPTORS + u64::from(3 * slot + 1) * 16 + 12, data)?;
        self.put(
            AVAILABLE + 4 + u64::from(self.available % RING) * 2,
            3 * slot,
        )?;
        self.available = self.available.wrapping_add(1);
        Ok(())
    }

    /// Shows the device what was submitted.
    fn ring(&self) -> Result<()> {
        let memory = &self.memory.0;
        memory.store(self.available, self.at(AVAILABLE + 2), Ordering::SeqCst)?;
        std::sync::atomic::fence(Ordering::SeqCst);
        let flags: u16 = memory.load(self.at(USED), Ordering::SeqCst)?;
        if flags & NO_NOTIFY == 0 {
            self.kick.write(1)?;
        }
        Ok(())
    }

    /// A slot that the device is through with.
    fn taken(&mut self) -> Result<Option<u16>> {
        let memory = &self.memory.0;
        let index: u16 = memory.load(self.at(USED + 2), Ordering::Acquire)?;
        if index == self.used {
            return Ok(None);
        }
        let entry = USED + 4 + u64::from(self.used % RING) * 8;
        let head: u32 = memory.read_obj(self.at(entry))?;
        self.used = self.used.wrapping_add(1);
        let slot = (head / 3) as u16;
        let state: u8 = memory.read_obj(self.at(STATES + u64::from(slot)))?;
        if state != 0 {
            bail!("a request ended with state {state}");
        }
        Ok(Some(slot))
    }

    /// Keeps `depth` requests in flight; how long each took that ended after `warm_up`, in
    /// microseconds.
    fn drive(
        mut self,
        load: &mut Load,
        depth: u16,
        warm_up: Duration,
        measured: Duration,
    ) -> Result<Vec<f64>> {
        for slot in 0..depth {
            self.prepare(slot, load.block)?;
        }
        let calls = Epoll::new()?;
        let event = EpollEvent::new(EventSet::IN, 0);
        calls.ctl(ControlOperation::Add, self.call.as_raw_fd(), event)?;
        let mut begun = vec![Instant::now(); usize::from(depth)];
        let mut times = Vec::with_capacity(1 << 20);
        let mut free: Vec<u16> = (0..depth).collect();
        let warm = Instant::now() + warm_up;
        let end = warm + measured;
        let mut in_flight = 0;
        loop {
            let now = Instant::now();
            if now < end && !free.is_empty() {
                for slot in free.drain(..) {
                    let request = load.draw();
                    self.submit(slot, request)?;
                    begun[usize::from(slot)] = now;
                    in_flight += 1;
                }
                self.ring()?;
            }
            if in_flight == 0 {
                return Ok(times);
            }
            while let Some(slot) = self.taken()? {
                if now >= warm {
                    let time = begun[usize::from(slot)].elapsed();
                    times.push(time.as_secs_f64() * 1e6);
                }
                free.push(slot);
                in_flight -= 1;
            }
            if free.is_empty() {
                calls.wait(-1, &mut [EpollEvent::default()])?;
                // The device may have made the descriptor, which is its own too, one that does not wait.
                let _ = self.call.read();
            }
        }
    }
}
