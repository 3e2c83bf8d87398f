//! Flush: many callers, one pass.
//!
//! A flush joins the first pass that starts after it was called. Whoever finds that no pass runs
//! carries out the next one; the others wait. If the one who carries it out goes away, the image
//! is poisoned, because nobody knows what of the pass has reached the disk.

use std::sync::atomic::Ordering;

use gaur_block::{Errno, File};
use parking_lot::Mutex;

use crate::image::{Image, Writer};
use crate::queue::Queue;
use crate::waiters::Waiters;

/// Which passes have started and ended.
#[derive(Debug, Default)]
pub(crate) struct FlushGroup {
    state: Mutex<State>,
    waiters: Waiters,
}

#[derive(Debug, Default)]
struct State {
    running: bool,
    started: u64,
    done: u64,
}

/// The pass of this caller; poisons the image unless it is ended properly.
struct Leader<'a> {
    image: &'a Image,
    group: &'a FlushGroup,
    pass: u64,
    ended: bool,
}

impl<F: File> Queue<F> {
    /// Makes everything that completed before durable.
    pub(crate) async fn flush_all(&self) -> Result<(), Errno> {
        let Some(writer) = &self.image.writer else {
            return self.barrier().await;
        };
        let group = &writer.flush;
        let mine = group.state.lock().started + 1;
        loop {
            let ticket = group.waiters.ticket();
            let leads = {
                let mut state = group.state.lock();
                if state.done >= mine {
                    break;
                }
                let leads = !state.running;
                if leads {
                    state.running = true;
                    state.started += 1;
                }
                leads.then_some(state.started)
            };
            match leads {
                None => group.waiters.wait(ticket).await,
                Some(pass) => {
                    let leader = Leader {
                        image: &self.image,
                        group,
                        pass,
                        ended: false,
                    };
                    let result = self.pass(writer).await;
                    leader.end(result);
                }
            }
        }
        match self.image.poisoned() {
            Some(errno) => Err(errno),
            None => Ok(()),
        }
    }

    /// Writes back when too much of a cache is dirty. Called after a request's own work, so that
    /// the request that filled the cache is the one that waits.
    pub(crate) async fn relieve(&self) -> Result<(), Errno> {
        let Some((qcow2, writer)) = self.top() else {
            return Ok(());
        };
        if !qcow2.maps.slices.pressed() && !writer.pressed.load(Ordering::Relaxed) {
            return Ok(());
        }
        // The request itself has succeeded; a failed pass poisons the image and is reported by the
        // next request.
        let _ = self.flush_all().await;
        Ok(())
    }

    async fn pass(&self, writer: &Writer) -> Result<(), Errno> {
        match self.image.poisoned() {
            Some(errno) => Err(errno),
            None => self.write_back(writer).await,
        }
    }
}

impl Leader<'_> {
    fn end(mut self, result: Result<(), Errno>) {
        if let Err(errno) = result {
            self.image.poison(errno);
        }
        self.ended = true;
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.image.poison(Errno::EIO);
        }
        {
            let mut state = self.group.state.lock();
            state.running = false;
            state.done = self.pass;
        }
        self.group.waiters.notify();
    }
}
