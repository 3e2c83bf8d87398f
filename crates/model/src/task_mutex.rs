//! An asynchronous mutex for the model checker: a task may hold it across an await.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::task::{Poll, Waker};

use crate::lock::Mutex;

/// `futures_util::lock::Mutex`: the guard's drop wakes one of the waiting tasks.
#[derive(Debug, Default)]
pub struct TaskMutex<T> {
    state: Mutex<TaskMutexState>,
    value: PhantomData<T>,
}

#[derive(Debug, Default)]
struct TaskMutexState {
    held: bool,
    waiting: VecDeque<Waker>,
}

impl<T> TaskMutex<T> {
    /// Waits until it is free and locks it.
    pub async fn lock(&self) -> TaskMutexGuard<'_, T> {
        poll_fn(|context| {
            let mut state = self.state.lock();
            if std::mem::replace(&mut state.held, true) {
                state.waiting.push_back(context.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
        TaskMutexGuard { mutex: self }
    }
}

/// Holds a [`TaskMutex`].
#[derive(Debug)]
pub struct TaskMutexGuard<'a, T> {
    mutex: &'a TaskMutex<T>,
}

impl<T> Drop for TaskMutexGuard<'_, T> {
    fn drop(&mut self) {
        let next = {
            let mut state = self.mutex.state.lock();
            state.held = false;
            state.waiting.pop_front()
        };
        if let Some(waker) = next {
            waker.wake();
        }
    }
}
