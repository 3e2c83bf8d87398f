//! Client of a control socket, for `gaur export` and `gaur snapshot --control`.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use gaur_engine::ErrorKind as EngineError;
use gaur_reactor::Address;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::frames::{HEAD_BYTES, Head};
use super::incoming::{Asked, Incoming};
use super::protocol::{Answer, Command, Event, LINE_BYTES_MAX, Reason, Request, kind_of};
use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::interrupt;
use crate::progress::Progress;
use crate::snapshot::Server;

/// A connection to a server.
pub struct Client {
    name: String,
    export: Option<String>,
    stream: UnixStream,
    input: BufReader<Incoming>,
    /// How long the server may be silent.
    limit: Duration,
    asked: Asked,
}

/// Longest answer in bytes: a list of all the snapshots that an image can have.
const ANSWER_BYTES_MAX: u64 = 256 << 20;
const _: () = assert!(LINE_BYTES_MAX as u64 <= ANSWER_BYTES_MAX);

impl Client {
    /// Connects.
    pub fn connect(server: &Server) -> Result<Client, Failure> {
        let name = server.socket.display().to_string();
        let failed = |error: std::io::Error| match is_late(&error) {
            true => silent(&name, server.timeout),
            false => Failure::io(&name, &error).hint("is it the socket of 'gaur serve --control'?"),
        };
        if let Some(reason) = Address::too_long(&server.socket) {
            return Err(Failure::about(&name, reason));
        }
        let stream = connect(&server.socket, server.timeout).map_err(failed)?;
        let asked = Asked::default();
        let incoming = stream.try_clone();
        let incoming =
            incoming.and_then(|stream| Incoming::new(stream, server.timeout, asked.clone()));
        Ok(Client {
            export: server.export.clone(),
            stream,
            input: BufReader::new(incoming.map_err(failed)?),
            limit: server.timeout,
            asked,
            name,
        })
    }

    /// Sends a command and waits for its result.
    pub fn call<T: DeserializeOwned>(
        mut self,
        command: Command,
        progress: &mut Progress,
    ) -> Result<T, Failure> {
        if command.can_be_given_up() {
            self.obey_signals()?;
        }
        self.ask(command)?;
        let result = self.result(progress);
        progress.end(&result);
        serde_json::from_value(result?).map_err(|error| {
            let message = format!("the server's answer is not understood: {error}");
            Failure::about(self.name, message)
        })
    }

    /// Sends a command.
    pub fn ask(&mut self, command: Command) -> Result<(), Failure> {
        let request = Request {
            export: self.export.clone(),
            command,
        };
        match self.stream.write_all(&request.line()) {
            // What the server said before it hung up tells more.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            sent => sent.map_err(|error| self.failed(&error)),
        }
    }

    /// The last answer to a command; what comes before it is progress.
    pub fn result(&mut self, progress: &mut Progress) -> Result<Value, Failure> {
        loop {
            match self.answer()? {
                Answer::Result { result } => return Ok(result),
                Answer::Event(Event::Progress { done, total }) => progress.update(done, total),
                Answer::Event(_) => return Err(self.nonsense()),
                // `answer` makes a failure of it.
                Answer::Error { error } => return Err(Failure::new(error.message)),
            }
        }
    }

    /// The last answer to a command whose state another thread sends. Nothing comes from the server
    /// meanwhile, so progress is what `meter` says was sent.
    pub fn result_of_stream(
        &mut self,
        progress: &mut Progress,
        meter: impl Fn() -> (u64, u64),
    ) -> Result<Value, Failure> {
        self.input.get_mut().speaks_later = true;
        loop {
            let (done, total) = meter();
            progress.update(done, total);
            match self.input.fill_buf() {
                Ok(_) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(self.failed(&error)),
            }
        }
        self.input.get_mut().speaks_later = false;
        self.result(&mut Progress::Quiet)
    }

    /// The next answer, unless it is an error.
    pub fn answer(&mut self) -> Result<Answer, Failure> {
        let mut line = Vec::new();
        let mut input = self.input.by_ref().take(ANSWER_BYTES_MAX);
        let read = input.read_until(b'\n', &mut line);
        match read {
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            read => drop(read.map_err(|error| self.failed(&error))?),
        }
        if line.is_empty() {
            let message = "the server ended the connection before it answered";
            return Err(Failure::about(&self.name, message));
        }
        match Answer::parse(&line) {
            Some(Answer::Error {
                error: Reason { kind, message },
            }) => {
                let failure = Failure::new(message);
                Err(match kind_of(&kind) {
                    Some(kind @ EngineError::Cancelled) => {
                        failure.kind(kind).code(EXIT_INTERRUPTED)
                    }
                    Some(kind) => failure.kind(kind),
                    None => failure,
                })
            }
            Some(answer) => Ok(answer),
            None => Err(self.nonsense()),
        }
    }

    /// The failure of a server that says something else than it should.
    pub fn nonsense(&self) -> Failure {
        let failure = Failure::about(&self.name, "the server's answer is not understood");
        failure.hint("is it the socket of 'gaur serve --control'?")
    }

    /// Why nothing comes from the server, or nothing can be sent.
    fn failed(&self, error: &std::io::Error) -> Failure {
        match is_late(error) {
            true if self.asked.get().is_some() => {
                let message = "interrupted, and the server does not answer";
                let failure = Failure::about(&self.name, message).code(EXIT_INTERRUPTED);
                failure.hint("it may still do what it was asked to")
            }
            true => silent(&self.name, self.limit),
            false => Failure::io(&self.name, error),
        }
    }

    /// A signal asks the server to give up what is under way; the second ends this process.
    pub fn obey_signals(&self) -> Result<(), Failure> {
        let failed = |error: std::io::Error| Failure::io(&self.name, &error);
        let stream = self.stream.try_clone().map_err(failed)?;
        let asked = self.asked.clone();
        interrupt::on_signal(move || {
            asked.get_or_init(Instant::now);
            // The server takes it for our leaving, but can still answer.
            let _ = stream.shutdown(Shutdown::Write);
        })
    }

    /// A way to send frames from another thread.
    pub fn frames(&self) -> Result<Frames, Failure> {
        let stream = self.stream.try_clone();
        let stream = stream.map_err(|error| Failure::io(&self.name, &error))?;
        let (name, limit) = (self.name.clone(), self.limit);
        Ok(Frames {
            stream,
            name,
            limit,
        })
    }

    /// Fills `into`.
    fn exact(&mut self, into: &mut [u8]) -> Result<(), Failure> {
        let filled = self.input.read_exact(into);
        filled.map_err(|error| self.failed(&error))
    }

    /// Passes frames to `sink` until the end of the stream, in parts of at most the length of `buffer`.
    /// When the server gives up, its reason is the failure.
    pub fn receive(
        &mut self,
        buffer: &mut [u8],
        mut sink: impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        loop {
            let mut head = [0; HEAD_BYTES];
            self.exact(&mut head)?;
            let mut rest = match Head::decode(head) {
                Head::End => return Ok(()),
                Head::Data(len) => len as usize,
                Head::Abort => {
                    return Err(match self.result(&mut Progress::Quiet) {
                        Ok(_) => self.nonsense(),
                        Err(failure) => failure,
                    });
                }
            };
            while rest > 0 {
                if self.asked.get().is_some() {
                    return Err(Failure::interrupted());
                }
                let len = rest.min(buffer.len());
                let part = buffer.get_mut(..len).unwrap_or_default();
                self.exact(part)?;
                sink(part)?;
                rest -= len;
            }
        }
    }
}

/// Connects; a server that is stopped lets no client in once its queue is full.
fn connect(path: &Path, limit: Duration) -> std::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // For connecting and for all that is sent.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(limit))?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

/// Whether an error is that of a limit.
fn is_late(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

fn silent(name: &str, limit: Duration) -> Failure {
    let message = format!("the server has not answered for {} s", limit.as_secs());
    let failure = Failure::about(name, message);
    failure.hint("it is stopped or hangs; --timeout SECONDS waits longer")
}

/// The sending half of a connection, for a state.
pub struct Frames {
    stream: UnixStream,
    name: String,
    limit: Duration,
}

impl Frames {
    /// Sends some of the state. The failure is that of a server that takes nothing for too long; the
    /// connection is ended then, for who waits for the answer too. Any other reason it tells in its answer.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Option<Failure>> {
        if bytes.is_empty() {
            return Ok(());
        }
        let head = self.stream.write_all(&Head::of(bytes.len()).encode());
        let sent = head.and_then(|()| self.stream.write_all(bytes));
        sent.map_err(|error| {
            is_late(&error).then(|| {
                // It fails when the server was faster.
                let _ = self.stream.shutdown(Shutdown::Both);
                silent(&self.name, self.limit)
            })
        })
    }

    /// Says that this was all, or that there will be no more.
    pub fn end(&mut self, head: Head) -> std::io::Result<()> {
        self.stream.write_all(&head.encode())
    }
}
