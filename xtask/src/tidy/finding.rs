//! A finding: a broken rule and its place.

use std::fmt;
use std::path::Path;

use crate::workspace;

/// One broken rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    place: String,
    line: usize,
    what: String,
}

impl Finding {
    /// A finding at a line (1 is the first) of a file.
    pub fn at(path: &Path, line: usize, what: impl Into<String>) -> Finding {
        Finding {
            place: workspace::shown(path),
            line,
            what: what.into(),
        }
    }

    /// A finding about something that is not one line of a file.
    pub fn of(place: impl Into<String>, what: impl Into<String>) -> Finding {
        Finding {
            place: place.into(),
            line: 0,
            what: what.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(out, "{}: {}", self.place, self.what),
            line => write!(out, "{}:{line}: {}", self.place, self.what),
        }
    }
}
