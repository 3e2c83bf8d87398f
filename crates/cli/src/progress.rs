//! Progress of a long operation: a bar on a terminal, qemu-img's lines for a program that reads them.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

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
}

/// Time from line to line.
const LINE_INTERVAL: Duration = Duration::from_millis(100);

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
            Progress::Quiet
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
            Progress::lines(total_bytes.unwrap_or(1))
        } else {
            Progress::Quiet
        }
    }

    fn lines(total_bytes: u64) -> Progress {
        let lines = Lines {
            total_bytes,
            done_bytes: 0,
            shown_at: Instant::now(),
        };
        lines.show();
        Progress::Lines(lines)
    }

    /// `done_bytes` are done of a total that may have changed; 0 is one that is not known.
    pub fn update(&mut self, done_bytes: u64, total_bytes: u64) {
        match self {
            Progress::Bar(bar) if total_bytes > 0 && bar.length() != Some(total_bytes) => {
                bar.set_length(total_bytes);
                lay_out(bar, LAYOUT);
            }
            Progress::Lines(_) if total_bytes == 0 => return,
            Progress::Lines(lines) => lines.total_bytes = total_bytes,
            _ => {}
        }
        self.set(done_bytes);
    }

    /// `done_bytes` of the total are done.
    pub fn set(&mut self, done_bytes: u64) {
        match self {
            Progress::Quiet => {}
            Progress::Bar(bar) => bar.set_position(done_bytes),
            Progress::Lines(lines) => {
                lines.done_bytes = done_bytes;
                if lines.shown_at.elapsed() >= LINE_INTERVAL {
                    lines.shown_at = Instant::now();
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
            Progress::Quiet => {}
            Progress::Bar(bar) => bar.finish_and_clear(),
            Progress::Lines(_) => _ = writeln!(std::io::stdout()),
        }
        *self = Progress::Quiet;
    }
}

impl Lines {
    fn show(&self) {
        let percent = match self.total_bytes {
            0 => 100.0,
            total => self.done_bytes as f64 * 100.0 / total as f64,
        };
        let mut out = std::io::stdout();
        // A reader that went away must not stop the work.
        let _ = write!(out, "    ({percent:.2}/100%)\r");
        let _ = out.flush();
    }
}

fn lay_out(bar: &ProgressBar, layout: &str) {
    if let Ok(style) = ProgressStyle::with_template(layout) {
        bar.set_style(style);
    }
}
