//! An unbounded channel from any thread to one task.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};

use parking_lot::Mutex;

struct State<T> {
    messages: VecDeque<T>,
    reader: Option<Waker>,
}

/// A queue that any thread writes and one task reads. Clones are the same channel.
pub(crate) struct Channel<T> {
    state: Arc<Mutex<State<T>>>,
}

impl<T> Clone for Channel<T> {
    fn clone(&self) -> Channel<T> {
        Channel {
            state: self.state.clone(),
        }
    }
}

impl<T> Default for Channel<T> {
    fn default() -> Channel<T> {
        Channel::new()
    }
}

impl<T> Channel<T> {
    pub(crate) fn new() -> Channel<T> {
        Channel {
            state: Arc::new(Mutex::new(State {
                messages: VecDeque::new(),
                reader: None,
            })),
        }
    }

    /// Appends a message and wakes the task that waits for one.
    pub(crate) fn put(&self, message: T) {
        let reader = {
            let mut state = self.state.lock();
            state.messages.push_back(message);
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Whether there is no message.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().messages.is_empty()
    }

    /// The next message, once there is one.
    pub(crate) async fn take(&self) -> T {
        poll_fn(|context| {
            let mut state = self.state.lock();
            match state.messages.pop_front() {
                Some(message) => Poll::Ready(message),
                None => {
                    state.reader = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}
