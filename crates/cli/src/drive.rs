//! Long operations on an image that this process has opened. They run on a reactor of their own, show
//! progress, and are cancelled in order when the user presses ctrl-C.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use gaur_engine::{Job, Queue};
use gaur_reactor::{Config, Driver, Either, Reactor, ReactorFile, race, sleep, uring};

use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::interrupt;
use crate::progress::Progress;
use crate::shared_image::SharedImage;

/// Time between two looks at how far it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Time between two looks at whether the other threads are done.
const JOIN_INTERVAL: Duration = Duration::from_millis(1);
/// Most threads that work together: each has its requests in flight.
const THREADS_MAX: usize = 8;

/// How far a job is, and a way to cancel it, for [`drive`].
pub fn watch(job: &Arc<Job>) -> (impl Fn() -> (u64, u64), impl FnOnce() + Send + 'static) {
    let (meter, cancel) = (Arc::clone(job), Arc::clone(job));
    (move || meter.progress_bytes(), move || cancel.cancel())
}

/// Does `work` on a queue of the image, shows how far it is, and has `cancel` end it when a signal asks for
/// that.
pub fn drive<T>(
    image: &SharedImage,
    host: HostKind,
    mut progress: Progress,
    (meter, cancel): (impl Fn() -> (u64, u64), impl FnOnce() + Send + 'static),
    work: impl AsyncFnOnce(&Queue<ReactorFile>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let reactor = reactor(host)?;
    interrupt::on_signal(cancel)?;
    let outcome = reactor.block_on(async {
        let queue = image.queue::<ReactorFile>();
        let show = async {
            loop {
                sleep(LOOK_INTERVAL).await;
                let (done, total) = meter();
                progress.update(done, total);
            }
        };
        match race(work(&queue), show).await {
            Either::Left(outcome) => outcome,
            Either::Right(never) => Ok(never),
        }
    });
    progress.end(&outcome);
    outcome
}

/// Does `share`, a part of what `job` stands for, on a queue of the image in each of several threads, and when all
/// have ended `finish` on one of them. As [`drive`] does.
pub fn drive_together<T>(
    image: &SharedImage,
    progress: Progress,
    job: &Arc<Job>,
    share: impl AsyncFn(&Queue<ReactorFile>) -> Result<(), Failure> + Sync,
    finish: impl AsyncFnOnce(&Queue<ReactorFile>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let failed = OnceLock::new();
    // Whoever fails first says why, and ends the others.
    let ended = |outcome: Result<(), Failure>| {
        if let Err(failure) = outcome {
            job.cancel();
            // Another was first.
            let _ = failed.set(failure);
        }
    };
    let other = || {
        let reactor = reactor(HostKind::Auto)?;
        reactor.block_on(async { share(&image.queue::<ReactorFile>()).await })
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let done = thread::scope(|scope| {
        let others = (1..threads.min(THREADS_MAX)).map(|_| scope.spawn(|| ended(other())));
        let others: Vec<_> = others.collect();
        let work = async |queue: &Queue<ReactorFile>| {
            ended(share(queue).await);
            while others.iter().any(|other| !other.is_finished()) {
                sleep(JOIN_INTERVAL).await;
            }
            match failed.get() {
                Some(_) => Ok(None),
                None => finish(queue).await.map(Some),
            }
        };
        drive(image, HostKind::Auto, progress, watch(job), work)
    })?;
    match (done, failed.into_inner()) {
        (_, Some(failure)) => Err(failure),
        (Some(done), None) => Ok(done),
        (None, None) => Err(Failure::new("a part was not done")),
    }
}

fn reactor(host: HostKind) -> Result<Reactor, Failure> {
    let config = Config {
        driver: driver(host)?,
        ..Config::default()
    };
    Reactor::new(&config).map_err(|errno| Failure::new(format!("cannot start a reactor: {errno}")))
}

/// A ring where there is one; without it things go slower, which is not worth a word here.
fn driver(host: HostKind) -> Result<Driver, Failure> {
    Ok(match host {
        HostKind::Blocking => Driver::Fallback,
        HostKind::Auto if uring::available().is_err() => Driver::Fallback,
        _ => {
            HostKind::Uring.choose()?;
            Driver::Ring
        }
    })
}
