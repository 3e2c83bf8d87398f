//! A driver that writes rings byte by byte: memory at guest address 0, two rings, and a served device.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gaur_reactor::{Descriptor, block_on};

use crate::device::Memory;
use crate::serve::ServingThreads;
use crate::virtio::inflight::{InflightLog, log_bytes};
use crate::virtio::memory::{Access, GuestMemory, Mapping, Run};
use crate::virtio::ring::RingAddresses;
use crate::virtio::ring_command::{CallNotifier, RingSetup};
use crate::virtio::rings::Rings;
use crate::virtio::server::{self, Setup};
use crate::virtio::wire::{descriptor, feature};

pub(super) const RING: u16 = 16;
pub(super) const MEMORY_BYTES: usize = 4 << 20;
/// Where a test may put requests.
pub(super) const FREE: u64 = 0x10000;
/// Guest memory from here on may only be read by the device.
pub(super) const READ_ONLY: u64 = (MEMORY_BYTES - 0x1000) as u64;
pub(super) const FEATURES: u64 =
    feature::VERSION_1 | feature::INDIRECT_DESC | feature::EVENT_IDX | feature::FLUSH;

pub(super) struct Guest {
    mapping: Mapping,
    file: OwnedFd,
}

impl Guest {
    /// Takes all of its memory away.
    pub(super) fn truncate(&self) {
        // SAFETY: the descriptor is open, and no memory is passed.
        assert_eq!(unsafe { libc::ftruncate(self.file.as_raw_fd(), 0) }, 0);
    }
}

impl GuestMemory for Guest {
    fn run(&self, address: u64, len: usize, access: Access) -> Option<Run> {
        if access == Access::Write && address.checked_add(len as u64)? > READ_ONLY {
            return None;
        }
        self.mapping.run(address, len)
    }

    fn is_truncated(&self) -> bool {
        self.mapping.is_truncated()
    }
}

pub(super) fn shared(len: usize) -> (Mapping, OwnedFd) {
    // SAFETY: the name is a string, and the descriptor is ours alone.
    let fd = unsafe {
        let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0 && libc::ftruncate(fd, len as i64) == 0);
        OwnedFd::from_raw_fd(fd)
    };
    let mapping = Mapping::new(fd.as_fd(), 0, len, true);
    (mapping.expect("memory can be mapped"), fd)
}

pub(super) fn event() -> OwnedFd {
    // SAFETY: the descriptor is ours alone.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    }
}

fn raise(event: &OwnedFd) {
    crate::virtio::ring_command::raise(event);
}

/// What an eventfd has counted since it was read.
pub(super) fn count(event: &OwnedFd) -> u64 {
    let mut count = 0_u64;
    // SAFETY: the pointer is to 8 bytes.
    unsafe { libc::read(event.as_raw_fd(), (&raw mut count).cast(), 8) };
    count
}

/// A ring as the driver sees it.
pub(super) struct DriverRing {
    base: u64,
    available: u16,
    used: u16,
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    pub(super) error: OwnedFd,
}

pub(super) struct Machine {
    pub(super) guest: Arc<Guest>,
    threads: Option<ServingThreads>,
    pub(super) control: Rings,
    pub(super) rings: Vec<DriverRing>,
    pub(super) lines: Arc<Mutex<Vec<String>>>,
    pub(super) logs: Arc<Mapping>,
}

impl Machine {
    /// Two rings that run, on a device of 1 MiB.
    pub(super) fn new() -> Machine {
        let mut machine = Machine::halted(Memory::new(1 << 20));
        machine.start(0, FEATURES);
        machine.start(1, FEATURES);
        machine
    }

    pub(super) fn halted(device: Memory) -> Machine {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let log = {
            let lines = lines.clone();
            move |line: &str| lines.lock().expect("no panic").push(line.to_owned())
        };
        let log: crate::Log = Arc::new(log);
        let setup = Setup {
            name: "test",
            peer: "driver",
            place: String::new(),
            threads: 1,
            rings: 2,
            read_only: false,
            log: Some(log.clone()),
        };
        let prepared = server::prepare(setup, move |_| Ok(device.clone()));
        let prepared = prepared.expect("threads can be started").prepared;
        let control = Rings::new(2, Some(log));
        let threads = prepared.serve(control.on_threads(1));
        let ring = |index: u64| DriverRing {
            base: 0x1000 + 0x1000 * index,
            available: 0,
            used: 0,
            kick: event(),
            call: event(),
            error: event(),
        };
        let (mapping, file) = shared(MEMORY_BYTES);
        Machine {
            guest: Arc::new(Guest { mapping, file }),
            control,
            threads: Some(threads),
            rings: vec![ring(0), ring(1)],
            lines,
            logs: Arc::new(shared(2 * log_bytes(RING)).0),
        }
    }

    pub(super) fn start(&mut self, ring: usize, features: u64) {
        let own = &self.rings[ring];
        let memory: Arc<dyn GuestMemory> = self.guest.clone();
        let parts = [own.base, own.base + 0x400, own.base + 0x800];
        let addresses = RingAddresses::find(u32::from(RING), parts, |at, len, access| {
            let run = memory.run(at, len, access)?;
            (run.len == len).then_some(run.start)
        });
        let clone = |fd: &OwnedFd| fd.try_clone().expect("descriptors can be duplicated");
        let log = InflightLog::open(&self.logs, (ring * log_bytes(RING)) as u64, RING);
        let setup = RingSetup {
            addresses: addresses.expect("the ring is in memory"),
            memory,
            next: Some(own.available),
            features,
            write_through: Arc::default(),
            log: Some(log.expect("there is room for a log")),
            used_address: None,
            kick: Descriptor::new(clone(&own.kick)),
            call: CallNotifier::Event(clone(&own.call)),
            error: Some(clone(&own.error)),
        };
        self.control.start(ring, setup);
    }

    /// Starts a ring anew, with nothing in it and nothing in flight.
    pub(super) fn restart_blank(&mut self, ring: usize) {
        let log = self
            .logs
            .run((ring * log_bytes(RING)) as u64, log_bytes(RING));
        log.expect("inside").copy_from(&vec![0; log_bytes(RING)]);
        let own = &mut self.rings[ring];
        (own.available, own.used) = (0, 0);
        self.put(self.rings[ring].base + 0x400, &[0; 0x800]);
        self.start(ring, FEATURES);
    }

    pub(super) fn put(&self, address: u64, bytes: &[u8]) {
        let run = self.guest.mapping.run(address, bytes.len());
        run.expect("an address of the guest").copy_from(bytes);
    }

    pub(super) fn get(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let run = self.guest.mapping.run(address, len);
        run.expect("an address of the guest").copy_to(&mut bytes);
        bytes
    }

    fn get16(&self, address: u64) -> u16 {
        let bytes = self.get(address, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    pub(super) fn descriptor_bytes(address: u64, len: u32, flags: u16, next: u16) -> Vec<u8> {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&next.to_le_bytes());
        bytes
    }

    pub(super) fn describe(&self, ring: usize, index: u16, (at, len, flags, next): Part) {
        let address = self.rings[ring].base + u64::from(index) * descriptor::BYTES as u64;
        self.put(address, &Machine::descriptor_bytes(at, len, flags, next));
    }

    /// Makes `head` available without a kick.
    pub(super) fn offer(&mut self, ring: usize, head: u16) {
        let own = &mut self.rings[ring];
        let entry = own.base + 0x404 + 2 * u64::from(own.available % RING);
        own.available = own.available.wrapping_add(1);
        let (index_at, index) = (own.base + 0x402, own.available);
        self.put(entry, &head.to_le_bytes());
        self.put(index_at, &index.to_le_bytes());
    }

    pub(super) fn set_available(&self, ring: usize, index: u16) {
        self.put(self.rings[ring].base + 0x402, &index.to_le_bytes());
    }

    pub(super) fn kick(&self, ring: usize) {
        raise(&self.rings[ring].kick);
    }

    /// The next used entry, once it is there: head and bytes written.
    pub(super) fn used(&mut self, ring: usize) -> (u16, u32) {
        let (base, used) = (self.rings[ring].base, self.rings[ring].used);
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.get16(base + 0x802) == used {
            assert!(Instant::now() < deadline, "a request was not served");
            std::thread::sleep(Duration::from_millis(1));
        }
        let entry = self.get(base + 0x804 + 8 * u64::from(used % RING), 8);
        self.rings[ring].used = used.wrapping_add(1);
        let word = |at: usize| {
            u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]])
        };
        (word(0) as u16, word(4))
    }

    /// Sends a request whose header is at [`FREE`], then what the device reads, what it writes, and the
    /// status; returns that and the bytes written.
    pub(super) fn request(
        &mut self,
        ring: usize,
        kind: u32,
        sector: u64,
        read: &[(u64, u32)],
        write: &[(u64, u32)],
    ) -> (u8, u32) {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend_from_slice(&[0; 4]);
        header.extend_from_slice(&sector.to_le_bytes());
        self.put(FREE, &header);
        self.put(FREE + 16, &[0xff]);
        // The header in two parts: where parts end means nothing.
        let mut parts = vec![(FREE, 7, 0), (FREE + 7, 9, 0)];
        parts.extend(read.iter().map(|(at, len)| (*at, *len, 0)));
        parts.extend(write.iter().map(|(at, len)| (*at, *len, descriptor::WRITE)));
        parts.push((FREE + 16, 1, descriptor::WRITE));
        let last = parts.len() - 1;
        for (index, (at, len, flags)) in parts.into_iter().enumerate() {
            let more = if index < last { descriptor::NEXT } else { 0 };
            let next = index as u16 + 1;
            self.describe(ring, index as u16, (at, len, flags | more, next));
        }
        self.offer(ring, 0);
        self.kick(ring);
        let (head, written) = self.used(ring);
        assert_eq!(head, 0);
        (self.get(FREE + 16, 1)[0], written)
    }

    pub(super) fn stop(&self, ring: usize) -> Option<u16> {
        block_on(self.control.stop(ring))
    }

    /// Waits for a line that has `part` in it.
    pub(super) fn expect_line(&self, part: &str) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let lines = self.lines.lock().expect("no panic").clone();
            if lines.iter().any(|line| line.contains(part)) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "no line about {part:?} in {lines:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A descriptor: address, length, flags, next.
pub(super) type Part = (u64, u32, u16, u16);

impl Drop for Machine {
    fn drop(&mut self) {
        for ring in 0..2 {
            self.stop(ring);
        }
        self.control.end();
        if let Some(threads) = self.threads.take() {
            threads.join();
        }
    }
}
