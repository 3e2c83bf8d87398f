//! The threads that serve a device: who serves what, and where.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use gaur_block::{Device, DeviceLimits, Errno};
use gaur_reactor::{Config, Driver, Handle, Reactor};

use super::channel::{Channel, Descriptors};
use super::features::Features;
use super::info::Info;
use super::options::{Options, ZERO_COPY};
use super::queue::{self, Worker};
use super::supervisor::Event;
use super::transfer::{Place, TransferMode};
use crate::error::ServeError;

/// Makes the device of a thread.
pub(super) type Make<D> = Arc<dyn Fn(usize) -> Result<D, String> + Send + Sync>;

/// The threads, each with its device and waiting to be told to begin.
pub(super) struct DeviceThreads {
    pub(super) running: Vec<ServingThread>,
    /// What the first device says.
    pub(super) size_bytes: u64,
    pub(super) limits: DeviceLimits,
}

/// One thread.
pub(super) struct ServingThread {
    begin: mpsc::SyncSender<Begin>,
    handle: Handle,
    pub(super) thread: JoinHandle<()>,
}

/// What a thread needs to serve.
#[derive(Clone)]
struct Begin {
    channel: Arc<Channel>,
    max_transfer: usize,
    events: mpsc::Sender<Event>,
    aborted: Arc<AtomicBool>,
}

struct Ready {
    handle: Handle,
    size_bytes: u64,
    limits: DeviceLimits,
}

/// What a thread is started with.
struct ThreadPlan {
    index: usize,
    places: Vec<Place>,
    processors: Vec<usize>,
    info: Info,
    options: Options,
}

/// Asks the device of the thread for its size.
type AskSize = Box<dyn Fn() -> u64>;

thread_local! {
    static SIZE: RefCell<Option<AskSize>> = const { RefCell::new(None) };
}

impl DeviceThreads {
    /// Starts the threads and waits until each has its device. `processors` tells where the requests
    /// of a queue come from.
    pub(super) fn start<D: Device + 'static>(
        info: &Info,
        options: &Options,
        make: &Make<D>,
        mut processors: impl FnMut(u16) -> Vec<usize>,
    ) -> Result<DeviceThreads, ServeError> {
        let mut running = Vec::new();
        let mut first = None;
        for (index, places) in plan(info, options.threads)?.into_iter().enumerate() {
            let first_queue = places.first().map(|place| place.queue);
            let plan = ThreadPlan {
                index,
                processors: first_queue.map_or_else(Vec::new, &mut processors),
                places,
                info: *info,
                options: options.clone(),
            };
            // One after the other: what is in the way of one is in the way of all.
            match plan.start(make) {
                Ok((thread, size_bytes, limits)) => {
                    first.get_or_insert((size_bytes, limits));
                    running.push(thread);
                }
                Err(error) => {
                    dismiss(running);
                    return Err(error);
                }
            }
        }
        let (size_bytes, limits) =
            first.ok_or_else(|| ServeError::new("a ublk device needs a thread"))?;
        Ok(DeviceThreads {
            running,
            size_bytes,
            limits,
        })
    }

    /// Makes all threads fetch requests.
    pub(super) fn begin(&self, channel: &Arc<Channel>, events: &mpsc::Sender<Event>) {
        let begin = Begin {
            channel: channel.clone(),
            max_transfer: (self.limits.max_transfer as usize).max(512),
            events: events.clone(),
            aborted: Arc::default(),
        };
        for thread in &self.running {
            // A thread that has gone says so by its event.
            let _ = thread.begin.send(begin.clone());
        }
    }

    /// For asking the size of the device later.
    pub(super) fn size_of(&self) -> Option<Handle> {
        self.running.first().map(|thread| thread.handle.clone())
    }
}

/// Ends threads that were never told to begin, and waits until their devices are gone.
pub(super) fn dismiss(running: Vec<ServingThread>) {
    for thread in running {
        drop(thread.begin);
        let _ = thread.thread.join();
    }
}

/// The size of the device of a thread now; `None` when the thread has ended.
pub(super) fn ask_size(handle: &Handle) -> Option<u64> {
    let (send, receive) = mpsc::sync_channel(1);
    let ask = move || async move {
        let size = SIZE.with_borrow(|ask| ask.as_ref().map(|ask| ask()));
        let _ = send.send(size);
    };
    handle.spawn(ask).ok()?;
    receive.recv_timeout(Duration::from_secs(10)).ok().flatten()
}

impl ThreadPlan {
    /// Starts the thread and waits until it has its device.
    fn start<D: Device + 'static>(
        self,
        make: &Make<D>,
    ) -> Result<(ServingThread, u64, DeviceLimits), ServeError> {
        let (ready_send, ready) = mpsc::sync_channel(1);
        let (begin, begin_receive) = mpsc::sync_channel(1);
        let make = make.clone();
        let thread = thread::Builder::new()
            .name(format!("ublk{}-{}", self.info.id, self.index))
            .spawn(move || self.work(&make, &ready_send, &begin_receive))
            .map_err(|error| ServeError::new(format!("no thread for ublk: {error}")))?;
        let told = ready.recv();
        match told.unwrap_or_else(|_| Err(ServeError::new("a thread for ublk ended"))) {
            Ok(ready) => {
                let thread = ServingThread {
                    begin,
                    handle: ready.handle,
                    thread,
                };
                Ok((thread, ready.size_bytes, ready.limits))
            }
            Err(error) => {
                let _ = thread.join();
                Err(error)
            }
        }
    }

    fn work<D: Device + 'static>(
        self,
        make: &Make<D>,
        ready: &mpsc::SyncSender<Result<Ready, ServeError>>,
        begin: &mpsc::Receiver<Begin>,
    ) {
        stay_on(&self.processors);
        let (reactor, device) = match self.prepare(make) {
            Ok(both) => both,
            Err(error) => return drop(ready.send(Err(error))),
        };
        let _ = ready.send(Ok(Ready {
            handle: reactor.handle(),
            size_bytes: device.size_bytes(),
            limits: device.limits(),
        }));
        let Ok(begin) = begin.recv() else {
            return;
        };
        let events = begin.events.clone();
        let size = {
            let device = device.clone();
            Box::new(move || device.size_bytes())
        };
        SIZE.set(Some(size));
        let result = self.serve(&reactor, device, begin);
        // The last of the device goes while the reactor is still there.
        SIZE.set(None);
        drop(reactor);
        let _ = events.send(Event::Ended(result));
    }

    fn prepare<D: Device + 'static>(&self, make: &Make<D>) -> Result<(Reactor, Rc<D>), ServeError> {
        let count = self.places.len();
        let config = self.options.reactor;
        let config = Config {
            driver: Driver::Ring,
            // All answers of a turn, and what they lead to, in one call.
            entries: config
                .entries
                .max((count as u32 * 2).next_power_of_two())
                .min(4096),
            pool_bytes: config.pool_bytes
                + queue::pool_bytes(count, self.info.buffer_bytes as usize),
        };
        let reactor = Reactor::new(&config)
            .map_err(|errno| ServeError::because("ublk needs io_uring", errno))?;
        let device = make(self.index).map_err(ServeError::new)?;
        Ok((reactor, Rc::new(device)))
    }

    fn serve<D: Device + 'static>(
        &self,
        reactor: &Reactor,
        device: Rc<D>,
        begin: Begin,
    ) -> Result<(), ServeError> {
        let mut queues: Vec<u16> = self.places.iter().map(|place| place.queue).collect();
        queues.dedup();
        let map = |queue| {
            Ok((
                queue,
                Descriptors::map(&begin.channel, queue, self.info.depth)?,
            ))
        };
        let mapped: Result<Vec<_>, Errno> = queues.into_iter().map(map).collect();
        let descriptors = mapped
            .map_err(|errno| ServeError::because("the requests of ublk cannot be seen", errno))?;
        let worker = Worker {
            device,
            channel: begin.channel,
            descriptors,
            mode: TransferMode {
                zero_copy: self.info.features.has(ZERO_COPY),
                max_transfer: begin.max_transfer,
            },
            events: begin.events,
            aborted: begin.aborted,
            log: self.options.log.clone(),
            tags: Default::default(),
        };
        let buffer_bytes = self.info.buffer_bytes as usize;
        reactor
            .block_on(worker.serve(&self.places, buffer_bytes))
            .map_err(|errno| ServeError::because("the device could not be flushed", errno))
    }
}

/// Which thread serves which tags, in the order of the threads. With fewer threads than queues, each
/// has whole queues; with a multiple, the tags of a queue go round among its threads.
fn plan(info: &Info, threads: Option<usize>) -> Result<Vec<Vec<Place>>, ServeError> {
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
            let places = &mut plan[thread];
            let local = places.len() as u16;
            places.push(Place { queue, tag, local });
        }
    }
    Ok(plan)
}

/// A hint: where it is refused, or where none of them is for this process, the thread runs anywhere.
fn stay_on(processors: &[usize]) {
    if processors.is_empty() {
        return;
    }
    // SAFETY: `cpu_set_t` is plain integers, for which zero is a value; the numbers are below the
    // size of the set, and the size is passed.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for processor in processors {
            if *processor < libc::CPU_SETSIZE as usize {
                libc::CPU_SET(*processor, &mut set);
            }
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ublk::info::request;

    fn info(queues: u16, depth: u16, features: Features) -> Info {
        Info::from_raw(&request(Some(0), queues, depth, 4096, features))
    }

    fn counts(plan: &[Vec<Place>]) -> Vec<usize> {
        plan.iter().map(Vec::len).collect()
    }

    #[test]
    fn a_thread_for_each_queue() {
        let plan = plan(&info(3, 8, Features::default()), None).unwrap();
        assert_eq!(counts(&plan), [8, 8, 8]);
        for (queue, places) in plan.iter().enumerate() {
            assert!(places.iter().all(|place| usize::from(place.queue) == queue));
            assert!(places.iter().all(|place| place.local == place.tag));
        }
    }

    #[test]
    fn fewer_threads_have_whole_queues() {
        let plan = plan(&info(3, 4, Features::default()), Some(2)).unwrap();
        assert_eq!(counts(&plan), [8, 4]);
        let locals: Vec<u16> = plan[0].iter().map(|place| place.local).collect();
        assert_eq!(locals, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn more_threads_share_queues() {
        let both = info(2, 4, Features::PER_IO_DAEMON);
        let plan_of_four = plan(&both, Some(4)).unwrap();
        assert_eq!(counts(&plan_of_four), [2, 2, 2, 2]);
        let tags: Vec<u16> = plan_of_four[2].iter().map(|place| place.tag).collect();
        assert_eq!(tags, [1, 3], "of queue 0, every other");
        assert!(plan(&both, Some(3)).is_err());
        assert!(plan(&info(2, 4, Features::default()), Some(4)).is_err());
    }
}
