//! A virtio block device that is served: what its transports have in common.

use std::future::Future;
use std::sync::mpsc;
use std::time::Duration;

use gaur_reactor::{Either, race};

use super::rings::{PreparedRings, Rings};
use crate::error::ServeError;
use crate::serve::{Channel, Server, StopSwitch, Transport};

/// How long a resize waits until the driver was told.
const TELL_TIMEOUT: Duration = Duration::from_secs(10);

/// The size has changed; the answer is whether the driver was told.
pub(crate) type SizeChanged = mpsc::Sender<Result<(), ServeError>>;

/// What the control thread of a transport works with.
pub(crate) struct Control {
    pub(crate) rings: Rings,
    pub(crate) switch: StopSwitch,
    pub(crate) size_changes: Channel<SizeChanged>,
}

struct SizeChanges {
    channel: Channel<SizeChanged>,
    /// The driver, or the client that stands for it.
    peer: &'static str,
}

impl Transport for SizeChanges {
    fn resized(&self) -> Result<(), ServeError> {
        let (answer, told) = mpsc::channel();
        self.channel.put(answer);
        told.recv_timeout(TELL_TIMEOUT).unwrap_or_else(|_| {
            let peer = self.peer;
            Err(ServeError::new(format!(
                "the {peer} was not told of the new size"
            )))
        })
    }
}

/// Who is served, in words.
pub(crate) struct Names {
    pub(crate) thread: &'static str,
    /// Who is told of a new size.
    pub(crate) peer: &'static str,
    pub(crate) place: String,
}

/// Serves rings on threads that have their devices. `serve` is the transport's side, on the control thread:
/// it starts and stops rings until the export is drained, and flushes them.
pub(crate) fn start<F, E>(
    names: Names,
    rings: Rings,
    prepared: PreparedRings,
    serve: F,
) -> Result<Server, ServeError>
where
    F: FnOnce(Control) -> E + Send + 'static,
    E: Future<Output = Result<(), ServeError>>,
{
    let threads = prepared.count();
    let threads = prepared.serve(rings.on_threads(threads));
    let channel = Channel::new();
    let transport = SizeChanges {
        channel: channel.clone(),
        peer: names.peer,
    };
    let name = names.thread.to_owned();
    Server::spawn(
        name,
        names.place,
        Box::new(transport),
        async move |switch| {
            let (now, all) = (switch.now.clone(), rings.clone());
            let control = Control {
                rings,
                switch,
                size_changes: channel,
            };
            match race(serve(control), now.stopped()).await {
                Either::Left(outcome) => {
                    all.end();
                    threads.join();
                    outcome
                }
                // The threads are left with the very requests that are not waited for.
                Either::Right(()) => Ok(()),
            }
        },
    )
}
