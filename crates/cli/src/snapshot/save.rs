//! `gaur snapshot save`: make a snapshot with a VM state from a file or a pipe. A thread of its own reads
//! the state while writes to the image are in flight.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, channel};

use gaur_engine::{Job, NewSnapshot};
use gaur_reactor::block_on;

use super::metadata::MetadataArgs;
use super::target::{ChangeArgs, Server, Target, TargetArgs};
use crate::control::client::{Client, Frames};
use crate::control::frames::Head;
use crate::control::protocol::{Answer, Command, Event};
use crate::drive::drive;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::progress::Progress;
use crate::state_pipe::{PIECE_BYTES, Sender, pipe};
use crate::vm_state;

/// Make a snapshot with the state of a machine, from a file or standard input
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur snapshot save [OPTIONS] IMAGE NAME")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    act: ChangeArgs,
    #[command(flatten)]
    metadata: MetadataArgs,
    /// The file with the state; '-' is standard input
    #[arg(long, value_name = "FILE", default_value = "-")]
    state: PathBuf,
    /// The image, and the name of the new snapshot
    #[arg(required = true, value_name = "IMAGE NAME")]
    words: Vec<OsString>,
}

/// Saves it.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let (target, [name]) = args.target.split(&args.words, ["the name"])?;
    let new = args.metadata.snapshot(&name)?;
    let source = Source::open(&args.state)?;
    out.flush()?;
    let progress = Progress::new(None, args.act.progress, args.act.quiet, false);
    match &target {
        Target::Image(spec) => save_here(spec, &args.act, &new, source, progress)?,
        Target::Server(server) => save_there(server, new, source, progress)?,
    }
    Ok(0)
}

/// Where the state comes from.
struct Source {
    name: String,
    input: Box<dyn Read + Send>,
    /// Its length in bytes; 0 if that is not known.
    len: u64,
}

impl Source {
    fn open(path: &Path) -> Result<Source, Failure> {
        if path != Path::new("-") {
            let name = &*path.to_string_lossy();
            let file = File::open(path).map_err(|error| Failure::io(name, &error))?;
            let facts = file.metadata().map_err(|error| Failure::io(name, &error))?;
            if facts.is_dir() {
                return Err(Failure::about(name, "is a directory"));
            }
            return Ok(Source {
                name: name.to_owned(),
                input: Box::new(file),
                len: facts.len(),
            });
        }
        let input = io::stdin();
        if input.is_terminal() {
            let failure =
                Failure::new("the state is read from standard input, and that is a terminal");
            return Err(failure.hint("--state FILE reads it from a file"));
        }
        Ok(Source {
            name: "standard input".to_owned(),
            input: Box::new(input),
            len: 0,
        })
    }

    /// Reads until a piece is full or there is no more.
    fn fill(&mut self, piece: &mut Vec<u8>) -> Result<usize, Failure> {
        piece.clear();
        let mut part = self.input.by_ref().take(PIECE_BYTES as u64);
        let filled = part.read_to_end(piece);
        filled.map_err(|error| Failure::io(&self.name, &error))
    }
}

fn save_here(
    spec: &ImageSpec,
    act: &ChangeArgs,
    new: &NewSnapshot,
    source: Source,
    progress: Progress,
) -> Result<(), Failure> {
    let image = act.open(spec)?;
    let (sender, receiver, handle) = pipe();
    let len = source.len;
    let (reader, trouble) = channel();
    // Not joined: when the save has failed, this thread may still be waiting for standard input.
    std::thread::spawn(move || pump(source, sender, &reader));
    let job = Arc::new(Job::default());
    let (asked, pipe) = (Arc::clone(&job), handle.clone());
    let cancel = move || {
        pipe.cancel();
        asked.cancel();
    };
    let watch = (|| (handle.sent_bytes(), len), cancel);
    let saved = drive(&image, act.host, progress, watch, async |queue| {
        vm_state::check_new(queue, spec.path(), new).await?;
        vm_state::save(queue, spec.path(), new, receiver, &job).await
    });
    let closed = image.close();
    let saved = saved.map_err(|failure| trouble.try_recv().unwrap_or(failure));
    saved.and(closed)
}

/// Reads the state into a pipe, until its end or that of the pipe.
fn pump(mut source: Source, sender: Sender, trouble: &mpsc::Sender<Failure>) {
    while let Ok(mut piece) = block_on(sender.piece()) {
        match source.fill(&mut piece) {
            Ok(filled) => {
                if filled > 0 {
                    sender.send(piece);
                }
                if filled < PIECE_BYTES {
                    return sender.finish();
                }
            }
            // Told before the pipe breaks, which makes the other side look.
            Err(failure) => {
                let _ = trouble.send(failure);
                return;
            }
        }
    }
}

fn save_there(
    server: &Server,
    new: NewSnapshot,
    source: Source,
    mut progress: Progress,
) -> Result<(), Failure> {
    let mut client = Client::connect(server)?;
    client.obey_signals()?;
    client.ask(Command::Save(new.into()))?;
    if client.answer()? != Answer::Event(Event::Ready) {
        return Err(client.nonsense());
    }
    let frames = client.frames()?;
    let ((reader, trouble), sent) = (channel(), Arc::new(AtomicU64::new(0)));
    let len = source.len;
    let counter = Arc::clone(&sent);
    // Not joined, as above: the server may fail first.
    std::thread::spawn(move || push(source, frames, &reader, &counter));
    let result = client.result_of_stream(&mut progress, || (sent.load(Ordering::Relaxed), len));
    progress.end(&result);
    let explain = |failure| trouble.try_recv().unwrap_or(failure);
    result.map(drop).map_err(explain)
}

/// Reads the state and sends it, until its end or that of the connection.
fn push(mut source: Source, mut frames: Frames, trouble: &mpsc::Sender<Failure>, sent: &AtomicU64) {
    let mut buffer = Vec::new();
    loop {
        let filled = match source.fill(&mut buffer) {
            Ok(filled) => filled,
            Err(failure) => {
                let _ = trouble.send(failure);
                // A server that is gone needs no telling.
                let _ = frames.end(Head::Abort);
                return;
            }
        };
        if let Err(failure) = frames.send(&buffer) {
            failure.map(|failure| trouble.send(failure));
            return;
        }
        sent.fetch_add(filled as u64, Ordering::Relaxed);
        if filled < PIECE_BYTES {
            let _ = frames.end(Head::End);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives what it has in small parts, interrupted now and then, and then fails if it is to.
    struct Parts {
        left: usize,
        calls: usize,
        fails: bool,
    }

    impl Read for Parts {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.calls += 1;
            if self.calls.is_multiple_of(3) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if self.left == 0 && self.fails {
                return Err(io::Error::from_raw_os_error(5));
            }
            let count = into.len().min(self.left).min(700_000);
            into[..count].fill(7);
            self.left -= count;
            Ok(count)
        }
    }

    fn pumped(left: usize, fails: bool) -> (Result<usize, ()>, Option<Failure>) {
        let (sender, receiver, _) = pipe();
        let source = Source {
            name: "state".to_owned(),
            input: Box::new(Parts {
                left,
                calls: 0,
                fails,
            }),
            len: 0,
        };
        let (reader, trouble) = channel();
        let thread = std::thread::spawn(move || pump(source, sender, &reader));
        let mut total = 0;
        let outcome = loop {
            match block_on(receiver.next()) {
                Ok(Some(piece)) => {
                    assert!(piece.iter().all(|byte| *byte == 7));
                    total += piece.len();
                    receiver.give_back(piece);
                }
                Ok(None) => break Ok(total),
                Err(_) => break Err(()),
            }
        };
        thread.join().expect("no panic");
        let own = trouble.try_recv().ok();
        (outcome, own)
    }

    #[test]
    fn vm_state_is_read_whole_through_short_reads() {
        for len in [
            0,
            1,
            PIECE_BYTES - 1,
            PIECE_BYTES,
            PIECE_BYTES + 1,
            10_000_000,
        ] {
            let (outcome, trouble) = pumped(len, false);
            assert_eq!(outcome, Ok(len));
            assert!(trouble.is_none());
        }
    }

    #[test]
    fn state_read_error_breaks_the_pipe_and_is_reported() {
        let (outcome, trouble) = pumped(3_000_000, true);
        assert_eq!(outcome, Err(()));
        let line = trouble.expect("a reason").to_string();
        assert_eq!(line, "state: input/output error");
    }
}
