//! What goes wrong with an answer, and with which.

use std::time::Duration;

use super::http::Request;
use crate::random::Random;

/// What goes wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An error of S3 in its XML, with the header `Retry-After` if it has seconds.
    Error {
        /// HTTP's status.
        status: u16,
        /// S3's word for it.
        code: &'static str,
        /// Seconds.
        retry_after: Option<u32>,
    },
    /// No answer, until the client goes.
    Hang,
    /// The connection is reset instead of an answer.
    Reset,
    /// The body ends after this many bytes, and so does the connection.
    CutShort(u64),
    /// The body's middle byte is another.
    OtherBytes,
    /// `Content-Range` names bytes that are this much further on; the body is what was asked for.
    WrongContentRange(u64),
    /// 200 and the whole object, whatever range is asked for.
    IgnoreRange,
    /// The object is said to have this size, in `Content-Length` of `HEAD` and in `Content-Range`.
    OtherSize(u64),
    /// The answer's first byte comes that late.
    SlowFirstByte(Duration),
    /// The body comes in pieces of so many bytes, with a pause between.
    Trickle(usize, Duration),
    /// 307 to another URL.
    Redirect(String),
    /// 307 to the same path, each time with another query.
    RedirectEndlessly,
    /// The answer has another `ETag` each time, and `If-Match` is ignored.
    OtherEtag,
    /// The body is compressed, with `Content-Encoding: gzip`: what proxies do that know better.
    ContentEncoding,
    /// A body without length that never ends.
    EndlessBody,
    /// Headers that never end.
    EndlessHeaders,
}

impl Fault {
    /// 503 `SlowDown`: too many requests.
    pub fn slow_down(retry_after: Option<u32>) -> Fault {
        Fault::Error {
            status: 503,
            code: "SlowDown",
            retry_after,
        }
    }

    /// 500 `InternalError`.
    pub fn internal_error() -> Fault {
        Fault::error(500, "InternalError")
    }

    /// 403 `ExpiredToken`: credentials that were good until a moment ago.
    pub fn expired_token() -> Fault {
        Fault::error(403, "ExpiredToken")
    }

    /// An error of S3.
    pub fn error(status: u16, code: &'static str) -> Fault {
        Fault::Error {
            status,
            code,
            retry_after: None,
        }
    }
}

/// Which requests a fault is for. They are counted from 0 among those with the method and path.
#[derive(Clone, Debug)]
pub struct When {
    method: Option<&'static str>,
    path: Option<String>,
    count: Count,
    seen: u64,
}

#[derive(Clone, Debug)]
enum Count {
    Always,
    Range(std::ops::Range<u64>),
    OneIn(u64, Random),
}

impl When {
    /// All requests.
    pub fn always() -> When {
        When::counted(Count::Always)
    }

    /// One request alone.
    pub fn nth(number: u64) -> When {
        When::counted(Count::Range(number..number + 1))
    }

    /// So many at first.
    pub fn first(count: u64) -> When {
        When::counted(Count::Range(0..count))
    }

    /// All after so many that go well.
    pub fn after(count: u64) -> When {
        When::counted(Count::Range(count..u64::MAX))
    }

    /// One in `n` by chance; which, depends on the seed and the number of the request.
    pub fn one_in(n: u64, seed: u64) -> When {
        When::counted(Count::OneIn(n, Random::new(seed)))
    }

    fn counted(count: Count) -> When {
        When {
            method: None,
            path: None,
            count,
            seen: 0,
        }
    }

    /// Only those with this method.
    #[must_use]
    pub fn method(mut self, method: &'static str) -> When {
        self.method = Some(method);
        self
    }

    /// Only those with this path.
    #[must_use]
    pub fn path(mut self, path: &str) -> When {
        self.path = Some(path.to_owned());
        self
    }

    /// Counts a request; whether it is one of them.
    pub(super) fn includes(&mut self, request: &Request) -> bool {
        let another =
            |wanted: Option<&str>, seen: &str| wanted.is_some_and(|wanted| wanted != seen);
        if another(self.method, &request.method) || another(self.path.as_deref(), &request.path) {
            return false;
        }
        let number = self.seen;
        self.seen += 1;
        match &mut self.count {
            Count::Always => true,
            Count::Range(range) => range.contains(&number),
            Count::OneIn(n, random) => random.one_in(*n),
        }
    }
}
