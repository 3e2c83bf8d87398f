//! The side of `gaur snapshot --control` on a control socket.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use gaur_reactor::Address;
use serde_json::Value;

use super::frames::{HEAD_BYTES, Head};
use super::protocol::{Answer, Command, LINE_BYTES_MAX, Request, kind_of};
use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::interrupt;
use crate::progress::Progress;
use crate::snapshot::Server;

/// A connection to a server.
pub struct Client {
    name: String,
    export: Option<String>,
    stream: UnixStream,
    input: BufReader<UnixStream>,
}

/// Time between two looks at how much was sent.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Longest answer in bytes: a list of all the snapshots that an image can have.
const ANSWER_BYTES_MAX: u64 = 256 << 20;
const _: () = assert!(LINE_BYTES_MAX as u64 <= ANSWER_BYTES_MAX);

impl Client {
    /// Connects.
    pub fn connect(server: &Server) -> Result<Client, Failure> {
        let name = server.socket.display().to_string();
        let failed = |error: std::io::Error| {
            let failure = Failure::io(&name, &error);
            failure.hint("is it the socket of 'gaur serve --control'?")
        };
        if let Some(reason) = Address::too_long(&server.socket) {
            return Err(Failure::about(&name, reason));
        }
        let stream = UnixStream::connect(&server.socket).map_err(failed)?;
        let input = BufReader::new(stream.try_clone().map_err(failed)?);
        Ok(Client {
            export: server.export.clone(),
            stream,
            input,
            name,
        })
    }

    /// Sends a command and waits for its result.
    pub fn call(mut self, command: Command, progress: &mut Progress) -> Result<Value, Failure> {
        self.obey_signals()?;
        self.ask(command)?;
        let result = self.result(progress);
        match result {
            Ok(_) => progress.finish(),
            Err(_) => progress.stop(),
        }
        result
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
            sent => sent.map_err(|error| Failure::io(&self.name, &error)),
        }
    }

    /// The last answer to a command; what comes before it is progress.
    pub fn result(&mut self, progress: &mut Progress) -> Result<Value, Failure> {
        loop {
            match self.answer()? {
                Answer::Result(result) => return Ok(result),
                Answer::Progress { done, total } => progress.update(done, total),
                Answer::Ready | Answer::State { .. } => return Err(self.nonsense()),
                // `answer` makes a failure of it.
                Answer::Error { message, .. } => return Err(Failure::new(message)),
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
        let failed = |error: std::io::Error| Failure::io(&self.name, &error);
        self.stream
            .set_read_timeout(Some(LOOK_INTERVAL))
            .map_err(failed)?;
        loop {
            let (done, total) = meter();
            progress.update(done, total);
            match self.input.fill_buf() {
                Ok(_) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        self.stream.set_read_timeout(None).map_err(failed)?;
        self.result(&mut Progress::Quiet)
    }

    /// The next answer, unless it is an error.
    pub fn answer(&mut self) -> Result<Answer, Failure> {
        let mut line = Vec::new();
        let mut input = self.input.by_ref().take(ANSWER_BYTES_MAX);
        let read = input.read_until(b'\n', &mut line);
        match read {
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            read => drop(read.map_err(|error| Failure::io(&self.name, &error))?),
        }
        if line.is_empty() {
            let message = "the server ended the connection before it answered";
            return Err(Failure::about(&self.name, message));
        }
        match Answer::parse(&line) {
            Some(Answer::Error { kind, message }) => {
                let failure = Failure::new(message);
                let cancelled = kind == "cancelled";
                let failure = match kind_of(&kind) {
                    Some(kind) => failure.kind(kind),
                    None => failure,
                };
                Err(match cancelled {
                    true => failure.code(EXIT_INTERRUPTED),
                    false => failure,
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

    /// A signal asks the server to give up what is under way; the second ends this process.
    pub fn obey_signals(&self) -> Result<(), Failure> {
        let failed = |error: std::io::Error| Failure::io(&self.name, &error);
        let stream = self.stream.try_clone().map_err(failed)?;
        interrupt::on_signal(move || {
            // The server takes it for our leaving, but can still answer.
            let _ = stream.shutdown(Shutdown::Write);
        })
    }

    /// A way to send frames from another thread.
    pub fn frames(&self) -> Result<Frames, Failure> {
        let stream = self.stream.try_clone();
        let stream = stream.map_err(|error| Failure::io(&self.name, &error))?;
        Ok(Frames { stream })
    }

    /// Passes frames to `sink` until the end of the stream, in parts of at most the length of `buffer`.
    /// When the server gives up, its reason is the failure.
    pub fn receive(
        &mut self,
        buffer: &mut [u8],
        mut sink: impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let name = self.name.clone();
        let failed = |error: std::io::Error| Failure::io(&name, &error);
        loop {
            let mut head = [0; HEAD_BYTES];
            self.input.read_exact(&mut head).map_err(failed)?;
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
                let len = rest.min(buffer.len());
                let part = buffer.get_mut(..len).unwrap_or_default();
                self.input.read_exact(part).map_err(failed)?;
                sink(part)?;
                rest -= len;
            }
        }
    }
}

/// The sending half of a connection, for a state.
pub struct Frames {
    stream: UnixStream,
}

impl Frames {
    /// Sends some of the state.
    pub fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.stream.write_all(&Head::of(bytes.len()).encode())?;
        self.stream.write_all(bytes)
    }

    /// Says that this was all, or that there will be no more.
    pub fn end(&mut self, head: Head) -> std::io::Result<()> {
        self.stream.write_all(&head.encode())
    }
}
