//! Progress of a long operation: a bar on a terminal, qemu-img's lines for a program that reads them.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{interrupt, notice};

/// What a verb shows while it works.
#[derive(Debug, clap::Args)]
pub struct ProgressOptions {
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    pub quiet: bool,
}

impl ProgressOptions {
    /// Progress towards so many bytes; `None` is not known yet.
    pub fn start(&self, total_bytes: Option<u64>) -> Progress {
        Progress::new(total_bytes, self.progress, self.quiet, false)
    }
}

/// Shows progress towards a number of bytes.
pub enum Progress {
    /// Nothing is shown.
    Quiet,
    /// A line on standard error when a signal asks for it.
    Asked(Lines),
    /// A bar on standard error.
    Bar(ProgressBar),
    /// `(12.34/100%)` on standard output.
    Lines(Lines),
}

/// The state of the lines.
pub struct Lines {
    total_bytes: u64,
    done_bytes: u64,
    shown_at: Instant,
    shown_percent: f64,
}

/// Time from line to line.
const LINE_INTERVAL: Duration = Duration::from_millis(100);
/// Part of the work from line to line, as with QEMU's program.
const LINE_PERCENT: f64 = 2.0;

/// What a bar looks like when the end is known, and when it is not.
const LAYOUT: &str =
    "{bar:40} {percent:>3}%  {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  {eta}";
const LAYOUT_ENDLESS: &str = "{spinner} {binary_bytes}  {binary_bytes_per_sec}";

impl Progress {
    /// Of so many bytes; `None` is not known yet, or never.
    ///
    /// With `wanted` (`-p`) there is always something to see, and a program that reads standard output
    /// sees lines; without it there is a bar if there is a terminal. `pure` standard output belongs to
    /// the data and has no lines of progress.
    pub fn new(total_bytes: Option<u64>, wanted: bool, quiet: bool, pure: bool) -> Progress {
        let lines = wanted && !pure && !std::io::stdout().is_terminal();
        if quiet {
            Progress::Asked(Lines::new(total_bytes))
        } else if !lines && std::io::stderr().is_terminal() {
            let target = ProgressDrawTarget::stderr_with_hz(10);
            let bar = ProgressBar::with_draw_target(total_bytes, target);
            lay_out(
                &bar,
                if total_bytes.is_some() {
                    LAYOUT
                } else {
                    LAYOUT_ENDLESS
                },
            );
            Progress::Bar(bar)
        } else if wanted && !pure {
            // Until the size is known nothing of it is done.
            let lines = Lines::new(total_bytes);
            lines.show();
            Progress::Lines(lines)
        } else {
            Progress::Asked(Lines::new(total_bytes))
        }
    }

    /// `done_bytes` are done of a total that may have changed; 0 is one that is not known.
    pub fn update(&mut self, done_bytes: u64, total_bytes: u64) {
        match self {
            Progress::Bar(bar) if total_bytes > 0 && bar.length() != Some(total_bytes) => {
                bar.set_length(total_bytes);
                lay_out(bar, LAYOUT);
            }
            Progress::Lines(_) if total_bytes == 0 => return,
            Progress::Lines(lines) | Progress::Asked(lines) => lines.total_bytes = total_bytes,
            _ => {}
        }
        self.set(done_bytes);
    }

    /// `done_bytes` of the total are done.
    pub fn set(&mut self, done_bytes: u64) {
        match self {
            Progress::Quiet => {}
            Progress::Bar(bar) => bar.set_position(done_bytes),
            Progress::Asked(lines) => {
                lines.done_bytes = done_bytes;
                if interrupt::take_asked() {
                    notice::say_bare(lines);
                }
            }
            Progress::Lines(lines) => {
                lines.done_bytes = done_bytes;
                if lines.is_due() {
                    lines.show();
                }
            }
        }
    }

    /// The work has ended so.
    pub fn end<T, E>(&mut self, outcome: &Result<T, E>) {
        match outcome {
            Ok(_) => self.finish(),
            Err(_) => self.stop(),
        }
    }

    /// All is done.
    pub fn finish(&mut self) {
        if let Progress::Lines(lines) = self {
            lines.done_bytes = lines.total_bytes;
            lines.show();
        }
        self.stop();
    }

    /// It ends here, done or not: leaves the terminal clean for what is printed next.
    pub fn stop(&mut self) {
        match self {
            Progress::Quiet | Progress::Asked(_) => {}
            Progress::Bar(bar) => bar.finish_and_clear(),
            Progress::Lines(_) => _ = writeln!(std::io::stdout()),
        }
        *self = Progress::Quiet;
    }
}

impl Lines {
    fn new(total_bytes: Option<u64>) -> Lines {
        Lines {
            total_bytes: total_bytes.unwrap_or(1),
            done_bytes: 0,
            shown_at: Instant::now(),
            shown_percent: 0.0,
        }
    }

    fn percent(&self) -> f64 {
        match self.total_bytes {
            0 => 100.0,
            total => self.done_bytes as f64 * 100.0 / total as f64,
        }
    }

    /// Whether the next line is due: after a time, as with QEMU's program also after a part of the work.
    fn is_due(&mut self) -> bool {
        let percent = self.percent();
        let due = self.shown_at.elapsed() >= LINE_INTERVAL
            || (notice::is_qemu() && percent >= self.shown_percent + LINE_PERCENT);
        if due {
            self.shown_at = Instant::now();
            self.shown_percent = percent;
        }
        due
    }

    fn show(&self) {
        let mut out = std::io::stdout();
        // A reader that went away must not stop the work.
        let _ = write!(out, "{self}\r");
        let _ = out.flush();
    }
}

impl fmt::Display for Lines {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "    ({:.2}/100%)", self.percent())
    }
}

fn lay_out(bar: &ProgressBar, layout: &str) {
    if let Ok(style) = ProgressStyle::with_template(layout) {
        bar.set_style(style);
    }
}
