//! What a client receives. A server at work says so every few seconds, so one that is silent for longer
//! than the client's limit is stopped, or hangs.

use std::io::{ErrorKind, Read, Result};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Time between two looks at the clock.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How long a server may be silent that a signal has asked to give up.
const GIVE_UP_LIMIT: Duration = Duration::from_secs(5);

/// When a signal has asked for the end, if one has.
pub type Asked = Arc<OnceLock<Instant>>;

/// A stream whose reads fail with [`ErrorKind::TimedOut`] when nothing comes.
pub struct Incoming {
    stream: UnixStream,
    limit: Duration,
    asked: Asked,
    /// The server waits for us: it may be silent, and a read that finds nothing returns soon, with
    /// [`ErrorKind::WouldBlock`].
    pub speaks_later: bool,
}

impl Incoming {
    /// Around a connected stream.
    pub fn new(stream: UnixStream, limit: Duration, asked: Asked) -> Result<Incoming> {
        stream.set_read_timeout(Some(LOOK_INTERVAL))?;
        Ok(Incoming {
            stream,
            limit,
            asked,
            speaks_later: false,
        })
    }

    fn is_over(&self, start: Instant) -> bool {
        let given_up = self.asked.get().is_some_and(|at| {
            let since = if self.speaks_later {
                *at
            } else {
                start.max(*at)
            };
            since.elapsed() >= GIVE_UP_LIMIT
        });
        given_up || (!self.speaks_later && start.elapsed() >= self.limit)
    }
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let start = Instant::now();
        loop {
            match self.stream.read(into) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.is_over(start) {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    if self.speaks_later {
                        return Err(error);
                    }
                }
                read => return read,
            }
        }
    }
}
