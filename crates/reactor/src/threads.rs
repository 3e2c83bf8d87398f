//! Threads with a reactor each.

use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use gaur_block::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::reactor::{Config, Handle, Reactor};
use crate::stop::Stop;
use crate::syscall;

/// What [`Threads::start`] starts.
#[derive(Clone, Debug)]
pub struct ThreadsConfig {
    /// How many, at least 1.
    pub count: usize,
    /// Thread n runs on the n-th of these sets of processors; on any where there is none, or an empty one.
    pub processors: Vec<Vec<usize>>,
    /// The first part of the threads' names.
    pub name: String,
    /// For each thread's reactor.
    pub reactor: Config,
}

/// Running reactors. Work reaches them through their handles.
pub struct Threads {
    handles: Vec<Handle>,
    threads: Vec<JoinHandle<()>>,
    stop: Stop,
}

impl Threads {
    /// Starts the threads; each has its reactor when this returns.
    ///
    /// # Errors
    /// When the system gives no thread, or a reactor cannot be made. Threads that started end.
    ///
    /// # Panics
    /// When the count is 0.
    pub fn start(config: &ThreadsConfig) -> Result<Threads, Errno> {
        assert!(config.count > 0, "there is at least one thread");
        let mut started = Threads {
            handles: vec![],
            threads: vec![],
            stop: Stop::new(),
        };
        for index in 0..config.count {
            let (send, receive) = mpsc::sync_channel(1);
            let reactor_config = config.reactor;
            let stop = started.stop.clone();
            let processors = config.processors.get(index).cloned().unwrap_or_default();
            let run = move || {
                stay_on(&processors);
                match Reactor::new(&reactor_config) {
                    Err(errno) => drop(send.send(Err(errno))),
                    Ok(reactor) => {
                        let _ = send.send(Ok(reactor.handle()));
                        serve(&reactor, &stop);
                    }
                }
            };
            let name = format!("{}-{index}", config.name);
            let thread = thread::Builder::new().name(name).spawn(run);
            let result = match thread {
                Ok(thread) => {
                    started.threads.push(thread);
                    receive.recv().unwrap_or(Err(Errno::EIO))
                }
                Err(error) => Err(syscall::errno_of(&error)),
            };
            match result {
                Ok(handle) => started.handles.push(handle),
                Err(errno) => {
                    started.join();
                    return Err(errno);
                }
            }
        }
        Ok(started)
    }

    /// One for each thread.
    pub fn handles(&self) -> &[Handle] {
        &self.handles
    }

    /// Ends each thread once its tasks have ended, and waits for that.
    ///
    /// # Panics
    /// When one of the threads did, outside of any task.
    pub fn join(self) {
        self.stop.stop();
        for thread in self.threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// Runs a reactor until it is told to stop, and then until its tasks have ended.
fn serve(reactor: &Reactor, stop: &Stop) {
    reactor.block_on(async {
        stop.stopped().await;
        reactor.drained().await;
    });
}

/// A hint: where it is refused, or where none of them is for this process, the thread runs anywhere.
fn stay_on(processors: &[usize]) {
    let mut set = CpuSet::new();
    for processor in processors.iter().filter(|one| **one < CpuSet::MAX_CPU) {
        set.set(*processor);
    }
    if set.count() > 0 {
        let _ = sched_setaffinity(None, &set);
    }
}
