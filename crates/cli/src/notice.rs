//! Lines on standard error. Nobody has to read them: when the terminal is gone, so are they, and the
//! work goes on.

use std::fmt;
use std::io::Write;

/// Says `line` under the name of the command.
pub fn say(line: impl fmt::Display) {
    say_as("gaur", line);
}

/// Says `line` under another name.
pub fn say_as(program: &str, line: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{program}: {line}");
}
