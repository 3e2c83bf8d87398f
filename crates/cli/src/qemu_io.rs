//! `qemu-io`: exercises an image, command by command.
//!
//! Commands, their flags and the lines they end with are those of QEMU's program, because test suites and
//! scripts read them. Requests that are begun in the background (`aio_read`, `aio_write`) go on while later
//! commands run, and are waited for at the latest before the image is closed or the next line is read.

mod commands;
mod flags;
mod report;
mod session;
mod terminal;
mod transfer;

use std::ffi::OsString;
use std::io::{BufRead, Read, Write};

use gaur_engine::Format;
use gaur_reactor::{Config, Driver, Reactor, uring};

use self::session::Session;
use crate::failure::{EXIT_FAILURE, Failure};
use crate::image_spec::Aio;
use crate::open::{CacheMode, KeyOptions, format_parser};

/// What the shell of commands shows when it waits for one.
const PROMPT: &str = "qemu-io> ";

/// Exercise an image, command by command, as qemu-io does
#[derive(Debug, clap::Args)]
#[command(version)]
pub struct Args {
    /// A command to run (any number of them; otherwise they come from standard input)
    #[arg(short = 'c', long = "cmd", value_name = "COMMAND")]
    commands: Vec<String>,
    /// Format of the image (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    format: Option<Format>,
    /// FILE is a list of options, driver=qcow2,file.filename=PATH,..
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,
    #[command(flatten)]
    keys: KeyOptions,
    #[command(flatten)]
    how: How,
    /// Taken, and without effect: buffers are aligned where they have to be
    #[arg(short, long)]
    misalign: bool,
    /// Taken, and without effect
    #[arg(short = 'T', long, value_name = "EVENTS")]
    trace: Option<String>,
    /// The image; without it, the command 'open' names one
    file: Option<OsString>,
}

/// How an image is opened; the command `open` has these, too.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct How {
    /// Refuse to change the image
    #[arg(short, long)]
    read_only: bool,
    /// Write to a temporary overlay, which is forgotten at the end
    #[arg(short, long)]
    snapshot: bool,
    /// Bypass the host's cache (-t none)
    #[arg(short, long)]
    nocache: bool,
    /// Copy what is read from backing files into the image
    #[arg(short = 'C', long)]
    copy_on_read: bool,
    /// Open beside a writer; what is read may be out of date or torn
    #[arg(short = 'U', long)]
    force_share: bool,
    /// How the host's cache is used
    #[arg(short = 't', long, value_name = "MODE", value_enum)]
    cache: Option<CacheMode>,
    /// What discards do
    #[arg(short, long, value_name = "MODE", value_parser = ["unmap", "on", "ignore", "off"])]
    discard: Option<String>,
    /// The way to reach the file
    #[arg(short = 'i', long, value_name = "MODE", value_enum)]
    aio: Option<Aio>,
    /// The same as --aio=native
    #[arg(short = 'k', long)]
    native_aio: bool,
}

/// Longest line of commands.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// Runs the commands. The code is 1 when any of them has failed.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let driver = match uring::available() {
        Ok(()) => Driver::Ring,
        Err(_) => Driver::Fallback,
    };
    let config = Config {
        driver,
        ..Config::default()
    };
    let reactor = Reactor::new(&config)
        .map_err(|errno| Failure::new(format!("cannot start a reactor: {errno}")))?;
    reactor.block_on(async {
        let mut session = Session::new(args.keys.keys()?, out);
        if let Some(file) = &args.file {
            let format = args.format;
            session.open(file, args.image_opts, format, &args.how)?;
        }
        let failed = match args.commands.is_empty() {
            true => converse(&mut session).await?,
            false => {
                let mut failed = false;
                for line in &args.commands {
                    match session.execute(line).await? {
                        commands::Next::Quit => break,
                        commands::Next::Go { worked } => failed |= !worked,
                    }
                }
                failed
            }
        };
        session.close().await?;
        Ok(if failed { EXIT_FAILURE } else { 0 })
    })
}

/// Runs the lines of standard input. Returns whether a command has failed.
async fn converse(session: &mut Session<'_>) -> Result<bool, Failure> {
    let mut failed = false;
    let mut lines: Box<dyn Lines> = match terminal::Terminal::new() {
        Some(terminal) => Box::new(terminal),
        None => Box::new(Piped),
    };
    loop {
        session.finish_all().await?;
        let Some(line) = lines.next(session.out)? else {
            return Ok(failed);
        };
        match session.execute(&line).await? {
            commands::Next::Quit => return Ok(failed),
            commands::Next::Go { worked } => failed |= !worked,
        }
    }
}

/// Where commands come from.
trait Lines {
    /// Shows the prompt and reads a line, without what ends it; `None` at the end.
    fn next(&mut self, out: &mut dyn Write) -> Result<Option<String>, Failure>;
}

/// Lines of a pipe or a file.
struct Piped;

impl Lines for Piped {
    fn next(&mut self, out: &mut dyn Write) -> Result<Option<String>, Failure> {
        out.write_all(PROMPT.as_bytes())?;
        out.flush()?;
        let mut line = Vec::new();
        let stdin = std::io::stdin().lock();
        let count = stdin.take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if count as u64 == LINE_BYTES_MAX && !line.ends_with(b"\n") {
            let most = LINE_BYTES_MAX;
            return Err(Failure::new(format!("a line is longer than {most} bytes")));
        }
        let text = String::from_utf8_lossy(&line);
        Ok((count > 0).then(|| text.trim_end_matches('\n').to_owned()))
    }
}
