//! `cache-clean-interval`: gives back the metadata of open images that nobody used for a while.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use gaur_block::Errno;
use gaur_engine::Image;
use gaur_reactor::{Config, Driver, Either, Reactor, Stop, race, sleep, spawn};

use crate::notice::say;

/// A thread that cleans the caches of images as long as this value exists.
pub struct CacheCleaner {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl CacheCleaner {
    /// For each image the time between two rounds, if there is any. Memory is all that is lost when
    /// the thread cannot be had, so that is said and no more.
    pub fn start(images: Vec<(Arc<Image>, Option<Duration>)>) -> CacheCleaner {
        let stop = Stop::new();
        let stopped = stop.clone();
        let images: Vec<(Arc<Image>, Duration)> = images
            .into_iter()
            .filter_map(|(image, interval)| Some((image, interval?)))
            .collect();
        if images.is_empty() {
            return CacheCleaner { stop, thread: None };
        }
        let clean = move || {
            if let Err(errno) = clean_until(images, &stopped) {
                say(format!("unused metadata stays in memory: {errno}"));
            }
        };
        let thread = std::thread::Builder::new().name("cleaner".to_owned());
        let thread = thread.spawn(clean);
        if let Err(error) = &thread {
            say(format!("unused metadata stays in memory: {error}"));
        }
        CacheCleaner {
            stop,
            thread: thread.ok(),
        }
    }
}

impl Drop for CacheCleaner {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            // It holds nothing that a panic could have broken.
            let _ = thread.join();
        }
    }
}

/// Sleeps and cleans, each image by its own clock.
fn clean_until(images: Vec<(Arc<Image>, Duration)>, stop: &Stop) -> Result<(), Errno> {
    let reactor = Reactor::new(&Config {
        // No file is touched, and nobody waits for this thread.
        driver: Driver::Fallback,
        pool_bytes: 0,
        ..Config::default()
    })?;
    reactor.block_on(async {
        for (image, interval) in images {
            let stop = stop.clone();
            drop(spawn(async move {
                while let Either::Left(()) = race(sleep(interval), stop.stopped()).await {
                    image.clean_caches();
                }
            }));
        }
        reactor.drained().await;
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use gaur_engine::{Format, OpenOptions};

    use super::*;
    use crate::image_spec::ImageSpec;
    use crate::new_image::NewImage;
    use crate::options::OptionList;
    use crate::shared_image::SharedImage;

    /// An image with one mapped cluster, whose slice was read.
    fn used_image(path: &str) -> SharedImage {
        let new = NewImage::new(
            path,
            Format::Qcow2,
            OptionList::default(),
            Some(1 << 20),
            false,
        );
        new.and_then(|new| new.make(false)).expect("a new image");
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
        let cleaner = CacheCleaner::start(vec![
            (Arc::clone(cleaned.image()), Some(Duration::from_millis(5))),
            (Arc::clone(kept.image()), None),
        ]);
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
        let interval = Some(Duration::from_secs(600));
        drop(CacheCleaner::start(vec![(
            Arc::clone(image.image()),
            interval,
        )]));
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}
