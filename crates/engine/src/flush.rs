//! Flush coalescing: many callers, one writeback pass.
//!
//! A flush joins the first pass that starts after it was called. The caller that finds no pass
//! running carries out the next one; the others wait. If its future is dropped meanwhile, the image is
//! poisoned, because it is unknown what of the pass has reached the disk.

use gaur_block::{Errno, File};

use crate::active::Active;
use crate::poison::Poison;
use crate::queue::Queue;
use crate::sync::Mutex;
use crate::sync::atomic::Ordering;
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
    poison: &'a Poison,
    group: &'a FlushGroup,
    pass: u64,
    ended: bool,
}

impl FlushGroup {
    /// Returns when a pass has ended that started after this call; carries it out with `pass` if
    /// no other caller does. A pass that fails poisons the image, for all callers that waited for it.
    pub(crate) async fn flush(
        &self,
        poison: &Poison,
        pass: impl AsyncFn() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mine = self.state.lock().started + 1;
        loop {
            let ticket = self.waiters.ticket();
            let leader = {
                let mut state = self.state.lock();
                if state.done >= mine {
                    return poison.get().map_or(Ok(()), Err);
                }
                self.start(&mut state, poison)
            };
            match leader {
                None => self.waiters.wait(ticket).await,
                Some(leader) => {
                    // All who waited for it find its failure in the poison.
                    let _ = leader.carry_out(&pass).await;
                }
            }
        }
    }

    /// Begins a pass unless one is running.
    fn start<'a>(&'a self, state: &mut State, poison: &'a Poison) -> Option<Leader<'a>> {
        if std::mem::replace(&mut state.running, true) {
            return None;
        }
        state.started += 1;
        Some(Leader {
            poison,
            group: self,
            pass: state.started,
            ended: false,
        })
    }

    /// Waits until no pass runs. Another may begin at once.
    pub(crate) async fn rest(&self) {
        loop {
            let ticket = self.waiters.ticket();
            if !self.state.lock().running {
                return;
            }
            self.waiters.wait(ticket).await;
        }
    }

    /// Carries out `pass`, which does all that a pass does and more, while no other pass runs. Callers
    /// that wait for a flush may be served by it, so if it fails the image is poisoned.
    pub(crate) async fn lead(
        &self,
        poison: &Poison,
        pass: impl AsyncFnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        loop {
            let ticket = self.waiters.ticket();
            let leader = self.start(&mut self.state.lock(), poison);
            if let Some(leader) = leader {
                return leader.carry_out(pass).await;
            }
            self.waiters.wait(ticket).await;
        }
    }
}

impl<F: File> Queue<F> {
    /// Makes everything that completed before durable.
    pub(crate) async fn flush_all(&self) -> Result<(), Errno> {
        match self.active() {
            Some(active) => active.flush_all().await,
            None => self.barrier().await,
        }
    }

    /// Everything written so far is durable; if that fails nothing is known any more.
    ///
    /// One at a time: a host that has lost data says so once, to the first caller that flushes. The next
    /// flush may succeed without the lost data, so it must not be asked for before the image is
    /// poisoned.
    pub(crate) async fn barrier(&self) -> Result<(), Errno> {
        let _held = self.image.flushing.lock().await;
        if let Some(errno) = self.image.poisoned() {
            return Err(errno);
        }
        self.flush_host().await
    }

    /// The same for the image file alone: guest data in a data file may be lost still.
    pub(crate) async fn metadata_barrier(&self) -> Result<(), Errno> {
        let _held = self.image.flushing.lock().await;
        if let Some(errno) = self.image.poisoned() {
            return Err(errno);
        }
        self.flush_top().await
    }

    /// Has the host flush the top file and its data file; the lock on flushing is held.
    pub(crate) async fn flush_host(&self) -> Result<(), Errno> {
        if self.flushes_data() {
            let (data, top) = futures_util::join!(self.data_file().flush(), self.flush_top());
            return self.note_flush(data).and(top);
        }
        self.flush_top().await
    }

    #[cfg(not(feature = "broken-order"))]
    fn flushes_data(&self) -> bool {
        self.image.data_file().is_some()
    }

    #[cfg(feature = "broken-order")]
    fn flushes_data(&self) -> bool {
        let broken = self.image.breaks(crate::options::BrokenRule::DataFlush);
        self.image.data_file().is_some() && !broken
    }

    async fn flush_top(&self) -> Result<(), Errno> {
        let flushed = self.top_file().flush().await;
        self.note_flush(flushed)
    }

    /// A host that failed to flush has lost data.
    fn note_flush(&self, flushed: Result<(), Errno>) -> Result<(), Errno> {
        flushed.inspect_err(|errno| {
            self.image.flush_failed.store(true, Ordering::Release);
            self.image.poison(*errno);
        })
    }
}

impl<F: File> Active<'_, F> {
    /// Makes everything that completed before durable.
    pub(crate) async fn flush_all(&self) -> Result<(), Errno> {
        let pass = async || self.write_back().await;
        self.writer.flush.flush(&self.image.poison, pass).await
    }

    /// Writes back when too much of a cache is dirty. Called after a request's own work, so that
    /// the request that filled the cache is the one that waits.
    pub(crate) async fn relieve(&self) {
        let log = self.qcow2.maps.log.as_deref();
        let pressed = self.qcow2.maps.slices.pressed()
            || self.writer.pressed.load(Ordering::Relaxed)
            || log.is_some_and(|log| log.is_filling());
        if pressed {
            // The request itself has succeeded; a failed pass poisons the image and is reported by the
            // next request.
            let _ = self.flush_all().await;
        }
    }
}

impl Leader<'_> {
    async fn carry_out(
        mut self,
        pass: impl AsyncFnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let result = match self.poison.get() {
            Some(errno) => Err(errno),
            None => pass().await,
        };
        if let Err(errno) = result {
            self.poison.set(errno);
        }
        self.ended = true;
        result
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.poison.set(Errno::EIO);
        }
        {
            let mut state = self.group.state.lock();
            state.running = false;
            state.done = self.pass;
        }
        self.group.waiters.notify();
    }
}

#[cfg(all(test, loom))]
mod loom_model;
