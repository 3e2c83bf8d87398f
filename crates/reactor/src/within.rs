//! Opening a file that an image names: only inside given directories, whatever links and `..` say.
//!
//! The kernel resolves the name below the open directory (`openat2(2)`, Linux 5.6), so that a link or a directory
//! that is swapped meanwhile leads out as little as one that was always there. Where there is no openat2 (old kernels,
//! some containers' filters) the name is walked component by component on open directories. A
//! file is looked at by its path alone (`O_PATH`) first, because opening a fifo waits and opening a device may do something.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use gaur_block::{Access, Errno, OpenError, Within};
use rustix::fs::{self, FileType, OFlags, Stat};

use crate::nbd;
use crate::open::{Kind, OpenFile, c_path, flags_of, kind_of, open_failed, refused};
use crate::remote::{self, Asker};
use crate::syscall::{self, again};

/// How often a name is resolved anew, because something was renamed meanwhile.
const ATTEMPTS: usize = 64;

/// Most links on the way to a file, as in the kernel.
const LINKS_MAX: usize = 40;

/// File systems whose files the kernel makes up as they are read. Magic numbers as in `statfs(2)`.
const MADE_UP: [u32; 14] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0xf97c_ff8c, // selinuxfs
    0x6265_6570, // configfs
    0xde5e_81e4, // efivarfs
    0xcafe_4a11, // bpf
    0x6165_676c, // pstore
    0x6e73_6673, // nsfs
    0x1cd1,      // devpts
];

impl OpenFile {
    /// Opens the file at the path `name`, if it lies `within`.
    ///
    /// # Errors
    /// [`Within::refused`] when it does not; else those of [`OpenFile::open`].
    pub fn open_within(
        name: impl AsRef<Path>,
        within: Within<'_>,
        access: Access,
    ) -> Result<OpenFile, OpenError> {
        let name = name.as_ref();
        let places = match within {
            Within::ByUser => return OpenFile::open(name, access),
            Within::Anywhere => {
                let opened = remote::open(name, Asker::AnyImage, access);
                return opened.unwrap_or_else(|| OpenFile::open(name, access));
            }
            Within::Places(places) => places,
        };
        if let Some(remote) = nbd::remote_of(name) {
            return match remote? {
                remote if nbd::is_within(&remote, within) => OpenFile::open_nbd(remote, access),
                _ => Err(refused(
                    Errno::EXDEV,
                    "an image may have no NBD export opened that is not allowed",
                )),
            };
        }
        if let Some(opened) = remote::open(name, Asker::Image(places), access) {
            return opened;
        }
        // A name may be bad in one place and lead to a file in another.
        let mut failed = None;
        for place in places {
            match open_at_place(name, place, access) {
                Ok(Some(file)) => return Ok(file),
                Ok(None) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        Err(failed.unwrap_or_else(|| within.refused()))
    }
}

/// Nothing when the name does not lead there.
fn open_at_place(name: &Path, place: &Path, access: Access) -> Result<Option<OpenFile>, OpenError> {
    let place = match place.as_os_str().is_empty() {
        true => Path::new("."),
        false => place,
    };
    let directory = match syscall::open(&c_path(place)?, OFlags::PATH | OFlags::DIRECTORY) {
        Ok(directory) => directory,
        // The user named this very file: what is opened is the user's path, not the image's.
        Err(Errno::ENOTDIR) if is_same(name, place) => {
            return OpenFile::open(place, access).map(Some);
        }
        // What is not there, or cannot be entered, holds nothing.
        Err(_) => return Ok(None),
    };
    let by_letters = below(std::path::absolute(name), std::path::absolute(place));
    if let Some(rest) = &by_letters
        && let Some(file) = open_beneath(directory.as_fd(), rest, access)?
    {
        return Ok(Some(file));
    }
    // Links may lead there. What they say now is no more than a guess: the file is opened beneath the
    // directory in any case.
    match below(name.canonicalize(), place.canonicalize()) {
        Some(rest) if by_letters.as_ref() != Some(&rest) => {
            open_beneath(directory.as_fd(), &rest, access)
        }
        _ => Ok(None),
    }
}

/// The path from a directory to a file.
fn below(name: std::io::Result<PathBuf>, place: std::io::Result<PathBuf>) -> Option<PathBuf> {
    let (name, place) = (name.ok()?, place.ok()?);
    name.strip_prefix(place).ok().map(Path::to_owned)
}

/// Whether two paths lead to one file.
fn is_same(name: &Path, place: &Path) -> bool {
    let found = (name.canonicalize(), place.canonicalize());
    name == place || matches!(found, (Ok(name), Ok(place)) if name == place)
}

/// Opens a regular file beneath a directory; nothing when the path leads out of it.
fn open_beneath(
    directory: BorrowedFd<'_>,
    path: &Path,
    access: Access,
) -> Result<Option<OpenFile>, OpenError> {
    let failed = |errno| open_failed(errno, access);
    let facts = match resolve(directory, path, OFlags::PATH) {
        Ok(found) => examine(&found, access)?,
        Err(Errno::EXDEV | Errno::ELOOP) => return Ok(None),
        Err(errno) => return Err(failed(errno)),
    };
    let fd = match resolve(directory, path, flags_of(access)) {
        Ok(fd) => fd,
        Err(Errno::EXDEV | Errno::ELOOP) => return Ok(None),
        Err(errno) => return Err(failed(errno)),
    };
    let opened = again(|| fs::fstat(&fd)).map_err(failed)?;
    if (opened.st_dev, opened.st_ino) != (facts.st_dev, facts.st_ino) {
        let reason = "was replaced by another file while it was opened";
        return Err(refused(Errno::EPERM, reason));
    }
    OpenFile::from_fd(fd, access).map(Some)
}

/// Looks at a file that is not open yet.
fn examine(found: &OwnedFd, access: Access) -> Result<Stat, OpenError> {
    let failed = |errno| open_failed(errno, access);
    let facts = again(|| fs::fstat(found)).map_err(failed)?;
    if kind_of(&facts)? == Kind::BlockDevice {
        let reason = "is a block device, which only the user may name";
        return Err(refused(Errno::EXDEV, reason));
    }
    let magic = syscall::filesystem_magic(found.as_fd()).map_err(failed)?;
    if MADE_UP.contains(&(magic as u32)) {
        let reason = "is on a file system that the kernel makes up, which holds no images";
        return Err(refused(Errno::EXDEV, reason));
    }
    Ok(facts)
}

/// Opens what is at a path beneath a directory: `EXDEV` when that leads out of it.
fn resolve(directory: BorrowedFd<'_>, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = match path.as_os_str().is_empty() {
        true => Path::new("."),
        false => path,
    };
    let name = c_string(path.as_os_str())?;
    for _ in 0..ATTEMPTS {
        match syscall::open_beneath(directory, &name, flags) {
            // Something was renamed while a `..` was resolved.
            Err(Errno::EAGAIN) => {}
            Err(Errno::ENOSYS | Errno::EPERM) => return walk(directory, path, flags),
            opened => return opened,
        }
    }
    Err(Errno::EAGAIN)
}

/// The same without the kernel's help.
fn walk(directory: BorrowedFd<'_>, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let mut left = Vec::new();
    push_components(&mut left, path)?;
    // The directories on the way, each opened in the one before.
    let mut way: Vec<OwnedFd> = Vec::new();
    let mut links = 0;
    while let Some(name) = left.pop() {
        if name == ".." {
            way.pop().ok_or(Errno::EXDEV)?;
            continue;
        }
        let here = way.last().map_or(directory, AsFd::as_fd);
        let name = c_string(&name)?;
        let found = syscall::open_in(here, &name, OFlags::PATH)?;
        let facts = again(|| fs::fstat(&found))?;
        match FileType::from_raw_mode(facts.st_mode) {
            FileType::Symlink if links < LINKS_MAX => {
                links += 1;
                let text = again(|| fs::readlinkat(&found, c"", Vec::new()))?;
                let text = OsString::from_vec(text.into_bytes());
                push_components(&mut left, Path::new(&text))?;
            }
            FileType::Symlink => return Err(Errno::ELOOP),
            FileType::Directory => way.push(found),
            _ if left.is_empty() => return syscall::open_in(here, &name, flags),
            _ => return Err(Errno::ENOTDIR),
        }
    }
    Err(Errno::EISDIR)
}

/// Puts the components of a path onto a stack, the first one on top: `EXDEV` when it is absolute. The
/// links of `/proc` that are more than their text are so, or lead nowhere.
fn push_components(stack: &mut Vec<OsString>, path: &Path) -> Result<(), Errno> {
    for component in path.components().rev() {
        match component {
            Component::Normal(name) => stack.push(name.to_owned()),
            Component::ParentDir => stack.push("..".into()),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return Err(Errno::EXDEV),
        }
    }
    Ok(())
}

fn c_string(name: &OsStr) -> Result<CString, Errno> {
    CString::new(name.as_bytes()).map_err(|_| Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A folder of its own below the temporary one, gone at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir();
            let path = path.join(format!("gaur-within-{}-{name}", std::process::id()));
            std::fs::create_dir_all(path.join("images/deep")).unwrap();
            std::fs::write(path.join("secret"), "secret").unwrap();
            std::fs::write(path.join("images/base"), "base").unwrap();
            std::fs::write(path.join("images/deep/base"), "deep").unwrap();
            Folder(path)
        }

        fn link(&self, to: &str, name: &str) {
            symlink(to, self.0.join("images").join(name)).unwrap();
        }

        fn opens(&self, name: &str) -> Result<u64, Errno> {
            let images = [self.0.join("images/")];
            let name = self.0.join("images").join(name);
            let opened = OpenFile::open_within(name, Within::Places(&images), READ);
            opened
                .map(|file| file.id().inode)
                .map_err(|error| error.errno)
        }

        fn walks(&self, name: &str) -> Result<u64, Errno> {
            let images = c_string(self.0.join("images").as_os_str())?;
            let images = syscall::open(&images, OFlags::PATH | OFlags::DIRECTORY)?;
            let fd = walk(images.as_fd(), Path::new(name), OFlags::RDONLY)?;
            Ok(again(|| fs::fstat(&fd))?.st_ino)
        }

        fn inode(&self, name: &str) -> u64 {
            let facts = std::fs::metadata(self.0.join("images").join(name)).unwrap();
            std::os::unix::fs::MetadataExt::ino(&facts)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const READ: Access = Access {
        write: false,
        direct: false,
        lock: false,
        force_share: false,
    };

    #[test]
    fn files_of_the_directory_open_by_any_path_that_stays_inside() {
        let folder = Folder::new("inside");
        folder.link("base", "link");
        folder.link("deep", "way");
        folder.link("../base", "deep/up");
        for name in [
            "base",
            "./base",
            "deep/../base",
            "link",
            "way/up",
            "way/../base",
        ] {
            assert_eq!(folder.opens(name), Ok(folder.inode("base")), "{name}");
            assert_eq!(folder.walks(name), Ok(folder.inode("base")), "{name}");
        }
        // An absolute link back into the directory.
        let absolute = folder.0.join("images/base");
        folder.link(absolute.to_str().unwrap(), "absolute");
        assert_eq!(folder.opens("absolute"), Ok(folder.inode("base")));
        assert_eq!(folder.opens("none"), Err(Errno::ENOENT));
        assert_eq!(folder.walks("none"), Err(Errno::ENOENT));
    }

    #[test]
    fn neither_links_nor_dots_nor_absolute_names_lead_out() {
        let folder = Folder::new("outside");
        folder.link("../secret", "link");
        folder.link("/etc", "etc");
        folder.link("..", "up");
        folder.link("/proc/self/fd", "fd");
        for name in [
            "../secret",
            "deep/../../secret",
            "link",
            "etc/passwd",
            "up/secret",
            "/etc/passwd",
            "/proc/self/maps",
            "/dev/fd/0",
            "fd/0",
        ] {
            assert_eq!(folder.opens(name), Err(Errno::EXDEV), "{name}");
            assert_eq!(folder.walks(name), Err(Errno::EXDEV), "{name}");
        }
        folder.link("loop", "loop");
        assert_eq!(folder.opens("loop"), Err(Errno::EXDEV));
        assert_eq!(folder.walks("loop"), Err(Errno::ELOOP));
    }

    #[test]
    fn what_is_no_file_of_a_disk_is_refused_and_a_fifo_does_not_hang() {
        let folder = Folder::new("kinds");
        let fifo = folder.0.join("images/fifo");
        fs::mknodat(fs::CWD, &fifo, FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(folder.opens("fifo"), Err(Errno::EINVAL));
        assert_eq!(folder.opens("deep"), Err(Errno::EISDIR));
        let open_in = |place: &str, name: &str| {
            let place = [PathBuf::from(place)];
            let opened = OpenFile::open_within(name, Within::Places(&place), READ);
            opened.map(|_| ()).map_err(|error| error.errno)
        };
        assert_eq!(open_in("/", "/proc/self/maps"), Err(Errno::EXDEV));
        assert_eq!(open_in("/proc/self", "/proc/self/maps"), Err(Errno::EXDEV));
        assert_eq!(
            open_in("/proc/self/fd", "/proc/self/fd/0"),
            Err(Errno::EXDEV)
        );
        assert_eq!(open_in("/dev", "/dev/null"), Err(Errno::EINVAL));
    }

    #[test]
    fn a_file_that_the_user_named_opens_by_its_own_path_only() {
        let folder = Folder::new("named");
        folder.link("../secret", "link");
        let places = [folder.0.join("images"), folder.0.join("secret")];
        let opens = |name: &str| {
            let name = folder.0.join("images").join(name);
            OpenFile::open_within(name, Within::Places(&places), READ).is_ok()
        };
        assert!(opens("../secret") && opens("link") && opens("base"));
        std::fs::write(folder.0.join("other"), "").unwrap();
        assert!(!opens("../other"));
    }

    /// A link that another process turns to and fro between a file inside and one outside, for as long as
    /// the name is opened: the file outside must never come back.
    #[test]
    fn a_link_swapped_while_it_is_opened_never_leads_out() {
        let folder = Folder::new("swapped");
        let secret = std::fs::metadata(folder.0.join("secret")).unwrap();
        let secret = std::os::unix::fs::MetadataExt::ino(&secret);
        folder.link("base", "link");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let images = folder.0.join("images");
                for target in ["../secret", "base"].iter().cycle() {
                    symlink(target, images.join("new")).unwrap();
                    std::fs::rename(images.join("new"), images.join("link")).unwrap();
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            let (mut opened, mut refused) = (0, 0);
            for _ in 0..20_000 {
                match folder.opens("link") {
                    Ok(inode) => {
                        assert_ne!(inode, secret);
                        opened += 1;
                    }
                    Err(_) => refused += 1,
                }
                assert_ne!(folder.walks("link"), Ok(secret));
            }
            done.store(true, Ordering::Relaxed);
            assert!(opened > 0 && refused > 0, "{opened} {refused}");
        });
    }
}
