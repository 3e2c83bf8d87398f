//! Lines for people: the process that uses this crate decides where they go.

use std::fmt;
use std::sync::OnceLock;

/// Takes a line.
pub type Listener = fn(&str);

static LISTENER: OnceLock<Listener> = OnceLock::new();

/// From now on lines go to `listener`, which any thread may call. Without one they are dropped; the first
/// one stays.
pub fn listen(listener: Listener) {
    LISTENER.get_or_init(|| listener);
}

/// Says `line`.
pub(crate) fn say(line: impl fmt::Display) {
    if let Some(listener) = LISTENER.get() {
        listener(&line.to_string());
    }
}

/// The same text without control characters.
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter.is_control() {
            true => line.extend(letter.escape_debug()),
            false => line.push(letter),
        }
    }
    line
}
