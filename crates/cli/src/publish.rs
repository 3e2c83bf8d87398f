//! `gaur publish`: put an image into an object store, as chunks by content and a manifest.

use std::ffi::OsString;
use std::io::Write;
use std::sync::Mutex;

use gaur_engine::{Job, MapExtent, OpenOptions};
use gaur_remote::published::{Builder, CHUNK_BYTES, Counts, Digest, Outcome, Publisher, Stored};
use serde_json::json;

use crate::compare::is_zero;
use crate::failure::Failure;
use crate::file_holes::FileHoles;
use crate::guest::Guest;
use crate::interrupt;
use crate::open::{self, Output, SourceOptions};
use crate::progress::ProgressOptions;
use crate::rate::{Rate, parse_rate};
use crate::shared_image::SharedImage;
use crate::snapshot_choice::SnapshotChoice;
use crate::workers::{self, Shared, hold};

/// Publish an image in an object store, as chunks by content and a manifest
///
/// Chunks that are there already, of this image or of another beside it, are not put again.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// Publish what the top layer has; the rest comes from this published image, beside the new one
    #[arg(long, value_name = "PARENT", conflicts_with = "snapshot")]
    top: Option<String>,
    /// Replace another image of this name
    #[arg(long)]
    force: bool,
    /// Publish this internal snapshot: an id, a name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Open the image even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Chunks in flight, 1 to 64
    #[arg(short = 'm', long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u8).range(1..=64))]
    parallel: u8,
    /// Read at most so many bytes of data a second
    #[arg(short, long, value_name = "RATE", value_parser = parse_rate)]
    rate: Option<u64>,
    #[command(flatten)]
    show: ProgressOptions,
    /// How to tell what was published
    #[arg(long, value_name = "FORMAT", default_value = "human")]
    output: Output,
    /// The image
    #[arg(value_name = "IMAGE")]
    file: OsString,
    /// Where to: s3://BUCKET/PREFIX/NAME.gaur
    #[arg(value_name = "NAME")]
    name: String,
}

/// Publishes.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let about = |text: String| Failure::about(&args.name, text);
    let job = interrupt::job()?;
    let image = open_image(args)?;
    let publisher = Publisher::new(&args.name).map_err(about)?;
    let parent = args.top.as_deref().map(|name| {
        let parent = publisher.parent(name);
        parent.map_err(|text| Failure::about(name, text))
    });
    let builder = Builder::new(image.size_bytes(), parent.transpose()?).map_err(about)?;
    let mut progress = args.show.start(Some(image.size_bytes()));
    let work = Publish {
        holes: Mutex::new((0, holes(&image)?)),
        image,
        top: args.top.is_some(),
        builder: Mutex::new(builder),
        rate: args.rate.map(Rate::new),
        publisher,
    };
    let threads = usize::from(args.parallel);
    let cancel = || work.publisher.cancel();
    let put = workers::run(threads, &job, &mut progress, cancel, |shared| {
        work.work(shared, args)
    });
    let put = put.and_then(|()| work.finish(args, &job));
    progress.end(&put);
    let done = put.map_err(|failure| match failure.hint {
        None => failure.hint("what was put stays; the same command goes on from there"),
        Some(_) => failure,
    })?;
    if !args.show.quiet {
        tell(args, &done, out)?;
    }
    Ok(0)
}

/// What was published.
struct Published {
    digest: Digest,
    outcome: Outcome,
    size_bytes: u64,
    chunks: usize,
    counts: Counts,
}

fn tell(args: &Args, done: &Published, out: &mut dyn Write) -> Result<(), Failure> {
    let Published { digest, counts, .. } = done;
    if args.output == Output::Json {
        let told = json!({
            "name": args.name,
            "digest": format!("blake3:{digest}"),
            "virtual-size": done.size_bytes,
            "chunks": done.chunks,
            "new-chunks": counts.put_chunks,
            "new-bytes": counts.put_bytes,
            "unchanged": done.outcome == Outcome::Unchanged,
        });
        return Ok(writeln!(out, "{told:#}")?);
    }
    let chunks = done.chunks;
    let what = match done.outcome {
        Outcome::Published => format!(
            "{chunks} chunks, {} of them new, {} bytes",
            counts.put_chunks, counts.put_bytes
        ),
        Outcome::Unchanged => format!("{chunks} chunks, all there before"),
    };
    Ok(writeln!(out, "blake3:{digest}: {what}")?)
}

fn open_image(args: &Args) -> Result<SharedImage, Failure> {
    let spec = args.source.spec(&args.file)?;
    let mut options = open::reading(None, args.force_share, args.source.references());
    options.keys = args.source.keys()?;
    let choice = args.snapshot.as_deref().map(SnapshotChoice::parse);
    let which = choice
        .transpose()?
        .map(|choice| choice.resolve(&spec, &options));
    let options = OpenOptions {
        snapshot: which.transpose()?,
        ..options
    };
    let image = SharedImage::open(&spec, &options)?;
    if args.top.is_some() && image.image().layers().get(1).is_none() {
        let failure = Failure::about(
            spec.path(),
            "it has no backing file, so there is no top layer",
        );
        return Err(failure.hint("without --top all of it is published"));
    }
    Ok(image)
}

fn holes(image: &SharedImage) -> Result<FileHoles, Failure> {
    let holes = FileHoles::new(image.files());
    holes.map_err(|errno| image.failed("read the allocation", 0, errno))
}

/// What the threads share.
struct Publish {
    image: SharedImage,
    /// What lower layers have is left out.
    top: bool,
    /// The next chunk.
    holes: Mutex<(u64, FileHoles)>,
    builder: Mutex<Builder>,
    rate: Option<Rate>,
    publisher: Publisher,
}

/// What is known of a part of the disk before it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The parent has it.
    Below,
    Zero,
    Data,
}

impl Publish {
    fn kind(&self, extent: &MapExtent) -> Kind {
        match extent {
            MapExtent { depth, .. } if self.top && *depth > 0 => Kind::Below,
            MapExtent { zero: true, .. } | MapExtent { present: false, .. } => Kind::Zero,
            _ => Kind::Data,
        }
    }

    fn map(&self, guest: &Guest, holes: &mut FileHoles, at: u64) -> Result<MapExtent, Failure> {
        let extent = guest.map(at, self.image.size_bytes() - at);
        let refined = extent.and_then(|mut extent| {
            holes.refine(guest.image(), &mut extent)?;
            Ok(extent)
        });
        refined.map_err(|errno| self.image.failed("read the allocation", at, errno))
    }

    /// What a chunk is: of one kind, or data.
    fn chunk_kind(
        &self,
        guest: &Guest,
        holes: &mut FileHoles,
        chunk: u64,
    ) -> Result<Kind, Failure> {
        let mut at = chunk * CHUNK_BYTES;
        let end = (at + CHUNK_BYTES).min(self.image.size_bytes());
        let mut all = None;
        while at < end {
            let extent = self.map(guest, holes, at)?;
            let kind = self.kind(&extent);
            if kind == Kind::Data || all.is_some_and(|all| all != kind) {
                return Ok(Kind::Data);
            }
            all = Some(kind);
            at += extent.len_bytes;
        }
        Ok(all.unwrap_or(Kind::Zero))
    }

    /// The next chunk with data, after those that need not be read.
    fn next(&self, guest: &Guest, shared: &Shared) -> Result<Option<u64>, Failure> {
        let size = self.image.size_bytes();
        let mut state = hold(&self.holes);
        let (next, holes) = &mut *state;
        while *next * CHUNK_BYTES < size && !shared.has_failed() {
            let (chunk, at) = (*next, *next * CHUNK_BYTES);
            let extent = self.map(guest, holes, at)?;
            let run = match at + extent.len_bytes >= size {
                true => size.div_ceil(CHUNK_BYTES) - chunk,
                false => extent.len_bytes / CHUNK_BYTES,
            };
            let (kind, count) = match self.kind(&extent) {
                kind @ (Kind::Below | Kind::Zero) if run > 0 => (kind, run),
                Kind::Data => (Kind::Data, 1),
                Kind::Below | Kind::Zero => (self.chunk_kind(guest, holes, chunk)?, 1),
            };
            *next += count;
            match kind {
                Kind::Data => return Ok(Some(chunk)),
                Kind::Zero => self.note(chunk, count, Stored::Zero)?,
                Kind::Below => {}
            }
            shared.add(count * CHUNK_BYTES);
        }
        Ok(None)
    }

    fn note(&self, chunk: u64, count: u64, stored: Stored) -> Result<(), Failure> {
        let noted = hold(&self.builder).add(chunk, count, stored);
        noted.map_err(Failure::new)
    }

    /// Puts chunks until there are no more.
    fn work(&self, shared: &Shared, args: &Args) -> Result<(), Failure> {
        let guest = self.image.guest();
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        while let Some(chunk) = self.next(&guest, shared)? {
            if let Some(rate) = &self.rate {
                rate.wait(CHUNK_BYTES, || shared.has_failed());
            }
            let at = chunk * CHUNK_BYTES;
            let len = (self.image.size_bytes() - at).min(CHUNK_BYTES) as usize;
            let (bytes, rest) = buffer.split_at_mut(len);
            let read = guest.read(at, bytes);
            read.map_err(|errno| self.image.failed("read", at, errno))?;
            // The last chunk is filled up.
            rest.fill(0);
            let stored = match is_zero(&buffer) {
                true => Stored::Zero,
                false => {
                    let kept = self.publisher.keep(&buffer);
                    kept.map_err(|text| Failure::about(&args.name, text))?
                }
            };
            self.note(chunk, 1, stored)?;
            shared.add(CHUNK_BYTES);
        }
        Ok(())
    }

    fn finish(&self, args: &Args, job: &Job) -> Result<Published, Failure> {
        interrupt::check(job)?;
        let none = Builder::new(0, None).map_err(Failure::new)?;
        let builder = std::mem::replace(&mut *hold(&self.builder), none);
        let chunks = builder.stored_chunks();
        let (digest, outcome) = self
            .publisher
            .finish(builder, args.force)
            .map_err(|text| Failure::about(&args.name, text))?;
        Ok(Published {
            digest,
            outcome,
            size_bytes: self.image.size_bytes(),
            chunks,
            counts: self.publisher.counts(),
        })
    }
}
