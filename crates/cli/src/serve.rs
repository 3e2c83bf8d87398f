//! `gaur serve`: images as network block devices, and as what the other front ends make of them.
//!
//! An image is opened once, which takes its locks; every serving thread makes its own queue on the
//! same open files. The last thing done to an image is to close it, after all queues are gone.

use std::ffi::OsString;
use std::io::Write;
use std::net::ToSocketAddrs;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gaur_engine::{Format, Job};
use gaur_export::Log;
use gaur_export::nbd::{self, Listen};

use crate::background::{self, KeepStderr};
use crate::exporter::{ImageOptions, Limits, NewExport};
use crate::failure::Failure;
use crate::front_args::FrontArgs;
use crate::fronts::FrontConfig;
use crate::host_kind::HostKind;
use crate::image_spec::{Aio, ImageSpec};
use crate::new_image::{NewImage, layout};
use crate::notice::say;
use crate::options::OptionList;
use crate::pin::Prospect;
use crate::pin_args::PinArgs;
use crate::size::parse_size;
use crate::socket_path;
use gaur_server::export_name::stem;
use gaur_server::tls_objects;
use gaur_tls::{Authorization, ServerCredentials};

mod announce;
mod names;
mod process;

pub use names::named_file;
pub use process::Plan;

/// Serve images as network block devices (NBD), or in other ways
///
/// Without options: on a Unix socket that only this user can reach, until the first client leaves.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The images: PATH, or NAME=PATH to call the export NAME
    #[arg(required_unless_present_any = ["control", "export_json"], value_name = "[NAME=]FILE")]
    images: Vec<OsString>,
    #[command(flatten)]
    image: ImageOptions,
    /// A Unix socket for commands about exports and images while they are served ('gaur export',
    /// 'gaur snapshot --control')
    #[arg(long, value_name = "PATH", conflicts_with = "temporary")]
    control: Option<PathBuf>,
    /// Make the image first, for the guest of this size; it must not be there yet
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          conflicts_with_all = ["read_only", "snapshot", "temporary", "image_opts"])]
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
    /// Encrypt connections (TLS), with the certificates and keys in this directory: server-cert.pem, server-key.pem,
    /// ca-cert.pem, ca-crl.pem. Clients need a certificate of an authority in ca-cert.pem
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// Clients need no certificate
    #[arg(long, requires = "tls_dir")]
    tls_any_client: bool,
    /// Only clients whose certificate has this name, O=Home,CN=laptop for example (any number of times)
    #[arg(
        long,
        value_name = "NAME",
        requires = "tls_dir",
        conflicts_with = "tls_any_client"
    )]
    tls_client: Vec<String>,
    /// Serve other machines without encryption
    #[arg(long, conflicts_with = "tls_dir")]
    insecure: bool,
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
    /// Serving threads (one a processor by default; no more than clients)
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroU16>,
    /// Seconds a client may take to choose an export
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    handshake_limit: u32,
    /// Seconds clients have, when the server or an export ends, to take what they have asked for; then
    /// they are cut off
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    drain_limit: u32,
    /// Seconds the images have after that to be flushed and closed; then the server ends without
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    close_limit: u32,
    /// Most memory for what NBD clients read and write at this moment, all together; 256 KiB for each
    /// come on top
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "256M")]
    request_memory: u64,
    /// Go on in the background once the server is ready
    #[arg(long)]
    fork: bool,
    /// File to write the server's process id to
    #[arg(long, value_name = "PATH")]
    pid_file: Option<PathBuf>,
    #[command(flatten)]
    pin: PinArgs,
    /// Say who connects and leaves
    #[arg(short, long)]
    verbose: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// How files are reached
    #[arg(long, default_value = "auto", hide = true)]
    host: HostKind,
    /// This process is the one in the background
    #[arg(long, hide = true)]
    forked: bool,
    /// An export as the control socket's export-add has it, in place of images
    #[arg(long, hide = true, conflicts_with = "images")]
    export_json: Option<String>,
    /// It takes over a device whose server is gone
    #[arg(long, hide = true, requires = "export_json")]
    recover: bool,
    #[command(flatten)]
    fronts: FrontArgs,
}

/// Port and address of a TCP server of which only the other is told, as qemu-nbd has them.
const PORT_DEFAULT: u16 = 10809;
const BIND_DEFAULT: &str = "0.0.0.0";

impl Args {
    /// Whether NBD is served: unless only other front ends are asked for.
    fn serves_nbd(&self, fronts: &[FrontConfig]) -> bool {
        let asked = self.socket.is_some() || self.port.is_some() || self.bind.is_some();
        asked || fronts.is_empty()
    }

    fn limits(&self) -> Limits {
        let seconds = |count: u32| Duration::from_secs(u64::from(count));
        Limits {
            drain: seconds(self.drain_limit),
            close: seconds(self.close_limit),
        }
    }

    fn log(&self) -> Option<Log> {
        let log = || -> Log { Arc::new(|line: &str| say(line)) };
        self.verbose.then(log)
    }
}

/// Serves until the end.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if args.fork && !args.forked {
        return background::run(out);
    }
    let (mut exports, nbd) = match &args.export_json {
        Some(json) => (vec![names::from_json(json, args.recover)?], false),
        None => asked_for(args)?,
    };
    let host = host_for(args.host, &exports)?;
    if let Some(size) = args.create
        && let Some(base) = create(args, size)?
    {
        for new in &mut exports {
            new.image.references = new.image.references.over(&base);
        }
    }
    let first = exports.first().map(|new| stem(new.spec.path()));
    let listen = nbd.then(|| listen(args, first.as_deref())).transpose()?;
    let plan = Plan {
        host,
        pin: args.pin.pin(),
        prospect: prospect(args, &exports),
        limits: args.limits(),
        log: args.log(),
        nbd: match listen {
            Some(listen) => Some((listen, nbd_options(args, &exports)?)),
            None => None,
        },
        control: args.control.clone(),
        // The server of a device ('gaur ublk add') ends with it.
        stays: args.export_json.is_none(),
        recover: args.recover,
        pid_file: args.pid_file.clone(),
        keeps_pid_file: false,
        forked: args.forked.then_some(KeepStderr(false)),
        quiet: args.quiet || args.forked,
        exports,
    };
    plan.run(out, |server, out| match args.quiet {
        true => Ok(()),
        false => announce::announce(args, server, out),
    })
}

/// The way to reach files that suits all exports.
pub fn host_for(host: HostKind, exports: &[NewExport]) -> Result<HostKind, Failure> {
    let asks_for_ring = |new: &NewExport| new.spec.aio() == Some(Aio::Uring);
    host.required_if(exports.iter().any(asks_for_ring)).choose()
}

/// The exports that the command line asks for, and whether NBD is served.
fn asked_for(args: &Args) -> Result<(Vec<NewExport>, bool), Failure> {
    let images = names::images(args)?;
    let fronts = args.fronts.configs()?;
    check(&images, &fronts)?;
    let nbd = args.serves_nbd(&fronts);
    Ok((names::exports(args, images, fronts, nbd)?, nbd))
}

/// What only the whole command line can tell.
fn check(images: &[(String, ImageSpec)], fronts: &[FrontConfig]) -> Result<(), Failure> {
    if let (Some(front), true) = (fronts.first(), images.len() != 1) {
        let kind = front.name();
        let failure = Failure::new(format!(
            "--{kind} exports one image, but {} are named",
            images.len()
        ));
        return Err(failure.hint("'gaur export add' adds further ones to a server with --control"));
    }
    Ok(())
}

/// Makes the image; what it is an overlay of, if it is one.
fn create(args: &Args, size: u64) -> Result<Option<PathBuf>, Failure> {
    let images = names::images(args)?;
    let [(_, spec)] = images.as_slice() else {
        return Err(Failure::new(
            "--create makes one image, but several are named",
        ));
    };
    let file = spec.given();
    let format = spec.format().unwrap_or(Format::Raw);
    let mut options = OptionList::parse(&args.options)?;
    if layout::choose(format, &mut options) {
        say(layout::CHOICE_NOTE);
    }
    if options.has("encrypt.key-secret") {
        let message = "--create: option 'encrypt.key-secret' is not supported";
        return Err(Failure::about(spec.path(), message).hint("--key-file PATH gives the key"));
    }
    let references = Some(args.image.references.references());
    let keys = args.image.keys.keys()?;
    let image = NewImage::new(file, format, options, Some(size), references, keys)?;
    if Path::new(file).exists() {
        let failure = Failure::about(
            spec.path(),
            "exists already, and --create overwrites nothing",
        );
        return Err(failure.hint("leave --create out to serve it"));
    }
    image.make(true, &Job::default())?;
    Ok(image.checked_backing())
}

/// Whether there will be block devices, on which the kernel's memory may depend.
fn prospect(args: &Args, exports: &[NewExport]) -> Prospect {
    let is_device = |new: &NewExport| new.front.is_device();
    match exports.iter().any(is_device) {
        true => Prospect::Devices,
        false if args.control.is_some() => Prospect::Commands,
        false => Prospect::Neither,
    }
}

fn listen(args: &Args, first: Option<&str>) -> Result<Listen, Failure> {
    if let Some(path) = &args.socket {
        return Ok(Listen::Unix(path.clone()));
    }
    if args.port.is_some() || args.bind.is_some() {
        let bind = args.bind.clone().unwrap_or_else(|| BIND_DEFAULT.to_owned());
        if args.tls_dir.is_none() && !args.insecure && !is_loopback(&bind) {
            let message = format!("{bind}: other machines would be served without encryption");
            let hint = "--tls-dir DIR encrypts, -b 127.0.0.1 is for this machine alone, --insecure insists";
            return Err(Failure::new(message).hint(hint));
        }
        let port = args.port.unwrap_or(PORT_DEFAULT);
        return Ok(Listen::Tcp { bind, port });
    }
    let activated = std::env::var("LISTEN_PID").ok();
    if activated.as_deref() == Some(&std::process::id().to_string()) {
        return Ok(Listen::Inherited);
    }
    socket_path::choose(first.unwrap_or("exports")).map(Listen::Unix)
}

/// Whether only this machine reaches an address, which may be a name.
pub fn is_loopback(bind: &str) -> bool {
    let addresses = (bind, 0).to_socket_addrs().map(Vec::from_iter);
    let addresses = addresses.unwrap_or_default();
    // A name that means nothing is told when it is to be listened on.
    addresses.iter().all(|address| address.ip().is_loopback())
}

/// How connections are encrypted, if they are.
fn tls(args: &Args) -> Result<Option<nbd::Tls>, Failure> {
    let Some(directory) = &args.tls_dir else {
        return Ok(None);
    };
    let credentials = ServerCredentials::load(directory, !args.tls_any_client);
    let names = &args.tls_client;
    Ok(Some(nbd::Tls {
        credentials: credentials.map_err(tls_objects::failed)?,
        authorization: (!names.is_empty()).then(|| Authorization::names(names.clone())),
    }))
}

fn nbd_options(args: &Args, exports: &[NewExport]) -> Result<nbd::Options, Failure> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options = nbd::Options::new(Vec::new());
    options.shared = args.shared;
    let others = exports.iter().any(|new| !new.front.is_nbd());
    options.persistent = args.persistent || args.images.is_empty() || others;
    options.threads = args
        .threads
        .map_or(processors, |count| usize::from(count.get()));
    options.handshake_timeout = Duration::from_secs(u64::from(args.handshake_limit));
    options.drain_timeout = args.limits().drain;
    options.memory_bytes = usize::try_from(args.request_memory).unwrap_or(usize::MAX);
    options.log = args.log();
    options.tls = tls(args)?;
    Ok(options)
}
