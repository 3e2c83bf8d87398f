//! Accepting clients, and the end of the server. Runs on the caller's thread, on a reactor of its own without
//! a ring; everything here happens once per client, not once per request.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::pending;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gaur_reactor::local::Notify;
use gaur_reactor::{Either, Stream, race, sleep, timeout};

use super::client::{Client, ClientGuard};
use super::listen::Listener;
use super::options::{Options, Outcome};
use crate::error::ServeError;
use crate::serve::{StopSwitch, say};

/// After a failed accept (no more descriptors, usually) the next attempt waits this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The threads on which connections run.
pub(super) trait ClientThreads {
    /// Begins to serve a client.
    fn serve(&self, guard: ClientGuard) -> Result<(), ServeError>;
    /// All clients are gone, and with them the devices; the error is a flush that failed.
    async fn close(&self) -> Result<(), ServeError>;
    /// Whether the server stays without clients, whatever its options say.
    fn stays(&self) -> bool;
}

/// The clients that are there.
#[derive(Default)]
struct Clients {
    present: RefCell<BTreeMap<u64, Arc<Client>>>,
    /// The last one that left had chosen an export.
    was_used: Cell<bool>,
    changed: Notify,
}

/// Lets clients in until the end, and sees to it that it is a good one.
pub(super) async fn run(
    listener: Listener,
    options: &Arc<Options>,
    stop: &StopSwitch,
    threads: &impl ClientThreads,
) -> Result<Outcome, ServeError> {
    let clients = Rc::new(Clients::default());
    let outcome = let_in(&listener, options, stop, threads, &clients).await;
    // No client is let in any more, and those that wait unaccepted learn it now.
    drop(listener);
    let finish = async {
        drain(options, &clients).await;
        threads.close().await
    };
    match race(finish, stop.now.stopped()).await {
        Either::Left(closed) => closed.map(|()| outcome),
        Either::Right(()) => {
            clients.hang_up();
            Ok(Outcome::Forced)
        }
    }
}

async fn let_in(
    listener: &Listener,
    options: &Arc<Options>,
    stop: &StopSwitch,
    threads: &impl ClientThreads,
    clients: &Rc<Clients>,
) -> Outcome {
    let mut number = 0;
    loop {
        let present = clients.present.borrow().len();
        if present == 0 && clients.was_used.get() && !options.persistent && !threads.stays() {
            return Outcome::LastClientLeft;
        }
        let room = options.shared == 0 || present < options.shared as usize;
        let accepted = async {
            if !room {
                // Further clients wait in the socket's queue.
                pending::<()>().await;
            }
            listener.socket.accept().await
        };
        match race(
            race(stop.drain.stopped(), clients.changed.notified()),
            accepted,
        )
        .await
        {
            Either::Left(Either::Left(())) => return Outcome::Drained,
            Either::Left(Either::Right(())) => {}
            Either::Right(Ok(stream)) => {
                number += 1;
                admit(number, stream, options, threads, clients);
            }
            Either::Right(Err(errno)) => {
                say(&options.log, &format!("cannot accept a client: {errno}"));
                race(sleep(ACCEPT_PAUSE), stop.drain.stopped()).await;
            }
        }
    }
}

fn admit(
    number: u64,
    stream: Stream,
    options: &Arc<Options>,
    threads: &impl ClientThreads,
    clients: &Rc<Clients>,
) {
    let client = Arc::new(Client::new(number, stream));
    clients.present.borrow_mut().insert(number, client.clone());
    gaur_reactor::spawn(watch(
        clients.clone(),
        client.clone(),
        options.handshake_timeout,
    ));
    if let Err(error) = threads.serve(ClientGuard(client)) {
        say(&options.log, &format!("client {number}: {error}"));
    }
}

/// Follows a client from its arrival to its end.
async fn watch(clients: Rc<Clients>, client: Arc<Client>, handshake_timeout: Duration) {
    let limited = !handshake_timeout.is_zero();
    if limited
        && timeout(handshake_timeout, client.settled.stopped())
            .await
            .is_none()
    {
        client.hang_up();
    }
    client.ended.stopped().await;
    clients.present.borrow_mut().remove(&client.number);
    clients.was_used.set(client.negotiated());
    clients.changed.notify_one();
}

/// Waits until every client has been answered and is gone.
async fn drain(options: &Options, clients: &Clients) {
    for client in clients.present.borrow().values() {
        client.drain.stop();
    }
    if timeout(options.drain_timeout, clients.emptied())
        .await
        .is_none()
    {
        say(
            &options.log,
            "clients that do not take their replies are hung up on",
        );
        clients.hang_up();
        // What the devices still work on has to end before they can go.
        clients.emptied().await;
    }
}

impl Clients {
    async fn emptied(&self) {
        while !self.present.borrow().is_empty() {
            self.changed.notified().await;
        }
    }

    fn hang_up(&self) {
        for client in self.present.borrow().values() {
            client.hang_up();
        }
    }
}
