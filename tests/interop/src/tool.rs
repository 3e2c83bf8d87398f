//! Running programs to their end under a time limit.

use std::process::{Command, Stdio};

use serde_json::Value;

/// Longest time any program of the tests may take, in seconds, unless it is told otherwise.
const TIME_LIMIT_SECONDS: u32 = 120;

/// What a program left behind.
#[derive(Debug)]
pub struct Run {
    /// The command line, for messages.
    pub command: String,
    /// Exit code; 124 after the time limit, 128 and the signal's number after a signal.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Run {
    /// Asserts that it ended with exit code 0.
    #[track_caller]
    pub fn ok(self) -> Run {
        self.code(0)
    }

    /// Asserts that it ended with this exit code.
    #[track_caller]
    pub fn code(self, expected: i32) -> Run {
        assert_eq!(self.code, expected, "{self}");
        self
    }

    /// Asserts a clean refusal: not 0, no panic, no signal, no time-out, and one line of text.
    #[track_caller]
    pub fn refused(self) -> Run {
        assert!(self.code != 0, "should have been refused: {self}");
        self.survived()
    }

    /// Asserts that, whatever it answered, it did so in order: no panic, no signal, no time-out,
    /// and if it failed without a report of its own, one line that says why.
    #[track_caller]
    pub fn survived(self) -> Run {
        assert!(
            self.code != 101 && self.code < 124,
            "panic, signal or time-out: {self}"
        );
        assert!(!self.stderr.contains("panicked"), "panic: {self}");
        if self.code != 0 && self.stdout.is_empty() {
            assert_eq!(
                self.stderr.lines().count(),
                1,
                "one line says what is wrong: {self}"
            );
            assert!(
                self.stderr.trim().len() > 10,
                "a sentence says what is wrong: {self}"
            );
        }
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        match serde_json::from_str(&self.stdout) {
            Ok(value) => value,
            Err(error) => panic!("{error}: {self}"),
        }
    }
}

impl std::fmt::Display for Run {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Run {
            command,
            code,
            stdout,
            stderr,
        } = self;
        write!(
            out,
            "{command}\nexit code {code}\n{}{}",
            clip(stdout),
            clip(stderr)
        )
    }
}

/// The end of a text that is too long for a message.
fn clip(text: &str) -> &str {
    let mut start = text.len().saturating_sub(4000);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// Runs a program with these arguments.
pub fn run(program: &str, arguments: &[&str]) -> Run {
    run_for(program, arguments, TIME_LIMIT_SECONDS)
}

/// Runs a program with these arguments for at most that long.
pub fn run_for(program: &str, arguments: &[&str], seconds: u32) -> Run {
    let limit = seconds.to_string();
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", &limit, program])
        .args(arguments);
    command.stdin(Stdio::null());
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("cannot start {program}: {error}"));
    let code = output.status.code().unwrap_or_else(|| {
        use std::os::unix::process::ExitStatusExt;
        128 + output.status.signal().unwrap_or_default()
    });
    assert!(
        code != 127 || program.contains('/'),
        "{program} is missing: scripts/setup installs what the tests need"
    );
    Run {
        command: format!("{program} {}", arguments.join(" ")),
        code,
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Runs `qemu-img`.
pub fn qemu_img(arguments: &[&str]) -> Run {
    run("qemu-img", arguments)
}

/// Asserts that `qemu-img check` finds nothing at all: no corruption, no leak.
#[track_caller]
pub fn assert_clean(image: &str) {
    qemu_img(&["check", image]).ok();
}
