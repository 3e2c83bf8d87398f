//! Lines on standard error. Nobody has to read them: when the terminal is gone, so are they, and the
//! work goes on.
//!
//! A line is one write, so that those of several threads and processes never mix, and one line,
//! whatever names of files and words of clients stand in it.

use std::fmt;
use std::io::Write;

/// Says `line` under the name of the command.
pub fn say(line: impl fmt::Display) {
    say_as("gaur", line);
}

/// Says `line` under another name.
pub fn say_as(program: &str, line: impl fmt::Display) {
    let line = format!("{program}: {}\n", one_line(&line.to_string()));
    let _ = std::io::stderr().write_all(line.as_bytes());
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
