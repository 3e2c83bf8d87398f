//! The task of a client: handshake, then reading requests and handing them
//! out until one side has had enough.

use std::rc::Rc;
use std::sync::Arc;

use gaur_block::{Device, Errno};
use gaur_reactor::{Either, race};
use gaur_tls as tls;

use super::client::{Client, ClientGuard};
use super::connection::{Connection, Open};
use super::execute;
use super::exports::ExportDevice;
use super::options::Tls;
use super::pieces;
use super::recv_buffer::RecvBuffer;
use super::thread_exports::ThreadExports;
use crate::nbd::proto::{
    Command, Event, Exports, Handshake, Kind, Parser, Refusal, Session, Step, Violation,
};
use crate::serve::say;

/// Answers to options are collected up to about this length before they are sent.
const ANSWERS_BYTES: usize = 16 << 10;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("client disconnected")]
    Goodbye,
    #[error("client left without a word")]
    Silent,
    #[error("connection closed by the client")]
    PeerClosed,
    #[error("connection failed: {0}")]
    Failed(Errno),
    #[error("protocol violation: {0}")]
    Violation(Violation),
    #[error("{0}")]
    Tls(String),
    #[error("{0} may not come in")]
    Denied(String),
    #[error("server is stopping")]
    Stopped,
}

impl End {
    /// What an administrator is to know of it, if anything, before a client has chosen an export or after that.
    fn failure(&self, negotiated: bool) -> Option<String> {
        match self {
            End::Goodbye | End::Stopped => None,
            End::PeerClosed if negotiated => None,
            End::Silent => None,
            end if negotiated => Some(format!("Disconnect client, due to: {end}")),
            end => Some(format!("option negotiation failed: {end}")),
        }
    }
}

/// Serves a client to its end.
pub(super) async fn serve<D: Device + 'static>(thread: &Rc<ThreadExports<D>>, guard: &ClientGuard) {
    let client = guard.0.clone();
    let number = client.number;
    say(
        &thread.options.log,
        &format!(
            "client {number}: connected from {}",
            client.stream.socket().peer()
        ),
    );
    let mut received = RecvBuffer::new();
    let shaken = race(
        handshake(thread, &client, &mut received),
        client.drain.stopped(),
    )
    .await;
    let end = match shaken {
        Either::Left(Ok(session)) => {
            guard.negotiated();
            use_export(thread, &client, session, &mut received).await
        }
        Either::Left(Err(end)) => end,
        Either::Right(()) => End::Stopped,
    };
    client.hang_up();
    gaur_reactor::freed_memory();
    say(&thread.options.log, &format!("client {number}: {end}"));
    if let Some(failure) = end.failure(client.negotiated()) {
        say(&thread.options.failures, &failure);
    }
}

async fn handshake<D: Device + 'static>(
    thread: &Rc<ThreadExports<D>>,
    client: &Client,
    received: &mut RecvBuffer,
) -> Result<Session, End> {
    let stream = &client.stream;
    // Whoever only looks whether a server is there is no failure.
    let greeted = stream.send(&Handshake::greeting()).await;
    if greeted.is_err() || !matches!(received.fill(stream).await, Ok(true)) {
        return Err(End::Silent);
    }
    let exports: &dyn Exports = &**thread;
    let mut handshake = match thread.options.tls {
        Some(_) => Handshake::with_tls(),
        None => Handshake::new(),
    };
    let mut out = Vec::new();
    loop {
        let (used, step) = handshake.feed(received.bytes(), exports, &mut out);
        received.consume(used);
        if step == Step::Again && out.len() < ANSWERS_BYTES {
            continue;
        }
        if !out.is_empty() {
            let sent = stream.send(&out).await;
            // A client that leaves need not wait for the answer.
            if step != Step::Abort {
                sent.map_err(|errno| lost(errno, &handshake))?;
            }
            out.clear();
        }
        match step {
            Step::Again => {}
            Step::Need => {
                let filled = received.fill(stream).await;
                if !filled.map_err(|errno| lost(errno, &handshake))? {
                    return Err(lost(Errno::ECONNRESET, &handshake));
                }
            }
            Step::StartTls => start_tls(thread.options.tls.as_ref(), client, received).await?,
            Step::Transmit(session) => return Ok(session),
            Step::Abort => return Err(End::Goodbye),
            Step::Violation(violation) => return Err(End::Violation(violation)),
        }
    }
}

/// How a handshake ends with the connection. A client that was refused nothing and leaves has no use for the connection any
/// more, and nothing went wrong.
fn lost(errno: Errno, handshake: &Handshake) -> End {
    match (errno, handshake.has_refused()) {
        (Errno::ECONNRESET | Errno::EPIPE, false) => End::Silent,
        (Errno::ECONNRESET | Errno::EPIPE, true) => End::PeerClosed,
        (errno, _) => End::Failed(errno),
    }
}

/// The TLS handshake. What arrived before it counts for nothing, not even as an option to be refused.
async fn start_tls(tls: Option<&Tls>, client: &Client, received: &RecvBuffer) -> Result<(), End> {
    if !received.bytes().is_empty() {
        return Err(End::Violation(Violation::PlainTextBeforeTls));
    }
    let tls = tls.ok_or_else(|| End::Tls("there are no credentials".to_owned()))?;
    let session = tls::Session::server(&tls.credentials);
    let session = session.map_err(|error| End::Tls(error.to_string()))?;
    client.stream.encrypt(session).await.map_err(End::Tls)?;
    if let Some(authorization) = &tls.authorization {
        let name = client.stream.peer_name().unwrap_or_default();
        if !authorization.allows(&name) {
            return Err(End::Denied(name));
        }
    }
    Ok(())
}

/// From the choice of an export to its last request.
async fn use_export<D: Device + 'static>(
    thread: &Rc<ThreadExports<D>>,
    client: &Arc<Client>,
    session: Session,
    received: &mut RecvBuffer,
) -> End {
    let guard = match thread.enter(session.export, client) {
        Ok(guard) => guard,
        Err(reason) => return End::Violation(Violation::ExportUnavailable(reason)),
    };
    let name = &guard.device.entry().export.name;
    let line = format!("client {}: uses export {name:?}", client.number);
    say(&thread.options.log, &line);
    let end = transmission(thread, client, (&guard.device, session), received).await;
    // From here on it has nothing more to wait for, and the removal of the export waits for it.
    client.hang_up();
    client.drain.stop();
    thread.leave(guard).await;
    end
}

async fn transmission<D: Device + 'static>(
    thread: &Rc<ThreadExports<D>>,
    client: &Arc<Client>,
    (device, session): (&Rc<ExportDevice<D>>, Session),
    received: &mut RecvBuffer,
) -> End {
    let connection = Connection::start(thread, client, Rc::clone(device), session);
    let _open = Open(&connection);
    gaur_reactor::spawn(watch_for_drain(connection.clone(), client.clone()));
    let end = Reader {
        connection: &connection,
        client,
        received,
        parser: Parser::new(session),
    }
    .run()
    .await;
    connection.close().await;
    if connection.draining() {
        End::Stopped
    } else {
        end
    }
}

/// Ends with the connection at the latest, whose [`ClientGuard`] raises the same flag.
async fn watch_for_drain<D: Device + 'static>(connection: Rc<Connection<D>>, client: Arc<Client>) {
    client.drain.stopped().await;
    connection.drain();
}

pub(super) struct Reader<'a, D> {
    pub(super) connection: &'a Rc<Connection<D>>,
    pub(super) client: &'a Client,
    received: &'a mut RecvBuffer,
    parser: Parser,
}

impl<D: Device + 'static> Reader<'_, D> {
    async fn run(mut self) -> End {
        loop {
            let (used, event) = self.parser.feed(self.received.bytes());
            self.received.consume(used);
            let outcome = match event {
                Event::Request(command) if self.connection.draining() => {
                    self.turn_away(command).await
                }
                Event::Request(command) => self.request(command).await,
                Event::Refuse(refusal) => self.refuse(refusal).await,
                Event::Disconnect => Err(End::Goodbye),
                Event::Violation(violation) => Err(End::Violation(violation)),
                Event::Need => match self.received.fill(&self.client.stream).await {
                    Ok(true) => Ok(()),
                    // Closed with replies on their way that it did not wait for.
                    Ok(false) | Err(Errno::ECONNRESET) => Err(End::PeerClosed),
                    Err(errno) => Err(End::Failed(errno)),
                },
            };
            if let Err(end) = outcome {
                return end;
            }
        }
    }

    async fn request(&mut self, command: Command) -> Result<(), End> {
        let mut job = self
            .connection
            .take_job(command, execute::payload_bytes(&command))
            .await;
        if pieces::needed(&mut job) {
            return self.serve_in_pieces(job).await;
        }
        if command.kind == Kind::Write
            && let Err(end) = self
                .receive(&mut job.payload()[..command.len_bytes as usize])
                .await
        {
            self.connection.release(job);
            return Err(end);
        }
        self.connection.dispatch(job);
        Ok(())
    }

    /// Fills `payload` with what has arrived already and then straight from the socket.
    pub(super) async fn receive(&mut self, payload: &mut [u8]) -> Result<(), End> {
        let arrived = self.received.bytes();
        let mut filled = arrived.len().min(payload.len());
        payload[..filled].copy_from_slice(&arrived[..filled]);
        self.received.consume(filled);
        if filled < payload.len() {
            let received = self.client.stream.recv_exact(&mut payload[filled..]).await;
            filled += received.map_err(End::Failed)?;
        }
        if filled < payload.len() {
            return Err(End::PeerClosed);
        }
        self.parser.take_payload(filled);
        Ok(())
    }

    async fn turn_away(&mut self, command: Command) -> Result<(), End> {
        self.parser.skip_payload();
        self.refuse(Refusal {
            cookie: command.cookie,
            offset_bytes: command.offset_bytes,
            errno: Errno::ESHUTDOWN,
            reason: "the server is shutting down",
        })
        .await
    }

    async fn refuse(&mut self, refusal: Refusal) -> Result<(), End> {
        let command = Command {
            cookie: refusal.cookie,
            kind: Kind::Flush,
            offset_bytes: refusal.offset_bytes,
            len_bytes: 0,
            fua: false,
        };
        let mut job = self.connection.take_job(command, 0).await;
        job.fail(refusal.errno, refusal.reason);
        self.connection.answer(job);
        Ok(())
    }
}
