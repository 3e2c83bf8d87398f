//! Running programs to their end under a time limit.

use std::io::Read;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longest time any program of the tests may take, in seconds, unless the caller sets another.
const TIME_LIMIT_SECONDS: u32 = 120;
/// Seconds between the signals with which a program is asked to end and killed.
const KILL_AFTER_SECONDS: u32 = 5;

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

/// Runs a program with these arguments for at most that long, with all that it leaves behind in its
/// process group: until everybody has closed its output.
pub fn run_for(program: &str, arguments: &[&str], seconds: u32) -> Run {
    let start = Instant::now();
    let mut command = Command::new("timeout");
    command.arg(format!("--kill-after={KILL_AFTER_SECONDS}"));
    command
        .args([&seconds.to_string(), program])
        .args(arguments);
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start {program}: {error}"));
    let stdout = child.stdout.take().map(Output::collect);
    let stderr = child.stderr.take().map(Output::collect);
    let status = child.wait().expect("a child can be waited for");
    let mut code = code_of(status);
    assert!(
        code != 127 || program.contains('/'),
        "{program} is missing: scripts/setup installs what the tests need"
    );
    let outputs: Vec<Output> = [stdout, stderr].into_iter().flatten().collect();
    let limit = Duration::from_secs((seconds + KILL_AFTER_SECONDS).into());
    let mut note = "";
    if !outputs.iter().all(|output| output.ends(start + limit)) {
        // The group is that of `timeout`, which makes one.
        kill_group(child.id());
        let soon = Instant::now() + Duration::from_secs(KILL_AFTER_SECONDS.into());
        outputs.iter().for_each(|output| _ = output.ends(soon));
        note = "killed: processes that it left behind, and that kept its output open\n";
        code = 124;
    }
    let [stdout, stderr] = [0, 1].map(|number| outputs.get(number).map(Output::text));
    Run {
        command: format!("{program} {}", arguments.join(" ")),
        code,
        stdout: stdout.unwrap_or_default(),
        stderr: stderr.unwrap_or_default() + note,
    }
}

fn code_of(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    let signal = || 128 + status.signal().unwrap_or_default();
    status.code().unwrap_or_else(signal)
}

fn kill_group(leader: u32) {
    let mut kill = Command::new("sh");
    kill.args(["-c", "kill -s KILL -- \"-$0\"", &leader.to_string()]);
    // There is none if what holds the output is in a session of its own.
    let _ = kill.stderr(Stdio::null()).status();
}

/// What a pipe has brought so far.
struct Output {
    bytes: Arc<Mutex<Vec<u8>>>,
    thread: JoinHandle<()>,
}

impl Output {
    /// Reads a pipe to its end, in a thread.
    fn collect(mut from: impl Read + Send + 'static) -> Output {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let collected = Arc::clone(&bytes);
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(len @ 1..) = from.read(&mut buffer) {
                let mut bytes = collected.lock().expect("its other user does not panic");
                bytes.extend_from_slice(&buffer[..len]);
            }
        });
        Output { bytes, thread }
    }

    /// Waits for the end of the pipe, until then; whether it has come.
    fn ends(&self, until: Instant) -> bool {
        while !self.thread.is_finished() {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn text(&self) -> String {
        let bytes = self
            .bytes
            .lock()
            .expect("the reading thread does not panic");
        String::from_utf8_lossy(&bytes).into_owned()
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

/// Runs commands of `qemu-io`, none of which may fail, on an image named by options, with the secret `object`.
#[track_caller]
pub fn qemu_io_with_key(object: &str, options: &str, commands: &[&str]) {
    let mut all = vec!["--object", object, "--image-opts", options];
    all.extend(commands.iter().flat_map(|command| ["-c", command]));
    let done = run("qemu-io", &all).ok();
    assert!(!done.stdout.contains("failed"), "{done}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test's shell failed and left a loop in the background, which held the shell's output. The time
    /// limit was for the shell alone: the test waited for the end of the output, for ever.
    #[test]
    fn child_processes_end_with_the_time_limit() {
        let line = "while sleep 0.05; do :; done & echo $!; false";
        let start = Instant::now();
        let run = run_for("sh", &["-ec", line], 1);
        assert!(start.elapsed() < Duration::from_secs(60));
        assert_eq!(run.code, 124, "{run}");
        assert!(run.stderr.contains("left behind"), "{run}");
        let left = format!("/proc/{}/exe", run.stdout.trim());
        assert!(std::fs::read_link(&left).is_err(), "{left} is alive: {run}");
    }

    #[test]
    fn output_that_comes_after_the_end_of_a_program_is_its_output() {
        let run = run("sh", &["-c", "(sleep 0.3; echo late) &"]).ok();
        assert_eq!(run.stdout, "late\n");
    }
}
