//! Long operations on an image that this process has opened: on a reactor of their own, with their
//! progress shown, and given up in order when somebody presses ctrl-C.

use std::future::pending;
use std::time::Duration;

use gaur_engine::Queue;
use gaur_reactor::{
    Config, Driver, Either, Reactor, ReactorFile, Signal, Signals, race, sleep, uring,
};

use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::host_kind::HostKind;
use crate::progress::Progress;
use crate::shared_image::SharedImage;

/// Time between two looks at how far it is.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Signals that give an operation up.
pub const SIGNALS: [Signal; 3] = [Signal::Interrupt, Signal::Terminate, Signal::Hangup];

/// How an operation is watched, and how it is given up.
pub struct Watch<M, C> {
    /// Where its progress goes.
    pub progress: Progress,
    /// How much is done, and of how much.
    pub meter: M,
    /// Asks for its end.
    pub cancel: C,
}

/// Does `work` on a queue of the image. The second signal ends the process at once, which is no worse
/// than a power cut.
pub fn drive<T, M, C>(
    image: &SharedImage,
    host: HostKind,
    watch: Watch<M, C>,
    work: impl AsyncFnOnce(&Queue<ReactorFile>) -> Result<T, Failure>,
) -> Result<T, Failure>
where
    M: Fn() -> (u64, u64),
    C: Fn(),
{
    let Watch {
        mut progress,
        meter,
        cancel,
    } = watch;
    let config = Config {
        driver: driver(host)?,
        ..Config::default()
    };
    let reactor = Reactor::new(&config)
        .map_err(|errno| Failure::new(format!("cannot start a reactor: {errno}")))?;
    let signals = Signals::install(&SIGNALS)
        .map_err(|errno| Failure::new(format!("cannot take over signals: {errno}")))?;
    let outcome = reactor.block_on(async {
        let queue = image.queue(ReactorFile::new);
        let obey = async {
            signals.next().await;
            signals.exit_on_next(EXIT_INTERRUPTED);
            cancel();
            pending::<T>().await
        };
        let show = async {
            loop {
                sleep(LOOK_INTERVAL).await;
                let (done, total) = meter();
                progress.update(done, total);
            }
        };
        match race(work(&queue), race(obey, show)).await {
            Either::Left(outcome) => outcome,
            Either::Right(Either::Left(never) | Either::Right(never)) => Ok(never),
        }
    });
    match outcome {
        Ok(_) => progress.finish(),
        Err(_) => progress.stop(),
    }
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
