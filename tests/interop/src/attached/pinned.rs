//! What the kernel knows of a server that is to be pinned: what is locked, what was taken away, and
//! which threads may wait for input and output when they ask for memory.

use std::path::Path;

/// Flags of a task that `PR_SET_IO_FLUSHER` sets: `PF_MEMALLOC_NOIO` and `PF_LOCAL_THROTTLE`.
const FLUSHER_FLAGS: u64 = 0x0008_0000 | 0x0010_0000;

const SCHED_RR: u64 = 2;

/// A process at one moment.
#[derive(Debug)]
pub struct Footprint {
    /// Memory that is locked, in KiB.
    pub locked_kib: u64,
    /// Memory that it has at all, in KiB.
    pub resident_kib: u64,
    /// Memory that was swapped out, in KiB.
    pub swapped_kib: u64,
    /// How often a thread has waited for a page from a disk.
    pub major_faults: u64,
    /// Threads for which the kernel does input and output to get memory, by name.
    pub strangers: Vec<String>,
    /// The other threads.
    pub flushers: Vec<String>,
    /// Threads that the kernel schedules before all ordinary ones, by name.
    pub real_time: Vec<String>,
}

impl Footprint {
    /// Of a process that runs.
    #[track_caller]
    pub fn of(process: u32) -> Footprint {
        let folder = format!("/proc/{process}");
        let status = read(Path::new(&folder).join("status").as_path());
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number
                .and_then(|text| text.parse().ok())
                .unwrap_or_else(|| panic!("no {name} in {status}"))
        };
        let mut found = Footprint {
            locked_kib: kib("VmLck:"),
            resident_kib: kib("VmRSS:"),
            swapped_kib: kib("VmSwap:"),
            major_faults: 0,
            strangers: Vec::new(),
            flushers: Vec::new(),
            real_time: Vec::new(),
        };
        let tasks = std::fs::read_dir(format!("{folder}/task")).expect("the server runs");
        for task in tasks {
            let path = task.expect("a thread").path().join("stat");
            // A worker of the kernel's may have gone.
            if let Ok(stat) = std::fs::read_to_string(path) {
                found.add(&stat);
            }
        }
        found
    }

    fn add(&mut self, stat: &str) {
        let (name, rest) = stat.rsplit_once(')').expect("a name in parentheses");
        let name = name.split_once('(').map_or("", |(_, name)| name).to_owned();
        // The third field is first here; flags are the ninth, major faults the twelfth,
        // the policy of scheduling is the 41st.
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let field = |index: usize| fields[index].parse::<u64>().expect("a number");
        self.major_faults += field(9);
        if field(38) == SCHED_RR {
            self.real_time.push(name.clone());
        }
        match field(6) & FLUSHER_FLAGS == FLUSHER_FLAGS {
            true => self.flushers.push(name),
            false => self.strangers.push(name),
        }
    }

    /// Asserts that it is pinned: everything it has is locked, nothing was taken away, and none of its
    /// threads waits for input or output when it asks for memory.
    #[track_caller]
    pub fn assert_pinned(&self) {
        assert!(
            self.locked_kib + KERNEL_KIB_MAX >= self.resident_kib,
            "{self:?}"
        );
        assert!(self.resident_kib > RESIDENT_KIB_MIN, "{self:?}");
        assert_eq!(self.swapped_kib, 0, "{self:?}");
        assert_eq!(self.strangers, Vec::<String>::new(), "{self:?}");
        assert!(!self.flushers.is_empty(), "{self:?}");
    }

    /// Asserts that nothing of it is pinned.
    #[track_caller]
    pub fn assert_free(&self) {
        assert_eq!(self.locked_kib, 0, "{self:?}");
        assert_eq!(self.flushers, Vec::<String>::new(), "{self:?}");
    }
}

/// What a server has that took its memory ahead: at least the payloads of its queues.
const RESIDENT_KIB_MIN: u64 = 32 << 10;

/// What belongs to the kernel and cannot be taken away: rings, the clock. It is not counted as locked.
const KERNEL_KIB_MAX: u64 = 4 << 10;

#[track_caller]
fn read(path: &Path) -> String {
    match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => panic!("{}: {error}", path.display()),
    }
}
