//! The first of two futures, a future with a time limit, and stepping aside once.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use crate::timer::sleep;

/// One of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Either<A, B> {
    /// The first.
    Left(A),
    /// The second.
    Right(B),
}

/// Drives both until one is done, and drops the other. The first has precedence when both are.
///
/// Dropping an operation waits until the kernel lets go of it; a receive that loses the race may
/// lose bytes.
pub async fn race<A: Future, B: Future>(left: A, right: B) -> Either<A::Output, B::Output> {
    let mut left = pin!(left);
    let mut right = pin!(right);
    poll_fn(|context| {
        if let Poll::Ready(output) = left.as_mut().poll(context) {
            return Poll::Ready(Either::Left(output));
        }
        right.as_mut().poll(context).map(Either::Right)
    })
    .await
}

/// The output of `future` if it comes within `duration`; otherwise the future is dropped.
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Option<F::Output> {
    match race(future, sleep(duration)).await {
        Either::Left(output) => Some(output),
        Either::Right(()) => None,
    }
}

/// Lets the other tasks of this thread run first.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
