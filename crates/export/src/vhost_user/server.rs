//! The running back end: a socket, and one client after the other.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use gaur_block::Device;
use gaur_reactor::{
    Address, Config, Driver, Either, Listener, Reactor, Stop, Stream, Threads, race, sleep,
};

use super::connection::Connection;
use super::options::Options;
use super::session::Session;
use crate::error::ServeError;
use crate::front::Front;
use crate::virtio::crew::{Crew, CrewOptions, Rings};
use crate::virtio::mailbox::Mailbox;

/// How long whoever resized the device waits until the client was told.
const TELL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait when no client can be let in, for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(200);

/// For the control thread: the size has changed, and who wants to know whether the client was told.
type News = mpsc::Sender<Result<(), ServeError>>;

/// What the control thread shares with the server.
#[derive(Clone)]
struct Switches {
    drain: Stop,
    force: Stop,
    ended: Stop,
    news: Mailbox<News>,
}

/// A vhost-user-blk back end that runs.
pub struct Server {
    place: String,
    switches: Switches,
    threads: Threads,
    control: JoinHandle<Result<(), ServeError>>,
    stops: Mutex<u32>,
    inflight_file: Option<PathBuf>,
}

impl Server {
    /// Starts it; clients can connect when this returns. `devices` is called on each thread.
    ///
    /// # Errors
    /// When an option makes no sense, a device cannot be made, or the socket cannot be listened on.
    pub fn start<D, F>(options: Options, devices: F) -> Result<Server, ServeError>
    where
        D: Device + 'static,
        F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
    {
        options.check().map_err(ServeError::new)?;
        let place = options.socket.display().to_string();
        if let Some(reason) = Address::too_long(&options.socket) {
            return Err(ServeError::new(format!(
                "cannot listen on {place}: {reason}"
            )));
        }
        let listener = Listener::bind(&Address::Unix(options.socket.clone())).map_err(|errno| {
            ServeError::because(format_args!("cannot listen on {place}"), errno)
        })?;
        let crew = Crew::start(
            CrewOptions {
                name: "vhost-user",
                threads: options.threads,
                rings: options.queues,
                reactor: options.reactor,
                read_only: options.read_only,
                serial: options.serial.clone(),
                log: options.log.clone(),
            },
            devices,
        )?;
        let switches = Switches {
            drain: Stop::new(),
            force: Stop::new(),
            ended: Stop::new(),
            news: Mailbox::new(),
        };
        let rings = crew.rings();
        let inflight_file = options.inflight_file.clone();
        let (inner, options) = (switches.clone(), Arc::new(options));
        let control = thread::Builder::new()
            .name("vhost-user".to_owned())
            .spawn(move || control(&listener, &options, &rings, &inner))
            .map_err(|error| ServeError::new(format!("cannot start a thread: {error}")))?;
        Ok(Server {
            place,
            switches,
            threads: crew.threads,
            control,
            stops: Mutex::new(0),
            inflight_file,
        })
    }
}

impl Front for Server {
    fn place(&self) -> String {
        self.place.clone()
    }

    fn resized(&self) -> Result<(), ServeError> {
        let (answer, told) = mpsc::channel();
        self.switches.news.put(answer);
        told.recv_timeout(TELL_TIMEOUT)
            .unwrap_or_else(|_| Err(ServeError::new("the client was not told of the new size")))
    }

    fn stop(&self) {
        let mut stops = self.stops.lock().unwrap_or_else(PoisonError::into_inner);
        *stops += 1;
        match *stops {
            1 => self.switches.drain.stop(),
            _ => self.switches.force.stop(),
        }
    }

    fn ended(&self) -> Stop {
        self.switches.ended.clone()
    }

    fn finish(self: Box<Self>) -> Result<(), ServeError> {
        let outcome = self
            .control
            .join()
            .unwrap_or_else(|_| Err(ServeError::new("the control thread panicked")));
        if let Some(path) = &self.inflight_file {
            // There may have been no client. One that is there yet has nothing in flight.
            let _ = std::fs::remove_file(path);
        }
        if self.switches.force.is_stopped() {
            // Joining would wait for the very requests that the second stop does not wait for.
            core::mem::forget(self.threads);
        } else {
            self.threads.join();
        }
        outcome
    }
}

/// Raised when the control thread ends, however it does.
struct Ended(Stop);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn control(
    listener: &Listener,
    options: &Arc<Options>,
    rings: &Rings,
    switches: &Switches,
) -> Result<(), ServeError> {
    let _ended = Ended(switches.ended.clone());
    let config = Config {
        driver: Driver::Fallback,
        ..Config::default()
    };
    let reactor = Reactor::new(&config)
        .map_err(|errno| ServeError::because("cannot start the control loop", errno))?;
    let serve = async {
        serve_clients(listener, options, rings, switches).await;
        let flushed = rings.flush().await;
        rings.dismiss();
        flushed
    };
    reactor.block_on(async {
        match race(serve, switches.force.stopped()).await {
            Either::Left(outcome) => outcome,
            Either::Right(()) => Ok(()),
        }
    })
}

async fn serve_clients(
    listener: &Listener,
    options: &Arc<Options>,
    rings: &Rings,
    switches: &Switches,
) {
    loop {
        let event = race(switches.news.take(), listener.accept());
        match race(switches.drain.stopped(), event).await {
            Either::Left(()) => return,
            // The next client asks for the size itself.
            Either::Right(Either::Left(answer)) => drop(answer.send(Ok(()))),
            Either::Right(Either::Right(Ok(stream))) => {
                rings.say("a client has connected");
                match serve_client(&stream, options, rings, switches).await {
                    Ok(()) => rings.say("the client has left"),
                    Err(reason) => rings.say(&format!("the client is hung up on: {reason}")),
                }
            }
            Either::Right(Either::Right(Err(errno))) => {
                rings.say(&format!("cannot accept a client: {errno}"));
                sleep(PAUSE).await;
            }
        }
    }
}

/// Serves a client until it leaves, does what it must not, or the server is to end.
async fn serve_client(
    stream: &Stream,
    options: &Arc<Options>,
    rings: &Rings,
    switches: &Switches,
) -> Result<(), String> {
    let socket = stream.as_fd().try_clone_to_owned();
    let socket = socket.map_err(|error| format!("cannot duplicate its socket: {error}"))?;
    let mut connection = Connection::new(socket);
    let mut session = Session::new(rings, options);
    let outcome = loop {
        let event = race(switches.news.take(), connection.next());
        match race(switches.drain.stopped(), event).await {
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
