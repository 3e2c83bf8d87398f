//! Lines that a person types, with editing and a history of this run.

use std::io::{IsTerminal, Write, stdin, stdout};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::{Lines, PROMPT};
use crate::failure::Failure;

/// A terminal.
pub struct Terminal(DefaultEditor);

impl Terminal {
    /// If there is one.
    pub fn new() -> Option<Terminal> {
        let typed = stdin().is_terminal() && stdout().is_terminal();
        typed.then(DefaultEditor::new)?.ok().map(Terminal)
    }
}

impl Lines for Terminal {
    fn next(&mut self, out: &mut dyn Write) -> Result<Option<String>, Failure> {
        out.flush()?;
        match self.0.readline(PROMPT) {
            Ok(line) => {
                // A history that is full forgets its oldest line.
                let _ = self.0.add_history_entry(&line);
                Ok(Some(line))
            }
            Err(ReadlineError::Eof | ReadlineError::Interrupted) => Ok(None),
            Err(error) => Err(Failure::new(format!("cannot read a line: {error}"))),
        }
    }
}
