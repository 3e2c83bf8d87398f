//! Runs the writers on files of this machine.

use std::time::Instant;

use gaur_block::{Access, File, Host};
use gaur_engine::{OpenOptions, References};
use gaur_format::plan::{CreateOptions, Preallocation};
use gaur_reactor::{Config, CreateFile, OpenFile, Reactor, ReactorHost};

use super::{Guest, Writer};
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
fn image_options(writer: Writer, bytes: u64) -> CreateOptions {
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
    let start = Instant::now();
    let clock = || start.elapsed().as_secs_f64();
    let file = (&ReactorHost, path);
    let result = reactor.block_on(measure(writer, file, direct, (guest, bytes), || {}, clock));
    std::fs::remove_file(path)?;
    result
}

/// Saves to a file and loads it again, by the seconds of this clock; `ready` is called when the image is there.
pub(super) async fn measure<H: Host>(
    writer: Writer,
    (host, path): (&H, &str),
    direct: bool,
    (guest, bytes): (&Guest, u64),
    ready: impl FnOnce(),
    clock: impl Fn() -> f64,
) -> Result<Times, Failure> {
    let access = Access {
        write: true,
        direct,
        lock: false,
        force_share: false,
    };
    let file = host.open(path.as_ref(), access).await;
    let file = file.map_err(|error| error.to_string())?;
    let job = gaur_engine::Job::default();
    gaur_engine::create(&file, &image_options(writer, bytes), &job).await?;
    if writer == Writer::Bare {
        file.set_len(0).await?;
    }
    let options = OpenOptions {
        format: (writer == Writer::Bare).then_some(gaur_engine::Format::Raw),
        direct,
        ..OpenOptions::new(References::Any)
    };
    let opened = gaur_engine::open(host, path, &options).await?;
    let queue = opened.image.queue(opened.files);
    ready();
    let started = clock();
    super::save(writer, &queue, &file, guest, bytes).await?;
    let saved = clock();
    let loaded = super::load(writer, &queue, &file, bytes).await?;
    let loaded = loaded.map(|()| clock() - saved);
    queue.close().await?;
    Ok(Times {
        save: saved - started,
        load: loaded,
    })
}
