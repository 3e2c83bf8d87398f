//! `cache-clean-interval`: drops cached metadata of open images that was idle for a while.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gaur_engine::Image;
use parking_lot::{Condvar, Mutex};

use crate::notice::say;

/// An image, and when it is its turn.
struct Turn {
    image: Weak<Image>,
    interval: Duration,
    next: Instant,
}

#[derive(Default)]
struct State {
    turns: Vec<Turn>,
    over: bool,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// A thread that cleans the caches of images as long as this value exists; it starts with the first
/// image, and forgets those that are closed.
#[derive(Default)]
pub struct CacheCleaner {
    shared: Arc<Shared>,
}

impl CacheCleaner {
    /// Cleans the caches of an image at this interval. Memory is all that is lost when the thread
    /// cannot be had, so that is said and no more.
    pub fn add(&self, image: &Arc<Image>, interval: Duration) {
        let mut state = self.shared.state.lock();
        state.turns.push(Turn {
            image: Arc::downgrade(image),
            interval,
            next: Instant::now() + interval,
        });
        if state.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("cleaner".to_owned());
            match thread.spawn(move || shared.clean()) {
                Ok(thread) => state.thread = Some(thread),
                Err(error) => say(format!("unused metadata stays in memory: {error}")),
            }
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for CacheCleaner {
    fn drop(&mut self) {
        let thread = {
            let mut state = self.shared.state.lock();
            state.over = true;
            state.thread.take()
        };
        self.shared.changed.notify_all();
        if let Some(thread) = thread {
            // It holds nothing that a panic could have broken.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Sleeps and cleans, each image by its own clock.
    fn clean(&self) {
        let mut state = self.state.lock();
        while !state.over {
            let now = Instant::now();
            let mut due = Vec::new();
            state.turns.retain_mut(|turn| {
                if turn.next <= now {
                    turn.next = now + turn.interval;
                    due.push(turn.image.clone());
                }
                turn.image.strong_count() > 0
            });
            if !due.is_empty() {
                drop(state);
                for image in due.iter().filter_map(Weak::upgrade) {
                    image.clean_caches();
                }
                state = self.state.lock();
                continue;
            }
            let first = state.turns.iter().map(|turn| turn.next).min();
            match first {
                None => self.changed.wait(&mut state),
                Some(first) => {
                    let pause = first.saturating_duration_since(now);
                    self.changed.wait_for(&mut state, pause);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Instant;

    use gaur_engine::{Format, OpenOptions};
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
        let image = SharedImage::open(&spec, &OpenOptions::default()).expect("it opens");
        image.guest().write(0, &[1; 512]).expect("a write");
        image.close().expect("nothing is left to write");
        image
    }

    fn slices(image: &SharedImage) -> u64 {
        let top = image.image().layers().first();
        let cache = top.and_then(|layer| layer.l2_cache());
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
