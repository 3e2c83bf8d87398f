//! Runs the writers on files of this machine.

use std::time::Instant;

use gaur_block::{Access, File, Host};
use gaur_engine::OpenOptions;
use gaur_format::plan::{CreateOptions, Preallocation};
use gaur_reactor::{Config, CreateFile, OpenFile, Reactor, ReactorHost};

use super::{Guest, Writer, load, save};
use crate::engine::Failure;

/// How long a writer took, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// To save, until everything was durable.
    pub save: f64,
    /// To load, if it has a reader.
    pub load: Option<f64>,
}

/// Options of the image that a writer gets: its disk has room for the whole stream. For those that write to
/// the disk its clusters have their places, so that a request is one request to the file; otherwise
/// they would pay for clusters that are taken one request at a time.
pub fn image_options(writer: Writer, bytes: u64) -> CreateOptions {
    CreateOptions {
        size_bytes: (bytes + (64 << 20)).next_multiple_of(1 << 20),
        preallocation: match writer {
            Writer::Vectors64 | Writer::Vectors1024 | Writer::TwoBuffers => Preallocation::Metadata,
            Writer::Ours | Writer::Bare => Preallocation::Off,
        },
        ..CreateOptions::default()
    }
}

/// Saves `bytes` to a new file called `path` and loads it again; removes the file.
pub fn on_file(
    writer: Writer,
    path: &str,
    direct: bool,
    guest: &Guest,
    bytes: u64,
) -> Result<Times, Failure> {
    let _ = std::fs::remove_file(path);
    drop(OpenFile::create(path, CreateFile::default()).map_err(|error| error.to_string())?);
    let reactor = Reactor::new(&Config::default())?;
    let result = reactor.block_on(measure(writer, path, direct, guest, bytes));
    std::fs::remove_file(path)?;
    result
}

async fn measure(
    writer: Writer,
    path: &str,
    direct: bool,
    guest: &Guest,
    bytes: u64,
) -> Result<Times, Failure> {
    let access = Access {
        write: true,
        direct,
        lock: false,
        force_share: false,
    };
    let file = ReactorHost.open(path.as_ref(), access).await;
    let file = file.map_err(|error| error.to_string())?;
    gaur_engine::create(
        &file,
        &image_options(writer, bytes),
        &gaur_engine::Job::default(),
    )
    .await?;
    if writer == Writer::Bare {
        file.set_len(0).await?;
    }
    let options = OpenOptions {
        format: (writer == Writer::Bare).then_some(gaur_engine::Format::Raw),
        direct,
        ..OpenOptions::default()
    };
    let opened = gaur_engine::open(&ReactorHost, path, &options).await?;
    let queue = opened.image.queue(opened.files);
    let started = Instant::now();
    save(writer, &queue, &file, guest, bytes).await?;
    let saved = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let loaded = load(writer, &queue, &file, bytes).await?;
    let loaded = loaded.map(|()| started.elapsed().as_secs_f64());
    queue.close().await?;
    Ok(Times {
        save: saved,
        load: loaded,
    })
}
