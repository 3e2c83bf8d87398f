//! Requests of one connection: those that wait to be sent, and those that are.
//!
//! The mutex is held for looks and copies, never over an await. Memory of a read is written to under it, and a request that is dropped
//! takes its memory away under it: so no byte goes where nobody waits for it. A write's bytes are
//! copied when it is made, so that it can be sent again after a reconnect, whoever waits for it.

use std::collections::{BTreeMap, VecDeque};
use std::future::{Future, poll_fn};
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use gaur_block::{Errno, Segments, SegmentsMut};
use gaur_nbd::wire::cmd;
use gaur_nbd::{Asked, Event, Headers, RequestHeader, Violation, request};
use parking_lot::{Mutex, MutexGuard};
use slab::Slab;

use super::Trouble;

/// Most requests at once. Servers allow at least as many.
const SLOTS_MAX: usize = 128;

/// Most bytes of reads and writes in flight, unless one request alone has more.
const BYTES_MAX: usize = 64 << 20;

/// Most memory of done writes that is kept for the next ones.
const SPARE_BYTES_MAX: usize = 16 << 20;

/// Most requests that go out in one call.
const BATCH_MAX: usize = 16;

/// So many bytes of replies that are not finished count as an answer.
const PROGRESS_BYTES: usize = 64 << 10;

/// A request may take so many times as long as the server may be silent.
const STARVING: u32 = 10;

/// Over so many connections a request is sent.
const SENDS_MAX: u32 = 5;

/// Most extents and errors in a reply.
const WORDS_MAX: u32 = 1 << 20;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) kind: u16,
    pub(super) flags: u16,
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
}

impl Ask {
    /// Bytes that travel for it.
    fn payload(&self) -> usize {
        match self.kind {
            cmd::READ | cmd::WRITE => self.len_bytes as usize,
            _ => 0,
        }
    }
}

/// Where the data of a read goes.
struct Memory(SegmentsMut<'static>);

// SAFETY: it is used under the mutex only, and taken away before the borrow that it was made from ends.
unsafe impl Send for Memory {}

/// A run of blocks that are alike, as the metadata context says that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) len_bytes: u64,
    /// Its flags.
    pub(super) state: u32,
}

/// How a request ended.
pub(super) type Outcome = Result<Option<Blocks>, Errno>;

struct Slot {
    ask: Ask,
    cookie: u64,
    bytes: Vec<u8>,
    memory: Option<Memory>,
    /// What of a read is there, by where it begins: one run, when chunks come in order.
    filled: BTreeMap<u64, u64>,
    extent: Option<Blocks>,
    extent_ended: bool,
    /// Extents and errors so far.
    words: u32,
    failed: Option<Errno>,
    /// When it was sent over this connection.
    sent: Option<Instant>,
    /// Over how many connections it was sent.
    sends: u32,
    waker: Option<Waker>,
    /// The request was dropped, and does not ask how it ended.
    dropped: bool,
    outcome: Option<Outcome>,
}

/// How the connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Requests are sent, or wait for the connection.
    Open,
    /// There is none, and requests fail at once.
    Down(Errno),
}

pub(super) struct State {
    slots: Slab<Slot>,
    to_send: VecDeque<usize>,
    serial: u64,
    bytes: usize,
    spare: Vec<Vec<u8>>,
    spare_bytes: usize,
    room: Vec<Waker>,
    /// Are woken when the mutex is free again, which they take first of all.
    woken: Vec<Waker>,
    driver: Option<Waker>,
    pub(super) phase: Phase,
    /// How requests begin on this connection.
    pub(super) headers: Headers,
    /// A request came while the connection was down.
    pub(super) wanted: bool,
    /// How many have the export open.
    pub(super) users: usize,
    /// When the last of them closed it.
    pub(super) left: Option<Instant>,
    /// When the server last finished a reply or had sent a good part of one, or had nothing to send.
    heard: Instant,
    /// Bytes that came since.
    unheard: usize,
    /// What went wrong last, in words.
    pub(super) trouble: Option<String>,
}

/// The requests of one connection.
pub(super) struct Slots(Mutex<State>);

/// The state while the mutex is held.
pub(super) struct Held<'a>(Option<MutexGuard<'a, State>>);

impl Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.0.as_ref().expect("it is there until the end")
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().expect("it is there until the end")
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let woken = self
            .0
            .take()
            .map(|mut state| std::mem::take(&mut state.woken));
        woken.into_iter().flatten().for_each(Waker::wake);
    }
}

/// A request on its way out.
pub(super) struct Outgoing {
    key: usize,
    cookie: u64,
    pub(super) header: RequestHeader,
    pub(super) bytes: Vec<u8>,
}

/// A request that somebody waits for.
struct Waiting<'a> {
    slots: &'a Slots,
    key: usize,
}

impl Slots {
    pub(super) fn new() -> Arc<Slots> {
        Arc::new(Slots(Mutex::new(State {
            slots: Slab::new(),
            to_send: VecDeque::new(),
            serial: 0,
            bytes: 0,
            spare: Vec::new(),
            spare_bytes: 0,
            room: Vec::new(),
            woken: Vec::new(),
            driver: None,
            phase: Phase::Open,
            headers: Headers::default(),
            wanted: false,
            users: 1,
            left: None,
            heard: Instant::now(),
            unheard: 0,
            trouble: None,
        })))
    }

    pub(super) fn hold(&self) -> Held<'_> {
        Held(Some(self.0.lock()))
    }

    /// Reads into `memory`.
    pub(super) async fn read(&self, ask: Ask, memory: SegmentsMut<'_>) -> Outcome {
        // SAFETY: `Waiting` borrows nothing of it, but takes it out of the slot when it is dropped, which is
        // before this future ends, and so before the borrow does.
        let memory =
            unsafe { std::mem::transmute::<SegmentsMut<'_>, SegmentsMut<'static>>(memory) };
        self.run(ask, Some(Memory(memory)), None).await
    }

    /// Writes `source`.
    pub(super) async fn write(&self, ask: Ask, source: Segments<'_>) -> Outcome {
        self.run(ask, None, Some(source)).await
    }

    /// A request without bytes.
    pub(super) async fn ask(&self, ask: Ask) -> Outcome {
        self.run(ask, None, None).await
    }

    async fn run(&self, ask: Ask, memory: Option<Memory>, source: Option<Segments<'_>>) -> Outcome {
        let mut memory = memory;
        let (key, mut bytes) = poll_fn(|context| {
            let mut state = self.hold();
            state.start(ask, &mut memory, context)
        })
        .await?;
        let waiting = Waiting { slots: self, key };
        if let Some(source) = source {
            source.append_to(&mut bytes);
        }
        self.hold().queue(key, bytes);
        waiting.await
    }

    /// The next requests to send; waits for the first.
    pub(super) async fn next_batch(&self, batch: &mut Vec<Outgoing>) {
        poll_fn(|context| {
            let mut state = self.hold();
            state.fill_batch(batch);
            match batch.is_empty() {
                true => {
                    state.driver = Some(context.waker().clone());
                    Poll::Pending
                }
                false => Poll::Ready(()),
            }
        })
        .await;
    }

    /// The bytes of requests that went out come back, to be sent again if need be.
    pub(super) fn give_back(&self, batch: &mut Vec<Outgoing>) {
        let mut state = self.hold();
        for outgoing in batch.drain(..) {
            match state.slots.get_mut(outgoing.key) {
                Some(slot) if slot.cookie == outgoing.cookie => slot.bytes = outgoing.bytes,
                _ => state.keep(outgoing.bytes),
            }
        }
    }

    /// Waits until `wanted` says so, when requests come and users go.
    pub(super) async fn until(&self, wanted: impl Fn(&State) -> bool) {
        poll_fn(|context| {
            let mut state = self.hold();
            if wanted(&state) {
                return Poll::Ready(());
            }
            state.driver = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Notes that the export was closed.
    pub(super) fn leave(&self) {
        let mut state = self.hold();
        state.users -= 1;
        if state.users == 0 {
            state.left = Some(Instant::now());
            state.wake_driver();
        }
    }
}

impl State {
    /// Takes a place for a request, and memory for its bytes.
    fn start(
        &mut self,
        ask: Ask,
        memory: &mut Option<Memory>,
        context: &Context<'_>,
    ) -> Poll<Result<(usize, Vec<u8>), Errno>> {
        match self.phase {
            Phase::Open => {}
            Phase::Down(errno) => {
                self.wanted = true;
                self.wake_driver();
                return Poll::Ready(Err(errno));
            }
        }
        let payload = ask.payload();
        let full = self.bytes > 0 && self.bytes.saturating_add(payload) > BYTES_MAX;
        if full || self.slots.len() >= SLOTS_MAX {
            self.room.push(context.waker().clone());
            return Poll::Pending;
        }
        self.bytes += payload;
        let key = self.slots.insert(Slot {
            ask,
            cookie: 0,
            bytes: Vec::new(),
            memory: memory.take(),
            filled: BTreeMap::new(),
            extent: None,
            extent_ended: false,
            words: 0,
            failed: None,
            sent: None,
            sends: 0,
            waker: None,
            dropped: false,
            outcome: None,
        });
        let bytes = match ask.kind {
            cmd::WRITE => self.spare.pop().unwrap_or_default(),
            _ => Vec::new(),
        };
        self.spare_bytes -= bytes.capacity();
        Poll::Ready(Ok((key, bytes)))
    }

    fn keep(&mut self, mut bytes: Vec<u8>) {
        let len = bytes.capacity();
        if len > 0 && self.spare_bytes + len <= SPARE_BYTES_MAX {
            bytes.clear();
            self.spare_bytes += len;
            self.spare.push(bytes);
        }
    }

    /// Lets a request that has a place be sent.
    fn queue(&mut self, key: usize, bytes: Vec<u8>) {
        self.serial += 1;
        let cookie = self.serial << 16 | key as u64;
        if let Some(slot) = self.slots.get_mut(key)
            && slot.outcome.is_none()
        {
            slot.bytes = bytes;
            slot.cookie = cookie;
            self.to_send.push_back(key);
        }
        self.wake_driver();
    }

    fn wake_driver(&mut self) {
        if let Some(driver) = self.driver.take() {
            self.woken.push(driver);
        }
    }

    fn fill_batch(&mut self, batch: &mut Vec<Outgoing>) {
        if !self.is_waiting_for_server() {
            self.hear();
        }
        while batch.len() < BATCH_MAX
            && let Some(key) = self.to_send.pop_front()
        {
            let Some(slot) = self.slots.get_mut(key) else {
                continue;
            };
            slot.sent = Some(Instant::now());
            slot.sends += 1;
            let Ask {
                kind,
                flags,
                offset_bytes,
                len_bytes,
            } = slot.ask;
            batch.push(Outgoing {
                key,
                cookie: slot.cookie,
                header: request(
                    self.headers,
                    (kind, flags),
                    slot.cookie,
                    offset_bytes,
                    len_bytes,
                ),
                bytes: std::mem::take(&mut slot.bytes),
            });
        }
    }

    /// Whether the server owes a reply.
    pub(super) fn is_waiting_for_server(&self) -> bool {
        self.slots
            .iter()
            .any(|(_, slot)| slot.sent.is_some() && slot.outcome.is_none())
    }

    /// The server is on its way.
    fn hear(&mut self) {
        (self.heard, self.unheard) = (Instant::now(), 0);
    }

    /// So many bytes have come. A few at a time are no answer.
    pub(super) fn receive(&mut self, len_bytes: usize) {
        self.unheard += len_bytes;
        if self.unheard >= PROGRESS_BYTES {
            self.hear();
        }
    }

    /// Whether the server owes a reply and is silent for so long, or owes one for many times as long.
    pub(super) fn is_overdue(&self, limit: Duration) -> bool {
        let starves = |slot: &Slot| {
            let sent = slot.sent.filter(|_| slot.outcome.is_none());
            sent.is_some_and(|sent| sent.elapsed() >= limit * STARVING)
        };
        let silent = self.heard.elapsed() >= limit && self.is_waiting_for_server();
        silent || self.slots.iter().any(|(_, slot)| starves(slot))
    }

    fn key_of(&self, cookie: u64) -> Option<usize> {
        let key = (cookie & 0xffff) as usize;
        let slot = self.slots.get(key)?;
        (slot.sent.is_some() && slot.cookie == cookie && slot.outcome.is_none()).then_some(key)
    }

    /// The request of a cookie.
    pub(super) fn asked(&self, cookie: u64) -> Option<Asked> {
        let ask = self.slots.get(self.key_of(cookie)?)?.ask;
        Some(Asked {
            kind: ask.kind,
            offset_bytes: ask.offset_bytes,
            len_bytes: ask.len_bytes,
        })
    }

    /// Takes what the server said of a request.
    pub(super) fn take(&mut self, event: &Event<'_>) -> Result<(), Violation> {
        let cookie = match event {
            Event::Need => return Ok(()),
            Event::Data { cookie, .. }
            | Event::Hole { cookie, .. }
            | Event::Extent { cookie, .. }
            | Event::Failed { cookie, .. }
            | Event::Done { cookie } => *cookie,
        };
        let key = self.key_of(cookie).ok_or(Violation::Unasked)?;
        let slot = self.slots.get_mut(key).ok_or(Violation::Unasked)?;
        match event {
            Event::Need => {}
            Event::Data {
                offset_bytes,
                bytes,
                ..
            } => {
                if let Some(part) = slot.fill(*offset_bytes, bytes.len() as u64)? {
                    part.copy_from(bytes);
                }
            }
            Event::Hole {
                offset_bytes,
                len_bytes,
                ..
            } => {
                if let Some(part) = slot.fill(*offset_bytes, *len_bytes)? {
                    part.fill_zeros();
                }
            }
            Event::Extent {
                len_bytes, state, ..
            } => slot.extend(*len_bytes, *state)?,
            Event::Failed { errno, message, .. } => {
                slot.count_word()?;
                slot.failed.get_or_insert(*errno);
                if !message.is_empty() {
                    self.trouble = Some(format!("the server says: {message}"));
                }
            }
            Event::Done { .. } => {
                let outcome = slot.finish()?;
                self.end(key, outcome);
                self.hear();
            }
        }
        Ok(())
    }

    /// Ends a request.
    fn end(&mut self, key: usize, outcome: Outcome) {
        let Some(slot) = self.slots.get_mut(key) else {
            return;
        };
        slot.memory = None;
        slot.outcome = Some(outcome);
        self.bytes -= slot.ask.payload();
        let bytes = std::mem::take(&mut slot.bytes);
        let (waker, dropped) = (slot.waker.take(), slot.dropped);
        if dropped {
            self.slots.remove(key);
        }
        self.keep(bytes);
        if let Some(waker) = waker {
            self.woken.push(waker);
        }
        self.woken.append(&mut self.room);
    }

    /// Every request fails that is not done.
    pub(super) fn fail_all(&mut self, errno: Errno) {
        self.to_send.clear();
        let open = self.slots.iter().filter(|(_, slot)| slot.outcome.is_none());
        let open: Vec<usize> = open.map(|(key, _)| key).collect();
        for key in open {
            self.end(key, Err(errno));
        }
        self.woken.append(&mut self.room);
    }

    /// Every request that is not done is sent again, in the order in which they were made. Those that many connections
    /// have not survived fail.
    pub(super) fn send_again(&mut self) {
        self.to_send.clear();
        let mut open: Vec<(u64, usize)> = Vec::new();
        let mut given_up: Vec<usize> = Vec::new();
        for (key, slot) in &mut self.slots {
            if slot.outcome.is_none() && slot.sends >= SENDS_MAX {
                given_up.push(key);
            } else if slot.outcome.is_none() && slot.cookie != 0 {
                slot.sent = None;
                slot.filled.clear();
                (slot.extent, slot.extent_ended, slot.words) = (None, false, 0);
                slot.failed = None;
                open.push((slot.cookie, key));
            }
        }
        open.sort_unstable();
        self.to_send.extend(open.into_iter().map(|(_, key)| key));
        for key in given_up {
            self.end(key, Err(Errno::EIO));
        }
    }
}

impl Slot {
    /// Notes that part of a read is there; returns the memory for it, if that is still wanted.
    fn fill(
        &mut self,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Option<SegmentsMut<'static>>, Violation> {
        let end = offset_bytes + len_bytes;
        let mut start = offset_bytes;
        let before = self.filled.range(..=offset_bytes).next_back();
        let before = before.map(|(start, end)| (*start, *end));
        let after = self.filled.range(offset_bytes..).next();
        let twice = before.is_some_and(|(_, before)| before > offset_bytes)
            || after.is_some_and(|(after, _)| *after < end);
        if twice {
            return Err(Violation::DataRange(offset_bytes));
        }
        if let Some((before, _)) = before.filter(|(_, before)| *before == offset_bytes) {
            start = before;
        } else {
            self.count_word()?;
        }
        self.filled.insert(start, end);
        let skip = (offset_bytes - self.ask.offset_bytes) as usize;
        Ok(self.memory.as_ref().map(|memory| {
            let rest = memory.0.split_at(skip).1;
            rest.split_at(len_bytes as usize).0
        }))
    }

    /// Takes an extent: the first run of them that say the same counts.
    fn extend(&mut self, len_bytes: u64, state: u32) -> Result<(), Violation> {
        self.count_word()?;
        match &mut self.extent {
            None => self.extent = Some(Blocks { len_bytes, state }),
            Some(extent) if extent.state == state && !self.extent_ended => {
                extent.len_bytes = extent.len_bytes.saturating_add(len_bytes);
            }
            Some(_) => self.extent_ended = true,
        }
        Ok(())
    }

    fn count_word(&mut self) -> Result<(), Violation> {
        self.words += 1;
        match self.words > WORDS_MAX {
            true => Err(Violation::Incomplete(self.ask.kind)),
            false => Ok(()),
        }
    }

    /// How it ended, now that nothing more is said about it.
    fn finish(&mut self) -> Result<Outcome, Violation> {
        if let Some(errno) = self.failed {
            return Ok(Err(errno));
        }
        let asked = self.ask.len_bytes;
        let incomplete = Violation::Incomplete(self.ask.kind);
        match self.ask.kind {
            cmd::READ => {
                let there: u64 = self.filled.iter().map(|(start, end)| end - start).sum();
                match there == asked {
                    true => Ok(Ok(None)),
                    false => Err(incomplete),
                }
            }
            cmd::BLOCK_STATUS => {
                let extent = self.extent.ok_or(incomplete)?;
                let len_bytes = extent.len_bytes.min(asked);
                Ok(Ok(Some(Blocks {
                    len_bytes,
                    ..extent
                })))
            }
            _ => Ok(Ok(None)),
        }
    }
}

impl Future for Waiting<'_> {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let mut state = self.slots.hold();
        let Some(slot) = state.slots.get_mut(self.key) else {
            return Poll::Ready(Err(Errno::EIO));
        };
        match slot.outcome {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                match &mut slot.waker {
                    Some(waker) => waker.clone_from(context.waker()),
                    none => *none = Some(context.waker().clone()),
                }
                Poll::Pending
            }
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.slots.hold();
        let Some(slot) = state.slots.get_mut(self.key) else {
            return;
        };
        slot.memory = None;
        slot.waker = None;
        let (done, unsent) = (slot.outcome.is_some(), slot.cookie == 0);
        slot.dropped = true;
        if done {
            state.slots.remove(self.key);
        } else if unsent {
            state.end(self.key, Err(Errno::ECANCELED));
        }
        let State { woken, room, .. } = &mut *state;
        woken.append(room);
    }
}

impl From<Violation> for Trouble {
    fn from(violation: Violation) -> Trouble {
        Trouble::violation(violation.to_string())
    }
}
