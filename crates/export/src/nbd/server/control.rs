//! Who is let in, and when it is over. Runs on the caller's thread, on a reactor of its own without
//! a ring; everything here happens once per client, not once per request.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::pending;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gaur_reactor::local::Notify;
use gaur_reactor::{Either, Stream, race, sleep, timeout};

use super::client::{Client, Presence};
use super::listen::Listener;
use super::options::{Options, Outcome};
use super::stop::Stop;
use crate::error::ServeError;

/// After a failed accept (no more descriptors, usually) the next attempt waits this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where connections run.
pub(super) trait Stations {
    /// Begins to serve a client.
    fn serve(&self, presence: Presence) -> Result<(), ServeError>;
    /// All clients are gone, and with them the devices; the error is a flush that failed.
    async fn close(&self) -> Result<(), ServeError>;
    /// Whether the server stays without clients, whatever its options say.
    fn stays(&self) -> bool;
}

/// The clients that are there.
#[derive(Default)]
struct Floor {
    clients: RefCell<BTreeMap<u64, Arc<Client>>>,
    /// The last one that left had chosen an export.
    was_used: Cell<bool>,
    changed: Notify,
}

/// Lets clients in until the end, and sees to it that it is a good one.
pub(super) async fn run(
    listener: Listener,
    options: &Arc<Options>,
    stop: &Stop,
    stations: &impl Stations,
) -> Result<Outcome, ServeError> {
    let floor = Rc::new(Floor::default());
    let outcome = let_in(&listener, options, stop, stations, &floor).await;
    // Nobody is let in any more, and whoever waits unaccepted learns it now.
    drop(listener);
    let finish = async {
        drain(options, &floor).await;
        stations.close().await
    };
    match race(finish, stop.force.stopped()).await {
        Either::Left(closed) => closed.map(|()| outcome),
        Either::Right(()) => {
            floor.hang_up();
            Ok(Outcome::Forced)
        }
    }
}

async fn let_in(
    listener: &Listener,
    options: &Arc<Options>,
    stop: &Stop,
    stations: &impl Stations,
    floor: &Rc<Floor>,
) -> Outcome {
    let mut number = 0;
    loop {
        let present = floor.clients.borrow().len();
        if present == 0 && floor.was_used.get() && !options.persistent && !stations.stays() {
            return Outcome::LastClientLeft;
        }
        let room = options.shared == 0 || present < options.shared as usize;
        let knock = async {
            if !room {
                // Further clients wait in the socket's queue.
                pending::<()>().await;
            }
            listener.socket.accept().await
        };
        match race(race(stop.drain.stopped(), floor.changed.notified()), knock).await {
            Either::Left(Either::Left(())) => return Outcome::Drained,
            Either::Left(Either::Right(())) => {}
            Either::Right(Ok(stream)) => {
                number += 1;
                admit(number, stream, options, stations, floor);
            }
            Either::Right(Err(errno)) => {
                options.say(&format!("cannot accept a client: {errno}"));
                race(sleep(ACCEPT_PAUSE), stop.drain.stopped()).await;
            }
        }
    }
}

fn admit(
    number: u64,
    stream: Stream,
    options: &Arc<Options>,
    stations: &impl Stations,
    floor: &Rc<Floor>,
) {
    let client = Arc::new(Client::new(number, stream));
    floor.clients.borrow_mut().insert(number, client.clone());
    gaur_reactor::spawn(watch(
        floor.clone(),
        client.clone(),
        options.handshake_timeout,
    ));
    if let Err(error) = stations.serve(Presence(client)) {
        options.say(&format!("client {number}: {error}"));
    }
}

/// Follows a client from its arrival to its end.
async fn watch(floor: Rc<Floor>, client: Arc<Client>, handshake_timeout: Duration) {
    let limited = !handshake_timeout.is_zero();
    if limited
        && timeout(handshake_timeout, client.settled.stopped())
            .await
            .is_none()
    {
        client.hang_up();
    }
    client.ended.stopped().await;
    floor.clients.borrow_mut().remove(&client.number);
    floor.was_used.set(client.negotiated());
    floor.changed.notify_one();
}

/// Waits until every client has been answered and is gone.
async fn drain(options: &Options, floor: &Floor) {
    for client in floor.clients.borrow().values() {
        client.drain.stop();
    }
    if timeout(options.drain_timeout, floor.emptied())
        .await
        .is_none()
    {
        options.say("clients that do not take their replies are hung up on");
        floor.hang_up();
        // What the devices still work on has to end before they can go.
        floor.emptied().await;
    }
}

impl Floor {
    async fn emptied(&self) {
        while !self.clients.borrow().is_empty() {
            self.changed.notified().await;
        }
    }

    fn hang_up(&self) {
        for client in self.clients.borrow().values() {
            client.hang_up();
        }
    }
}
