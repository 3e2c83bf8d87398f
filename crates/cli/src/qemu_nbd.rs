//! `qemu-nbd`: an image as a network block device, by the flags, defaults and messages of QEMU's program.
//!
//! What the flags ask for becomes the [`Plan`] of a server, which runs as under `gaur serve`. The differences: TCP
//! port 10809 of every address unless a socket is named, discards do nothing unless asked for, an image may refer to
//! any file, and without `-f` a raw image is served with a warning, its first sector guarded.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use gaur_engine::{Format, OpenOptions};
use gaur_export::Log;
use gaur_export::nbd::{self, Listen};
use gaur_server::tls_objects::TlsObjects;

use crate::background::{self, KeepStderr};
use crate::exporter::{DetectZeroes, Discard, ImageOptions, Limits, NewExport};
use crate::failure::Failure;
use crate::fronts::FrontConfig;
use crate::host_kind::HostKind;
use crate::image_spec::{Aio, ImageSpec};
use crate::notice::{self, say};
use crate::open::{CacheMode, KeyOptions, ReferenceOptions, format_parser};
use crate::pin::{Pin, Prospect, Wish};
use crate::serve::{self, Plan};
use crate::size::{parse_size, parse_whole_number};
use crate::snapshot_choice::SnapshotChoice;
use crate::usage;

mod device;
mod list;

/// Serve an image as a network block device, as qemu-nbd does
#[derive(Debug, clap::Args)]
#[command(override_usage = "qemu-nbd [OPTIONS] FILE\n       qemu-nbd -L [OPTIONS]")]
pub struct Args {
    /// The image
    file: Option<OsString>,
    /// Print the version
    #[arg(short = 'V', long)]
    version: bool,
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    kernel: Kernel,
    #[command(flatten)]
    part: Part,
    #[command(flatten)]
    general: General,
    #[command(flatten)]
    image: Image,
    /// This process is the one in the background
    #[arg(long, hide = true)]
    forked: bool,
}

/// How clients reach the server.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Connection properties")]
struct Connection {
    /// TCP port to listen on (10809 by default)
    #[arg(short, long)]
    port: Option<u16>,
    /// Address to listen on (0.0.0.0 by default)
    #[arg(short, long, value_name = "ADDRESS")]
    bind: Option<String>,
    /// Path of the Unix socket to listen on in place of TCP; it is absolute
    #[arg(short = 'k', long, value_name = "PATH", value_parser = clap::value_parser!(PathBuf))]
    socket: Option<PathBuf>,
    /// Clients served at once; 0 for any number
    #[arg(short = 'e', long, value_name = "N", value_parser = parse_whole_number::<u32>, default_value_t = 1)]
    shared: u32,
    /// Stay when the last client has left
    #[arg(short = 't', long)]
    persistent: bool,
    /// With --fork, go on to print messages to standard error
    #[arg(short, long)]
    verbose: bool,
    /// Name of the export (empty by default)
    #[arg(short = 'x', long, value_name = "NAME")]
    export_name: Option<String>,
    /// Description of the export, for people
    #[arg(short = 'D', long, value_name = "TEXT")]
    description: Option<String>,
    /// SELinux label of the listening socket
    #[arg(long, value_name = "LABEL")]
    selinux_label: Option<String>,
    /// Seconds a client may take to choose an export; 0 for no limit
    #[arg(long, value_name = "SECONDS", value_parser = parse_whole_number::<u32>, default_value_t = 10)]
    handshake_limit: u32,
}

/// The kernel's NBD client.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Block device of this machine")]
struct Kernel {
    /// Connect this device (/dev/nbdN) to the image, and go on in the background unless --verbose is given
    #[arg(short, long, value_name = "DEV", conflicts_with = "disconnect")]
    connect: Option<PathBuf>,
    /// FILE is a device to disconnect
    #[arg(short, long)]
    disconnect: bool,
}

/// What of the image is shown.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Exposing part of the image")]
struct Part {
    /// Show the disk from this byte on
    #[arg(short, long, value_name = "BYTES", value_parser = parse_size, default_value_t = 0)]
    offset: u64,
    /// Show how deep in the backing chain data lies, as qemu:allocation-depth
    #[arg(short = 'A', long)]
    allocation_depth: bool,
    /// Show this persistent bitmap, as qemu:dirty-bitmap:NAME (any number of times)
    #[arg(short = 'B', long = "bitmap", value_name = "NAME")]
    bitmaps: Vec<String>,
}

/// What is neither about clients nor about the image.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "General purpose options")]
struct General {
    /// List the exports of another server
    #[arg(short = 'L', long)]
    list: bool,
    /// A secret for encrypted images, credentials for TLS, or who may come in: secret, tls-creds-x509, authz-simple,
    /// authz-list
    #[arg(long = "object", value_name = "TYPE,id=ID,..")]
    objects: Vec<String>,
    /// Encrypt connections with the credentials of this id
    #[arg(long, value_name = "ID")]
    tls_creds: Option<String>,
    /// Let in whom the authorization object of this id allows
    #[arg(long, value_name = "ID", requires = "tls_creds")]
    tls_authz: Option<String>,
    /// With -L, the name that the server's certificate has to have
    #[arg(long, value_name = "NAME", requires = "tls_creds")]
    tls_hostname: Option<String>,
    /// Taken, and without effect
    #[arg(short = 'T', long, value_name = "EVENTS")]
    trace: Option<String>,
    /// Go on in the background once the server is ready
    #[arg(long)]
    fork: bool,
    /// File to write the server's process id to
    #[arg(long, value_name = "PATH")]
    pid_file: Option<PathBuf>,
}

/// How the image is opened.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Block device options")]
struct Image {
    /// Format of the image (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    format: Option<Format>,
    /// Refuse writes
    #[arg(short, long)]
    read_only: bool,
    /// Write to a temporary overlay, which is forgotten at the end
    #[arg(short, long)]
    snapshot: bool,
    /// Serve this internal snapshot, read-only: an id or a name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(short, long, value_name = "SNAPSHOT")]
    load_snapshot: Option<String>,
    /// Bypass the host's cache (--cache none)
    #[arg(short, long, conflicts_with = "cache")]
    nocache: bool,
    /// How the host's cache is used
    #[arg(long, value_name = "MODE", value_enum, default_value = "writeback")]
    cache: CacheMode,
    /// The way to reach the file
    #[arg(long, value_name = "MODE", value_enum)]
    aio: Option<Aio>,
    /// What a client's discard does (ignore by default)
    #[arg(long, value_name = "MODE", value_parser = ["ignore", "off", "unmap", "on"])]
    discard: Option<String>,
    /// What a client's write of nothing but zeros does
    #[arg(long, value_name = "MODE", value_enum, default_value = "off")]
    detect_zeroes: DetectZeroes,
    /// FILE is a list of options, driver=qcow2,file.filename=PATH,..
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,
}

/// Port and address without `-p` and `-b`.
const PORT_DEFAULT: u16 = 10809;
const BIND_DEFAULT: &str = "0.0.0.0";

/// What clients are told to run at full speed, as there for every image.
const PREFERRED_BLOCK: u32 = 4096;

/// Seconds for the ends of clients and images, as `gaur serve` has them by default.
const LIMITS: Limits = Limits {
    drain: Duration::from_secs(10),
    close: Duration::from_secs(300),
};

/// Serves until the end.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if args.version {
        writeln!(out, "{}", usage::qemu_version(notice::program()))?;
        return Ok(0);
    }
    args.check()?;
    let objects = TlsObjects::parse(&args.general.objects)?;
    if args.general.list {
        return args.list(&objects, out);
    }
    let Some(file) = &args.file else {
        return Err(Failure::new("the image is missing").hint("--help lists the options"));
    };
    if args.kernel.disconnect {
        device::disconnect(Path::new(file), out)?;
        return Ok(0);
    }
    let tls = args.general.tls(&objects)?;
    let device = args.kernel.connect.as_deref();
    let forks = args.general.fork || (device.is_some() && !args.connection.verbose);
    if forks && !args.forked {
        return background::run(out);
    }
    let forked = args.forked.then_some(KeepStderr(args.connection.verbose));
    let listen = args.connection.listen(device);
    if device.is_none() {
        args.connection.warn(tls.is_some());
    }
    let export = args.export(file, objects.others())?;
    let host = serve::host_for(HostKind::default(), std::slice::from_ref(&export))?;
    let plan = Plan {
        exports: vec![export],
        nbd: Some((listen.clone(), args.connection.options(tls))),
        host,
        pin: Pin::new(Wish::WhereNeeded, false),
        prospect: match device {
            Some(_) => Prospect::Devices,
            None => Prospect::Neither,
        },
        limits: LIMITS,
        log: None,
        control: None,
        stays: false,
        recover: false,
        pid_file: args.general.pid_file.clone(),
        // Scripts remove it themselves.
        keeps_pid_file: true,
        // The thread of the device says when it is there.
        forked: forked.filter(|_| device.is_none()),
        quiet: true,
    };
    let (Some(device), Listen::Unix(socket)) = (device, listen) else {
        return plan.run(out, |_, _| Ok(()));
    };
    let connection = device::Connection {
        device: device.to_owned(),
        socket,
        export: args.connection.export_name.clone().unwrap_or_default(),
        image: file.to_string_lossy().into_owned(),
        forked,
        verbose: args.connection.verbose,
    };
    let mut thread = None;
    let outcome = plan.run(out, |server, _| {
        thread = Some(connection.start(server.stopper())?);
        Ok(())
    });
    // A server that has not ended in order may still hold the connection.
    let ended = thread.filter(|thread| matches!(outcome, Ok(0)) || thread.is_finished());
    match ended.map(JoinHandle::join) {
        Some(Ok(Err(failure))) => Err(failure),
        _ => outcome,
    }
}

impl Args {
    /// What only the whole command line can tell.
    fn check(&self) -> Result<(), Failure> {
        let socket = self.connection.socket.as_deref();
        if socket.is_some_and(Path::is_relative) {
            return Err(Failure::new("socket path must be absolute"));
        }
        if self.image.detect_zeroes == DetectZeroes::Unmap && !self.image.unmaps() {
            let message = "--detect-zeroes unmap is not allowed without --discard unmap";
            return Err(Failure::new(message));
        }
        if self.general.tls_hostname.is_some() && !self.general.list {
            return Err(Failure::new("--tls-hostname is for -L"));
        }
        if self.general.list {
            return self.check_list();
        }
        if self.kernel.connect.is_some() {
            self.check_device()?;
        }
        if self.connection.is_activated() {
            let said = &self.connection;
            let place = [
                ("-k", said.socket.is_some()),
                ("-b", said.bind.is_some()),
                ("-p", said.port.is_some()),
            ];
            if let Some((flag, _)) = place.iter().find(|(_, is_said)| *is_said) {
                let message = format!("{flag} cannot be set when using socket activation");
                return Err(Failure::new(message));
            }
        }
        Ok(())
    }

    /// The kernel is a client without TLS on a socket of this machine.
    fn check_device(&self) -> Result<(), Failure> {
        let said = [
            ("--tls-creds", self.general.tls_creds.is_some()),
            ("socket activation", self.connection.is_activated()),
            ("-p", self.connection.port.is_some()),
            ("-b", self.connection.bind.is_some()),
        ];
        match said.iter().find(|(_, is_said)| *is_said) {
            Some((what, _)) => Err(Failure::new(format!("-c does not go with {what}"))),
            None => Ok(()),
        }
    }

    /// A list is of a server, not of an image.
    fn check_list(&self) -> Result<(), Failure> {
        let (part, image) = (&self.part, &self.image);
        let said = [
            ("an image", self.file.is_some()),
            ("-x", self.connection.export_name.is_some()),
            ("-D", self.connection.description.is_some()),
            ("-o", part.offset > 0),
            ("-A", part.allocation_depth),
            ("-c", self.kernel.connect.is_some()),
            ("-d", self.kernel.disconnect),
            ("-B", !part.bitmaps.is_empty()),
            ("-f", image.format.is_some()),
            ("-l", image.load_snapshot.is_some()),
            ("--aio", image.aio.is_some()),
            ("--discard", image.discard.is_some()),
            ("-n", image.nocache),
            ("--fork", self.general.fork),
            ("--tls-authz", self.general.tls_authz.is_some()),
        ];
        match said.iter().find(|(_, is_said)| *is_said) {
            Some((what, _)) => Err(Failure::new(format!("-L does not go with {what}"))),
            None => Ok(()),
        }
    }

    /// Lists the exports of another server.
    fn list(&self, objects: &TlsObjects, out: &mut dyn Write) -> Result<u8, Failure> {
        let bind = self.connection.bind.as_deref();
        let port = self.connection.port.unwrap_or(PORT_DEFAULT);
        let (place, host) = match &self.connection.socket {
            Some(path) => (list::Place::Unix(path), None),
            None => {
                let host = bind.unwrap_or(BIND_DEFAULT);
                (list::Place::Tcp(host, port), Some(host))
            }
        };
        let tls = match self.general.tls_creds.as_deref() {
            None => None,
            Some(id) => Some(list::Tls {
                credentials: objects.client(id)?,
                host: self.general.tls_hostname.as_deref().or(host),
            }),
        };
        list::run(&place, tls, out)
    }

    /// The one export.
    fn export(&self, file: &OsString, secrets: &[String]) -> Result<NewExport, Failure> {
        let image = &self.image;
        let mut spec = ImageSpec::parse(file, image.image_opts, image.format)?;
        let probed = spec.format().is_none();
        spec = spec.with_probed_format(false)?.format_switch("-f");
        let mut options = image.options(&self.part, secrets)?;
        if image.aio == Some(Aio::Native) && !options.cache.direct() {
            return Err(spec.native_without_direct());
        }
        if let Some(text) = &image.load_snapshot {
            let base = OpenOptions {
                read_only: true,
                ..OpenOptions::new(options.references.references())
            };
            options.snapshot = Some(SnapshotChoice::parse(text)?.resolve(&spec, &base)?);
        }
        if probed && spec.format() == Some(Format::Raw) && options.writes_file(&spec) {
            notice::warn_of_raw(spec.path());
            options.guard_format = true;
        }
        Ok(NewExport {
            name: self.connection.export_name.clone().unwrap_or_default(),
            spec,
            image: options,
            description: self.connection.description.clone().unwrap_or_default(),
            front: FrontConfig::Nbd {},
        })
    }
}

impl Connection {
    fn is_activated(&self) -> bool {
        let activated = std::env::var("LISTEN_PID").ok();
        activated.as_deref() == Some(&std::process::id().to_string())
    }

    /// Where clients come; the connection of a device has a socket of its own.
    fn listen(&self, device: Option<&Path>) -> Listen {
        if self.is_activated() {
            return Listen::Inherited;
        }
        let of_device = device.map(device::socket_path);
        match self.socket.clone().or(of_device) {
            Some(path) => Listen::Unix(path),
            None => Listen::Tcp {
                bind: self.bind.clone().unwrap_or_else(|| BIND_DEFAULT.to_owned()),
                port: self.port.unwrap_or(PORT_DEFAULT),
            },
        }
    }

    /// Says who can read and write the disk, where that may be more than were meant.
    fn warn(&self, is_encrypted: bool) {
        if is_encrypted || self.socket.is_some() || self.is_activated() {
            return;
        }
        let bind = self.bind.as_deref().unwrap_or(BIND_DEFAULT);
        if !serve::is_loopback(bind) {
            say(
                "warning: other machines are served without encryption (--tls-creds, or -b 127.0.0.1)",
            );
        }
    }

    fn options(&self, tls: Option<nbd::Tls>) -> nbd::Options {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mut options = nbd::Options::new(Vec::new());
        options.shared = self.shared;
        options.persistent = self.persistent;
        options.threads = processors;
        options.handshake_timeout = Duration::from_secs(u64::from(self.handshake_limit));
        options.drain_timeout = LIMITS.drain;
        options.tls = tls;
        options.preferred_block = Some(PREFERRED_BLOCK);
        options.socket_label = self.selinux_label.clone();
        let failures: Log = Arc::new(|line: &str| say(line));
        options.failures = Some(failures);
        options
    }
}

impl General {
    /// How connections are encrypted, if they are.
    fn tls(&self, objects: &TlsObjects) -> Result<Option<nbd::Tls>, Failure> {
        let Some(id) = &self.tls_creds else {
            return Ok(None);
        };
        let authorization = self.tls_authz.as_deref();
        let authorization = authorization.map(|id| objects.authorization(id));
        Ok(Some(nbd::Tls {
            credentials: objects.server(id)?,
            authorization: authorization.transpose()?,
        }))
    }
}

impl Image {
    /// Whether discards give space back.
    fn unmaps(&self) -> bool {
        matches!(self.discard.as_deref(), Some("unmap" | "on"))
    }

    fn options(&self, part: &Part, secrets: &[String]) -> Result<ImageOptions, Failure> {
        Ok(ImageOptions {
            format: self.format,
            image_opts: self.image_opts,
            references: ReferenceOptions {
                allow_any: true,
                ..ReferenceOptions::default()
            },
            keys: KeyOptions {
                objects: secrets.to_vec(),
                key_file: None,
                inline_secrets: true,
            },
            read_only: self.read_only || self.load_snapshot.is_some(),
            temporary: self.snapshot,
            cache: match self.nocache {
                true => CacheMode::None,
                false => self.cache,
            },
            discard: match self.unmaps() {
                true => Discard::Unmap,
                false => Discard::Ignore,
            },
            detect_zeroes: self.detect_zeroes,
            bitmap: part.bitmaps.clone(),
            allocation_depth: part.allocation_depth,
            offset: part.offset,
            ..ImageOptions::default()
        })
    }
}
