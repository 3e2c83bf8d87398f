//! Devices that wait, fail, count or break their word when a test says so.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use gaur_block::{Device, DeviceLimits, Errno, Payload, Request, Status};
use gaur_export::device::Memory;

/// A memory device behind a gate.
#[derive(Clone)]
pub struct Gated {
    pub inner: Memory,
    pub gate: Arc<Gate>,
}

#[derive(Default)]
pub struct Gate {
    state: Mutex<State>,
    /// Flushes that were asked for.
    pub flushes: AtomicU32,
    /// Writes that were asked to be durable by themselves.
    pub durable: AtomicU32,
    /// Requests that have begun.
    pub begun: AtomicU32,
    /// Longest payload seen.
    pub longest: AtomicU32,
}

#[derive(Default)]
struct State {
    closed: bool,
    wakers: Vec<Waker>,
    fail: Option<Errno>,
    panic_at: Option<u64>,
    max_transfer: Option<u32>,
}

impl Gate {
    /// Requests wait from now on.
    pub fn close(&self) {
        self.state.lock().unwrap().closed = true;
    }

    pub fn open(&self) {
        let wakers = {
            let mut state = self.state.lock().unwrap();
            state.closed = false;
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Requests fail from now on.
    pub fn fail(&self, errno: Errno) {
        self.state.lock().unwrap().fail = Some(errno);
    }

    /// A request for this offset panics.
    pub fn panic_at(&self, offset_bytes: u64) {
        self.state.lock().unwrap().panic_at = Some(offset_bytes);
    }

    pub fn limit_transfer(&self, max_transfer: u32) {
        self.state.lock().unwrap().max_transfer = Some(max_transfer);
    }
}

impl Gated {
    pub fn new(size_bytes: u64) -> Gated {
        Gated {
            inner: Memory::new(size_bytes),
            gate: Arc::new(Gate::default()),
        }
    }

    async fn pass(&self) {
        poll_fn(|context| {
            let mut state = self.gate.state.lock().unwrap();
            if state.closed {
                state.wakers.push(context.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
    }
}

impl Device for Gated {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn limits(&self) -> DeviceLimits {
        let max_transfer = self.gate.state.lock().unwrap().max_transfer;
        DeviceLimits {
            max_transfer: max_transfer.unwrap_or(u32::MAX),
            ..self.inner.limits()
        }
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        let len = match &payload {
            Payload::Read(target) => target.len(),
            Payload::Write(source) => source.len(),
            Payload::None => 0,
        };
        self.gate.longest.fetch_max(len as u32, Ordering::Relaxed);
        {
            let state = self.gate.state.lock().unwrap();
            if let (Some(at), Request::Read { offset_bytes }) = (state.panic_at, request)
                && at == offset_bytes
            {
                drop(state);
                panic!("as the test wants");
            }
        }
        if matches!(request, Request::Write { fua: true, .. }) {
            self.gate.durable.fetch_add(1, Ordering::AcqRel);
        }
        self.gate.begun.fetch_add(1, Ordering::AcqRel);
        self.pass().await;
        if request == Request::Flush {
            self.gate.flushes.fetch_add(1, Ordering::AcqRel);
        }
        let fail = self.gate.state.lock().unwrap().fail;
        match fail {
            Some(errno) => Err(errno),
            None => self.inner.submit(request, payload).await,
        }
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
        self.inner.status(offset_bytes, len_bytes).await
    }
}
