//! How a server ends: in order within its limits, or at once.
//!
//! The first signal, or the last client's leaving, begins the end. Clients have the drain limit, then
//! they and commands that are under way are given up; the images have the close limit to be flushed and
//! closed. A thread of its own sees to it, because what hangs may be the file system below an image. The
//! second signal does not wait for any of that.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gaur_reactor::{Signal, Signals, Stop, block_on};

use crate::exporter::{Exporter, Limits};
use crate::notice::say;

/// Exit code of a server that was stopped before its images were flushed and closed.
pub const EXIT_FORCED: u8 = 1;
/// What that means.
pub const LOST: &str = "stopped at once, what clients had not flushed may be lost";

/// How long the front ends have for their part of an end at once.
const FORCED_LIMIT: Duration = Duration::from_secs(1);
/// When it is told that the images are not closed yet.
const SLOW: Duration = Duration::from_secs(10);

/// The end of the server.
pub struct End {
    exporter: Arc<Exporter>,
    /// Commands of the control socket are given up.
    commands: Stop,
    limits: Limits,
    pid_file: Option<PathBuf>,
    began: AtomicBool,
}

impl End {
    /// It has not begun.
    pub fn new(exporter: &Arc<Exporter>, limits: Limits, pid_file: Option<PathBuf>) -> Arc<End> {
        Arc::new(End {
            exporter: Arc::clone(exporter),
            commands: Stop::new(),
            limits,
            pid_file,
            began: AtomicBool::new(false),
        })
    }

    /// Raised when commands are to be given up.
    pub fn commands(&self) -> Stop {
        self.commands.clone()
    }

    /// The first signal drains, the second ends the server at once.
    pub fn obey(self: &Arc<Self>, signals: Signals, quiet: bool) {
        let end = Arc::clone(self);
        std::thread::spawn(move || {
            let signal = block_on(signals.next());
            if !quiet && signal == Signal::Interrupt {
                say("finishing what is under way (again to stop at once)");
            }
            end.commands.stop();
            end.exporter.stop();
            end.begin();
            block_on(signals.next());
            signals.exit_on_next(EXIT_FORCED);
            end.exporter.stop();
            std::thread::sleep(FORCED_LIMIT);
            end.force(LOST);
        });
    }

    /// From now on the limits count.
    pub fn begin(self: &Arc<Self>) {
        if self.began.swap(true, Ordering::AcqRel) {
            return;
        }
        let end = Arc::clone(self);
        std::thread::spawn(move || {
            let Limits { drain, close } = end.limits;
            std::thread::sleep(drain);
            end.commands.stop();
            let silent = close.min(SLOW);
            std::thread::sleep(silent);
            let left = close - silent;
            let names = end.names();
            if !left.is_zero() {
                let seconds = left.as_secs();
                say(format!(
                    "{names} not flushed and closed yet ({seconds} s left, --close-limit)"
                ));
                std::thread::sleep(left);
            }
            end.force(&format!(
                "{names} not flushed and closed in time (--close-limit); {LOST}"
            ));
        });
    }

    /// The exports that are left.
    fn names(&self) -> String {
        let exports = self.exporter.exports();
        match exports.as_slice() {
            [one] => format!("export {:?} is", one.name()),
            others => format!("{} exports are", others.len()),
        }
    }

    /// Ends the process, whatever its threads do.
    fn force(&self, why: &str) {
        say(why);
        if let Some(path) = &self.pid_file {
            super::remove_pid_file(path);
        }
        std::process::exit(i32::from(EXIT_FORCED));
    }
}
