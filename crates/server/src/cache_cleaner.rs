//! `cache-clean-interval`: drops cached metadata of open images that was idle for a while.

use std::sync::{Arc, OnceLock, Weak};
use std::thread::{Builder, JoinHandle, park, park_timeout};
use std::time::{Duration, Instant};

use gaur_engine::Image;
use parking_lot::Mutex;

use crate::notice::say;

/// An image, and when it is its turn.
struct Turn {
    image: Weak<Image>,
    interval: Duration,
    next: Instant,
}

/// A thread that cleans the caches of images as long as this value exists; it starts with the first
/// image, and forgets those that are closed.
#[derive(Default)]
pub struct CacheCleaner {
    turns: Arc<Mutex<Vec<Turn>>>,
    thread: OnceLock<Option<JoinHandle<()>>>,
}

impl CacheCleaner {
    /// Cleans the caches of an image at this interval. Memory is all that is lost when the thread
    /// cannot be had, so that is said and no more.
    pub fn add(&self, image: &Arc<Image>, interval: Duration) {
        self.turns.lock().push(Turn {
            image: Arc::downgrade(image),
            interval,
            next: Instant::now() + interval,
        });
        let thread = self.thread.get_or_init(|| {
            let turns = Arc::downgrade(&self.turns);
            let thread = Builder::new().name("cleaner".to_owned());
            let thread = thread.spawn(move || while clean(&turns) {});
            thread
                .inspect_err(|error| say(format!("unused metadata stays in memory: {error}")))
                .ok()
        });
        if let Some(thread) = thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for CacheCleaner {
    fn drop(&mut self) {
        self.turns = Arc::default();
        if let Some(Some(thread)) = self.thread.take() {
            thread.thread().unpark();
            // It holds nothing that a panic could have broken.
            let _ = thread.join();
        }
    }
}

/// Cleans the images whose turn it is, each by its own clock, and sleeps until that of the next; `false`
/// at the end.
fn clean(turns: &Weak<Mutex<Vec<Turn>>>) -> bool {
    let Some(turns) = turns.upgrade() else {
        return false;
    };
    let now = Instant::now();
    let mut due = Vec::new();
    turns.lock().retain_mut(|turn| {
        if turn.next <= now {
            turn.next = now + turn.interval;
            due.extend(turn.image.upgrade());
        }
        turn.image.strong_count() > 0
    });
    let first = turns.lock().iter().map(|turn| turn.next).min();
    drop(turns);
    due.iter().for_each(|image| image.clean_caches());
    drop(due);
    match first {
        None => park(),
        Some(first) => park_timeout(first.saturating_duration_since(Instant::now())),
    }
    true
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use gaur_engine::{Format, OpenOptions, References};
    use gaur_format::plan::CreateOptions;

    use super::*;
    use crate::image_spec::ImageSpec;
    use crate::shared_image::SharedImage;
    use crate::temporary;

    /// An image with one mapped cluster, whose slice was read.
    fn used_image(path: &str) -> SharedImage {
        let plan = CreateOptions {
            size_bytes: 1 << 20,
            ..CreateOptions::default()
        };
        temporary::make(Path::new(path), &plan).expect("a new image");
        let spec = ImageSpec::plain(path, Some(Format::Qcow2));
        let image = SharedImage::open(&spec, &OpenOptions::new(References::Any)).expect("it opens");
        image.guest().write(0, &[1; 512]).expect("a write");
        image.close().expect("nothing is left to write");
        image
    }

    fn slices(image: &SharedImage) -> u64 {
        let cache = image.image().layers().top().l2_cache();
        cache.expect("a qcow2 image has a cache").slices
    }

    #[test]
    fn what_is_not_used_is_given_back() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
        let (cleaned, kept) = (used_image(&path("cleaned")), used_image(&path("kept")));
        assert!(slices(&cleaned) > 0 && slices(&kept) > 0);
        let cleaner = CacheCleaner::default();
        cleaner.add(cleaned.image(), Duration::from_millis(5));
        cleaner.add(kept.image(), Duration::from_secs(600));
        let deadline = Instant::now() + Duration::from_secs(30);
        while slices(&cleaned) > 0 {
            assert!(Instant::now() < deadline, "the slice is still there");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(cleaner);
        assert!(slices(&kept) > 0);
    }

    #[test]
    fn a_long_interval_does_not_hold_up_the_end() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let image = used_image(&dir.path().join("image").to_string_lossy());
        let start = Instant::now();
        let cleaner = CacheCleaner::default();
        cleaner.add(image.image(), Duration::from_secs(600));
        drop(cleaner);
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}
