//! Covering a file with a mount, and uncovering it.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use gaur_block::Errno;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno as Raw;
use rustix::mount::{MountFlags, UnmountFlags, unmount};
use rustix::process::{getegid, geteuid};

use super::mount_table::{self, Entry};
use super::options::{AllowOther, Options};
use super::{device, fusermount};
use crate::error::{ServeError, errno_of};
use crate::fuse::proto::wire::PAYLOAD_MAX;
use crate::serve::say;

/// What the mount is called in lists of mounts, and what such mounts are recognised by.
const SOURCE: &CStr = c"gaur";
const KIND: &CStr = c"fuse.gaur";
/// Whether an error says that the server of a file system has gone: before it was asked, or while it was.
/// A killed process's ring, and with it the connection, may end a moment after the process.
fn is_gone(errno: i32) -> bool {
    matches!(errno, libc::ENOTCONN | libc::ECONNABORTED)
}

/// A mounted file.
pub(super) struct Mount {
    path: PathBuf,
    /// How the kernel lists it; `None` when it is not listed.
    entry: Option<Entry>,
    /// Mounted by the program that may.
    helped: bool,
    ended: Mutex<bool>,
}

fn refused(path: &Path, what: impl std::fmt::Display) -> ServeError {
    ServeError::new(format!("{}: {what}", path.display()))
}

/// The file to cover, by its real path. What a dead server left at the path is taken away.
///
/// # Errors
/// When there is no regular file, or one that is covered already.
pub(super) fn prepare(options: &Options) -> Result<PathBuf, ServeError> {
    let given = options.path.as_path();
    let path = real_path(given)?;
    if let Some(entry) = mount_table::at(&path)
        && entry.kind.starts_with("fuse")
    {
        let ours = entry.kind.as_bytes() == KIND.to_bytes();
        match (ask_again(&path), ours) {
            (Err(errno), true) if is_gone(errno) => {
                take_away(&path, UnmountFlags::DETACH, false)
                    .map_err(|errno| refused(given, format_args!("{STALE}: {errno}")))?;
                say(
                    &options.log,
                    &format!("{}: uncovered, {STALE}", given.display()),
                );
            }
            (Err(errno), false) if is_gone(errno) => return Err(refused(given, STALE_OTHER)),
            _ => return Err(refused(given, "is covered by a mount of FUSE already")),
        }
    }
    let metadata =
        std::fs::metadata(&path).map_err(|error| refused(given, format_args!("{error}")))?;
    if !metadata.is_file() {
        return Err(refused(given, "is not a regular file"));
    }
    Ok(path)
}

const STALE: &str = "the server that had covered it is gone";
const STALE_OTHER: &str =
    "the server of another mount over it is gone; unmount that first ('umount FILE')";

fn real_path(given: &Path) -> Result<PathBuf, ServeError> {
    let error = match std::fs::canonicalize(given) {
        Ok(path) => return Ok(path),
        Err(error) => error,
    };
    if error.kind() == std::io::ErrorKind::NotFound {
        let what = "there is no such file; make an empty one to be covered ('touch FILE')";
        return Err(refused(given, what));
    }
    // A dead server's file cannot be looked at, its folder can.
    let folder = match given.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => Path::new("/"),
    };
    match (std::fs::canonicalize(folder), given.file_name()) {
        (Ok(folder), Some(name)) if error.raw_os_error().is_some_and(is_gone) => {
            Ok(folder.join(name))
        }
        _ => Err(refused(given, error)),
    }
}

/// Asks the server of what is mounted at a path whether it is there. What the kernel remembers does
/// not count.
fn ask_again(path: &Path) -> Result<(), i32> {
    let (flags, mask) = (AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
    let asked = statx(CWD, path, flags, mask);
    asked.map(drop).map_err(Raw::raw_os_error)
}

impl Mount {
    /// Covers the file. The mount is of no use before the first request is answered.
    pub(super) fn make(
        path: PathBuf,
        options: &Options,
        read_only: bool,
    ) -> Result<(Mount, OwnedFd), ServeError> {
        let said = &options.path;
        let direct = match geteuid().is_root() {
            true => {
                let descriptor = device::open().map_err(|errno| no_device(said, errno))?;
                let made = by_system(&descriptor, &path, options, read_only);
                Some(made.map(|()| descriptor))
            }
            false => None,
        };
        let (descriptor, helped) = match direct {
            Some(Ok(descriptor)) => (descriptor, false),
            // Not so mighty after all, in a container for instance.
            None | Some(Err(Errno::EPERM)) => {
                let made = by_helper(&path, options.allow_other, read_only);
                let made = made.map_err(|reason| refused(said, reason))?;
                (made, true)
            }
            Some(Err(errno)) => {
                return Err(refused(said, format_args!("cannot be mounted: {errno}")));
            }
        };
        let mount = Mount {
            entry: mount_table::at(&path),
            path,
            helped,
            ended: Mutex::new(false),
        };
        Ok((mount, descriptor))
    }

    /// Whether it is still the mount that was made; it may have been taken away by anybody, and the
    /// path covered anew.
    fn is_there(&self) -> bool {
        match &self.entry {
            None => true,
            Some(entry) => mount_table::at(&self.path).as_ref() == Some(entry),
        }
    }

    /// Uncovers the file; programs that have it open keep it as long as it is served. Once is enough.
    pub(super) fn end(&self) -> Result<(), ServeError> {
        let mut ended = self.ended.lock();
        if std::mem::replace(&mut *ended, true) || !self.is_there() {
            return Ok(());
        }
        match take_away(&self.path, UnmountFlags::DETACH, self.helped) {
            // Not a mount any more: another process was faster.
            Ok(()) | Err(Errno::EINVAL) => Ok(()),
            Err(errno) => Err(refused(
                &self.path,
                format_args!("cannot be unmounted: {errno}"),
            )),
        }
    }

    /// Ends it and everything under way, without waiting for anybody, if it is there. What has been
    /// detached ends when its last descriptor is closed.
    pub(super) fn abort(&self) {
        if self.is_there() {
            let flags = UnmountFlags::DETACH | UnmountFlags::FORCE;
            let _ = take_away(&self.path, flags, self.helped);
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A caller that wants to know of an error calls `end`.
        let _ = self.end();
    }
}

fn take_away(path: &Path, flags: UnmountFlags, helped: bool) -> Result<(), Errno> {
    if helped {
        return fusermount::unmount(path);
    }
    match unmount(path, flags | UnmountFlags::NOFOLLOW) {
        Err(Raw::PERM) => fusermount::unmount(path),
        result => result.map_err(errno_of),
    }
}

/// Mounts with the rights of this process.
fn by_system(
    descriptor: &OwnedFd,
    path: &Path,
    options: &Options,
    read_only: bool,
) -> Result<(), Errno> {
    let others = options.allow_other != AllowOther::Off;
    let data = system_options(descriptor.as_raw_fd(), others)?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    flags.set(MountFlags::RDONLY, read_only);
    rustix::mount::mount(SOURCE, path, KIND, flags, &*data).map_err(errno_of)
}

fn no_device(said: &Path, errno: Errno) -> ServeError {
    let what = match errno.raw() {
        libc::ENOENT | libc::ENODEV | libc::ENXIO => {
            "this kernel or container has no FUSE ('modprobe fuse')"
        }
        _ => "cannot be mounted",
    };
    let device = device::PATH;
    refused(said, format_args!("{what}: cannot open {device}: {errno}"))
}

fn system_options(descriptor: i32, others: bool) -> Result<CString, Errno> {
    let (uid, gid) = (geteuid(), getegid());
    let others = if others { ",allow_other" } else { "" };
    let text = format!(
        "fd={descriptor},rootmode=100600,user_id={},group_id={},default_permissions,\
         max_read={PAYLOAD_MAX}{others}",
        uid.as_raw(),
        gid.as_raw()
    );
    CString::new(text).map_err(|_| Errno::EINVAL)
}

/// Has the program mount that may.
fn by_helper(path: &Path, others: AllowOther, read_only: bool) -> Result<OwnedFd, String> {
    let access = if read_only { "ro" } else { "rw" };
    let common = format!(
        "{access},nosuid,nodev,fsname=gaur,subtype=gaur,default_permissions,max_read={PAYLOAD_MAX}"
    );
    let with_others = format!("{common},allow_other");
    let made = match others {
        AllowOther::Off => fusermount::mount(path, &common),
        AllowOther::On => fusermount::mount(path, &with_others),
        AllowOther::Auto => {
            fusermount::mount(path, &with_others).or_else(|_| fusermount::mount(path, &common))
        }
    };
    let descriptor = made?;
    device::never_wait(descriptor.as_fd()).map_err(|errno| errno.to_string())?;
    Ok(descriptor)
}
