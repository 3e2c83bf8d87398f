//! Models of wake-ups from other threads: a task that is woken is polled after that, and sees what was
//! done before. A wake-up that is lost shows as a deadlock.

use std::future::poll_fn;

use gaur_model::{block_on, check, thread};

use super::*;
use crate::sync::atomic::AtomicUsize;

/// Drives tasks until none is left, as a reactor does.
fn drive(tasks: &Tasks, inbox: &Inbox) {
    let mut messages = VecDeque::new();
    while tasks.alive() > 0 {
        tasks.run_ready(|| false);
        if tasks.alive() > 0 && !tasks.has_ready() && inbox.fall_asleep() {
            inbox.event().wait();
            inbox.event().clear();
            inbox.wake_up();
        }
        inbox.take(&mut messages);
        for message in messages.drain(..) {
            match message {
                Message::Wake(header) => tasks.push_ready(header),
                Message::Run(run) => run(),
            }
        }
    }
}

/// The task leaves its waker once; the threads wake it by that after each of their steps.
fn woken_by(threads: usize, steps: usize) {
    let inbox = Inbox::new().unwrap();
    let tasks = Tasks::new(inbox.clone());
    let done = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let mut wakers = Vec::new();
    let (leave, left) = std::sync::mpsc::channel();
    tasks.spawn(Box::pin({
        let done = Arc::clone(&done);
        let mut leave = Some(leave);
        poll_fn(move |context| {
            if let Some(leave) = leave.take() {
                leave.send(context.waker().clone()).unwrap();
            }
            let all = done[..threads]
                .iter()
                .all(|one| one.load(Ordering::Relaxed) == steps);
            if all { Poll::Ready(()) } else { Poll::Pending }
        })
    }));
    // The first poll, before there are threads.
    let mut messages = VecDeque::new();
    inbox.take(&mut messages);
    for message in messages.drain(..) {
        if let Message::Wake(header) = message {
            tasks.push_ready(header);
        }
    }
    tasks.run_ready(|| false);
    let waker: Waker = left.recv().unwrap();
    for number in 0..threads {
        let (waker, done) = (waker.clone(), Arc::clone(&done));
        wakers.push(thread::spawn(move || {
            for step in 1..=steps {
                done[number].store(step, Ordering::Relaxed);
                waker.wake_by_ref();
            }
        }));
    }
    drive(&tasks, &inbox);
    for thread in wakers {
        thread.join().unwrap();
    }
}

#[test]
fn a_task_is_polled_after_it_was_woken() {
    check(|| woken_by(1, 2));
}

#[test]
fn a_task_that_two_threads_wake_sees_what_both_did() {
    check(|| woken_by(2, 1));
}

#[test]
fn a_result_reaches_a_thread_that_waits_for_it() {
    check(|| {
        let (handle, completer) = joint::<u32>();
        let waiting = thread::spawn(move || block_on(handle));
        completer.finish(Outcome::Done(Ok(7)));
        drop(completer);
        assert_eq!(waiting.join().unwrap(), 7);
    });
}
