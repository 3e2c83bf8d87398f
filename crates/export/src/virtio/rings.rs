//! The control side of the rings of a virtio block device.

use super::ring_command::{RingCommand, RingSetup};
use crate::error::ServeError;
use crate::serve::{Channel, Geometry, Log, say};

/// The rings of one thread: number, and commands to its task.
pub(crate) type ThreadRings = Vec<(u16, Channel<RingCommand>)>;

/// The control side of the rings. Clones are the same. Ring n is on thread n modulo their number.
#[derive(Clone)]
pub(crate) struct Rings {
    commands: Vec<Channel<RingCommand>>,
    log: Option<Log>,
}

impl Rings {
    /// `count` rings that no thread serves yet.
    pub(crate) fn new(count: u16, log: Option<Log>) -> Rings {
        Rings {
            commands: (0..count).map(|_| Channel::new()).collect(),
            log,
        }
    }

    /// What each of `threads` threads serves of them.
    pub(crate) fn on_threads(&self, threads: usize) -> impl Iterator<Item = ThreadRings> {
        (0..threads).map(move |thread| {
            let all = (0_u16..).zip(self.commands.iter().cloned());
            all.skip(thread).step_by(threads).collect()
        })
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.commands.len()
    }

    pub(crate) fn start(&self, ring: usize, setup: RingSetup) {
        self.command(ring, RingCommand::Start(Box::new(setup)));
    }

    /// The next entry of a ring that ran, once nothing of it is in flight.
    pub(crate) async fn stop(&self, ring: usize) -> Option<u16> {
        self.ask(ring, RingCommand::Stop).await
    }

    /// The next entry of a ring that runs.
    #[cfg(feature = "vduse")]
    pub(crate) async fn position(&self, ring: usize) -> Option<u16> {
        self.ask(ring, RingCommand::Position).await
    }

    pub(crate) fn command(&self, ring: usize, command: RingCommand) {
        self.commands[ring].put(command);
    }

    pub(crate) async fn geometry(&self) -> Geometry {
        self.ask(0, RingCommand::Geometry).await
    }

    /// Makes durable what every ring has written; they have stopped.
    pub(crate) async fn flush(&self) -> Result<(), ServeError> {
        let flushed = self.ask(0, RingCommand::Flush).await;
        flushed.map_err(|errno| ServeError::because("the last flush failed", errno))
    }

    /// Ends the tasks of all rings, once the requests of those that still run are done.
    pub(crate) fn end(&self) {
        for commands in &self.commands {
            commands.put(RingCommand::Stop(Channel::new()));
            commands.put(RingCommand::End);
        }
    }

    async fn ask<T>(&self, ring: usize, command: impl FnOnce(Channel<T>) -> RingCommand) -> T {
        let answer = Channel::new();
        self.command(ring, command(answer.clone()));
        answer.take().await
    }

    pub(crate) fn say(&self, line: &str) {
        say(&self.log, line);
    }
}
