//! A small HTTP server of objects that answers as an S3 store does, and wrongly when it is told to.
//!
//! It knows `HEAD` and `GET` with a range and `If-Match`, of objects that it has in memory, and asks for no
//! credentials. It remembers every request, so that a test can say what was asked for, how often, and with what.

use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::acceptor::{Acceptor, Sleeper};
use super::fault::{Fault, When};
use super::http::{AskedRange, Request};

/// Bytes of a body that are written at once.
const PIECE_BYTES: usize = 1 << 16;
/// Most requests that are remembered.
const REQUESTS: usize = 1 << 20;
/// Longest body of a request that is read over.
const REQUEST_BODY_BYTES: u64 = 1 << 20;
/// Longer than any test.
const FOREVER: Duration = Duration::from_secs(3600);

/// The server.
#[derive(Debug)]
pub struct FaultyStore {
    // Its threads end first.
    acceptor: Acceptor,
    shared: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Object>,
    rules: Vec<(When, Fault)>,
    requests: Vec<Request>,
    /// Changes made to objects, and other tags given out.
    versions: u64,
}

#[derive(Clone, Debug)]
struct Object {
    bytes: Arc<Vec<u8>>,
    version: u64,
}

impl Object {
    /// Of the form that says "not an MD5": as after an upload in parts.
    fn etag(&self) -> String {
        format!("\"{:032x}-1\"", self.version)
    }

    fn modified(&self) -> String {
        let second = self.version % 60;
        format!("Mon, 23 Nov 2026 10:00:{second:02} GMT")
    }
}

impl FaultyStore {
    /// Starts one without objects that answers rightly.
    pub fn start() -> FaultyStore {
        let shared = Arc::new(Mutex::new(State::default()));
        let state = Arc::clone(&shared);
        let acceptor = Acceptor::start(move |socket, connection, sleeper| {
            let mut reader = BufReader::new(&**socket);
            while let Some(request) = Request::read(&mut reader) {
                let body = request.body_bytes();
                let rest = &mut (&mut reader).take(body.min(REQUEST_BODY_BYTES));
                let skipped = std::io::copy(rest, &mut std::io::sink());
                if skipped.is_err() || body > REQUEST_BODY_BYTES {
                    break;
                }
                let answer = lock(&state).answer(request, connection);
                if !answer.send(socket, sleeper) {
                    break;
                }
            }
        });
        FaultyStore { acceptor, shared }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.acceptor.port()
    }

    /// What S3 clients take as endpoint.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port())
    }

    /// The URL of a path: `/bucket/key`.
    pub fn url(&self, path: &str) -> String {
        self.endpoint() + path
    }

    /// Puts an object at a path, in place of one that may be there: its tag and time change.
    pub fn put(&self, path: &str, bytes: Vec<u8>) {
        let mut state = self.lock();
        state.versions += 1;
        let object = Object {
            bytes: Arc::new(bytes),
            version: state.versions,
        };
        state.objects.insert(path.to_owned(), object);
    }

    /// Removes an object.
    pub fn delete(&self, path: &str) {
        self.lock().objects.remove(path);
    }

    /// Makes answers go wrong. Of several rules the first that includes a request is taken; each counts the requests
    /// that those before it have left to it.
    pub fn fail(&self, when: When, fault: Fault) {
        self.lock().rules.push((when, fault));
    }

    /// Forgets all rules: everything goes well again.
    pub fn recover(&self) {
        self.lock().rules.clear();
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.lock().requests.clone()
    }

    /// The requests since the last call, which are forgotten.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.lock().requests)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.shared)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no thread panics with the lock")
}

impl State {
    /// Remembers a request, and makes its answer.
    fn answer(&mut self, mut request: Request, connection: u64) -> Answer {
        let included = |(when, fault): &mut (When, Fault)| {
            let is_included = when.includes(&request);
            is_included.then(|| fault.clone())
        };
        let fault = self.rules.iter_mut().find_map(included);
        request.number = self.requests.len() as u64;
        request.connection = connection;
        request.fault.clone_from(&fault);
        let answer = self.answer_with(&request, fault);
        assert!(self.requests.len() < REQUESTS, "too many requests");
        self.requests.push(request);
        answer
    }

    fn answer_with(&mut self, request: &Request, fault: Option<Fault>) -> Answer {
        let mut answer = match &fault {
            Some(Fault::Error {
                status,
                code,
                retry_after,
            }) => {
                let mut answer = Answer::error(*status, code, &request.path);
                let seconds = retry_after.map(|seconds| seconds.to_string());
                answer.add_all("Retry-After", seconds);
                answer
            }
            Some(Fault::Redirect(to)) => Answer::redirect(to.clone()),
            Some(Fault::RedirectEndlessly) => {
                self.versions += 1;
                Answer::redirect(format!("{}?hop={}", request.path, self.versions))
            }
            _ => self.object(request, fault.as_ref()),
        };
        if request.method == "HEAD" {
            answer.body_is_sent = false;
        }
        answer.fault = fault;
        answer
    }

    /// An answer with an object, or why there is none.
    fn object(&mut self, request: &Request, fault: Option<&Fault>) -> Answer {
        if !matches!(&*request.method, "GET" | "HEAD") {
            return Answer::error(405, "MethodNotAllowed", &request.path);
        }
        let Some(mut object) = self.objects.get(&request.path).cloned() else {
            return Answer::error(404, "NoSuchKey", &request.path);
        };
        if fault == Some(&Fault::OtherEtag) {
            self.versions += 1;
            object.version = self.versions;
        } else if let Some(wanted) = request.header("if-match")
            && wanted != object.etag()
            && wanted != "*"
        {
            return Answer::error(412, "PreconditionFailed", &request.path);
        }
        let len = object.bytes.len() as u64;
        let range = match request.asked() {
            _ if fault == Some(&Fault::IgnoreRange) => None,
            AskedRange::Whole => None,
            AskedRange::Part(start, end) => Some(start..end.unwrap_or(len).min(len)),
            AskedRange::Last(count) => Some(len.saturating_sub(count)..len),
        };
        if range.as_ref().is_some_and(|range| range.is_empty()) {
            let mut answer = Answer::error(416, "InvalidRange", &request.path);
            answer.add("Content-Range", format!("bytes */{len}"));
            return answer;
        }
        Answer::part(&object, range, fault)
    }
}

/// An answer, not yet with what goes wrong while it is sent.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    bytes: Arc<Vec<u8>>,
    /// The body's place in them.
    body: std::ops::Range<usize>,
    /// What `Content-Length` says.
    said_bytes: u64,
    body_is_sent: bool,
    fault: Option<Fault>,
}

impl Answer {
    fn new(status: u16, bytes: Arc<Vec<u8>>, body: std::ops::Range<usize>) -> Answer {
        Answer {
            status,
            headers: Vec::new(),
            said_bytes: body.len() as u64,
            bytes,
            body,
            body_is_sent: true,
            fault: None,
        }
    }

    fn add(&mut self, name: &'static str, value: String) {
        self.headers.push((name, value));
    }

    fn add_all(&mut self, name: &'static str, values: Option<String>) {
        self.headers.extend(values.map(|value| (name, value)));
    }

    fn error(status: u16, code: &str, path: &str) -> Answer {
        let text = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code>\
             <Message>As the test wants it.</Message><Resource>{path}</Resource></Error>"
        );
        let len = text.len();
        let mut answer = Answer::new(status, Arc::new(text.into_bytes()), 0..len);
        answer.add("Content-Type", "application/xml".to_owned());
        answer
    }

    fn redirect(to: String) -> Answer {
        let mut answer = Answer::new(307, Arc::default(), 0..0);
        answer.add("Location", to);
        answer
    }

    /// A part of an object, or all of it, with the faults that are in headers and bytes.
    fn part(object: &Object, range: Option<std::ops::Range<u64>>, fault: Option<&Fault>) -> Answer {
        let len = object.bytes.len() as u64;
        let place = range.clone().unwrap_or(0..len);
        let place = place.start as usize..place.end as usize;
        let status = if range.is_some() { 206 } else { 200 };
        let mut answer = Answer::new(status, Arc::clone(&object.bytes), place);
        answer.add("ETag", object.etag());
        answer.add("Last-Modified", object.modified());
        answer.add("Accept-Ranges", "bytes".to_owned());
        answer.add("Content-Type", "application/octet-stream".to_owned());
        let mut total = len;
        if let Some(Fault::OtherSize(other)) = fault {
            total = *other;
            if range.is_none() {
                answer.said_bytes = total;
            }
        }
        if let Some(range) = &range {
            let shift = match fault {
                Some(Fault::WrongContentRange(shift)) => *shift,
                _ => 0,
            };
            let (first, last) = (range.start + shift, range.end - 1 + shift);
            answer.add("Content-Range", format!("bytes {first}-{last}/{total}"));
        }
        match fault {
            Some(Fault::OtherBytes) => answer.change_middle(),
            Some(Fault::ContentEncoding) => answer.compress(),
            _ => {}
        }
        answer
    }

    fn change_middle(&mut self) {
        let mut bytes = self.bytes[self.body.clone()].to_vec();
        let middle = bytes.len() / 2;
        if let Some(byte) = bytes.get_mut(middle) {
            *byte ^= 1;
        }
        self.replace_body(bytes);
    }

    fn compress(&mut self) {
        let level = flate2::Compression::fast();
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
        let written = encoder.write_all(&self.bytes[self.body.clone()]);
        written.expect("memory can be written to");
        let bytes = encoder.finish().expect("memory can be written to");
        self.replace_body(bytes);
        self.said_bytes = self.body.len() as u64;
        self.add("Content-Encoding", "gzip".to_owned());
    }

    fn replace_body(&mut self, bytes: Vec<u8>) {
        self.body = 0..bytes.len();
        self.bytes = Arc::new(bytes);
    }

    /// Sends it; whether the connection is good for another.
    fn send(&self, socket: &TcpStream, sleeper: &Sleeper) -> bool {
        let sent = match &self.fault {
            Some(Fault::Hang) => hang(socket),
            Some(Fault::Reset) => {
                // With nothing to linger for, the close is a reset.
                let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
                let _ = socket.shutdown(Shutdown::Read);
                return false;
            }
            Some(Fault::SlowFirstByte(late)) if !sleeper.sleep(*late) => return false,
            Some(Fault::EndlessHeaders) => self.send_head(socket, Some("x-more: and more\r\n")),
            Some(Fault::EndlessBody) => self.send_endless_body(socket),
            _ => self.send_whole(socket, sleeper),
        };
        sent.is_ok() && !matches!(self.fault, Some(Fault::CutShort(_)))
    }

    /// The status line and headers; with an endless one more headers, until the client goes.
    fn send_head(&self, mut socket: &TcpStream, endless: Option<&str>) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} {}\r\n", self.status, phrase(self.status));
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += match self.fault {
            Some(Fault::EndlessBody) => "Transfer-Encoding: chunked\r\n".to_owned(),
            _ => format!("Content-Length: {}\r\n", self.said_bytes),
        }
        .as_str();
        if let Some(endless) = endless {
            socket.write_all(head.as_bytes())?;
            loop {
                socket.write_all(endless.as_bytes())?;
            }
        }
        head += "\r\n";
        socket.write_all(head.as_bytes())
    }

    fn send_whole(&self, mut socket: &TcpStream, sleeper: &Sleeper) -> std::io::Result<()> {
        self.send_head(socket, None)?;
        if !self.body_is_sent {
            return Ok(());
        }
        let mut body = &self.bytes[self.body.clone()];
        if let Some(Fault::CutShort(len)) = self.fault {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            body = &body[..body.len().min(len)];
        }
        let (piece, pause) = match self.fault {
            Some(Fault::Trickle(bytes, pause)) => (bytes.max(1), pause),
            _ => (PIECE_BYTES, Duration::ZERO),
        };
        for piece in body.chunks(piece) {
            socket.write_all(piece)?;
            if !pause.is_zero() && !sleeper.sleep(pause) {
                break;
            }
        }
        if body.len() as u64 == self.said_bytes {
            return Ok(());
        }
        Err(std::io::ErrorKind::UnexpectedEof.into())
    }

    fn send_endless_body(&self, mut socket: &TcpStream) -> std::io::Result<()> {
        self.send_head(socket, None)?;
        let mut chunk = format!("{PIECE_BYTES:x}\r\n").into_bytes();
        chunk.resize(chunk.len() + PIECE_BYTES, b'x');
        chunk.extend_from_slice(b"\r\n");
        loop {
            socket.write_all(&chunk)?;
        }
    }
}

/// Waits until the client goes, or the server does.
fn hang(mut socket: &TcpStream) -> std::io::Result<()> {
    let limited = socket.set_read_timeout(Some(FOREVER));
    limited?;
    while socket.read(&mut [0; 1024])? > 0 {}
    Err(std::io::ErrorKind::UnexpectedEof.into())
}

fn phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        206 => "Partial Content",
        307 => "Temporary Redirect",
        400..500 => "Client Error",
        500..600 => "Server Error",
        _ => "Status",
    }
}
