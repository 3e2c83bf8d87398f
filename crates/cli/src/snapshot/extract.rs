//! `gaur snapshot extract`: write a snapshot's VM state to a file or a pipe.

use std::cell::Cell;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use gaur_reactor::block_on;

use super::target::{self, ChangeArgs, Server, Target, TargetArgs};
use crate::control::client::Client;
use crate::control::protocol::{Answer, Command, Event};
use crate::drive::drive;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::open;
use crate::progress::Progress;
use crate::shared_image::SharedImage;
use crate::state_pipe::{PIECE_BYTES, Receiver, pipe};
use crate::vm_state;

/// Write the state of a machine in a snapshot to a file or standard output
#[derive(Debug, clap::Args)]
#[command(override_usage = "gaur snapshot extract [OPTIONS] IMAGE SNAPSHOT")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    act: ChangeArgs,
    /// The file to write; '-' is standard output
    #[arg(long, value_name = "FILE", default_value = "-")]
    to: PathBuf,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The image, and the snapshot's id or name
    #[arg(required = true, value_name = "IMAGE SNAPSHOT")]
    words: Vec<OsString>,
}

/// Extracts it.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let (target, [which]) = args.target.split(&args.words, ["the snapshot"])?;
    out.flush()?;
    if args.to == Path::new("-") && io::stdout().is_terminal() {
        let failure = Failure::new("the state goes to standard output, and that is a terminal");
        return Err(failure.hint("--to FILE writes it to a file"));
    }
    let pure = args.to == Path::new("-");
    let progress = Progress::new(None, args.act.progress, args.act.quiet, pure);
    match &target {
        Target::Image(spec) => extract_here(spec, args, &which, progress)?,
        Target::Server(server) => extract_there(server, args, which, progress)?,
    }
    Ok(0)
}

/// Where the state goes. A file is created when the first byte of the state arrives, so a wrong
/// snapshot name does not overwrite a file.
struct Sink {
    path: PathBuf,
    /// The path as text.
    name: String,
    file: Option<File>,
    /// Bytes of the file, holes included.
    len: u64,
}

impl Sink {
    fn new(path: &Path) -> Sink {
        Sink {
            path: path.to_owned(),
            name: path.to_string_lossy().into_owned(),
            file: None,
            len: 0,
        }
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if self.path == Path::new("-") {
            return Ok(io::stdout().write_all(bytes)?);
        }
        let written = self.put_file(bytes);
        written.map_err(|error| Failure::io(&self.name, &error))
    }

    fn put_file(&mut self, bytes: &[u8]) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(File::create(&self.path)?),
        };
        let hole = bytes.len() == PIECE_BYTES
            && bytes.iter().all(|byte| *byte == 0)
            && file.seek(SeekFrom::Current(bytes.len() as i64)).is_ok();
        if !hole {
            file.write_all(bytes)?;
        }
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// That was all: what ends in a hole gets its length.
    fn finish(self) -> Result<(), Failure> {
        let Some(file) = self.file else {
            return Ok(io::stdout().flush()?);
        };
        let facts = file
            .metadata()
            .map_err(|error| Failure::io(&self.name, &error))?;
        if facts.is_file() && facts.len() < self.len {
            file.set_len(self.len)
                .map_err(|error| Failure::io(&self.name, &error))?;
        }
        Ok(())
    }

    /// What to say when it ends before its end.
    fn incomplete(&self, failure: Failure) -> Failure {
        match &self.file {
            Some(_) => failure.hint(format!("{} is incomplete and not to be used", self.name)),
            None => failure,
        }
    }
}

fn extract_here(
    spec: &ImageSpec,
    args: &Args,
    which: &str,
    progress: Progress,
) -> Result<(), Failure> {
    let mut options = open::reading(None, args.force_share, args.act.references.references());
    options.direct = args.act.cache.direct();
    options.keys = args.act.keys.keys()?;
    let image = SharedImage::open(spec, &options).map_err(target::explain_lock)?;
    let (sender, receiver, handle) = pipe();
    let sink = Sink::new(&args.to);
    let writer = std::thread::spawn(move || drain(receiver, sink));
    let size = Cell::new(0);
    let pipe = handle.clone();
    let watch = (|| (handle.sent_bytes(), size.get()), move || pipe.cancel());
    let read = drive(&image, args.act.host, progress, watch, async |queue| {
        let snapshot = vm_state::find(queue, spec.path(), which).await?;
        size.set(snapshot.vm_state_size);
        vm_state::extract(queue, spec.path(), which, sender).await
    });
    let (sink, written) = writer
        .join()
        .map_err(|_| Failure::new("the thread that writes the state failed"))?;
    // A failed write breaks the pipe, so it is the reason for what went wrong here.
    let done = match (written, read) {
        (Err(failure), _) => Err(failure),
        (Ok(()), Err(failure)) => Err(failure),
        (Ok(()), Ok(())) => return sink.finish(),
    };
    done.map_err(|failure| sink.incomplete(failure))
}

/// Writes what comes out of a pipe.
fn drain(receiver: Receiver, mut sink: Sink) -> (Sink, Result<(), Failure>) {
    while let Ok(Some(piece)) = block_on(receiver.next()) {
        if let Err(failure) = sink.put(&piece) {
            return (sink, Err(failure));
        }
        receiver.give_back(piece);
    }
    (sink, Ok(()))
}

fn extract_there(
    server: &Server,
    args: &Args,
    which: String,
    mut progress: Progress,
) -> Result<(), Failure> {
    let mut client = Client::connect(server)?;
    client.obey_signals()?;
    client.ask(Command::Extract { snapshot: which })?;
    let Answer::Event(Event::State { size }) = client.answer()? else {
        return Err(client.nonsense());
    };
    let mut sink = Sink::new(&args.to);
    let mut buffer = vec![0; PIECE_BYTES];
    let mut done = 0;
    let received = client.receive(&mut buffer, |bytes| {
        done += bytes.len() as u64;
        progress.update(done, size);
        sink.put(bytes)
    });
    let received = received.and_then(|()| client.result(&mut Progress::Quiet));
    progress.end(&received);
    match received {
        Ok(_) => sink.finish(),
        Err(failure) => Err(sink.incomplete(failure)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extracted_zeros_become_holes_and_length_is_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("state");
        let mut sink = Sink::new(&path);
        assert!(!path.exists());
        for piece in [
            vec![1; PIECE_BYTES],
            vec![0; PIECE_BYTES],
            vec![2; 5],
            vec![0; PIECE_BYTES],
        ] {
            sink.put(&piece).expect("room");
        }
        sink.finish().expect("a length");
        let bytes = std::fs::read(&path).expect("there");
        assert_eq!(bytes.len(), 3 * PIECE_BYTES + 5);
        assert_eq!(
            bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>(),
            (1 << 20) + 10
        );
        assert_eq!(bytes[2 * PIECE_BYTES], 2);
    }
}
