//! The task of a connection: it connects, sends, receives, and connects again.

use std::io::IoSlice;
use std::net::{Shutdown, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use gaur_block::Errno;
use gaur_nbd::wire::cmd;
use gaur_nbd::{Event, Remote, Replies, Server, Violation, request};

use super::handshake::{Session, shake_hands};
use super::slots::{Outgoing, Phase, Slots};
use super::{Trouble, give_up, is_in_a_hurry};
use crate::address::Address;
use crate::race::{Either, race, timeout};
use crate::secure::SecureStream;
use crate::socket::Stream;
use crate::timer::sleep;

/// Most seconds for connecting and the handshake.
const CONNECT_SECONDS: u32 = 30;

/// Between two attempts to connect, the first and all later ones.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How often is looked whether the server has stopped answering.
const TICK: Duration = Duration::from_millis(500);

/// After how many seconds a server counts as silent when the process is to end.
const HURRY_SECONDS: u32 = 3;

/// How long a connection stays that nobody uses.
const LINGER: Duration = Duration::from_secs(1);

/// How long saying goodbye may take.
const GOODBYE: Duration = Duration::from_secs(1);

/// Bytes received by one call at most.
const RECEIVE_BYTES: usize = 512 << 10;

/// A stream, what was agreed on there, and where it leads.
type Connected = (SecureStream, Session, Address);

/// One connection, or the attempt to have one.
pub(super) struct Connection {
    remote: Remote,
    slots: Arc<Slots>,
    /// Where the server is, if it was looked up before.
    address: Option<Address>,
}

impl Connection {
    pub(super) fn new(remote: Remote, slots: Arc<Slots>) -> Connection {
        Connection {
            remote,
            slots,
            address: None,
        }
    }

    /// The same with the server at an address.
    pub(super) fn at(self, address: Address) -> Connection {
        Connection {
            address: Some(address),
            ..self
        }
    }

    /// Makes a connection beside one whose `session` it has to be able to stand for, and keeps it until it is lost or
    /// its user is gone.
    pub(super) async fn drive_once(&self, session: &Session) {
        let unused = || self.slots.until(|state| state.users == 0);
        let (stream, own) = match race(unused(), self.connect()).await {
            Either::Right(Ok((stream, own, _))) if own.can_replace(session) => (stream, own),
            _ => return,
        };
        self.slots.hold().phase = Phase::Open;
        match race(unused(), self.run(&stream, &own)).await {
            Either::Right(Some(trouble)) => self.go_down(&trouble),
            _ => self.say_goodbye(&stream).await,
        }
    }

    async fn say_goodbye(&self, stream: &SecureStream) {
        let headers = self.slots.hold().headers;
        let goodbye = request(headers, (cmd::DISC, 0), 0, 0, 0);
        let _ = timeout(GOODBYE, stream.send(&goodbye)).await;
        let _ = stream.socket().shutdown(Shutdown::Write);
    }

    /// Keeps the connection until it is closed. `tell` is told how the first attempt ended; if it failed,
    /// that is all.
    pub(super) async fn drive(&self, tell: &SyncSender<Result<(Session, Address), Trouble>>) {
        let patience = Duration::from_secs(self.remote.patience.open_timeout.into());
        let first = match self.connect_within(patience).await {
            Ok(first) => first,
            Err(trouble) => {
                let _ = tell.send(Err(trouble));
                return;
            }
        };
        let (mut stream, mut session, address) = first;
        if tell.send(Ok((session, address))).is_err() {
            return;
        }
        while let Some(trouble) = self.run(&stream, &session).await {
            drop(stream);
            (stream, session) = match self.reconnect(&session, trouble).await {
                Some(again) => again,
                None => return,
            };
        }
        self.say_goodbye(&stream).await;
    }

    /// Connects, again and again for a while.
    async fn connect_within(&self, patience: Duration) -> Result<Connected, Trouble> {
        let start = Instant::now();
        let mut pause = PAUSE_MIN;
        loop {
            let outcome = self.connect().await;
            // The last attempt is at the end of the patience.
            let left = patience.saturating_sub(start.elapsed());
            match outcome {
                Err(trouble) if !trouble.is_final && !left.is_zero() && !is_in_a_hurry() => {
                    sleep(pause.min(left)).await;
                }
                done => return done,
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    async fn connect(&self) -> Result<Connected, Trouble> {
        let seconds = match self.remote.patience.request_timeout {
            0 => CONNECT_SECONDS,
            limit => limit.min(CONNECT_SECONDS),
        };
        let connecting = async {
            let (stream, address) = self.connect_socket().await?;
            let stream = SecureStream::plain(Arc::new(stream));
            let session = shake_hands(&stream, &self.remote).await?;
            Ok((stream, session, address))
        };
        let limit = Duration::from_secs(seconds.into());
        timeout(limit, connecting).await.unwrap_or_else(|| {
            let text = format!("the server did not answer for {seconds} seconds");
            Err(Trouble::timed_out(text))
        })
    }

    async fn connect_socket(&self) -> Result<(Stream, Address), Trouble> {
        let failed = |errno| {
            let what = format!("cannot connect to {}", self.remote.server);
            Trouble::system(&what, errno)
        };
        let mut last = failed(Errno::EHOSTUNREACH);
        for address in self.addresses()? {
            match Stream::connect(&address).await {
                Ok(stream) => return Ok((stream, address)),
                Err(errno) => last = failed(errno),
            }
        }
        Err(last)
    }

    /// Where the server may be. Looking up a name blocks, so the threads that serve have it told.
    fn addresses(&self) -> Result<Vec<Address>, Trouble> {
        let (host, port) = match (&self.address, &self.remote.server) {
            (Some(address), _) => return Ok(vec![address.clone()]),
            (None, Server::Unix(path)) => return Ok(vec![Address::Unix(path.clone())]),
            (None, Server::Inet { host, port }) => (host.as_str(), *port),
        };
        let found = (host, port).to_socket_addrs();
        let found = found.map_err(|error| Trouble {
            errno: Errno::EHOSTUNREACH,
            text: format!("cannot find the host {host}: {error}"),
            is_final: false,
        })?;
        Ok(found.map(Address::Tcp).collect())
    }

    /// Connects again after a loss. Until that works, requests wait for as long as they may and then
    /// fail; from then on a request that fails is the sign that another attempt is worth it. Nothing once
    /// nobody uses it any more.
    async fn reconnect(
        &self,
        before: &Session,
        trouble: Trouble,
    ) -> Option<(SecureStream, Session)> {
        let patience = Duration::from_secs(self.remote.patience.reconnect_delay.into());
        let mut failed = trouble;
        let mut try_now = !patience.is_zero();
        loop {
            if try_now {
                let unused = self.slots.until(|state| state.users == 0);
                match race(unused, self.connect_within(patience)).await {
                    Either::Left(()) => {}
                    Either::Right(Ok((stream, session, _))) if session.can_replace(before) => {
                        let mut state = self.slots.hold();
                        state.send_again();
                        state.phase = Phase::Open;
                        return Some((stream, session));
                    }
                    Either::Right(Ok(_)) => {
                        let text = "the export is not what it was before the connection was lost";
                        failed = Trouble::final_word(failed.errno, text.to_owned());
                    }
                    Either::Right(Err(trouble)) => failed = trouble,
                }
            }
            self.go_down(&failed);
            let wanted = self.slots.until(|state| state.wanted || state.users == 0);
            race(sleep(PAUSE_MAX), self.slots.until(|state| state.users == 0)).await;
            wanted.await;
            if give_up(&self.slots) {
                return None;
            }
            self.slots.hold().wanted = false;
            try_now = true;
        }
    }

    fn go_down(&self, trouble: &Trouble) {
        let mut state = self.slots.hold();
        state.trouble = Some(trouble.text.clone());
        state.phase = Phase::Down(trouble.errno);
        state.fail_all(trouble.errno);
    }

    /// Uses a connection until it is lost; nothing when nobody uses it any more.
    async fn run(&self, stream: &SecureStream, session: &Session) -> Option<Trouble> {
        self.slots.hold().headers = session.headers;
        let transfers = race(self.receive(stream, session.replies()), self.send(stream));
        match race(transfers, self.watch()).await {
            Either::Left(Either::Left(trouble) | Either::Right(trouble)) => Some(trouble),
            Either::Right(silent) => silent,
        }
    }

    /// Sends requests as they come.
    async fn send(&self, stream: &SecureStream) -> Trouble {
        let mut batch: Vec<Outgoing> = Vec::new();
        loop {
            self.slots.next_batch(&mut batch).await;
            let parts = batch
                .iter()
                .flat_map(|one| [&one.header[..], &one.bytes[..]]);
            let parts: Vec<IoSlice<'_>> = parts
                .filter(|part| !part.is_empty())
                .map(IoSlice::new)
                .collect();
            let sent = stream.send_vectored(&parts).await;
            drop(parts);
            self.slots.give_back(&mut batch);
            if let Err(errno) = sent {
                return Trouble::system("cannot send", errno);
            }
        }
    }

    async fn receive(&self, stream: &SecureStream, mut replies: Replies) -> Trouble {
        let mut buffer = vec![0; RECEIVE_BYTES];
        let mut there = 0..0;
        loop {
            if there.is_empty() {
                there = 0..0;
            } else if buffer.len() - there.end < Replies::BUFFER_BYTES {
                buffer.copy_within(there.clone(), 0);
                there = 0..there.len();
            }
            let received = match stream.recv(&mut buffer[there.end..]).await {
                Ok(0) => return Trouble::closed("the server closed the connection"),
                Ok(count) => count,
                Err(errno) => return Trouble::system("cannot receive", errno),
            };
            there.end += received;
            match self.take(&mut replies, received, &buffer[there.clone()]) {
                Ok(used) => there.start += used,
                Err(violation) => return violation.into(),
            }
        }
    }

    /// Takes what is there, of which `received` bytes are new; returns how much of it was used.
    fn take(
        &self,
        replies: &mut Replies,
        received: usize,
        input: &[u8],
    ) -> Result<usize, Violation> {
        let mut state = self.slots.hold();
        state.receive(received);
        let mut rest = input;
        loop {
            let (used, event) = replies.feed(rest, |cookie| state.asked(cookie))?;
            rest = &rest[used..];
            if event == Event::Need {
                return Ok(input.len() - rest.len());
            }
            state.take(&event)?;
        }
    }

    /// Ends when the server owes a reply and has been silent for too long, and with nothing when nobody uses the
    /// connection any more.
    async fn watch(&self) -> Option<Trouble> {
        loop {
            sleep(TICK).await;
            let seconds = match self.remote.patience.request_timeout {
                0 if is_in_a_hurry() => HURRY_SECONDS,
                seconds if is_in_a_hurry() => seconds.min(HURRY_SECONDS),
                seconds => seconds,
            };
            let limit = Duration::from_secs(seconds.into());
            let (silent, unused) = {
                let state = self.slots.hold();
                let silent = state.is_overdue(limit);
                let left = state.left.filter(|_| state.users == 0);
                (silent, left.is_some_and(|left| left.elapsed() >= LINGER))
            };
            if unused && give_up(&self.slots) {
                return None;
            }
            if silent && seconds > 0 {
                let text = format!("the server did not answer for {seconds} seconds");
                return Some(Trouble::timed_out(text));
            }
        }
    }
}
