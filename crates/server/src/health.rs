//! What a server says about the failures of an image: the first failed request of each kind, that the
//! image refuses writes, and that requests succeed again. Those in between are counted, so a full disk
//! makes a handful of lines, however many requests fail.
//!
//! A request that succeeds while none has failed costs one load of a flag that does not change.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gaur_block::{Errno, Request};
use gaur_engine::Image;
use gaur_reactor::OpenFile;
use jiff::Zoned;
use parking_lot::Mutex;

use crate::notice::{one_line, say};
use crate::shared_image::SharedImage;

/// Requests of a kind succeed again when one has and none failed for so long: on a full disk those that
/// need no space succeed among the others.
const QUIET: Duration = Duration::from_secs(5);

/// Memory of the client that cannot be reached.
const EFAULT: Errno = Errno::from_raw(14);

/// Kinds of requests, as they are told.
const KINDS: [&str; 5] = ["read", "write", "zeroing", "discard", "flush"];

/// A time as the log shows it.
fn time(at: &Zoned) -> String {
    at.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// A request, as far as it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    kind: usize,
    offset_bytes: u64,
    len_bytes: u64,
}

impl Asked {
    /// A look at `len_bytes`, or a request with a payload of that length.
    pub fn new(request: Option<&Request>, offset_bytes: u64, len_bytes: u64) -> Asked {
        let (kind, offset_bytes, len_bytes) = match request {
            None => (0, offset_bytes, len_bytes),
            Some(Request::Read { offset_bytes }) => (0, *offset_bytes, len_bytes),
            Some(Request::Write { offset_bytes, .. }) => (1, *offset_bytes, len_bytes),
            Some(Request::WriteZeroes {
                offset_bytes,
                len_bytes,
                ..
            }) => (2, *offset_bytes, *len_bytes),
            Some(Request::Discard {
                offset_bytes,
                len_bytes,
            }) => (3, *offset_bytes, *len_bytes),
            Some(Request::Flush) => (4, 0, 0),
        };
        Asked {
            kind,
            offset_bytes,
            len_bytes,
        }
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = KINDS.get(self.kind).unwrap_or(&"request");
        match self.kind {
            4 => out.write_str(kind),
            _ => write!(
                out,
                "{kind} of {} bytes at offset {}",
                self.len_bytes, self.offset_bytes
            ),
        }
    }
}

/// Failures of one kind of requests.
struct Trouble {
    first: Asked,
    errno: Errno,
    since: Zoned,
    count: u64,
    last: Instant,
}

impl fmt::Display for Trouble {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, since) = (self.count, time(&self.since));
        let (first, errno) = (self.first, self.errno);
        write!(out, "{first} failed at {since}: {errno}; {count} in all")
    }
}

/// How the image of an export is.
pub struct Health {
    /// The export and the image.
    subject: String,
    image: Arc<Image>,
    failing: AtomicBool,
    /// Said already: that it is corrupt, that it refuses writes.
    corrupt: AtomicBool,
    refuses: AtomicBool,
    /// Said already: that what is read does not stay in it, as it should.
    copies: AtomicBool,
    troubles: Mutex<[Option<Trouble>; KINDS.len()]>,
    /// Files that can say more than an error number.
    remote: Vec<OpenFile>,
}

impl Health {
    /// Of an image about which nothing is known yet.
    pub fn new(export: &str, shared: &SharedImage) -> Health {
        Health {
            subject: format!("export {export:?} ({})", one_line(shared.name())),
            image: Arc::clone(shared.image()),
            remote: shared.remote_files(),
            failing: AtomicBool::new(false),
            corrupt: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
            // Nothing to say about others.
            copies: AtomicBool::new(!shared.image().copies_on_read()),
            troubles: Mutex::default(),
        }
    }

    /// A request has ended.
    pub fn note<T>(&self, asked: impl FnOnce() -> Asked, outcome: &Result<T, Errno>) {
        if !self.copies.load(Ordering::Relaxed) {
            self.look_at_copies();
        }
        match outcome {
            Ok(_) if !self.failing.load(Ordering::Relaxed) => {}
            Ok(_) => self.succeeded(asked()),
            Err(errno) => self.failed(asked(), *errno),
        }
    }

    /// What fails now, for people.
    pub fn trouble(&self) -> Option<String> {
        let mut parts: Vec<String> = Vec::new();
        let corruption = self.image.corruption();
        parts.extend(corruption.map(|report| format!("is corrupt: {report}")));
        if let Some(errno) = self.image.poisoned() {
            parts.push(format!("refuses writes until it is served anew: {errno}"));
        }
        let troubles = self.troubles.lock();
        parts.extend(troubles.iter().flatten().map(Trouble::to_string));
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    fn tell(&self, level: &str, what: fmt::Arguments<'_>) {
        let now = time(&Zoned::now());
        say(format_args!("{now} {level} {}: {what}", self.subject));
    }

    fn look_at_copies(&self) {
        if let Some(errno) = self.image.copies().first_failure
            && !self.copies.swap(true, Ordering::Relaxed)
        {
            let what = format_args!(
                "what was read could not be kept in the image: {errno}; the read did not fail (further ones are counted)"
            );
            self.tell("WARN", what);
        }
    }

    #[cold]
    fn failed(&self, asked: Asked, errno: Errno) {
        let end = asked.offset_bytes.checked_add(asked.len_bytes);
        let beyond = end.is_none_or(|end| end > self.image.size_bytes());
        // These are the client's failures.
        if beyond || matches!(errno, Errno::EROFS | Errno::EOPNOTSUPP | EFAULT) {
            return;
        }
        if self.count(asked, errno) {
            self.failing.store(true, Ordering::Relaxed);
            let trouble = self.remote.iter().find_map(OpenFile::trouble);
            let why = trouble.map_or_else(|| errno.to_string(), |why| one_line(&why));
            let what = format_args!("{asked} failed: {why} (further ones are counted)");
            self.tell("WARN", what);
        }
        let corruption = self.image.corruption();
        if let Some(report) = &corruption
            && !self.corrupt.swap(true, Ordering::Relaxed)
        {
            self.tell("ERROR", format_args!("is corrupt: {report}"));
        }
        if let Some(errno) = self.image.poisoned()
            && !self.refuses.swap(true, Ordering::Relaxed)
        {
            let reason = match corruption {
                Some(_) => "it is corrupt",
                None => "metadata may not have reached the disk",
            };
            let what =
                format_args!("refuses writes until it is served anew, because {reason}: {errno}");
            self.tell("ERROR", what);
        }
    }

    /// Counts a failure; whether it is the first.
    fn count(&self, asked: Asked, errno: Errno) -> bool {
        let mut troubles = self.troubles.lock();
        let last = Instant::now();
        match troubles.get_mut(asked.kind) {
            Some(Some(trouble)) => {
                trouble.count += 1;
                trouble.last = last;
                false
            }
            Some(none) => {
                *none = Some(Trouble {
                    first: asked,
                    errno,
                    since: Zoned::now(),
                    count: 1,
                    last,
                });
                true
            }
            None => false,
        }
    }

    #[cold]
    fn succeeded(&self, asked: Asked) {
        let mut troubles = self.troubles.lock();
        let quiet = |trouble: &mut Trouble| trouble.last.elapsed() >= QUIET;
        let over = troubles.get_mut(asked.kind);
        let Some(over) = over.and_then(|trouble| trouble.take_if(quiet)) else {
            return;
        };
        let failing = troubles.iter().any(Option::is_some);
        self.failing.store(failing, Ordering::Relaxed);
        drop(troubles);
        let what = format_args!("{asked} succeeded again; before, {over}");
        self.tell("INFO", what);
    }
}

impl Drop for Health {
    fn drop(&mut self) {
        let copies = self.image.copies();
        if copies.failed > 1 {
            let count = copies.failed;
            let what =
                format_args!("what was read could not be kept in the image; {count} times in all");
            self.tell("INFO", what);
        }
        let troubles = std::mem::take(&mut *self.troubles.lock());
        // A single one has been told.
        for trouble in troubles
            .iter()
            .flatten()
            .filter(|trouble| trouble.count > 1)
        {
            self.tell("INFO", format_args!("{trouble}"));
        }
    }
}
