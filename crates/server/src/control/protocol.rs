//! The lines on a control socket.

use std::num::NonZeroU64;
use std::time::Duration;

use gaur_engine::{ErrorKind, NewSnapshot};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::exporter::AddExport;
use crate::failure::Failure;
use crate::json;
use crate::size::{NewSize, parse_new_size};
use crate::snapshot_operation::Operation;

/// What a client and a server must have in common.
pub const VERSION: u32 = 1;

/// Longest line in bytes.
pub const LINE_BYTES_MAX: usize = 256 << 10;

/// A snapshot that is about to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct NewEntry {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    date_sec: Option<u32>,
    #[serde(default)]
    date_nsec: u32,
    #[serde(default)]
    vm_clock_nsec: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    icount: Option<u64>,
}

impl NewEntry {
    /// What it asks for; without a date it is made `now`.
    pub fn snapshot(self, now: (u32, u32)) -> NewSnapshot {
        let (date_sec, date_nsec) = match self.date_sec {
            Some(seconds) => (seconds, self.date_nsec),
            None => now,
        };
        NewSnapshot {
            name: self.name,
            id: self.id,
            date_sec,
            date_nsec,
            vm_clock_nsec: self.vm_clock_nsec,
            icount: self.icount,
        }
    }
}

impl From<NewSnapshot> for NewEntry {
    fn from(new: NewSnapshot) -> NewEntry {
        NewEntry {
            name: new.name,
            id: new.id,
            date_sec: Some(new.date_sec),
            date_nsec: new.date_nsec,
            vm_clock_nsec: new.vm_clock_nsec,
            icount: new.icount,
        }
    }
}

/// Another size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resizing {
    /// Bytes, or text as `gaur resize` takes it.
    size: Value,
    /// It may be smaller than it was.
    #[serde(default)]
    pub shrink: bool,
}

impl Resizing {
    /// To that size, in the words of the command line.
    pub fn to(size: &str, shrink: bool) -> Resizing {
        let size = json!(size);
        Resizing { size, shrink }
    }

    /// The size asked for.
    pub fn size(&self) -> Result<NewSize, Failure> {
        let size = match &self.size {
            Value::Number(bytes) => bytes.as_u64().map(NewSize::Exactly),
            Value::String(text) => parse_new_size(text).ok(),
            _ => None,
        };
        size.ok_or_else(|| {
            let message = format!("size {} is neither bytes nor [+|-]SIZE", self.size);
            Failure::new(message).kind(ErrorKind::InvalidInput)
        })
    }
}

/// How an export ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Removing {
    /// Seconds that clients have to take what they have asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_limit: Option<u32>,
}

impl Removing {
    /// The time that clients have, if it is told.
    pub fn drain_limit(self) -> Option<Duration> {
        let seconds = self.drain_limit?;
        Some(Duration::from_secs(u64::from(seconds)))
    }
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// What the server is and exports.
    Ping {},
    /// The snapshots of an image.
    List {},
    /// One snapshot.
    Info {
        /// Its id or name.
        snapshot: String,
    },
    /// Check an image.
    Check {},
    /// Copy into an image what lies below it.
    Stream {
        /// Most bytes a second.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rate: Option<NonZeroU64>,
    },
    /// Change the snapshots of an image in one step.
    #[serde(skip)]
    Change(Operation),
    /// Make a snapshot with the state of a machine, which the client sends.
    Save(NewEntry),
    /// Send the client the state that a snapshot has.
    Extract {
        /// Its id or name.
        snapshot: String,
    },
    /// Add an export.
    ExportAdd(Box<AddExport>),
    /// The exports.
    ExportList {},
    /// Remove an export.
    ExportRemove(Removing),
    /// Change the size of an export's image.
    ExportResize(Resizing),
}

impl Command {
    /// Whether the server gives it up when its client asks for that.
    pub fn can_be_given_up(&self) -> bool {
        matches!(
            self,
            Command::Change(_)
                | Command::Check {}
                | Command::Stream { .. }
                | Command::Save(_)
                | Command::ExportResize(_)
        )
    }
}

/// A line from a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The export it is about; the only one if not told.
    pub export: Option<String>,
    /// What is to be done.
    pub command: Command,
}

impl Request {
    /// Reads a line; the error is for the client.
    pub fn parse(line: &[u8]) -> Result<Request, String> {
        let value: Value =
            serde_json::from_slice(line).map_err(|error| format!("not a line of json: {error}"))?;
        let Value::Object(mut rest) = value else {
            return Err("a command is an object".to_owned());
        };
        let name = match rest.remove("command") {
            Some(Value::String(name)) => name,
            _ => return Err("\"command\" is missing, or is not text".to_owned()),
        };
        let export = match rest.remove("export") {
            None | Some(Value::Null) => None,
            Some(Value::String(export)) => Some(export),
            Some(_) => return Err("\"export\" is not text".to_owned()),
        };
        let command = match Operation::NAMES.contains(&&*name) {
            true => json::read_variant(&name, rest).map(Command::Change),
            false => json::read_variant(&name, rest),
        };
        let command = command.map_err(|error| {
            match error.starts_with(&format!("{name}: unknown variant `{name}`")) {
                true => format!("command {name:?} is unknown"),
                false => error,
            }
        })?;
        Ok(Request { export, command })
    }

    /// The line, with its end. One that JSON cannot say is refused by the server.
    pub fn line(&self) -> Vec<u8> {
        let said = match &self.command {
            Command::Change(operation) => json::variant(operation),
            command => json::variant(command),
        };
        let (name, fields) = said.unwrap_or_default();
        let mut line = Map::new();
        line.insert("command".to_owned(), json!(name));
        if let Some(export) = &self.export {
            line.insert("export".to_owned(), json!(export));
        }
        line.extend(fields);
        ended(Value::Object(line).to_string())
    }
}

/// A line from a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Answer {
    /// Something on the way to the result.
    Event(Event),
    /// The command went well.
    Result {
        /// Its result.
        result: Value,
    },
    /// It did not.
    Error {
        /// Why.
        error: Reason,
    },
}

/// What happens before the result of a command is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// So much is done; a total of 0 is one that is not known yet.
    Progress {
        /// Bytes done.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// The state may be sent now.
    Ready,
    /// The state follows, so many bytes of it.
    State {
        /// Bytes.
        size: u64,
    },
}

/// Why a command failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// One of a fixed set of words.
    pub kind: String,
    /// For people.
    pub message: String,
}

impl Answer {
    /// The failure of a command.
    pub fn failure(failure: &Failure) -> Answer {
        let kind = failure.kind.map_or("other", kind_name);
        Answer::Error {
            error: Reason {
                kind: kind.to_owned(),
                message: failure.to_string(),
            },
        }
    }

    /// The line, with its end.
    pub fn line(&self) -> Vec<u8> {
        ended(json!(self).to_string())
    }

    /// Reads a line.
    pub fn parse(line: &[u8]) -> Option<Answer> {
        serde_json::from_slice(line).ok()
    }
}

fn ended(mut line: String) -> Vec<u8> {
    line.push('\n');
    line.into_bytes()
}

const KINDS: [(ErrorKind, &str); 13] = [
    (ErrorKind::Io, "io"),
    (ErrorKind::NoSpace, "no-space"),
    (ErrorKind::Corrupt, "corrupt"),
    (ErrorKind::Unsupported, "unsupported"),
    (ErrorKind::ForeignFormat, "foreign-format"),
    (ErrorKind::FormatNotTold, "format-not-told"),
    (ErrorKind::InvalidInput, "invalid-input"),
    (ErrorKind::Locked, "locked"),
    (ErrorKind::NotFound, "not-found"),
    (ErrorKind::PermissionDenied, "permission-denied"),
    (ErrorKind::ReadOnly, "read-only"),
    (ErrorKind::Poisoned, "poisoned"),
    (ErrorKind::Cancelled, "cancelled"),
];

fn kind_name(kind: ErrorKind) -> &'static str {
    let known = KINDS.iter().find(|(known, _)| *known == kind);
    known.map_or("other", |(_, name)| *name)
}

/// The kind of that name, if it is one of the engine's.
pub fn kind_of(name: &str) -> Option<ErrorKind> {
    let known = KINDS.iter().find(|(_, known)| *known == name);
    known.map(|(kind, _)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fronts;

    fn new() -> NewEntry {
        NewEntry::from(NewSnapshot {
            name: "a \"b\"\n".to_owned(),
            id: Some("7".to_owned()),
            date_sec: 1,
            date_nsec: 2,
            vm_clock_nsec: 3,
            icount: Some(4),
        })
    }

    #[test]
    fn every_command_is_one_line_that_reads_back() {
        let snapshot = || "1".to_owned();
        let name = "two".to_owned();
        let all = [
            Command::Ping {},
            Command::List {},
            Command::Info {
                snapshot: snapshot(),
            },
            Command::Change(Operation::Create(new())),
            Command::Change(Operation::Apply {
                snapshot: snapshot(),
            }),
            Command::Change(Operation::Delete {
                snapshot: snapshot(),
            }),
            Command::Change(Operation::Rename {
                snapshot: snapshot(),
                name,
            }),
            Command::Stream { rate: None },
            Command::Stream {
                rate: NonZeroU64::new(7),
            },
            Command::Save(new()),
            Command::Extract {
                snapshot: snapshot(),
            },
            Command::ExportAdd(Box::new(AddExport {
                file: "/images/disk.qcow2".to_owned(),
                description: String::new(),
                image: crate::exporter::ImageOptions::default(),
                front: fronts::FrontConfig::Nbd {},
            })),
            Command::ExportList {},
            Command::ExportRemove(Removing::default()),
            Command::ExportRemove(Removing {
                drain_limit: Some(0),
            }),
            Command::ExportResize(Resizing::to("+1G", true)),
        ];
        for command in all {
            for export in [None, Some("x".to_owned())] {
                let request = Request {
                    export,
                    command: command.clone(),
                };
                let line = request.line();
                assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
                assert_eq!(Request::parse(&line), Ok(request));
            }
        }
    }

    #[test]
    fn every_answer_is_one_line_that_reads_back() {
        let all = [
            Answer::Event(Event::Progress { done: 1, total: 2 }),
            Answer::Event(Event::Ready),
            Answer::Event(Event::State { size: 1 << 40 }),
            Answer::Result {
                result: json!([{ "name": "x" }]),
            },
            Answer::failure(&Failure::about("a\nb", "is gone").kind(ErrorKind::NotFound)),
        ];
        for answer in all {
            let line = answer.line();
            assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            assert_eq!(Answer::parse(&line), Some(answer));
        }
        assert_eq!(Answer::parse(b"{\"event\":\"new\"}"), None);
    }

    #[test]
    fn wrong_lines_are_refused_with_a_reason() {
        for (line, word) in [
            ("", "json"),
            ("[]", "object"),
            ("{}", "command"),
            (r#"{"command":7}"#, "command"),
            (r#"{"command":"dance"}"#, "dance"),
            (r#"{"command":"list","export":1}"#, "export"),
            (
                r#"{"command":"list","colour":"red"}"#,
                "key \"colour\" is unknown",
            ),
            (r#"{"command":"delete"}"#, "snapshot"),
            (r#"{"command":"stream","rate":0}"#, "0"),
            (r#"{"command":"export-add"}"#, "file"),
            (r#"{"command":"export-resize","export":"x"}"#, "size"),
            (r#"{"command":"export-remove","name":"x"}"#, "name"),
            (r#"{"command":"create","name":"x","date":1}"#, "date"),
            (r#"{"command":"create","name":"x","icount":-1}"#, "-1"),
        ] {
            let error = Request::parse(line.as_bytes()).expect_err(line);
            assert!(error.contains(word), "{line}: {error}");
        }
    }

    #[test]
    fn a_snapshot_without_a_date_is_made_now() {
        let line = br#"{"command":"create","name":"x"}"#;
        let command = Request::parse(line).expect("a command").command;
        let Command::Change(Operation::Create(new)) = command else {
            panic!("a snapshot is made");
        };
        let new = new.snapshot((5, 6));
        assert_eq!((new.date_sec, new.date_nsec, new.icount), (5, 6, None));
    }

    #[test]
    fn kinds_have_names_that_map_back() {
        for (kind, name) in KINDS {
            assert_eq!((kind_name(kind), kind_of(name)), (name, Some(kind)));
        }
        assert_eq!(kind_of("other"), None);
    }
}
