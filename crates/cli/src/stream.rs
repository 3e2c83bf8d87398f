//! `gaur stream`: copy into an image what its backing files hold.

use std::ffi::OsString;
use std::io::Write;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gaur_engine::{Job, OpenOptions, Shares};
use gaur_server::stream_facts::StreamFacts;

use crate::control::client::Client;
use crate::control::protocol::Command;
use crate::drive::drive_together;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::open::{CacheMode, SourceOptions};
use crate::progress::ProgressOptions;
use crate::rate::{Pace, parse_rate};
use crate::shared_image::SharedImage;
use crate::size::human;
use crate::snapshot::Server;

/// Copy into an image what its backing files hold
///
/// Afterwards the image shows the same disk without them. What it holds already is skipped: after ctrl-C, or when the
/// process was killed, another run goes on where it was.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceOptions,
    /// Make the image stand alone at the end: it no longer names its backing file
    #[arg(long, conflicts_with = "control")]
    unlink: bool,
    /// Use of the host's cache
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,
    /// Copy at most so many bytes a second
    #[arg(short, long, value_name = "RATE", value_parser = parse_rate)]
    rate: Option<u64>,
    #[command(flatten)]
    show: ProgressOptions,
    /// The image is one that 'gaur serve --control SOCKET' has open, and is used meanwhile; no FILE is given then
    #[arg(long, value_name = "SOCKET",
          conflicts_with_all = ["format", "image_opts", "allow", "allow_any", "untrusted", "cache"])]
    control: Option<PathBuf>,
    /// Name of the export, if the server has several
    #[arg(short = 'x', long, value_name = "NAME", requires = "control")]
    export_name: Option<String>,
    /// Seconds the server may be silent before it counts as hung (30)
    #[arg(long, value_name = "SECONDS", requires = "control",
          value_parser = clap::value_parser!(u32).range(1..))]
    timeout: Option<u32>,
    /// The image
    #[arg(required_unless_present = "control", conflicts_with = "control")]
    file: Option<OsString>,
}

/// Streams.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let copied_bytes = match &args.file {
        Some(file) => stream(args, &args.source.spec(file)?)?,
        None => stream_served(args)?,
    };
    if !args.show.quiet {
        let end = match args.unlink {
            true => "; the image stands alone",
            false => "",
        };
        writeln!(out, "{} copied{end}.", human(copied_bytes))?;
    }
    Ok(0)
}

/// Has a server do it with the image that it serves.
fn stream_served(args: &Args) -> Result<u64, Failure> {
    let socket = args.control.clone().unwrap_or_default();
    let server = Server::new(socket, args.export_name.clone(), args.timeout);
    let mut progress = args.show.start(None);
    let rate = args.rate.and_then(NonZeroU64::new);
    let command = Command::Stream { rate };
    let facts: StreamFacts = Client::connect(&server)?.call(command, &mut progress)?;
    Ok(facts.copied_bytes)
}

fn stream(args: &Args, spec: &ImageSpec) -> Result<u64, Failure> {
    let options = OpenOptions {
        direct: args.cache.direct(),
        keys: args.source.keys()?,
        ..OpenOptions::new(args.source.references())
    };
    let image = SharedImage::open(spec, &options)?;
    let header = image.image().layers().top().header();
    let lowest = image.image().layers().iter().last();
    let lowest = lowest.and_then(|layer| layer.header());
    if args.unlink && lowest.is_some_and(|header| header.backing_file().is_some()) {
        let message = "the options leave a backing file out, whose data would be lost";
        let failure = Failure::about(spec.path(), message);
        return Err(failure.hint("leave backing=null or --unlink out"));
    }
    if args.unlink && header.is_some_and(|header| header.nb_snapshots > 0) {
        let message = "its internal snapshots show what its backing file holds";
        let failure = Failure::about(spec.path(), message);
        return Err(failure.hint("delete them first, or leave --unlink out"));
    }
    let job = Arc::new(Job::default());
    let _pace = args.rate.map(|rate| Pace::start(&job, rate));
    let progress = args.show.start(None);
    let failed = |error| Failure::image(spec.path(), &error);
    let (shares, copied) = (Shares::default(), AtomicU64::new(0));
    let streamed = drive_together(
        &image,
        progress,
        &job,
        async |queue| {
            let bytes = queue.stream(&shares, &job).await.map_err(failed)?;
            copied.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        },
        async |queue| match args.unlink {
            true => queue.set_backing(None, None).await.map_err(failed),
            false => Ok(()),
        },
    );
    streamed.and(image.close())?;
    Ok(copied.into_inner())
}
