//! The failure of a verb: one line for the user and an exit code for the script.

use std::ffi::OsStr;
use std::fmt;

use gaur_block::Errno;
use gaur_engine::{ErrorKind, Image, ImageError};

use crate::notice::one_line;

/// Exit code of most failures.
pub const EXIT_FAILURE: u8 = 1;

/// Exit code after a signal that was obeyed: what a shell makes of a program that SIGINT ended.
pub const EXIT_INTERRUPTED: u8 = 130;

/// What went wrong, where, and what to do about it. Prints as one line in lower case.
#[derive(Debug)]
pub struct Failure {
    /// What it is about, usually a file; nothing when the message says it.
    subject: Option<String>,
    message: String,
    /// Advice.
    pub hint: Option<String>,
    /// The code to exit with.
    pub code: u8,
    /// Nothing is to be printed.
    pub silent: bool,
    /// What the engine calls it, if the failure is the engine's.
    pub kind: Option<ErrorKind>,
}

impl Failure {
    /// A failure that is not about one file.
    pub fn new(message: impl Into<String>) -> Failure {
        Failure {
            subject: None,
            message: message.into(),
            hint: None,
            code: EXIT_FAILURE,
            silent: false,
            kind: None,
        }
    }

    /// A failure that prints nothing, because its message was printed already or standard output is closed.
    pub fn silent(code: u8) -> Failure {
        Failure {
            silent: true,
            ..Failure::new("").code(code)
        }
    }

    /// A failure about `subject`.
    pub fn about(subject: impl AsRef<OsStr>, message: impl Into<String>) -> Failure {
        Failure {
            subject: Some(subject.as_ref().to_string_lossy().into_owned()),
            ..Failure::new(message)
        }
    }

    /// The failure of an operation on the image `name`.
    pub fn image(name: &str, error: &ImageError) -> Failure {
        if error.kind() == ErrorKind::Cancelled {
            return Failure::cancelled(name);
        }
        let text = format!("{error:#}");
        Failure::about(name, without_name(name, &text)).kind(error.kind())
    }

    /// An operation on the image `name` was given up.
    pub fn cancelled(name: &str) -> Failure {
        let failure = Failure::about(name, "cancelled, the image is unchanged");
        failure.kind(ErrorKind::Cancelled).code(EXIT_INTERRUPTED)
    }

    /// A signal has ended work that changes nothing.
    pub fn interrupted() -> Failure {
        let failure = Failure::new("interrupted").kind(ErrorKind::Cancelled);
        failure.code(EXIT_INTERRUPTED)
    }

    /// A failed system call on `name` while doing `what`.
    pub fn system(name: &str, what: &str, errno: Errno) -> Failure {
        Failure::about(name, format!("{what}: {errno}"))
    }

    /// A request to the image `name` failed while doing `what`. Names the corruption that was found, if that
    /// can be the reason.
    pub fn request(image: &Image, name: &str, what: &str, errno: Errno) -> Failure {
        match image.corruption() {
            Some(report) if errno == Errno::EIO => {
                let text = report.to_string();
                Failure::about(name, format!("{what}: {}", without_name(name, &text)))
                    .kind(ErrorKind::Corrupt)
            }
            _ => Failure::system(name, what, errno),
        }
    }

    /// A failed call of the standard library on `name`.
    pub fn io(name: impl AsRef<OsStr>, error: &std::io::Error) -> Failure {
        let text = match system_error(error) {
            Some(errno) if errno.name().is_some() => errno.to_string(),
            _ => lower_first(&error.to_string()),
        };
        Failure::about(name, text)
    }

    /// The same failure in other words.
    pub fn message(mut self, message: impl Into<String>) -> Failure {
        self.message = message.into();
        self
    }

    /// The same failure with its cause, if that is known.
    pub fn because(mut self, cause: Option<String>) -> Failure {
        if let Some(cause) = cause {
            self.message = format!("{}: {cause}", self.message);
        }
        self
    }

    /// The same failure, about `subject` if it was not about anything.
    pub fn with_subject(mut self, subject: &str) -> Failure {
        self.subject.get_or_insert_with(|| subject.to_owned());
        self
    }

    /// The same failure with advice.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// The same failure with advice if the image is locked by another program.
    pub fn hint_if_locked(self, hint: &str) -> Failure {
        match self.kind {
            Some(ErrorKind::Locked) => self.hint(hint),
            _ => self,
        }
    }

    /// Whether another program has the image locked.
    pub fn is_locked(&self) -> bool {
        self.kind == Some(ErrorKind::Locked)
    }

    /// The same failure, of a kind that the engine knows.
    pub fn kind(mut self, kind: ErrorKind) -> Failure {
        self.kind = Some(kind);
        self
    }

    /// The same failure with another exit code.
    pub fn code(mut self, code: u8) -> Failure {
        self.code = code;
        self
    }
}

/// What the engine says of the image `name`: the engine may name the file itself; do not name it twice.
fn without_name<'a>(name: &str, text: &'a str) -> &'a str {
    let rest = text.strip_prefix(name);
    rest.and_then(|rest| rest.strip_prefix(": "))
        .unwrap_or(text)
}

/// Failures of printing. A reader that closes the pipe has read enough.
impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Failure::silent(EXIT_FAILURE),
            _ => Failure::io("standard output", &error),
        }
    }
}

/// The system's number for an error, or that of its kind where a library has wrapped it up.
fn system_error(error: &std::io::Error) -> Option<Errno> {
    let by_kind = || match error.kind() {
        std::io::ErrorKind::NotFound => Some(Errno::ENOENT),
        std::io::ErrorKind::PermissionDenied => Some(Errno::EACCES),
        std::io::ErrorKind::StorageFull => Some(Errno::ENOSPC),
        std::io::ErrorKind::ReadOnlyFilesystem => Some(Errno::EROFS),
        std::io::ErrorKind::NotADirectory => Some(Errno::ENOTDIR),
        _ => None,
    };
    error.raw_os_error().map(Errno::from_raw).or_else(by_kind)
}

fn lower_first(text: &str) -> String {
    let mut letters = text.chars();
    match letters.next() {
        Some(first) => first.to_lowercase().chain(letters).collect(),
        None => String::new(),
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.subject.as_deref() {
            None => {}
            Some("") => out.write_str("'': ")?,
            Some(subject) => write!(out, "{}: ", one_line(subject))?,
        }
        out.write_str(&one_line(&self.message))?;
        if let Some(hint) = &self.hint {
            write!(out, " ({})", one_line(hint))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_message_is_one_line() {
        let failure = Failure::about("a\nb", "is a directory").hint("name a file");
        assert_eq!(failure.to_string(), "a\\nb: is a directory (name a file)");
        let failure = Failure::new("option 'a\u{1b}[1m\nb' is unknown");
        let text = failure.to_string();
        assert_eq!(text, "option 'a\\u{1b}[1m\\nb' is unknown");
    }

    #[test]
    fn system_errors_are_told_in_lower_case() {
        let error = std::io::Error::from_raw_os_error(2);
        assert_eq!(
            Failure::io("x", &error).to_string(),
            "x: no such file or directory"
        );
        assert_eq!(Failure::io("x", &error).code, EXIT_FAILURE);
    }
}
