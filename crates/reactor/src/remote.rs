//! Files whose bytes are elsewhere, and in part here: in a sparse file that holds what was fetched.
//!
//! This crate knows neither stores nor networks. Whoever does implements [`RemoteFile`] and says how names are opened
//! ([`install`]). What is held is read like any file, by the ring; only what is not is asked for.

use std::fmt::Debug;
use std::path::Path;
use std::pin::Pin;
use std::sync::OnceLock;

use gaur_block::{Access, Errno, Extent, OpenError, SegmentsMut, Target};

use crate::open::{OpenFile, refused};
use crate::whole::{self, Raw};

/// A read that waits for bytes from elsewhere.
pub type Fetch<'a> = Pin<Box<dyn Future<Output = Result<(), Errno>> + 'a>>;

/// The far side of a file.
pub trait RemoteFile: Debug + Send + Sync {
    /// The file's length in bytes, which never changes.
    fn len_bytes(&self) -> u64;

    /// Whether all bytes of a range are in the file that holds them, as far as it reaches: then a mark, for
    /// [`RemoteFile::still_holds`].
    fn holds(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64>;

    /// Whether nothing was given up since the mark: what was read since is right.
    fn still_holds(&self, mark: u64) -> bool;

    /// Reads bytes, all of them below the file's length, wherever they are.
    fn fetch<'a>(&'a self, offset_bytes: u64, into: SegmentsMut<'a>) -> Fetch<'a>;

    /// Whether its bytes are a guest's disk, and no image whatever they look like.
    fn is_disk(&self) -> bool {
        false
    }

    /// The run of data or zeros at an offset below the file's length, where that is known.
    fn extent_at(&self, _offset_bytes: u64) -> Option<Extent> {
        None
    }

    /// What went wrong last, in words.
    fn trouble(&self) -> Option<String>;

    /// The name of the file, without what is secret in it.
    fn name(&self) -> String;
}

/// By whose word a remote file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asker<'a> {
    /// The user's.
    User,
    /// An image's, which may refer to what is below these names of the user's.
    Image(&'a [std::path::PathBuf]),
    /// An image's, which may refer to anything.
    AnyImage,
}

/// Opens remote files by name.
pub trait Opener: Send + Sync {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// Whatever the other side says, in words; `EXDEV` when the image may not refer to it.
    fn open(&self, name: &str, asker: Asker<'_>) -> Result<OpenFile, OpenError>;
}

static OPENER: OnceLock<Box<dyn Opener>> = OnceLock::new();

/// Has names of remote files opened in this process from here on. The first opener stays.
pub fn install(opener: Box<dyn Opener>) {
    let _ = OPENER.set(opener);
}

/// Opens a file if its name is that of a remote one.
pub(crate) fn open(
    name: &Path,
    asker: Asker<'_>,
    access: Access,
) -> Option<Result<OpenFile, OpenError>> {
    gaur_block::is_remote(name).then(|| open_remote(name, asker, access))
}

fn open_remote(name: &Path, asker: Asker<'_>, access: Access) -> Result<OpenFile, OpenError> {
    let Some(opener) = OPENER.get() else {
        let what = "this program was built without stores";
        return Err(refused(Errno::EOPNOTSUPP, what));
    };
    if access.write {
        return Err(refused(Errno::EROFS, "what is in a store is only read"));
    }
    let Some(name) = name.to_str() else {
        return Err(refused(Errno::EINVAL, "the name is no text"));
    };
    opener.open(name, asker)
}

/// Reads what is here like any file's bytes, and fetches the rest.
pub(crate) async fn read_at<R: Raw>(
    raw: &R,
    remote: &dyn RemoteFile,
    offset_bytes: u64,
    target: Target<'_>,
) -> Result<(), Errno> {
    if let Some(mark) = remote.holds(offset_bytes, target.len() as u64) {
        whole::read_at(raw, offset_bytes, target).await?;
        // Otherwise it was given up meanwhile.
        if remote.still_holds(mark) {
            return Ok(());
        }
    }
    fetch(raw, remote, offset_bytes, target).await
}

async fn fetch<R: Raw>(
    raw: &R,
    remote: &dyn RemoteFile,
    offset_bytes: u64,
    target: Target<'_>,
) -> Result<(), Errno> {
    // Memory registered with a ring is none that a thread can fill.
    let Target::Memory(memory) = target else {
        return Err(Errno::EOPNOTSUPP);
    };
    let there = remote.len_bytes().saturating_sub(offset_bytes);
    let there = usize::try_from(there).map_or(memory.len(), |there| there.min(memory.len()));
    let (memory, beyond) = memory.split_at(there);
    beyond.fill_zeros();
    if there == 0 {
        return Ok(());
    }
    raw.wait(remote.fetch(offset_bytes, memory)).await
}
