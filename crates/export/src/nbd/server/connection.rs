//! A connection from its first byte to its last: handshake, then reading requests and handing them
//! out until one side has had enough.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use gaur_block::{Device, Errno};
use gaur_reactor::{Either, race};

use super::client::{Client, Presence};
use super::execute;
use super::exports::Stand;
use super::hub::{Hub, Open};
use super::inflow::Inflow;
use super::pieces;
use super::shelf::Shelf;
use crate::nbd::proto::{
    Command, Event, Exports, Handshake, Kind, Parser, Refusal, Session, Step, Violation,
};

/// Answers to options are collected up to about this length before they are sent.
const ANSWERS_BYTES: usize = 16 << 10;

/// Why a connection ended.
pub(super) enum End {
    Goodbye,
    PeerClosed,
    Failed(Errno),
    Violation(Violation),
    Stopped,
}

impl fmt::Display for End {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Goodbye => out.write_str("client disconnected"),
            End::PeerClosed => out.write_str("connection closed by the client"),
            End::Failed(errno) => write!(out, "connection failed: {errno}"),
            End::Violation(violation) => write!(out, "protocol violation: {violation}"),
            End::Stopped => out.write_str("server is stopping"),
        }
    }
}

/// Serves a client to its end.
pub(super) async fn serve<D: Device + 'static>(shelf: &Rc<Shelf<D>>, presence: &Presence) {
    let client = presence.0.clone();
    let number = client.number;
    shelf.options.say(&format!(
        "client {number}: connected from {}",
        client.stream.peer()
    ));
    let mut inflow = Inflow::new();
    let shaken = race(
        handshake(&**shelf, &client, &mut inflow),
        client.drain.stopped(),
    )
    .await;
    let end = match shaken {
        Either::Left(Ok(session)) => {
            presence.negotiated();
            use_export(shelf, &client, session, &mut inflow).await
        }
        Either::Left(Err(end)) => end,
        Either::Right(()) => End::Stopped,
    };
    client.hang_up();
    gaur_reactor::freed_memory();
    shelf.options.say(&format!("client {number}: {end}"));
}

async fn handshake(
    exports: &dyn Exports,
    client: &Client,
    inflow: &mut Inflow,
) -> Result<Session, End> {
    let stream = &client.stream;
    stream
        .send(&Handshake::greeting())
        .await
        .map_err(End::Failed)?;
    let mut handshake = Handshake::new();
    let mut out = Vec::new();
    loop {
        let (used, step) = handshake.feed(inflow.bytes(), exports, &mut out);
        inflow.consume(used);
        if step == Step::Again && out.len() < ANSWERS_BYTES {
            continue;
        }
        if !out.is_empty() {
            stream.send(&out).await.map_err(End::Failed)?;
            out.clear();
        }
        match step {
            Step::Again => {}
            Step::Need => {
                if !inflow.fill(stream).await.map_err(End::Failed)? {
                    return Err(End::PeerClosed);
                }
            }
            Step::Transmit(session) => return Ok(session),
            Step::Abort => return Err(End::Goodbye),
            Step::Violation(violation) => return Err(End::Violation(violation)),
        }
    }
}

/// From the choice of an export to its last request.
async fn use_export<D: Device + 'static>(
    shelf: &Rc<Shelf<D>>,
    client: &Arc<Client>,
    session: Session,
    inflow: &mut Inflow,
) -> End {
    let visit = match shelf.enter(session.export, client) {
        Ok(visit) => visit,
        Err(reason) => return End::Violation(Violation::ExportUnavailable(reason)),
    };
    let name = &visit.stand.entry().export.name;
    let line = format!("client {}: uses export {name:?}", client.number);
    shelf.options.say(&line);
    let end = transmission(shelf, client, (&visit.stand, session), inflow).await;
    // From here on it has nothing more to wait for, and whoever removes the export waits for it.
    client.hang_up();
    client.drain.stop();
    shelf.leave(visit).await;
    end
}

async fn transmission<D: Device + 'static>(
    shelf: &Rc<Shelf<D>>,
    client: &Arc<Client>,
    (stand, session): (&Rc<Stand<D>>, Session),
    inflow: &mut Inflow,
) -> End {
    let hub = Hub::start(shelf, client, Rc::clone(stand), session);
    let _open = Open(&hub);
    gaur_reactor::spawn(watch_for_drain(hub.clone(), client.clone()));
    let end = Reader {
        hub: &hub,
        client,
        inflow,
        parser: Parser::new(session),
    }
    .run()
    .await;
    hub.close().await;
    if hub.draining() { End::Stopped } else { end }
}

/// Ends with the connection at the latest, whose [`Presence`] raises the same flag.
async fn watch_for_drain<D: Device + 'static>(hub: Rc<Hub<D>>, client: Arc<Client>) {
    client.drain.stopped().await;
    hub.drain();
}

pub(super) struct Reader<'a, D> {
    pub(super) hub: &'a Rc<Hub<D>>,
    pub(super) client: &'a Client,
    inflow: &'a mut Inflow,
    parser: Parser,
}

impl<D: Device + 'static> Reader<'_, D> {
    async fn run(mut self) -> End {
        loop {
            let (used, event) = self.parser.feed(self.inflow.bytes());
            self.inflow.consume(used);
            let outcome = match event {
                Event::Request(command) if self.hub.draining() => self.turn_away(command).await,
                Event::Request(command) => self.request(command).await,
                Event::Refuse(refusal) => self.refuse(refusal).await,
                Event::Disconnect => Err(End::Goodbye),
                Event::Violation(violation) => Err(End::Violation(violation)),
                Event::Need => match self.inflow.fill(&self.client.stream).await {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(End::PeerClosed),
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
            .hub
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
            self.hub.release(job);
            return Err(end);
        }
        self.hub.dispatch(job);
        Ok(())
    }

    /// Fills `payload` with what has arrived already and then straight from the socket.
    pub(super) async fn receive(&mut self, payload: &mut [u8]) -> Result<(), End> {
        let arrived = self.inflow.bytes();
        let mut filled = arrived.len().min(payload.len());
        payload[..filled].copy_from_slice(&arrived[..filled]);
        self.inflow.consume(filled);
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
        let Command {
            cookie,
            offset_bytes,
            ..
        } = command;
        let reason = "the server is shutting down";
        self.refuse(Refusal {
            cookie,
            offset_bytes,
            errno: Errno::ESHUTDOWN,
            reason,
        })
        .await
    }

    async fn refuse(&mut self, refusal: Refusal) -> Result<(), End> {
        let Refusal {
            cookie,
            offset_bytes,
            errno,
            reason,
        } = refusal;
        let kind = Kind::Flush;
        let command = Command {
            cookie,
            kind,
            offset_bytes,
            len_bytes: 0,
            fua: false,
        };
        let mut job = self.hub.take_job(command, 0).await;
        job.fail(errno, reason);
        self.hub.answer(job);
        Ok(())
    }
}
