//! Letters from one thread to a task of another.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

struct State<T> {
    letters: VecDeque<T>,
    reader: Option<Waker>,
}

/// A queue that any thread writes and one task reads. Clones are the same box.
pub(crate) struct Mailbox<T> {
    state: Arc<Mutex<State<T>>>,
}

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Mailbox<T> {
        Mailbox {
            state: self.state.clone(),
        }
    }
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> Mailbox<T> {
        Mailbox {
            state: Arc::new(Mutex::new(State {
                letters: VecDeque::new(),
                reader: None,
            })),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Each change under the lock is one step, so a panic elsewhere spoils nothing.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn put(&self, letter: T) {
        let reader = {
            let mut state = self.lock();
            state.letters.push_back(letter);
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// The next letter, once there is one.
    pub(crate) async fn take(&self) -> T {
        poll_fn(|context| {
            let mut state = self.lock();
            match state.letters.pop_front() {
                Some(letter) => Poll::Ready(letter),
                None => {
                    state.reader = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}
