//! A server process of a fixture: killed with the fixture or the test, its output in a log.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::tool::run;

/// Between two looks at whether the process has ended.
const PAUSE: Duration = Duration::from_millis(10);
/// How much of a log stands in a message.
const LOG_LINES: usize = 20;

/// A process. A thread of its own starts it, waits for it and kills it: the kernel kills the process when that
/// thread is gone (`PR_SET_PDEATHSIG` is about the thread that forked), and that is when the test's process is.
#[derive(Debug)]
pub(super) struct Daemon {
    id: u32,
    log: String,
    // Closed, it tells the thread to kill the process.
    owner: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Daemon {
    /// Starts a program; what it prints is added to the file `log`.
    #[track_caller]
    pub(super) fn start(command: &Command, log: &str) -> Daemon {
        let mut bound = Command::new("setpriv");
        bound.args(["--pdeathsig", "KILL", "--"]);
        bound.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => bound.env(name, value),
                None => bound.env_remove(name),
            };
        }
        if let Some(folder) = command.get_current_dir() {
            bound.current_dir(folder);
        }
        let output = File::options().create(true).append(true).open(log);
        let output = output.expect("scratch is writable");
        let errors = output.try_clone().expect("a file can be opened twice");
        bound.stdin(Stdio::null()).stdout(output).stderr(errors);
        let (owner, owned) = channel::<()>();
        let (started, start) = channel();
        let thread = std::thread::spawn(move || {
            let mut child = bound.spawn().expect("setpriv is there: util-linux has it");
            started.send(child.id()).expect("the starter waits for it");
            while matches!(child.try_wait(), Ok(None)) {
                let order = owned.recv_timeout(PAUSE);
                if order == Err(RecvTimeoutError::Disconnected) {
                    return kill(&mut child);
                }
            }
        });
        Daemon {
            id: start.recv().expect("the process was started"),
            log: log.to_owned(),
            owner: Some(owner),
            thread: Some(thread),
        }
    }

    /// Process number.
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// Whether the process runs.
    pub(super) fn is_running(&self) -> bool {
        let thread = self.thread.as_ref();
        thread.is_some_and(|thread| !thread.is_finished())
    }

    /// Sends a signal by its name, `HUP` for example.
    #[track_caller]
    pub(super) fn signal(&self, name: &str) {
        assert!(self.is_running(), "{}", self.last_words());
        run("kill", &["-s", name, &self.id.to_string()]).ok();
    }

    /// The end of its log.
    pub(super) fn last_words(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let from = lines.len().saturating_sub(LOG_LINES);
        format!("{}:\n{}", self.log, lines[from..].join("\n"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.owner = None;
        if let Some(thread) = self.thread.take() {
            // It ends with the process, and has nothing to report.
            let _ = thread.join();
        }
    }
}

fn kill(child: &mut Child) {
    // It may have ended by itself.
    let _ = child.kill();
    let _ = child.wait();
}

/// Asks until the answer is yes, at most for `patience`; whether it came.
pub(super) fn wait_for(patience: Duration, mut ready: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !ready() {
        if start.elapsed() > patience {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}
