//! Control commands: what is done to a device as a whole.
//!
//! They go through a small ring with long entries, one at a time, and block the calling thread: some
//! wait in the kernel for requests or for other processes. The memory of a command is the kernel's
//! until it has been answered, so a command is always waited for; one that takes too long is
//! cancelled first.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use gaur_block::Errno;
use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};

use super::features::Features;
use super::info::{self, Info, State};
use super::params::{self, PARAMS_BYTES};
use super::uapi::{self, CONTROL_COMMAND_BYTES, DEV_INFO_BYTES, DevInfo};
use crate::error::ServeError;

/// How often a waiting command looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(50);

/// Numbers of the entries of the ring.
const COMMAND: u64 = 1;
const CANCEL: u64 = 2;

/// Processors of which affinity can be asked.
const PROCESSORS_MAX: usize = 4096;

/// The driver, as a whole.
pub(super) struct Control {
    ring: IoUring<Entry128, cqueue::Entry>,
    file: File,
}

/// One command.
#[derive(Clone, Copy)]
struct Command {
    operation: u32,
    id: u32,
    data: u64,
    /// Unprivileged devices want to be told the path of the character device in front of the data.
    path: bool,
}

impl Control {
    /// Opens the driver's control device.
    ///
    /// # Errors
    /// When there is no ublk, or it is not for this user.
    pub(super) fn open() -> Result<Control, ServeError> {
        let path = uapi::CONTROL_PATH;
        let opened = File::options().read(true).write(true).open(path);
        let file = opened.map_err(|error| ServeError::new(explain_open(&error)))?;
        let ring = IoUring::builder().dontfork().build(4).map_err(|error| {
            ServeError::new(format!("ublk needs io_uring, which has no ring: {error}"))
        })?;
        Ok(Control { ring, file })
    }

    /// What the driver can do.
    pub(super) fn features(&mut self) -> Result<Features, ServeError> {
        let mut bytes = [0; 8];
        let command = Command::new(uapi::GET_FEATURES, u32::MAX);
        match self.execute(command, &mut bytes, &|| false) {
            Ok(_) => Ok(Features::from_bits(u64::from_ne_bytes(bytes))),
            Err(Errno::EOPNOTSUPP) => Err(ServeError::new(
                "this kernel's ublk is too old to say what it can do (Linux 6.5 does)",
            )),
            Err(errno) => Err(ServeError::because(
                "ublk does not say what it can do",
                errno,
            )),
        }
    }

    /// Makes a device; the answer has its number and what the driver made of the wishes.
    pub(super) fn add(&mut self, wanted: &DevInfo) -> Result<Info, ServeError> {
        let mut bytes = wanted.encode();
        let command = Command::new(uapi::ADD_DEV, wanted.id);
        self.execute(command, &mut bytes, &|| false)
            .map_err(|errno| ServeError::new(explain_add(wanted, errno)))?;
        let info = Info::from_raw(&DevInfo::decode(&bytes));
        let sane = info.queues > 0
            && info.queues <= wanted.queues
            && info.depth == wanted.depth
            && info.buffer_bytes <= wanted.buffer_bytes
            && info.buffer_bytes >= uapi::BUFFER_BYTES_MIN
            && (wanted.id == u32::MAX || info.id == wanted.id);
        if !sane {
            // Whatever it made, it is not what is served here.
            let _ = self.delete(&info, &|| true);
            return Err(ServeError::new(format!(
                "the ublk driver answers with a device that was not asked for: {info:?}"
            )));
        }
        Ok(info)
    }

    /// What a device is.
    pub(super) fn info(&mut self, id: u32) -> Result<Info, Errno> {
        let mut bytes = [0; DEV_INFO_BYTES];
        let mut command = Command::new(uapi::GET_DEV_INFO2, id);
        command.path = true;
        let result = match self.execute(command, &mut bytes, &|| false) {
            // No node in this mount namespace, or a kernel that does not know it.
            Err(Errno::ENOENT | Errno::EOPNOTSUPP) => {
                let command = Command::new(uapi::GET_DEV_INFO, id);
                self.execute(command, &mut bytes, &|| false)
            }
            result => result,
        };
        result?;
        let raw = DevInfo::decode(&bytes);
        if raw.id != id || raw.queues == 0 || raw.depth == 0 || raw.depth > uapi::DEPTH_MAX {
            return Err(Errno::EIO);
        }
        let mut info = Info::from_raw(&raw);
        let mut bytes = [0; PARAMS_BYTES];
        bytes[..4].copy_from_slice(&(PARAMS_BYTES as u32).to_ne_bytes());
        let command = Command::on(uapi::GET_PARAMS, &info);
        self.execute(command, &mut bytes, &|| false)?;
        if let Some((sectors, read_only)) = params::decode(&bytes) {
            info.size_bytes = sectors.saturating_mul(uapi::SECTOR_BYTES);
            info.read_only = read_only;
        }
        Ok(info)
    }

    /// Says what the block device looks like.
    pub(super) fn set_params(
        &mut self,
        info: &Info,
        mut params: [u8; PARAMS_BYTES],
    ) -> Result<(), Errno> {
        let command = Command::on(uapi::SET_PARAMS, info);
        self.execute(command, &mut params, &|| false).map(drop)
    }

    /// Sends a command of [`uapi`] about a device, with a number if it takes one.
    pub(super) fn tell(&mut self, operation: u32, info: &Info, data: u64) -> Result<(), Errno> {
        let command = Command {
            data,
            ..Command::on(operation, info)
        };
        self.execute(command, &mut [], &|| false).map(drop)
    }

    /// Has the device served by this process, when every request has been fetched: a new one that is
    /// shown then (`START_DEV`), or one that is taken over (`END_USER_RECOVERY`).
    pub(super) fn start(
        &mut self,
        operation: u32,
        info: &Info,
        give_up: &dyn Fn() -> bool,
    ) -> Result<(), Errno> {
        let command = Command {
            data: u64::from(std::process::id()),
            ..Command::on(operation, info)
        };
        self.execute(command, &mut [], give_up).map(drop)
    }

    /// Takes the device away and waits until its number is free.
    pub(super) fn delete(&mut self, info: &Info, give_up: &dyn Fn() -> bool) -> Result<(), Errno> {
        let command = Command::on(uapi::DEL_DEV, info);
        self.execute(command, &mut [], give_up).map(drop)
    }

    /// Takes the device away; its number is free when no process uses it any more.
    pub(super) fn delete_later(&mut self, info: &Info) -> Result<(), Errno> {
        match self.tell(uapi::DEL_DEV_ASYNC, info, 0) {
            Err(Errno::EOPNOTSUPP) => self.delete(info, &|| false),
            result => result,
        }
    }

    /// Tells the server of a device to leave it to the next one. Fails with `EBUSY` when some queue
    /// has no idle request within `patience`.
    pub(super) fn quiesce(&mut self, info: &Info, patience: Duration) -> Result<(), Errno> {
        // 0 would mean for ever.
        let patience_ms = (patience.as_millis() as u64).max(1);
        self.tell(uapi::QUIESCE_DEV, info, patience_ms)
    }

    /// The processors whose requests come to a queue.
    pub(super) fn affinity(&mut self, info: &Info, queue: u16) -> Result<Vec<usize>, Errno> {
        let mut mask = [0; PROCESSORS_MAX / 8];
        let mut command = Command::on(uapi::GET_QUEUE_AFFINITY, info);
        command.data = u64::from(queue);
        self.execute(command, &mut mask, &|| false)?;
        let words = mask
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(uapi::take(word, 0)));
        let bits = words.enumerate().flat_map(|(at, word)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| at * 64 + bit)
        });
        Ok(bits.collect())
    }

    /// Sends a command and waits for its answer. Once `give_up` says so the kernel is asked to let
    /// it be, which then fails with `EINTR`.
    fn execute(
        &mut self,
        command: Command,
        payload: &mut [u8],
        give_up: &dyn Fn() -> bool,
    ) -> Result<u32, Errno> {
        let path = if command.path {
            let mut path = info::char_path(command.id).into_bytes();
            path.push(0);
            path
        } else {
            Vec::new()
        };
        let mut memory = path.clone();
        memory.extend_from_slice(payload);
        let bytes = command.encode(&mut memory, path.len());
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, command.operation).cmd(bytes);
        // SAFETY: the entry points to `memory`, which lives until the command has been answered:
        // `wait` does not return before.
        unsafe { self.push(&entry.build().user_data(COMMAND)) };
        let result = self.wait(give_up);
        payload.copy_from_slice(&memory[path.len()..]);
        u32::try_from(result).map_err(|_| Errno::from_raw(result.wrapping_neg()))
    }

    /// # Safety
    /// What the entry points to stays valid until it has been answered.
    unsafe fn push(&mut self, entry: &Entry128) {
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("a ring of four has room for a command and its cancellation");
    }

    fn wait(&mut self, give_up: &dyn Fn() -> bool) -> i32 {
        let mut cancelled = false;
        let mut result = None;
        loop {
            for entry in self.ring.completion() {
                if entry.user_data() == COMMAND {
                    result = Some(entry.result());
                }
            }
            if let Some(result) = result {
                return result;
            }
            if !cancelled && give_up() {
                cancelled = true;
                let entry = opcode::AsyncCancel::new(COMMAND).build().user_data(CANCEL);
                // SAFETY: the entry points to nothing.
                unsafe { self.push(&Entry128::from(entry)) };
            }
            let time = types::Timespec::from(LOOK);
            let arguments = types::SubmitArgs::new().timespec(&time);
            // An error is the time being over, or a signal; whatever it is, the answer is what
            // matters.
            let _ = self.ring.submitter().submit_with_args(1, &arguments);
        }
    }

    /// Waits until a device is no longer in `state`, which the driver leaves by itself; what it is
    /// then.
    pub(super) fn wait_while(
        &mut self,
        id: u32,
        patience: Duration,
        waiting: impl Fn(&Info) -> bool,
    ) -> Result<Info, Errno> {
        let end = Instant::now() + patience;
        loop {
            let info = self.info(id)?;
            if !waiting(&info) || Instant::now() > end {
                return Ok(info);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Command {
    fn new(operation: u32, id: u32) -> Command {
        Command {
            operation,
            id,
            data: 0,
            path: false,
        }
    }

    fn on(operation: u32, info: &Info) -> Command {
        Command {
            path: info.features.has(Features::UNPRIVILEGED),
            ..Command::new(operation, info.id)
        }
    }

    /// `struct ublksrv_ctrl_cmd`, as the start of what an entry carries.
    fn encode(&self, memory: &mut [u8], path_bytes: usize) -> [u8; 80] {
        let mut bytes = [0; 80];
        let address = if memory.is_empty() {
            0
        } else {
            memory.as_mut_ptr() as u64
        };
        bytes[0..4].copy_from_slice(&self.id.to_ne_bytes());
        // For no queue in particular.
        bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(memory.len() as u16).to_ne_bytes());
        bytes[8..16].copy_from_slice(&address.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.data.to_ne_bytes());
        bytes[24..26].copy_from_slice(&(path_bytes as u16).to_ne_bytes());
        debug_assert!(CONTROL_COMMAND_BYTES <= bytes.len());
        bytes
    }
}

/// Why the control device cannot be opened.
fn explain_open(error: &io::Error) -> String {
    let path = uapi::CONTROL_PATH;
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => format!(
            "{path} is missing: this kernel has no ublk, or its module is not loaded \
             (modprobe ublk_drv)"
        ),
        Some(libc::EACCES | libc::EPERM) => {
            format!("no permission for {path}: be root, or have a udev rule that opens it to you")
        }
        _ => format!("{path}: {error}"),
    }
}

/// Why no device could be made.
fn explain_add(wanted: &DevInfo, errno: Errno) -> String {
    let unprivileged = Features::from_bits(wanted.flags).has(Features::UNPRIVILEGED);
    match errno.raw() {
        libc::EEXIST => format!("ublk device {} exists already", wanted.id),
        libc::EACCES if unprivileged => {
            "there are as many unprivileged ublk devices as the kernel \
             allows (parameter ublks_max of ublk_drv)"
                .to_owned()
        }
        libc::EPERM | libc::EACCES => {
            "no permission to make a ublk device: it takes CAP_SYS_ADMIN, \
             or an unprivileged device"
                .to_owned()
        }
        libc::ENOSPC => "no ublk device number is free".to_owned(),
        libc::EINVAL if wanted.id != u32::MAX && wanted.id >= 1 << 20 => {
            format!(
                "{} is no number of a ublk device: they go up to 1048575",
                wanted.id
            )
        }
        _ => format!("the kernel makes no ublk device: {errno}"),
    }
}

/// Whether a device can get a new server.
pub(super) fn recoverable(info: &Info) -> bool {
    matches!(info.state, State::Quiesced | State::Failing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_carry_the_path_in_front() {
        let mut command = Command::new(uapi::QUIESCE_DEV, 5);
        command.data = 77;
        let bytes = command.encode(&mut [], 0);
        assert_eq!(u32::from_ne_bytes(uapi::take(&bytes, 0)), 5);
        assert_eq!(u16::from_ne_bytes(uapi::take(&bytes, 4)), u16::MAX);
        assert_eq!(u64::from_ne_bytes(uapi::take(&bytes, 8)), 0);
        assert_eq!(u64::from_ne_bytes(uapi::take(&bytes, 16)), 77);
        let mut memory = *b"/dev/ublkc5\0data";
        let bytes = command.encode(&mut memory, 12);
        assert_eq!(u16::from_ne_bytes(uapi::take(&bytes, 6)), 16);
        assert_eq!(u16::from_ne_bytes(uapi::take(&bytes, 24)), 12);
    }

    #[test]
    fn refusals_are_explained() {
        let wanted = |id, features| info::request(id, 1, 1, 4096, features);
        let plain = wanted(Some(3), Features::default());
        assert_eq!(
            explain_add(&plain, Errno::from_raw(libc::EEXIST)),
            "ublk device 3 exists already"
        );
        let unprivileged = wanted(None, Features::UNPRIVILEGED);
        assert!(explain_add(&unprivileged, Errno::EACCES).contains("ublks_max"));
        assert!(explain_add(&plain, Errno::EPERM).contains("CAP_SYS_ADMIN"));
        let far = wanted(Some(1 << 20), Features::default());
        assert!(explain_add(&far, Errno::EINVAL).contains("1048575"));
        let missing = io::Error::from_raw_os_error(libc::ENOENT);
        assert!(explain_open(&missing).contains("modprobe ublk_drv"));
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        assert!(explain_open(&denied).contains("no permission"));
    }
}
