//! As much of HTTP/1.1 as a server of one's own needs: requests of a connection, and what they asked for.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::ops::Range;
use std::time::Instant;

use super::fault::Fault;

/// Longest head of a request.
const HEAD_BYTES: u64 = 1 << 16;

/// A request as it came, and the fault that it met.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its number, from 0, among all of the server.
    pub number: u64,
    /// The number of its connection.
    pub connection: u64,
    /// When it had come.
    pub at: Instant,
    /// `GET`, `HEAD` ...
    pub method: String,
    /// Path, without the query.
    pub path: String,
    /// Query, without `?`; empty when there is none.
    pub query: String,
    /// Headers in their order, the names in lower case.
    pub headers: Vec<(String, String)>,
    /// What went wrong with the answer.
    pub fault: Option<Fault>,
}

/// The header `Range` of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskedRange {
    /// All of the object, also for what servers may ignore: other units, several ranges.
    Whole,
    /// From the first byte to before the second.
    Part(u64, Option<u64>),
    /// That many at the end.
    Last(u64),
}

impl Request {
    /// Reads the next of a connection; none at its end, and for what is no HTTP.
    pub(super) fn read(stream: &mut BufReader<&TcpStream>) -> Option<Request> {
        let mut head = stream.take(HEAD_BYTES);
        let mut line = || {
            let mut line = String::new();
            head.read_line(&mut line).ok()?;
            line.strip_suffix("\r\n").map(str::to_owned)
        };
        let first = line()?;
        let mut words = first.split(' ');
        let (method, target) = (words.next()?, words.next()?);
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let mut headers = Vec::new();
        loop {
            let header = line()?;
            if header.is_empty() {
                break;
            }
            let (name, value) = header.split_once(':')?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        Some(Request {
            number: 0,
            connection: 0,
            at: Instant::now(),
            method: method.to_owned(),
            path: path.to_owned(),
            query: query.to_owned(),
            headers,
            fault: None,
        })
    }

    /// The value of a header; the name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(other, _)| other == name);
        found.map(|(_, value)| &**value)
    }

    /// The bytes that it asks for, if it names both ends.
    pub fn range(&self) -> Option<Range<u64>> {
        match self.asked() {
            AskedRange::Part(start, Some(end)) => Some(start..end),
            _ => None,
        }
    }

    /// Whether it carries anything that proves who sent it.
    pub fn has_credentials(&self) -> bool {
        const HEADERS: [&str; 4] = [
            "authorization",
            "proxy-authorization",
            "cookie",
            "x-amz-security-token",
        ];
        const PARAMETERS: [&str; 3] = ["x-amz-credential=", "x-amz-signature=", "signature="];
        let query = self.query.to_ascii_lowercase();
        HEADERS.iter().any(|name| self.header(name).is_some())
            || PARAMETERS.iter().any(|name| query.contains(name))
    }

    /// The body's length, by its header.
    pub(super) fn body_bytes(&self) -> u64 {
        let text = self.header("content-length");
        text.and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    pub(super) fn asked(&self) -> AskedRange {
        let asked = self.header("range").and_then(|text| {
            let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
            if first.is_empty() {
                return Some(AskedRange::Last(last.parse().ok()?));
            }
            let first = first.parse().ok()?;
            if last.is_empty() {
                return Some(AskedRange::Part(first, None));
            }
            let last: u64 = last.parse().ok()?;
            (first <= last).then_some(AskedRange::Part(first, Some(last.checked_add(1)?)))
        });
        asked.unwrap_or(AskedRange::Whole)
    }
}

/// How often the most wanted byte was asked for, by requests with both ends of a range.
pub fn most_fetched(requests: &[Request]) -> u64 {
    // At each offset, how many ranges begin and end.
    let mut steps: BTreeMap<u64, [u64; 2]> = BTreeMap::new();
    for range in requests.iter().filter_map(Request::range) {
        steps.entry(range.start).or_default()[0] += 1;
        steps.entry(range.end).or_default()[1] += 1;
    }
    let (mut depth, mut most) = (0, 0);
    for [begin, end] in steps.into_values() {
        depth = depth + begin - end;
        most = most.max(depth);
    }
    most
}
