//! `gaur serve`: images as network block devices.
//!
//! An image is opened once, which takes its locks; every serving thread makes its own queue on the
//! same open files. The last thing done to an image is to close it, after all queues are gone.

use std::io::Write;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gaur_engine::{AllocationPolicy, Format, OpenOptions};
use gaur_export::nbd::{self, Export, Listen, Listener, Outcome, Place, Stop};
use gaur_reactor::{BlockingFile, ReactorFile, Signal, Signals, block_on};

use crate::cache_cleaner::CacheCleaner;
use crate::cached_device::{CachedDevice, Policy};
use crate::control::server::{ControlServer, Controlled};
use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::image_spec::{Aio, ImageSpec};
use crate::new_image::{self, NewImage};
use crate::notice::say;
use crate::open::{CacheMode, allocation_parser, format_parser};
use crate::options::OptionList;
use crate::shared_image::SharedImage;
use crate::size::{human, parse_size};
use crate::{background, control, socket_path, temporary};

/// Serve images as network block devices (NBD)
///
/// Without options: on a Unix socket that only this user can reach, until the first client leaves.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The images: PATH, or NAME=PATH to call the export NAME
    #[arg(required = true, value_name = "[NAME=]FILE")]
    images: Vec<String>,
    /// Format of the images (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    format: Option<Format>,
    /// The images are lists of options, driver=qcow2,file.filename=PATH,..
    #[arg(long, conflicts_with_all = ["format", "create"])]
    image_opts: bool,
    /// Refuse writes
    #[arg(short, long)]
    read_only: bool,
    /// Serve the disk as it was when this internal snapshot (an id or a name) was made; it cannot be
    /// written to, unless --temporary is given
    #[arg(long, value_name = "NAME", conflicts_with = "create")]
    snapshot: Option<String>,
    /// What clients write is kept beside the image, in $TMPDIR, and forgotten at the end
    #[arg(long, conflicts_with_all = ["read_only", "create"])]
    temporary: bool,
    /// A Unix socket for commands about the images while they are served ('gaur snapshot --control')
    #[arg(long, value_name = "PATH", conflicts_with = "temporary")]
    control: Option<PathBuf>,
    /// Make the image first, for the guest of this size; it must not be there yet
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "read_only")]
    create: Option<u64>,
    /// Options of the format of the image to make; see 'gaur create -o help'
    #[arg(short, long, value_name = "KEY=VALUE,..", requires = "create")]
    options: Vec<String>,
    /// Path of the Unix socket
    #[arg(short = 'k', long, value_name = "PATH", conflicts_with_all = ["port", "bind"])]
    socket: Option<PathBuf>,
    /// TCP port (10809 with only -b)
    #[arg(short, long)]
    port: Option<u16>,
    /// Address to bind to (0.0.0.0 with only -p)
    #[arg(short, long, value_name = "ADDRESS")]
    bind: Option<String>,
    /// Name of the export (empty for one image, otherwise the file's name without extension)
    #[arg(short = 'x', long, value_name = "NAME")]
    export_name: Option<String>,
    /// Description of the export, for people
    #[arg(short = 'D', long, value_name = "TEXT")]
    description: Option<String>,
    /// Clients served at once; 0 for any number
    #[arg(short = 'e', long, value_name = "N", default_value_t = 1)]
    shared: u32,
    /// Stay when the last client has left
    #[arg(short = 't', long)]
    persistent: bool,
    /// Use of the host's cache
    #[arg(long, value_name = "MODE", value_enum, default_value = "writeback")]
    cache: CacheMode,
    /// What a client's discard does
    #[arg(long, value_name = "MODE", value_enum, default_value = "unmap")]
    discard: Discard,
    /// What to do with the host's space, whatever the image says
    #[arg(long, value_name = "POLICY", value_parser = allocation_parser())]
    allocation: Option<AllocationPolicy>,
    /// Serving threads (one a processor by default; no more than clients)
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroU16>,
    /// Seconds a client may take to choose an export
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    handshake_limit: u32,
    /// Go on in the background once the server is ready
    #[arg(long)]
    fork: bool,
    /// File to write the server's process id to
    #[arg(long, value_name = "PATH")]
    pid_file: Option<PathBuf>,
    /// Say who connects and leaves
    #[arg(short, long)]
    verbose: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// How files are reached
    #[arg(long, value_enum, default_value = "auto", hide = true)]
    host: HostKind,
    /// This process is the one in the background
    #[arg(long, hide = true)]
    forked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Discard {
    /// Give the space back to the host
    Unmap,
    /// Nothing
    Ignore,
}

/// Port and address of a TCP server of which only the other is told, as qemu-nbd has them.
const PORT_DEFAULT: u16 = 10809;
const BIND_DEFAULT: &str = "0.0.0.0";

/// Signals that end the server in order. A terminal that goes away sends the last, unless the server
/// was started so that it stays (`nohup`).
fn signals() -> Vec<Signal> {
    const HANGUP_BIT: u64 = 1;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let mut signals = vec![Signal::Interrupt, Signal::Terminate];
    if ignored.unwrap_or(0) & HANGUP_BIT == 0 {
        signals.push(Signal::Hangup);
    }
    signals
}

/// An open image and how it is exported.
struct Served {
    export: Export,
    image: Arc<SharedImage>,
    policy: Policy,
    clean_interval: Option<Duration>,
    /// What was written to it is not kept.
    temporary: bool,
}

/// Serves until the end.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if args.fork && !args.forked {
        return background::run(out);
    }
    let names = exports(args)?;
    let asks_for_ring = |(_, spec): &(String, ImageSpec)| spec.aio() == Some(Aio::Uring);
    let host = args
        .host
        .required_if(names.iter().any(asks_for_ring))
        .choose()?;
    if let Some(size) = args.create {
        create(args, &names, size)?;
    }
    let served = names
        .into_iter()
        .map(|(name, spec)| open_image(args, name, &spec))
        .collect::<Result<Vec<Served>, Failure>>()?;
    // Taken over before a client can come, so that no signal finds the images unflushed.
    let signals = Signals::install(&signals())
        .map_err(|errno| Failure::new(format!("cannot take over signals: {errno}")))?;
    let listener =
        Listener::bind(&listen(args, &served)?).map_err(|error| Failure::new(error.to_string()))?;
    let control = args
        .control
        .as_deref()
        .map(control::server::bind)
        .transpose()?;
    if let Some(path) = &args.pid_file {
        std::fs::write(path, format!("{}\n", std::process::id()))
            .map_err(|error| Failure::io(&path.display().to_string(), &error))?;
    }
    if !args.quiet {
        announce(args, &listener, &served, out)?;
    }
    if args.forked {
        background::ready(out)?;
    }
    let stops = Stops::default();
    stop_on_signals(signals, stops.clone(), args);
    let outcome = serve(args, (listener, control), served, &stops, host);
    if let Some(path) = &args.pid_file {
        // Somebody may have removed it already; nothing depends on it any more.
        let _ = std::fs::remove_file(path);
    }
    outcome
}

/// Names and images of the exports.
fn exports(args: &Args) -> Result<Vec<(String, ImageSpec)>, Failure> {
    let single = args.images.len() == 1;
    if args.snapshot.is_some() && !single {
        let failure = Failure::new("--snapshot is one of one image, but there are several images");
        return Err(failure.hint("serve each with a command of its own"));
    }
    if args.export_name.is_some() && !single {
        let failure = Failure::new("-x names one export, but there are several images");
        return Err(failure.hint("write NAME=FILE for each"));
    }
    let made_as = |file: &str| args.create.map(|_| new_image::format_by_name(file));
    let export = |text: &String| {
        let named = match args.image_opts {
            true => None, // Every option has an equals sign.
            false => split_name(text),
        };
        let (name, given) = match named {
            Some((name, file)) => (Some(name.to_owned()), file),
            None => (None, text.as_str()),
        };
        let format = args.format.or(made_as(given));
        let spec = ImageSpec::parse(given, args.image_opts, format)?;
        let name = match name {
            Some(name) => name,
            None if single => String::new(),
            None => stem(spec.path()),
        };
        Ok((name, spec))
    };
    let exports: Result<Vec<(String, ImageSpec)>, Failure> =
        args.images.iter().map(export).collect();
    let mut exports = exports?;
    if let (Some(name), Some(first)) = (&args.export_name, exports.first_mut()) {
        first.0.clone_from(name);
    }
    Ok(exports)
}

/// `NAME=FILE`, unless the whole is an image.
fn split_name(text: &str) -> Option<(&str, &str)> {
    let (name, file) = text.split_once('=')?;
    let is_name = !name.is_empty() && !name.contains('/') && !file.is_empty();
    let is_file = text.starts_with("json:") || Path::new(text).exists();
    (is_name && !is_file).then_some((name, file))
}

fn stem(file: &str) -> String {
    let stem = Path::new(file).file_stem();
    stem.map_or_else(
        || "disk".to_owned(),
        |stem| stem.to_string_lossy().into_owned(),
    )
}

fn create(args: &Args, names: &[(String, ImageSpec)], size: u64) -> Result<(), Failure> {
    let [(_, spec)] = names else {
        return Err(Failure::new(
            "--create makes one image, but several are named",
        ));
    };
    let file = spec.given();
    let format = spec.format().unwrap_or(Format::Raw);
    let options = OptionList::parse(&args.options)?;
    let image = NewImage::new(file, format, options, Some(size), true)?;
    if Path::new(file).exists() {
        let failure = Failure::about(file, "exists already, and --create overwrites nothing");
        return Err(failure.hint("leave --create out to serve it"));
    }
    image.make(true)
}

fn open_image(args: &Args, name: String, spec: &ImageSpec) -> Result<Served, Failure> {
    let kept = args.snapshot.is_some() && !args.temporary;
    let read_only = args.read_only || kept || (spec.is_read_only() && !args.temporary);
    let options = OpenOptions {
        read_only,
        direct: args.cache.direct(),
        discard: args.discard == Discard::Unmap,
        allocation: args.allocation,
        snapshot: args.snapshot.clone(),
        ..OpenOptions::default()
    };
    let image = match args.temporary {
        true => temporary::open(spec, &options)?,
        false => SharedImage::open(spec, &options)?,
    };
    let top = image.image().layers().first().map(|layer| layer.format());
    if top == Some(Format::Raw) && spec.format().is_none() && !read_only {
        let message = "looks like a raw image, but a client could write a qcow2 header into it";
        let failure = Failure::about(spec.path(), message);
        return Err(failure.hint("say -f raw if it is one, or -r to only read it"));
    }
    let ignore_flush = args.cache == CacheMode::Unsafe || spec.ignores_flushes();
    Ok(Served {
        export: Export {
            name,
            description: args.description.clone().unwrap_or_default(),
            read_only,
        },
        image: Arc::new(image),
        policy: Policy {
            writethrough: args.cache.writethrough(),
            // Nothing of a temporary overlay outlives the process.
            ignore_flush: ignore_flush || args.temporary,
            ignore_discard: spec
                .ignores_discards()
                .unwrap_or(args.discard == Discard::Ignore),
        },
        clean_interval: spec.clean_interval(),
        temporary: args.temporary,
    })
}

fn listen(args: &Args, served: &[Served]) -> Result<Listen, Failure> {
    if let Some(path) = &args.socket {
        return Ok(Listen::Unix(path.clone()));
    }
    if args.port.is_some() || args.bind.is_some() {
        return Ok(Listen::Tcp {
            bind: args.bind.clone().unwrap_or_else(|| BIND_DEFAULT.to_owned()),
            port: args.port.unwrap_or(PORT_DEFAULT),
        });
    }
    let activated = std::env::var("LISTEN_PID").ok();
    if activated.as_deref() == Some(&std::process::id().to_string()) {
        return Ok(Listen::Inherited);
    }
    let first = served.first().map(|served| stem(served.image.name()));
    socket_path::choose(&first.unwrap_or_default()).map(Listen::Unix)
}

/// Prints where the exports are: the URI of each on a line of its own, then what to do with it.
fn announce(
    args: &Args,
    listener: &Listener,
    served: &[Served],
    out: &mut dyn Write,
) -> Result<(), Failure> {
    for one in served {
        writeln!(out, "{}", listener.uri(&one.export.name))?;
    }
    if let Some(first) = served.first() {
        let uri = listener.uri(&first.export.name);
        let size = human(first.image.image().size_bytes());
        writeln!(
            out,
            "# {}, {size}; connect with one of these:",
            first.image.name()
        )?;
        writeln!(out, "nbdinfo '{uri}'")?;
        let read_only = first.export.read_only;
        let read_only = if read_only { ",readonly=on" } else { "" };
        writeln!(
            out,
            "qemu-system-x86_64 -m 1G -drive 'file={uri},format=raw,if=virtio{read_only}'"
        )?;
    }
    if let Some(path) = &args.control {
        let path = path.display();
        writeln!(out, "# commands: gaur snapshot list --control '{path}'")?;
    }
    out.flush()?;
    if args.port.is_some() && args.bind.is_none() {
        say("every host that reaches this machine can connect (-b 127.0.0.1 keeps it local)");
    }
    Ok(())
}

/// What a signal stops.
#[derive(Clone, Default)]
struct Stops {
    clients: Stop,
    /// Commands of the control socket are given up.
    commands: gaur_reactor::Stop,
}

/// The first signal drains, the second ends the server at once.
fn stop_on_signals(signals: Signals, stops: Stops, args: &Args) {
    let quiet = args.quiet || args.forked;
    std::thread::spawn(move || {
        let mut count = 0;
        loop {
            let signal = block_on(signals.next());
            count += 1;
            if count == 1 && !quiet && signal == Signal::Interrupt {
                say("finishing what is under way (again to stop at once)");
            }
            stops.commands.stop();
            stops.clients.drain();
        }
    });
}

/// Exit code of a server that was stopped before its images were flushed and closed.
const EXIT_FORCED: u8 = 1;

fn nbd_options(args: &Args, served: &[Served]) -> nbd::Options {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options =
        nbd::Options::new(served.iter().map(|served| served.export.clone()).collect());
    options.default_export = (served.len() == 1).then_some(0);
    options.shared = args.shared;
    options.persistent = args.persistent;
    options.threads = args
        .threads
        .map_or(processors, |count| usize::from(count.get()));
    options.handshake_timeout = Duration::from_secs(u64::from(args.handshake_limit));
    if args.verbose {
        options.log = Some(Arc::new(|line: &str| say(line)));
    }
    options
}

fn start_control(
    socket: gaur_reactor::Listener,
    served: &[Served],
    stops: &Stops,
    host: HostKind,
) -> Result<ControlServer, Failure> {
    let controlled = served.iter().map(|served| Controlled {
        export: served.export.name.clone(),
        image: Arc::clone(&served.image),
    });
    ControlServer::start(socket, controlled.collect(), host, stops.commands.clone())
}

fn serve(
    args: &Args,
    (listener, control): (Listener, Option<gaur_reactor::Listener>),
    served: Vec<Served>,
    stops: &Stops,
    host: HostKind,
) -> Result<u8, Failure> {
    let options = nbd_options(args, &served);
    let control = control.map(|socket| start_control(socket, &served, stops, host));
    let control = control.transpose()?;
    let cleaned = served.iter().map(|served| {
        let image = Arc::clone(served.image.image());
        (image, served.clean_interval)
    });
    let cleaner = CacheCleaner::start(cleaned.collect());
    let served = Arc::new(served);
    let shared = Arc::clone(&served);
    let outcome = match host {
        HostKind::Blocking => {
            nbd::serve_blocking(listener, options, &stops.clients, move |place: Place| {
                let served = &shared[place.export];
                let queue = served.image.queue(BlockingFile::new);
                Ok(CachedDevice::new(queue, served.policy))
            })
        }
        _ => nbd::serve_uring(listener, options, &stops.clients, move |place: Place| {
            let served = &shared[place.export];
            let queue = served.image.queue(ReactorFile::new);
            Ok(CachedDevice::new(queue, served.policy))
        }),
    };
    drop(cleaner);
    let outcome = outcome.map_err(|error| Failure::new(error.to_string()));
    if matches!(outcome, Ok(Outcome::Forced)) {
        say("stopped at once, what clients had not flushed may be lost");
        return Ok(EXIT_FORCED);
    }
    if let Some(control) = control {
        control.finish();
    }
    // Every image is closed, even when serving or another one failed; the first failure is told.
    let closed = served
        .iter()
        .filter(|served| !served.temporary)
        .map(|served| served.image.close())
        .fold(Ok(()), Result::and);
    outcome.and(closed)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn names(words: &[&str]) -> Result<Vec<(String, String)>, Failure> {
        let line = Line::try_parse_from([&["serve"], words].concat());
        let exports = exports(&line.expect("a valid command line").args)?;
        let paths = exports
            .into_iter()
            .map(|(name, spec)| (name, spec.path().to_owned()));
        Ok(paths.collect())
    }

    fn pair(name: &str, file: &str) -> (String, String) {
        (name.to_owned(), file.to_owned())
    }

    #[test]
    fn one_image_has_the_empty_name_and_several_are_called_after_their_files() {
        assert_eq!(
            names(&["d/a.qcow2"]).expect("names"),
            [pair("", "d/a.qcow2")]
        );
        assert_eq!(
            names(&["d/a.qcow2", "b", "x=c.raw"]).expect("names"),
            [pair("a", "d/a.qcow2"), pair("b", "b"), pair("x", "c.raw")]
        );
    }

    #[test]
    fn a_name_given_to_several_images_is_refused() {
        assert_eq!(
            names(&["-x", "n", "a.qcow2"]).expect("names"),
            [pair("n", "a.qcow2")]
        );
        assert!(names(&["-x", "n", "a.qcow2", "b.qcow2"]).is_err());
    }

    #[test]
    fn an_equals_sign_in_a_directory_is_no_name() {
        assert_eq!(names(&["./a=b/c"]).expect("names"), [pair("", "./a=b/c")]);
        assert_eq!(names(&["a=b/c"]).expect("names"), [pair("a", "b/c")]);
        assert_eq!(names(&["=b"]).expect("names"), [pair("", "=b")]);
    }

    #[test]
    fn an_equals_sign_among_options_is_no_name() {
        let options = "driver=qcow2,file.filename=d/a.qcow2";
        assert_eq!(
            names(&["--image-opts", options]).expect("names"),
            [pair("", "d/a.qcow2")]
        );
        assert_eq!(
            names(&["--image-opts", options, "driver=raw,file.filename=b.raw"]).expect("names"),
            [pair("a", "d/a.qcow2"), pair("b", "b.raw")]
        );
        let json = r#"json:{"driver":"raw","file.filename":"c=d"}"#;
        assert_eq!(names(&[json]).expect("names"), [pair("", "c=d")]);
        assert_eq!(
            names(&[&format!("n={json}")]).expect("names"),
            [pair("n", "c=d")]
        );
    }
}
