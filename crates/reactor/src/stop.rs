//! A flag that any thread can raise and any task can wait for.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug, Default)]
struct Shared {
    stopped: AtomicBool,
    waiting: Mutex<Vec<Option<Waker>>>,
}

/// A flag that is raised once, for every clone.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    shared: Arc<Shared>,
}

impl Stop {
    /// Not raised.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// Raises it.
    pub fn stop(&self) {
        let waiting = {
            let mut waiting = self.shared.waiting.lock();
            self.shared.stopped.store(true, Ordering::SeqCst);
            // The places stay: their owners give them up.
            waiting
                .iter_mut()
                .filter_map(Option::take)
                .collect::<Vec<Waker>>()
        };
        for waker in waiting {
            waker.wake();
        }
    }

    /// Whether it is raised.
    pub fn is_stopped(&self) -> bool {
        self.shared.stopped.load(Ordering::SeqCst)
    }

    /// Waits until it is raised.
    pub async fn stopped(&self) {
        Stopped {
            shared: &self.shared,
            place: None,
        }
        .await;
    }
}

struct Stopped<'a> {
    shared: &'a Shared,
    place: Option<usize>,
}

impl Future for Stopped<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let shared = self.shared;
        let mut waiting = shared.waiting.lock();
        if shared.stopped.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        let place = self.place.unwrap_or_else(|| {
            let vacant = waiting.iter().position(Option::is_none);
            vacant.unwrap_or_else(|| {
                waiting.push(None);
                waiting.len() - 1
            })
        });
        waiting[place] = Some(context.waker().clone());
        drop(waiting);
        self.place = Some(place);
        Poll::Pending
    }
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            let mut waiting = self.shared.waiting.lock();
            waiting[place] = None;
        }
    }
}

#[cfg(all(test, loom))]
mod loom_model;
