//! A file in a store: who asks for a chunk, and who waits for it.
//!
//! A chunk is asked for once, however many wait for it (single flight): in this process by [`Flight`], between processes by
//! claims on the entry of the cache. What arrives is handed to those who wait and kept in the cache; where it
//! cannot be kept, it is handed over all the same.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use gaur_block::{Errno, Extent, SegmentsMut};
use gaur_reactor::remote::{Fetch, RemoteFile};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep};

use crate::CHUNK_BYTES;
use crate::ahead::Ahead;
use crate::attempt::{self, Pace};
use crate::cache::{Cache, Entry};
use crate::runtime;
use crate::store::{Facts, Fault, Source};

/// Most chunks of one request to the store.
const RUN_CHUNKS: u64 = 8;
/// Most chunks that one read waits for at once.
const WINDOW_CHUNKS: u64 = 64;
/// Requests at once, for all files of the process: those that somebody waits for, and those ahead.
const WANTED_MAX: usize = 32;
const AHEAD_MAX: usize = 16;
/// Runs of chunks that are verified at once.
const LOOKS_MAX: usize = 16;
/// How long another process is waited for that fetches the same chunk, and between two looks.
const CLAIM_PATIENCE: Duration = Duration::from_secs(10);
const CLAIM_PAUSE: Duration = Duration::from_millis(3);

static WANTED: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(WANTED_MAX)));
static LOOKS: Semaphore = Semaphore::const_new(LOOKS_MAX);
static AHEAD: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(AHEAD_MAX)));

/// The bytes of a chunk once they are there, or why not.
type Landing = Option<Result<Bytes, Errno>>;

/// A file in a store.
pub(crate) struct Layer {
    name: String,
    source: Source,
    facts: Facts,
    cache: Arc<Cache>,
    entry: Entry,
    flights: Mutex<HashMap<u64, watch::Receiver<Landing>>>,
    ahead: Ahead,
    pace: Pace,
    patience: Duration,
    trouble: Mutex<Option<String>>,
    me: Weak<Layer>,
}

/// A chunk on its way. Dropped, nobody waits for it any more.
struct Flight {
    layer: Arc<Layer>,
    chunk: u64,
    tell: watch::Sender<Landing>,
}

impl Flight {
    fn land(self, bytes: Result<Bytes, Errno>) {
        self.tell.send_replace(Some(bytes));
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.layer.flights.lock().remove(&self.chunk);
    }
}

/// Chunks that no other process touches.
struct Claim<'a> {
    entry: &'a Entry,
    chunks: Range<u64>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.entry.give_back(self.chunks.clone());
    }
}

impl Layer {
    pub(crate) fn open(
        name: String,
        source: Source,
        facts: Facts,
        cache: Arc<Cache>,
        patience: Duration,
    ) -> io::Result<Arc<Layer>> {
        let entry = cache.entry(&source.identity(&name), &source.endpoint(), &facts)?;
        Ok(Arc::new_cyclic(|me| Layer {
            name,
            source,
            facts,
            cache,
            entry,
            flights: Mutex::default(),
            ahead: Ahead::default(),
            pace: Pace::default(),
            patience,
            trouble: Mutex::default(),
            me: me.clone(),
        }))
    }

    pub(crate) fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Sees to it that chunks are on their way; returns where those arrive that are not here.
    fn want(&self, chunks: Range<u64>) -> Result<Vec<(u64, watch::Receiver<Landing>)>, Errno> {
        let me = self.me.upgrade().ok_or(Errno::EIO)?;
        let mut waits = Vec::new();
        let mut own: Vec<Flight> = Vec::new();
        let mut flights = self.flights.lock();
        for chunk in chunks {
            if self.source.is_zero(chunk) {
                let zeros = Bytes::from_static(&[0; CHUNK_BYTES as usize]);
                waits.push((chunk, watch::channel(Some(Ok(zeros))).1));
                continue;
            }
            let known = flights.get(&chunk).cloned();
            let arrival = known.unwrap_or_else(|| {
                let (tell, arrival) = watch::channel(None);
                flights.insert(chunk, arrival.clone());
                let layer = me.clone();
                own.push(Flight { layer, chunk, tell });
                arrival
            });
            waits.push((chunk, arrival));
        }
        drop(flights);
        start(&me, own, &WANTED)?;
        Ok(waits)
    }

    /// Whether a chunk can be read from the entry: it was kept, or is a hole there for good.
    fn is_here(&self, chunk: u64) -> bool {
        self.entry.is_ready(chunk) || self.source.is_zero(chunk)
    }

    /// Asks for chunks that nobody waits for, as far as there is room for that.
    fn ask_ahead(&self, chunks: Range<u64>) {
        let Some(me) = self.me.upgrade() else {
            return;
        };
        let mut own: Vec<Flight> = Vec::new();
        let mut flights = self.flights.lock();
        for chunk in chunks {
            if flights.contains_key(&chunk) || self.is_here(chunk) {
                continue;
            }
            let (tell, arrival) = watch::channel(None);
            flights.insert(chunk, arrival);
            let layer = me.clone();
            own.push(Flight { layer, chunk, tell });
        }
        drop(flights);
        let _ = start(&me, own, &AHEAD);
    }

    /// Brings a run of chunks here. What is here waits for no store: the gate is for requests alone.
    async fn bring(self: Arc<Self>, run: Vec<Flight>, gate: Arc<Semaphore>) {
        // So long for all of it, however long it waits for its turn.
        let deadline = Instant::now() + self.patience;
        for run in runs(self.look(run).await) {
            self.bring_missing(run, &gate, deadline).await;
        }
        if self.cache.is_due() {
            let cache = self.cache.clone();
            // What cannot be removed now is tried again later.
            tokio::task::spawn_blocking(move || drop(cache.make_room()));
        }
    }

    /// Lands what is here and right; returns the rest.
    async fn look(self: &Arc<Self>, mut run: Vec<Flight>) -> Vec<Flight> {
        let _permit = LOOKS.acquire().await;
        let layer = self.clone();
        let looked = tokio::task::spawn_blocking(move || {
            run.retain_mut(|flight| match layer.entry.verify(flight.chunk) {
                Some(bytes) => {
                    flight.tell.send_replace(Some(Ok(bytes)));
                    false
                }
                None => true,
            });
            run
        });
        looked.await.unwrap_or_default()
    }

    async fn bring_missing(
        self: &Arc<Self>,
        run: Vec<Flight>,
        gate: &Semaphore,
        deadline: Instant,
    ) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            return;
        };
        let claim = self.claim(first.chunk..last.chunk + 1).await;
        // Another process may have brought it meanwhile.
        for run in runs(self.look(run).await) {
            self.fetch_run(run, claim.is_some(), gate, deadline).await;
        }
        drop(claim);
    }

    async fn fetch_run(
        self: &Arc<Self>,
        run: Vec<Flight>,
        keep: bool,
        gate: &Semaphore,
        deadline: Instant,
    ) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            return;
        };
        let range = self.entry.bytes_of(first.chunk..last.chunk + 1);
        // A pause between two attempts is none of the requests at once.
        let ask = || async {
            let _permit = gate.acquire().await;
            attempt::hedged(&self.source, &self.facts, range.clone(), &self.pace).await
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let answer = attempt::repeat(ask, left, |fault| self.note_trouble(fault)).await;
        let layer = self.clone();
        let landed = tokio::task::spawn_blocking(move || match answer {
            Ok(bytes) => {
                for flight in run {
                    let at = (flight.chunk * CHUNK_BYTES - range.start) as usize;
                    let end = bytes.len().min(at + CHUNK_BYTES as usize);
                    let chunk = bytes.slice(at..end);
                    // A full disk keeps nothing; the bytes are right all the same.
                    if keep && layer.entry.keep(flight.chunk, &chunk).is_ok() {
                        layer.cache.add(chunk.len() as u64);
                    }
                    flight.land(Ok(chunk));
                }
            }
            Err(fault) => {
                for flight in run {
                    flight.land(Err(fault.errno));
                }
            }
        });
        let _ = landed.await;
    }

    /// Claims chunks; nothing when another process has them for too long.
    async fn claim(&self, chunks: Range<u64>) -> Option<Claim<'_>> {
        let deadline = Instant::now() + CLAIM_PATIENCE.min(self.patience);
        loop {
            match self.entry.try_claim(chunks.clone()) {
                Ok(true) => {
                    let entry = &self.entry;
                    return Some(Claim { entry, chunks });
                }
                Ok(false) if Instant::now() < deadline => sleep(CLAIM_PAUSE).await,
                Ok(false) | Err(_) => return None,
            }
        }
    }

    fn note_trouble(&self, fault: &Fault) {
        *self.trouble.lock() = Some(format!("{}: {}", self.name, fault.text));
    }

    async fn read(&self, offset_bytes: u64, into: SegmentsMut<'_>) -> Result<(), Errno> {
        let end = offset_bytes + into.len() as u64;
        let (mut at, mut rest) = (offset_bytes, into);
        let chunks = offset_bytes / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES);
        let mut start = chunks.start;
        while start < chunks.end {
            let window = start..chunks.end.min(start + WINDOW_CHUNKS);
            let waits = self.want(window.clone())?;
            if window.start == chunks.start {
                self.ask_ahead(self.ahead.note(chunks.clone(), self.entry.chunks()));
            }
            for (chunk, mut arrival) in waits {
                let arrived = arrival.wait_for(Option::is_some).await;
                // Whoever fetched it is gone without a word.
                let arrived = arrived.map_err(|_| Errno::EIO)?.clone();
                let bytes = arrived.ok_or(Errno::EIO)??;
                let skip = (at - chunk * CHUNK_BYTES) as usize;
                let part = bytes.get(skip..).ok_or(Errno::EIO)?;
                let len = part.len().min(rest.len());
                let (now, later) = rest.split_at(len);
                now.copy_from(&part[..len]);
                at += len as u64;
                rest = later;
            }
            start = window.end;
        }
        Ok(())
    }
}

/// Starts flights, in runs of chunks that follow each other.
fn start(layer: &Arc<Layer>, own: Vec<Flight>, gate: &Arc<Semaphore>) -> Result<(), Errno> {
    if own.is_empty() {
        return Ok(());
    }
    let runtime = runtime::get().map_err(|_| Errno::EIO)?;
    for run in runs(own) {
        runtime.spawn(layer.clone().bring(run, gate.clone()));
    }
    Ok(())
}

/// Cuts flights, which are in order, into runs of one request each.
fn runs(flights: Vec<Flight>) -> Vec<Vec<Flight>> {
    let mut runs: Vec<Vec<Flight>> = Vec::new();
    // Chunks of a published image are objects of their own.
    let published = |flight: &Flight| matches!(flight.layer.source, Source::Published(_));
    let most = match flights.first().is_some_and(published) {
        true => 1,
        false => RUN_CHUNKS,
    };
    for flight in flights {
        let fits = |run: &&mut Vec<Flight>| {
            let next = run.last().map(|last| last.chunk + 1);
            next == Some(flight.chunk) && (run.len() as u64) < most
        };
        match runs.last_mut().filter(fits) {
            Some(run) => run.push(flight),
            None => runs.push(vec![flight]),
        }
    }
    runs
}

impl RemoteFile for Layer {
    fn len_bytes(&self) -> u64 {
        self.facts.len_bytes
    }

    fn holds(&self, offset_bytes: u64, len_bytes: u64) -> Option<u64> {
        let mark = self.entry.epoch();
        let end = offset_bytes
            .saturating_add(len_bytes)
            .min(self.facts.len_bytes);
        if offset_bytes >= end {
            return Some(mark);
        }
        let mut chunks = offset_bytes / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES);
        if !chunks.clone().all(|chunk| self.is_here(chunk)) {
            return None;
        }
        if let Some(marked) = chunks.find(|chunk| self.ahead.is_mark(*chunk)) {
            let read = marked..marked + 1;
            self.ask_ahead(self.ahead.note(read, self.entry.chunks()));
        }
        Some(mark)
    }

    fn still_holds(&self, mark: u64) -> bool {
        self.entry.epoch() == mark
    }

    fn fetch<'a>(&'a self, offset_bytes: u64, into: SegmentsMut<'a>) -> Fetch<'a> {
        Box::pin(self.read(offset_bytes, into))
    }

    fn is_disk(&self) -> bool {
        matches!(self.source, Source::Published(_))
    }

    fn extent_at(&self, offset_bytes: u64) -> Option<Extent> {
        let Source::Published(image) = &self.source else {
            return None;
        };
        let (zero, end) = image.run(offset_bytes / CHUNK_BYTES);
        let end = self.facts.len_bytes.min(end * CHUNK_BYTES);
        Some(Extent {
            len: end.checked_sub(offset_bytes)?.max(1),
            data: !zero,
        })
    }

    fn trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

impl std::fmt::Debug for Layer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Layer({})", self.name)
    }
}
