//! `gaur snapshot save`: make a snapshot with a VM state from a file or a pipe. A thread of its own reads
//! the state while writes to the image are in flight.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use gaur_engine::{Job, NewSnapshot};
use gaur_reactor::block_on;

use super::local::{self, Watch};
use super::metadata::MetadataArgs;
use super::target::{ChangeArgs, Server, Target, TargetArgs};
use crate::control::client::{Client, Frames};
use crate::control::frames::Head;
use crate::control::protocol::{Answer, Command, Event};
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
    let progress = Progress::growing(args.act.progress, args.act.quiet, false);
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
}

/// The failure of a thread that reads.
#[derive(Clone, Default)]
struct ReadError(Arc<Mutex<Option<Failure>>>);

impl ReadError {
    fn put(&self, failure: Failure) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
    }

    /// The reason for the failure of the whole: this one, if there is one.
    fn explain(&self, failure: Failure) -> Failure {
        let own = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        own.unwrap_or(failure)
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
    let trouble = ReadError::default();
    let reader = trouble.clone();
    // Not joined: when the save has failed, this thread may still be waiting for standard input.
    std::thread::spawn(move || pump(source, sender, &reader));
    let job = Arc::new(Job::default());
    let (asked, pipe) = (Arc::clone(&job), handle.clone());
    let watch = Watch {
        progress,
        meter: || (handle.sent_bytes(), len),
        cancel: move || {
            pipe.cancel();
            asked.cancel();
        },
    };
    let saved = local::drive(&image, act.host, watch, async |queue| {
        vm_state::check_new(queue, spec.path(), new).await?;
        vm_state::save(queue, spec.path(), new, receiver, &job).await
    });
    let closed = image.close();
    let saved = saved.map_err(|failure| trouble.explain(failure));
    saved.and(closed)
}

/// Reads the state into a pipe, until its end or that of the pipe.
fn pump(mut source: Source, sender: Sender, trouble: &ReadError) {
    while let Ok(mut piece) = block_on(sender.piece()) {
        match fill(&mut source.input, &mut piece) {
            Ok(filled) => {
                piece.truncate(filled);
                if filled > 0 {
                    sender.send(piece);
                }
                if filled < PIECE_BYTES {
                    return sender.finish();
                }
            }
            // Told before the pipe breaks, which makes the other side look.
            Err(error) => return trouble.put(Failure::io(&source.name, &error)),
        }
    }
}

/// Reads until `memory` is full or there is no more.
fn fill(input: &mut dyn Read, memory: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = memory.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
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
    let (trouble, sent) = (ReadError::default(), Arc::new(AtomicU64::new(0)));
    let (reader, len) = (trouble.clone(), source.len);
    let counter = Arc::clone(&sent);
    // Not joined, as above: the server may fail first.
    std::thread::spawn(move || push(source, frames, &reader, &counter));
    let result = client.result_of_stream(&mut progress, || (sent.load(Ordering::Relaxed), len));
    match result {
        Ok(_) => progress.finish(),
        Err(_) => progress.stop(),
    }
    result.map(drop).map_err(|failure| trouble.explain(failure))
}

/// Reads the state and sends it, until its end or that of the connection.
fn push(mut source: Source, mut frames: Frames, trouble: &ReadError, sent: &AtomicU64) {
    let mut buffer = vec![0; PIECE_BYTES];
    loop {
        let filled = match fill(&mut source.input, &mut buffer) {
            Ok(filled) => filled,
            Err(error) => {
                trouble.put(Failure::io(&source.name, &error));
                // A server that is gone needs no telling.
                let _ = frames.end(Head::Abort);
                return;
            }
        };
        let part = buffer.get(..filled).unwrap_or_default();
        // Why the server does not take it, it says in its answer, unless it hangs.
        if let Err(error) = frames.send(part) {
            if let Some(failure) = frames.failure(&error) {
                trouble.put(failure);
                frames.hang_up();
            }
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
        let trouble = ReadError::default();
        let reader = trouble.clone();
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
        let own = trouble.0.lock().expect("no panic").take();
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
