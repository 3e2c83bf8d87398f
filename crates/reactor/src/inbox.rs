//! The way into a reactor from other threads: wake-ups, and functions to run there.
//!
//! Lock rule: the queue's lock is held for a push or a swap and for nothing else. A thread that is
//! about to sleep says so first and looks into the queue afterwards, and a sender pushes first and
//! looks for a sleeper afterwards, so one of the two always sees the other.

use std::collections::VecDeque;
use std::sync::Arc;

use gaur_block::Errno;

use crate::event::Event;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::task::TaskHeader;

/// What another thread asks for.
pub(crate) enum Message {
    /// Poll this task.
    Wake(Arc<TaskHeader>),
    /// Call this on the reactor's thread.
    Run(Box<dyn FnOnce() + Send>),
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<Message>,
    closed: bool,
}

/// Messages for one reactor.
pub(crate) struct Inbox {
    queue: Mutex<Queue>,
    /// The reactor sleeps, or is about to, until `event` is raised.
    asleep: AtomicBool,
    event: Event,
}

impl Inbox {
    pub(crate) fn new() -> Result<Arc<Inbox>, Errno> {
        Ok(Arc::new(Inbox {
            queue: Mutex::new(Queue::default()),
            asleep: AtomicBool::new(false),
            event: Event::new()?,
        }))
    }

    /// Becomes readable when the sleeping reactor has a message.
    pub(crate) fn event(&self) -> &Event {
        &self.event
    }

    /// Leaves a message and wakes the reactor; gives it back when the reactor has ended.
    pub(crate) fn send(&self, message: Message) -> Result<(), Message> {
        {
            let mut queue = self.queue.lock();
            if queue.closed {
                return Err(message);
            }
            queue.messages.push_back(message);
        }
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.event.raise();
        }
        Ok(())
    }

    /// Moves all messages to `into`, which is empty.
    pub(crate) fn take(&self, into: &mut VecDeque<Message>) {
        let mut queue = self.queue.lock();
        std::mem::swap(&mut queue.messages, into);
    }

    /// Announces sleep; `false` when there is a message, and the reactor must not sleep.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let empty = {
            let queue = self.queue.lock();
            queue.messages.is_empty()
        };
        if !empty {
            self.wake_up();
        }
        empty
    }

    /// Ends the sleep: senders need not raise the event any more.
    pub(crate) fn wake_up(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Takes no more messages, unless one is waiting; says whether it is closed now.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut queue = self.queue.lock();
        queue.closed |= queue.messages.is_empty();
        queue.closed
    }

    /// Takes no more messages, and drops those that wait.
    pub(crate) fn close(&self) {
        let messages = {
            let mut queue = self.queue.lock();
            queue.closed = true;
            std::mem::take(&mut queue.messages)
        };
        drop(messages);
    }
}

#[cfg(all(test, loom))]
mod loom_model;
