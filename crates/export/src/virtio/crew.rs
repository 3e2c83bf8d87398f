//! The threads of a server, their devices and their rings.

use std::rc::Rc;
use std::sync::{Arc, mpsc};

use gaur_block::Device;
use gaur_reactor::{Config, Threads, ThreadsConfig};

use super::Log;
use super::mailbox::Mailbox;
use super::order::{Order, Setup, Shape};
use super::queue;
use super::station::Station;
use crate::error::ServeError;

/// What a crew is told when it starts.
pub(crate) struct CrewOptions {
    /// First part of the threads' names.
    pub(crate) name: &'static str,
    pub(crate) threads: usize,
    pub(crate) rings: u16,
    pub(crate) reactor: Config,
    pub(crate) read_only: bool,
    pub(crate) serial: String,
    pub(crate) log: Option<Log>,
}

/// Rings on threads. Ring n is on thread n modulo their number.
pub(crate) struct Crew {
    pub(crate) threads: Threads,
    orders: Vec<Mailbox<Order>>,
    pub(crate) log: Option<Log>,
}

/// The part of a crew that the control side needs: clones are the same.
#[derive(Clone)]
pub(crate) struct Rings {
    orders: Vec<Mailbox<Order>>,
    log: Option<Log>,
}

impl Crew {
    /// Starts the threads and makes a device on each.
    pub(crate) fn start<D, F>(options: CrewOptions, devices: F) -> Result<Crew, ServeError>
    where
        D: Device + 'static,
        F: Fn(usize) -> Result<D, String> + Send + Sync + 'static,
    {
        let count = options.threads.clamp(1, usize::from(options.rings.max(1)));
        let threads = Threads::start(&ThreadsConfig {
            count,
            pin: false,
            name: options.name.to_owned(),
            reactor: options.reactor,
        })
        .map_err(|errno| ServeError::because("cannot start threads", errno))?;
        let orders: Vec<Mailbox<Order>> = (0..options.rings).map(|_| Mailbox::new()).collect();
        let log = options.log.clone();
        let (options, devices) = (Arc::new(options), Arc::new(devices));
        let (send, receive) = mpsc::channel();
        for (thread, handle) in threads.handles().iter().enumerate() {
            let (options, devices, send) = (options.clone(), devices.clone(), send.clone());
            let mine: Vec<(u16, Mailbox<Order>)> = (0_u16..)
                .zip(orders.iter().cloned())
                .filter(|(ring, _)| usize::from(*ring) % count == thread)
                .collect();
            let settle = move || async move {
                let _ = send.send(settle(&options, thread, &*devices, mine));
            };
            handle
                .spawn(settle)
                .map_err(|errno| ServeError::because("cannot start threads", errno))?;
        }
        drop(send);
        let outcome = receive.iter().take(count).collect::<Result<(), String>>();
        let crew = Crew {
            threads,
            orders,
            log,
        };
        match outcome {
            Ok(()) => Ok(crew),
            Err(reason) => {
                crew.rings().dismiss();
                crew.threads.join();
                Err(ServeError::new(reason))
            }
        }
    }

    pub(crate) fn rings(&self) -> Rings {
        Rings {
            orders: self.orders.clone(),
            log: self.log.clone(),
        }
    }
}

/// Makes the device of a thread and the tasks of its rings.
fn settle<D: Device + 'static>(
    options: &CrewOptions,
    thread: usize,
    devices: &dyn Fn(usize) -> Result<D, String>,
    rings: Vec<(u16, Mailbox<Order>)>,
) -> Result<(), String> {
    let device = devices(thread)?;
    let station = Rc::new(Station::new(
        device,
        options.read_only,
        &options.serial,
        options.log.clone(),
    ));
    for (ring, orders) in rings {
        gaur_reactor::spawn(queue::run(station.clone(), ring, orders));
    }
    Ok(())
}

impl Rings {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.orders.len()
    }

    pub(crate) fn start(&self, ring: usize, setup: Setup) {
        self.orders[ring].put(Order::Start(Box::new(setup)));
    }

    /// The next entry of a ring that ran, once nothing of it is in flight.
    pub(crate) async fn stop(&self, ring: usize) -> Option<u16> {
        self.ask(ring, Order::Stop).await
    }

    /// The next entry of a ring that runs.
    #[cfg(feature = "vduse")]
    pub(crate) async fn position(&self, ring: usize) -> Option<u16> {
        self.ask(ring, Order::Position).await
    }

    #[cfg(feature = "vhost-user")]
    pub(crate) fn order(&self, ring: usize, order: Order) {
        self.orders[ring].put(order);
    }

    pub(crate) async fn shape(&self) -> Shape {
        self.ask(0, Order::Shape).await
    }

    /// Makes durable what every ring has written; they have stopped.
    pub(crate) async fn flush(&self) -> Result<(), ServeError> {
        let flushed = self.ask(0, Order::Flush).await;
        flushed.map_err(|errno| ServeError::because("the last flush failed", errno))
    }

    async fn ask<T>(&self, ring: usize, order: impl FnOnce(Mailbox<T>) -> Order) -> T {
        let answer = Mailbox::new();
        self.orders[ring].put(order(answer.clone()));
        answer.take().await
    }

    /// Ends the tasks of all rings, which do not run.
    pub(crate) fn dismiss(&self) {
        for orders in &self.orders {
            orders.put(Order::End);
        }
    }

    pub(crate) fn say(&self, line: &str) {
        if let Some(log) = &self.log {
            log(line);
        }
    }
}
