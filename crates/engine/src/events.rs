//! Events of an open image, for `tracing`: the first failed request, no space left on the host and space
//! again. Others are where they happen: poison, corruption, what a writeback pass wrote.
//!
//! While no subscriber wants them they cost a load, and nothing is allocated for them.

use gaur_block::{Errno, Request};

use crate::image::Image;
use crate::range::GuestRange;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// So many changes in a row succeed before space counts as found: on a full disk those that need none succeed
/// among the others.
const SUCCESSES: usize = 64;

/// Which events an image has had.
#[derive(Debug, Default)]
pub(crate) struct RequestEvents {
    failed: AtomicBool,
    /// Changes that have to succeed until there is space again; 0 if there is.
    no_space: AtomicUsize,
}

impl Image {
    /// A request has ended; `payload_bytes` is the length of a read or write.
    #[inline]
    pub(crate) fn note(&self, request: Request, payload_bytes: u64, result: Result<(), Errno>) {
        match result {
            Ok(()) if self.events.no_space.load(Ordering::Relaxed) == 0 => {}
            Ok(()) => self.note_success(request),
            Err(errno) => self.note_failure(request, payload_bytes, errno),
        }
    }

    #[cold]
    fn note_success(&self, request: Request) {
        if matches!(request, Request::Read { .. } | Request::Flush) {
            return;
        }
        let no_space = &self.events.no_space;
        let left = no_space.load(Ordering::Relaxed);
        let next = left.saturating_sub(1);
        // When another thread was faster, this success is not counted.
        let stepped = no_space.compare_exchange(left, next, Ordering::Relaxed, Ordering::Relaxed);
        if stepped == Ok(1) {
            tracing::info!(image = %self.name(), "the host has space again");
        }
    }

    #[cold]
    fn note_failure(&self, request: Request, payload_bytes: u64, errno: Errno) {
        let (kind, offset, len) = described(request, payload_bytes);
        let refused = self.read_only && !matches!(request, Request::Read { .. });
        let inside =
            GuestRange::checked(offset, len).is_some_and(|range| range.end() <= self.size_bytes());
        if refused || !inside {
            return;
        }
        if !self.events.failed.swap(true, Ordering::Relaxed) {
            let image = self.name();
            tracing::warn!(%image, kind, offset, len, %errno, "the first request failed");
        }
        let full = matches!(errno, Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG);
        if full && self.events.no_space.swap(SUCCESSES, Ordering::Relaxed) == 0 {
            tracing::warn!(image = %self.name(), %errno, "the host has no space left");
        }
    }
}

/// What an event calls a request, and its offset and length in bytes.
fn described(request: Request, payload_bytes: u64) -> (&'static str, u64, u64) {
    match request {
        Request::Read { offset_bytes } => ("read", offset_bytes, payload_bytes),
        Request::Write { offset_bytes, .. } => ("write", offset_bytes, payload_bytes),
        Request::WriteZeroes {
            offset_bytes,
            len_bytes,
            ..
        } => ("write zeroes", offset_bytes, len_bytes),
        Request::Discard {
            offset_bytes,
            len_bytes,
        } => ("discard", offset_bytes, len_bytes),
        Request::Flush => ("flush", 0, 0),
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::{Debug, Write};
    use std::sync::{Arc, Mutex};

    use gaur_block::{Device, Payload, Request, Source};
    use gaur_format::plan::CreateOptions;
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::chain::open;
    use crate::create::create;
    use crate::job::Job;
    use crate::options::OpenOptions;
    use crate::queue::Queue;
    use crate::references::References;
    use crate::test_file::{TestFile, TestHost, block_on, cached_limits};

    /// Keeps events as text.
    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<String>>>);

    struct Text(String);

    impl Visit for Text {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            write!(self.0, " {field}={value:?}").unwrap();
        }
    }

    impl Subscriber for Kept {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut text = Text(event.metadata().level().to_string());
            event.record(&mut text);
            self.0.lock().unwrap().push(text.0);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    impl Kept {
        /// How many events have all these words.
        fn count(&self, words: &[&str]) -> usize {
            let events = self.0.lock().unwrap();
            let has = |event: &&String| words.iter().all(|word| event.contains(word));
            events.iter().filter(has).count()
        }
    }

    fn image() -> (TestFile, Queue<TestFile>) {
        let file = TestFile::new(Vec::new(), cached_limits());
        let options = CreateOptions {
            size_bytes: 64 << 20,
            ..CreateOptions::default()
        };
        block_on(create(&file, &options, &Job::default())).unwrap();
        let mut host = TestHost::default();
        host.add("image", file.clone());
        let opened = block_on(open(&host, "image", &OpenOptions::new(References::Any))).unwrap();
        (file, opened.image.queue(opened.files))
    }

    fn write(queue: &Queue<TestFile>, offset_bytes: u64) -> Result<(), Errno> {
        let request = Request::Write {
            offset_bytes,
            fua: false,
        };
        let payload = Payload::Write(Source::memory(&[7; 512]));
        block_on(queue.submit(request, payload))
    }

    fn flush(queue: &Queue<TestFile>) -> Result<(), Errno> {
        block_on(queue.submit(Request::Flush, Payload::None))
    }

    #[test]
    fn no_space_and_space_again_are_one_event_each() {
        let kept = Kept::default();
        tracing::subscriber::with_default(kept.clone(), || {
            let (file, queue) = image();
            write(&queue, 0).unwrap();
            file.fail_from(file.events().len(), Errno::ENOSPC);
            for _ in 0..5 {
                assert_eq!(write(&queue, 0), Err(Errno::ENOSPC));
            }
            assert_eq!(
                kept.count(&["WARN", "the host has no space left", "image=image"]),
                1
            );
            assert_eq!(
                kept.count(&["WARN", "the first request failed", "write"]),
                1
            );
            file.fail_from(usize::MAX, Errno::ENOSPC);
            for _ in 0..SUCCESSES as u64 * 2 {
                write(&queue, 0).unwrap();
            }
            assert_eq!(kept.count(&["INFO", "space again"]), 1);
        });
    }

    #[test]
    fn a_pass_tells_what_it_wrote_and_a_failed_one_that_writes_are_refused() {
        let kept = Kept::default();
        tracing::subscriber::with_default(kept.clone(), || {
            let (file, queue) = image();
            write(&queue, 0).unwrap();
            flush(&queue).unwrap();
            assert_eq!(kept.count(&["DEBUG", "writeback", "refcount_bytes="]), 1);
            write(&queue, 1 << 20).unwrap();
            file.fail_from(file.events().len(), Errno::EIO);
            for _ in 0..3 {
                flush(&queue).unwrap_err();
            }
            assert_eq!(kept.count(&["ERROR", "refuses writes", "image=image"]), 1);
        });
    }
}
