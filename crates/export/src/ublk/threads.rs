//! The threads that serve a device: who serves what, and where.

use std::rc::Rc;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};

use gaur_block::Device;
use gaur_reactor::{Config, Driver, ThreadsConfig};

use super::char_device::CharDevice;
use super::features::Features;
use super::info::Info;
use super::options::Options;
use super::queue;
use super::supervisor::Event;
use super::transfer::ThreadTag;
use crate::error::ServeError;
use crate::serve::{Channel, Geometry, Log, Prepared, ServingThreads};

/// Asks a thread for the size of its device.
pub(super) type SizeQuery = mpsc::Sender<u64>;

/// The threads, each with its device and waiting to be told to serve.
pub(super) struct DeviceThreads {
    pub(super) prepared: Prepared<Geometry, ThreadStart>,
    /// The tags of each.
    tags: Vec<Vec<ThreadTag>>,
}

/// What all threads need to serve.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) info: Info,
    pub(super) char_device: Arc<CharDevice>,
    pub(super) events: Channel<Event>,
    /// Some thread has been handed a tag back.
    pub(super) aborted: Arc<AtomicBool>,
    pub(super) log: Option<Log>,
}

/// What a thread needs to serve.
pub(super) struct ThreadStart {
    pub(super) shared: Shared,
    pub(super) tags: Vec<ThreadTag>,
    pub(super) size_queries: Channel<SizeQuery>,
}

impl DeviceThreads {
    /// Starts the threads and waits until each has its device. `processors` tells where the requests
    /// of a queue come from.
    pub(super) fn start<D, F>(
        info: &Info,
        options: &Options,
        devices: F,
        mut processors: impl FnMut(u16) -> Vec<usize>,
    ) -> Result<DeviceThreads, ServeError>
    where
        D: Device + 'static,
        F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
    {
        let tags = plan(info, options.threads)?;
        let most = tags.iter().map(Vec::len).max().unwrap_or(0);
        let first_queues = tags.iter().map(|tags| tags.first().map(|tag| tag.queue));
        let config = ThreadsConfig {
            count: tags.len(),
            processors: first_queues
                .map(|queue| queue.map_or_else(Vec::new, &mut processors))
                .collect(),
            name: format!("ublk{}", info.id),
            reactor: reactor_config(options.reactor, most, info.buffer_bytes as usize),
        };
        let make = move |thread| {
            let device = Rc::new(devices(thread)?);
            let geometry = Geometry::of(&*device);
            Ok((device, geometry))
        };
        let prepared = Prepared::start(&config, make, queue::serve::<D>)?;
        Ok(DeviceThreads { prepared, tags })
    }

    /// Makes all threads fetch requests; how many there are. The first answers `size_queries`.
    pub(super) fn serve(
        self,
        shared: &Shared,
        size_queries: &Channel<SizeQuery>,
    ) -> (ServingThreads, usize) {
        let count = self.tags.len();
        let starts = self.tags.into_iter().enumerate();
        let starts = starts.map(|(thread, tags)| ThreadStart {
            shared: shared.clone(),
            tags,
            size_queries: match thread {
                0 => size_queries.clone(),
                _ => Channel::new(),
            },
        });
        (self.prepared.serve(starts), count)
    }
}

/// A reactor for a thread of up to `tags` tags.
fn reactor_config(config: Config, tags: usize, buffer_bytes: usize) -> Config {
    Config {
        driver: Driver::Ring,
        // All answers of a turn, and what they lead to, in one call.
        entries: config
            .entries
            .max((tags as u32 * 2).next_power_of_two())
            .min(4096),
        pool_bytes: config.pool_bytes + queue::pool_bytes(tags, buffer_bytes),
    }
}

/// Which thread serves which tags, in the order of the threads. With fewer threads than queues, each
/// has whole queues; with a multiple, the tags of a queue go round among its threads.
fn plan(info: &Info, threads: Option<usize>) -> Result<Vec<Vec<ThreadTag>>, ServeError> {
    let queues = usize::from(info.queues);
    let threads = threads.unwrap_or(queues);
    if threads > queues {
        if !threads.is_multiple_of(queues) {
            return Err(ServeError::new(format!(
                "{threads} threads cannot share {queues} ublk queues evenly"
            )));
        }
        if !info.features.has(Features::PER_IO_DAEMON) {
            return Err(ServeError::new(
                "this kernel's ublk has at most one thread for a queue (Linux 6.16 has more)",
            ));
        }
    }
    let mut plan = vec![Vec::new(); threads];
    for queue in 0..info.queues {
        for tag in 0..info.depth {
            let share = usize::from(tag) % (threads / queues).max(1);
            let thread = (usize::from(queue) + share * queues) % threads;
            let tags = &mut plan[thread];
            let local = tags.len() as u16;
            tags.push(ThreadTag { queue, tag, local });
        }
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ublk::info::request;

    fn info(queues: u16, depth: u16, features: Features) -> Info {
        Info::from_raw(&request(Some(0), queues, depth, 4096, features))
    }

    fn counts(plan: &[Vec<ThreadTag>]) -> Vec<usize> {
        plan.iter().map(Vec::len).collect()
    }

    #[test]
    fn a_thread_for_each_queue() {
        let plan = plan(&info(3, 8, Features::default()), None).unwrap();
        assert_eq!(counts(&plan), [8, 8, 8]);
        for (queue, tags) in plan.iter().enumerate() {
            assert!(tags.iter().all(|tag| usize::from(tag.queue) == queue));
            assert!(tags.iter().all(|tag| tag.local == tag.tag));
        }
    }

    #[test]
    fn fewer_threads_have_whole_queues() {
        let plan = plan(&info(3, 4, Features::default()), Some(2)).unwrap();
        assert_eq!(counts(&plan), [8, 4]);
        let locals: Vec<u16> = plan[0].iter().map(|tag| tag.local).collect();
        assert_eq!(locals, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn more_threads_share_queues() {
        let both = info(2, 4, Features::PER_IO_DAEMON);
        let plan_of_four = plan(&both, Some(4)).unwrap();
        assert_eq!(counts(&plan_of_four), [2, 2, 2, 2]);
        let tags: Vec<u16> = plan_of_four[2].iter().map(|tag| tag.tag).collect();
        assert_eq!(tags, [1, 3], "of queue 0, every other");
        assert!(plan(&both, Some(3)).is_err());
        assert!(plan(&info(2, 4, Features::default()), Some(4)).is_err());
    }
}
