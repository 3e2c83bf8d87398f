//! The log callback of an export.

use std::sync::Arc;

/// Takes one line: a client came or left and why, or something went wrong that no caller waits for.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// Logs a line where there is a log.
pub(crate) fn say(log: &Option<Log>, line: &str) {
    if let Some(log) = log {
        log(line);
    }
}
