//! Long operations on an image that this process has opened. They run on a reactor of their own, show
//! progress, and are cancelled in order when the user presses ctrl-C.

use std::sync::Arc;
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
    let config = Config {
        driver: driver(host)?,
        ..Config::default()
    };
    let reactor = Reactor::new(&config)
        .map_err(|errno| Failure::new(format!("cannot start a reactor: {errno}")))?;
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
