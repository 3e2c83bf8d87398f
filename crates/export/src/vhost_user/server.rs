//! The running back end: a socket, and one client after the other.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use gaur_block::Device;
use gaur_reactor::{Address, Either, Listener, Stream, race, sleep};

use super::connection::Connection;
use super::options::Options;
use super::session::Session;
use crate::error::ServeError;
use crate::serve::{OnDrop, Server};
use crate::virtio::server::{self, Control, Setup};

/// How long to wait when no client can be let in, for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(200);

/// Starts a vhost-user-blk back end; clients can connect when this returns. `devices` is called on each
/// thread.
///
/// # Errors
/// When an option makes no sense, a device cannot be made, or the socket cannot be listened on.
pub fn start<D, F>(options: Options, devices: F) -> Result<Server, ServeError>
where
    D: Device + 'static,
    F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
{
    server::check(options.queues, options.threads).map_err(ServeError::new)?;
    let place = options.socket.display().to_string();
    if let Some(reason) = Address::too_long(&options.socket) {
        return Err(ServeError::new(format!(
            "cannot listen on {place}: {reason}"
        )));
    }
    let listener = Listener::bind(&Address::Unix(options.socket.clone()))
        .map_err(|errno| ServeError::because(format_args!("cannot listen on {place}"), errno))?;
    let setup = Setup {
        name: "vhost-user",
        peer: "client",
        place,
        threads: options.threads,
        rings: options.queues,
        read_only: options.read_only,
        log: options.log.clone(),
    };
    let options = Arc::new(options);
    server::prepare(setup, devices)?.serve(async move |control| {
        let inflight_file = options.inflight_file.clone();
        // There may have been no client. One that is there yet has nothing in flight.
        let _remove = OnDrop(|| {
            if let Some(path) = &inflight_file {
                let _ = std::fs::remove_file(path);
            }
        });
        serve_clients(&listener, &options, &control).await;
        control.rings.flush().await
    })
}

async fn serve_clients(listener: &Listener, options: &Arc<Options>, control: &Control) {
    loop {
        let event = race(control.size_changes.take(), listener.accept());
        match race(control.switch.drain.stopped(), event).await {
            Either::Left(()) => return,
            // The next client asks for the size itself.
            Either::Right(Either::Left(answer)) => drop(answer.send(Ok(()))),
            Either::Right(Either::Right(Ok(stream))) => {
                control.rings.say("a client has connected");
                match serve_client(&stream, options, control).await {
                    Ok(()) => control.rings.say("the client has left"),
                    Err(reason) => control
                        .rings
                        .say(&format!("the client is hung up on: {reason}")),
                }
            }
            Either::Right(Either::Right(Err(errno))) => {
                control
                    .rings
                    .say(&format!("cannot accept a client: {errno}"));
                sleep(PAUSE).await;
            }
        }
    }
}

/// Serves a client until it leaves, does what it must not, or the server is to end.
async fn serve_client(
    stream: &Stream,
    options: &Arc<Options>,
    control: &Control,
) -> Result<(), String> {
    let socket = stream.as_fd().try_clone_to_owned();
    let socket = socket.map_err(|error| format!("cannot duplicate its socket: {error}"))?;
    let mut connection = Connection::new(socket);
    let mut session = Session::new(&control.rings, options);
    let outcome = loop {
        let event = race(control.size_changes.take(), connection.next());
        match race(control.switch.drain.stopped(), event).await {
            Either::Left(()) => break Ok(()),
            Either::Right(Either::Left(answer)) => {
                let told = match session.tell_config_change().await {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(ServeError::new(
                        "the client takes no messages and cannot be told of the new size",
                    )),
                    Err(reason) => Err(ServeError::new(reason)),
                };
                let _ = answer.send(told);
            }
            Either::Right(Either::Right(Ok(Some(message)))) => {
                if let Err(reason) = session.answer(&connection, message).await {
                    break Err(reason);
                }
            }
            Either::Right(Either::Right(Ok(None))) => break Ok(()),
            Either::Right(Either::Right(Err(reason))) => break Err(reason),
        }
    };
    session.halt().await;
    outcome
}
