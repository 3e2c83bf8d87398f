//! Options of a device and its server.

use std::sync::Arc;
use std::thread;

use gaur_reactor::uring;

use super::features::Features;
use super::uapi;
use crate::error::ServeError;
use crate::serve::{Log, say};

/// Whether the buffers of requests are used where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopy {
    /// Where the kernel can and files are opened with O_DIRECT.
    #[default]
    Auto,
    /// Yes, or an error.
    On,
    /// No: the driver copies to and from the server's memory.
    Off,
}

/// How a device is made and served.
#[derive(Clone)]
pub struct Options {
    /// Its number; `None` for the first that is free.
    pub id: Option<u32>,
    /// Hardware queues, at least 1; the driver makes no more than there are processors.
    pub queues: usize,
    /// Requests of one queue at once, 1 to 4096 (1008 with zero copy); `None` for 128 with one or two
    /// queues and 64 with more, which at 512 KiB each come to 128 MiB for up to four.
    pub depth: Option<u16>,
    /// Threads that serve them; `None` for one a queue. Fewer serve several queues each; a multiple
    /// of the queues share the tags of each, where the kernel can (`per-io-daemon`).
    pub threads: Option<usize>,
    /// Longest request in bytes, a multiple of the page, up to 32 MiB. Each tag has that much memory.
    pub buffer_bytes: u32,
    /// Made without privileges: no recovery, no zero copy, and only its owner may open it.
    pub unprivileged: bool,
    /// Whether requests are copied.
    pub zero_copy: ZeroCopy,
    /// The devices' files are opened with O_DIRECT. A cached file would make the ring hand every
    /// transfer from a registered buffer to a worker thread, which costs more than a copy.
    pub direct: bool,
    /// Writes are refused, whatever the devices say.
    pub read_only: bool,
    /// When the server dies, requests wait for the next one rather than the device ending.
    pub recovery: bool,
    /// The kernel looks for partitions.
    pub partition_scan: bool,
    /// Threads run on the processors from which their queue's requests come, where those are several: a
    /// single one is busy with the program that sends the requests.
    pub affinity: bool,
    /// The reactor that each thread runs; its ring and its pool are made large enough.
    pub reactor: gaur_reactor::Config,
    /// Where lines about what happens go.
    pub log: Option<Log>,
    /// Told the number of a new device as soon as it has one: before there is a block device, which
    /// would outlive this process.
    pub added: Option<Added>,
}

/// Is told the number of a device.
pub type Added = Arc<dyn Fn(u32) + Send + Sync>;

/// More queues than this are only made when asked for.
const QUEUES_DEFAULT_MAX: usize = 4;

/// So many queues may be deep without taking much memory, which is locked as a rule.
const QUEUES_FEW: usize = 2;

impl Options {
    /// A queue and a thread for each processor up to four, requests of up to 512 KiB, recovery, and
    /// zero copy where it is of use.
    pub fn new() -> Options {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Options {
            id: None,
            queues: processors.min(QUEUES_DEFAULT_MAX),
            depth: None,
            threads: None,
            buffer_bytes: 512 << 10,
            unprivileged: false,
            zero_copy: ZeroCopy::Auto,
            direct: false,
            read_only: false,
            recovery: true,
            partition_scan: true,
            affinity: true,
            reactor: gaur_reactor::Config::default(),
            log: None,
            added: None,
        }
    }

    /// Requests of one queue at once.
    pub(super) fn depth(&self) -> u16 {
        let few = self.queues <= QUEUES_FEW;
        self.depth.unwrap_or(if few { 128 } else { 64 })
    }

    pub(super) fn check(&self) -> Result<(), ServeError> {
        let refuse = |reason: String| Err(ServeError::new(reason));
        let queues_max = uapi::QUEUES_MAX;
        if self.queues == 0 || self.queues > usize::from(queues_max) {
            return refuse(format!("a ublk device has 1 to {queues_max} queues"));
        }
        let depth_max = uapi::DEPTH_MAX;
        if self.depth() == 0 || self.depth() > depth_max {
            return refuse(format!("a ublk queue is 1 to {depth_max} requests deep"));
        }
        let (low, high) = (uapi::BUFFER_BYTES_MIN, uapi::BUFFER_BYTES_MAX);
        if self.buffer_bytes < low
            || self.buffer_bytes > high
            || !self.buffer_bytes.is_multiple_of(low)
        {
            return refuse(format!(
                "the longest request is a multiple of {low} bytes up to {high}"
            ));
        }
        if self.threads == Some(0) {
            return refuse("a ublk device needs a thread".to_owned());
        }
        if self.unprivileged && self.zero_copy == ZeroCopy::On {
            return refuse("an unprivileged ublk device has no zero copy".to_owned());
        }
        Ok(())
    }

    /// What the device is made with, of what the kernel has.
    pub(super) fn wanted(&self, kernel: Features) -> Result<Features, ServeError> {
        let mut wanted = Features::UPDATE_SIZE;
        if !self.partition_scan {
            wanted = wanted.with(Features::NO_AUTO_PART_SCAN);
        }
        if self.unprivileged {
            let all = wanted.and(kernel).with(Features::UNPRIVILEGED);
            return Ok(all);
        }
        // To quiesce means nothing without recovery, and the driver refuses it.
        let recovery = Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE);
        if self.recovery && kernel.has(recovery) {
            wanted = wanted.with(recovery).with(Features::QUIESCE);
        }
        if self.has_zero_copy(kernel)? {
            wanted = wanted.with(ZERO_COPY);
        }
        Ok(wanted.and(kernel))
    }

    fn has_zero_copy(&self, kernel: Features) -> Result<bool, ServeError> {
        let most = uring::EXPORT_BUFFERS;
        let possible = kernel.has(ZERO_COPY) && self.depth() <= most;
        match self.zero_copy {
            ZeroCopy::Off => Ok(false),
            ZeroCopy::Auto => Ok(self.direct && possible),
            ZeroCopy::On if possible => Ok(true),
            ZeroCopy::On if self.depth() > most => Err(ServeError::new(format!(
                "with zero copy a ublk queue is at most {most} requests deep"
            ))),
            ZeroCopy::On => Err(ServeError::new(
                "this kernel's ublk has no zero copy with automatic registration (Linux 6.16 has)",
            )),
        }
    }

    pub(super) fn say(&self, line: &str) {
        say(&self.log, line);
    }
}

impl Default for Options {
    fn default() -> Options {
        Options::new()
    }
}

/// Zero copy as it is used here: the driver registers buffers, and the bytes of a request that has
/// to be looked into are copied by reading and writing the character device. The flag for
/// registering by command is not needed for either.
pub(super) const ZERO_COPY: Features = Features::AUTO_BUF_REG.with(Features::USER_COPY);

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Features = Features::from_bits(u64::MAX);

    #[test]
    fn what_a_device_is_made_with() {
        let mut options = Options::new();
        let plain = options.wanted(ALL).unwrap();
        assert!(plain.has(Features::USER_RECOVERY_REISSUE.with(Features::QUIESCE)));
        assert!(!plain.has(Features::USER_COPY));
        assert!(!plain.has(Features::NO_AUTO_PART_SCAN));
        // Quiesce never without recovery.
        let old = Features::QUIESCE.with(Features::USER_RECOVERY);
        assert_eq!(options.wanted(old).unwrap(), Features::default());
        options.direct = true;
        assert!(options.wanted(ALL).unwrap().has(ZERO_COPY));
        options.depth = Some(2048);
        assert!(!options.wanted(ALL).unwrap().has(ZERO_COPY));
        options.zero_copy = ZeroCopy::On;
        assert!(options.wanted(ALL).is_err());
        options.depth = Some(64);
        assert!(options.wanted(Features::USER_COPY).is_err());
        options.zero_copy = ZeroCopy::Auto;
        options.unprivileged = true;
        let unprivileged = options.wanted(ALL).unwrap();
        let both = Features::UNPRIVILEGED.with(Features::UPDATE_SIZE);
        assert_eq!(unprivileged, both);
    }

    #[test]
    fn a_device_of_many_queues_has_shorter_ones() {
        let mut options = Options::new();
        let depths = [1, 2, 3, 4, 16].map(|queues| {
            options.queues = queues;
            options.depth()
        });
        assert_eq!(depths, [128, 128, 64, 64, 64]);
        options.depth = Some(7);
        assert_eq!(options.depth(), 7);
    }

    #[test]
    fn invalid_options_are_refused_in_one_line() {
        let breaks: [fn(&mut Options); 6] = [
            |options| options.queues = 0,
            |options| options.depth = Some(5000),
            |options| options.buffer_bytes = 100,
            |options| options.buffer_bytes = 64 << 20,
            |options| options.threads = Some(0),
            |options| {
                options.unprivileged = true;
                options.zero_copy = ZeroCopy::On;
            },
        ];
        for (at, breaks) in breaks.iter().enumerate() {
            let mut options = Options::new();
            breaks(&mut options);
            let error = options.check().expect_err(&format!("case {at}"));
            assert!(!error.to_string().contains('\n'));
        }
        assert!(Options::new().check().is_ok());
    }
}
