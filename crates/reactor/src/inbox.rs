//! The way into a reactor from other threads: wake-ups, and functions to run there.
//!
//! Lock rule: the queue's lock is held for a push or a swap and for nothing else. A thread that is
//! about to sleep says so first and looks into the queue afterwards, and a sender pushes first and
//! looks for a sleeper afterwards, so one of the two always sees the other.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use gaur_block::Errno;

use crate::syscall;
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
    /// The reactor sleeps, or is about to, until `event` is written.
    asleep: AtomicBool,
    event: OwnedFd,
}

impl Inbox {
    pub(crate) fn new() -> Result<Arc<Inbox>, Errno> {
        // SAFETY: no memory is passed; a descriptor that comes back is new and ours alone.
        let event = unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if fd < 0 {
                return Err(syscall::last_errno());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let queue = Mutex::new(Queue::default());
        Ok(Arc::new(Inbox {
            queue,
            asleep: AtomicBool::new(false),
            event,
        }))
    }

    /// Becomes readable when the sleeping reactor has a message.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Leaves a message and wakes the reactor; gives it back when the reactor has ended.
    pub(crate) fn send(&self, message: Message) -> Result<(), Message> {
        {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            if queue.closed {
                return Err(message);
            }
            queue.messages.push_back(message);
        }
        if self.asleep.swap(false, Ordering::SeqCst) {
            let one = 1_u64;
            // SAFETY: the pointer is to 8 bytes. The write fails only when the counter is full,
            // and then the event is readable already.
            let _ = unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
        }
        Ok(())
    }

    /// Moves all messages to `into`, which is empty.
    pub(crate) fn take(&self, into: &mut VecDeque<Message>) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut queue.messages, into);
    }

    /// Announces sleep; `false` when there is a message, and the reactor must not sleep.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let empty = {
            let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            queue.messages.is_empty()
        };
        if !empty {
            self.wake_up();
        }
        empty
    }

    /// Ends the sleep: senders need not write the event any more.
    pub(crate) fn wake_up(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Empties the event's counter.
    pub(crate) fn clear_event(&self) {
        let mut counter = 0_u64;
        // SAFETY: the pointer is to 8 bytes. Failing means that the counter is empty.
        let _ = unsafe { libc::read(self.event.as_raw_fd(), (&raw mut counter).cast(), 8) };
    }

    /// Takes no more messages, unless one is waiting; says whether it is closed now.
    pub(crate) fn close_if_empty(&self) -> bool {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.closed |= queue.messages.is_empty();
        queue.closed
    }

    /// Takes no more messages, and drops those that wait.
    pub(crate) fn close(&self) {
        let messages = {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            queue.closed = true;
            std::mem::take(&mut queue.messages)
        };
        drop(messages);
    }
}
