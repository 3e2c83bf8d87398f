//! `gaur ublk`: block devices of this machine, each served by a process in the background.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Subcommand;
use gaur_export::ublk::{self, Deletion};

use gaur_server::export_name::as_text;

use crate::exporter::{AddExport, ImageOptions};
use crate::failure::Failure;
use crate::fronts::{self, FrontConfig};
use crate::open::Output;
use crate::pin_args::PinArgs;
use crate::{background, json, serve};

mod list;

pub use gaur_server::ublk_state as state;
use state::State;

/// Make, list, remove and recover block devices of this machine (ublk)
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a block device of an image; its server goes on in the background
    Add(Box<AddArgs>),
    /// List the devices
    List {
        /// How to print
        #[arg(long, value_enum, default_value = "human")]
        output: Output,
    },
    /// Remove a device: requests under way are finished, the image is flushed and closed
    #[command(visible_alias = "del", alias = "delete")]
    Remove {
        /// Leave one alone that is open or mounted
        #[arg(long)]
        if_unused: bool,
        /// Its number
        device: u32,
    },
    /// Start a new server for a device whose server has died, or was told to leave it
    Recover {
        #[command(flatten)]
        server: ServerArgs,
        /// Its number
        device: u32,
    },
    /// Have a device's server end and leave the device to 'gaur ublk recover': requests wait meanwhile
    Quiesce {
        /// Its number
        device: u32,
    },
    /// Show what this kernel's ublk can do
    Features {
        /// How to print
        #[arg(long, value_enum, default_value = "human")]
        output: Output,
    },
}

#[derive(Debug, clap::Args)]
struct ServerArgs {
    /// A Unix socket for commands to the server
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    #[command(flatten)]
    pin: PinArgs,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
}

#[derive(Debug, clap::Args)]
struct AddArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    image: ImageOptions,
    #[command(flatten)]
    device: fronts::ublk::Config,
    /// The image: PATH, or NAME=PATH to call the export NAME
    #[arg(value_name = "[NAME=]FILE")]
    file: OsString,
}

/// Does what is asked for.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    match &args.verb {
        Verb::Add(args) => add(args, out),
        Verb::List { output } => list::run(*output, out),
        Verb::Remove { if_unused, device } => delete(*device, *if_unused),
        Verb::Recover { server, device } => recover(server, *device, out),
        Verb::Quiesce { device } => {
            ublk::quiesce(*device).map_err(failed)?;
            Ok(0)
        }
        Verb::Features { output } => features(*output, out),
    }
}

fn failed(error: ublk::ServeError) -> Failure {
    Failure::new(error.to_string())
}

fn add(args: &AddArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let (name, file) = serve::named_file(&args.file, &args.image);
    let add = AddExport {
        file: as_text(file)?,
        description: String::new(),
        image: args.image.clone(),
        front: FrontConfig::Ublk(args.device.clone()),
    };
    start(&args.server, name, add.fields()?, None, out)
}

fn recover(server: &ServerArgs, device: u32, out: &mut dyn Write) -> Result<u8, Failure> {
    let directory = state::directory();
    let Some(state) = State::read(&directory, device)? else {
        let message = format!("nothing is known of a device {device} that gaur served");
        let failure = Failure::new(message);
        return Err(failure.hint("'gaur ublk list' shows those that are"));
    };
    // The kernel takes a server that was killed apart in its own time.
    let deadline = Instant::now() + PATIENCE;
    let is_live = || match ublk::info(device) {
        Ok(info) => Ok(info.state == ublk::State::Live),
        Err(error) => Err(failed(error)),
    };
    while is_live()? && !state.is_served() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    if is_live()? {
        let message = format!("device {device} is served by process {}", state.pid);
        let failure = Failure::new(message);
        return Err(failure.hint(format!(
            "'gaur ublk quiesce {device}' has it leave the device"
        )));
    }
    let mut export = state.export;
    export.insert("id".to_owned(), device.into());
    let from = Some(state.directory.as_path());
    start(server, Some(&state.name), export, from, out)
}

/// Starts a server in the background, for a device that is there when it starts in a `directory` of a
/// server before.
fn start(
    server: &ServerArgs,
    name: Option<&str>,
    mut export: serde_json::Map<String, serde_json::Value>,
    directory: Option<&Path>,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    if let Some(name) = name {
        export.insert("export".to_owned(), name.into());
    }
    let json = serde_json::Value::Object(export).to_string();
    let mut line: Vec<OsString> = vec!["serve".into(), "--export-json".into(), json.into()];
    if directory.is_some() {
        line.push("--recover".into());
    }
    line.extend(server.pin.words().map(OsString::from));
    if let Some(control) = &server.control {
        let control = std::path::absolute(control);
        let control = control.map_err(|error| Failure::io("the control socket", &error))?;
        line.extend(["--control".into(), control.into()]);
    }
    let mut place = String::new();
    let pid = background::start(line, directory, |text| {
        if place.is_empty() {
            text.clone_into(&mut place);
        }
        Ok(())
    })?;
    match server.output {
        Output::Human => writeln!(out, "{place}")?,
        Output::Json => json::write(out, &serde_json::json!({ "place": place, "pid": pid }))?,
    }
    Ok(0)
}

/// Most time that a server takes to end when it was killed, or its device is gone.
const PATIENCE: Duration = Duration::from_secs(60);

fn delete(device: u32, if_unused: bool) -> Result<u8, Failure> {
    let directory = state::directory();
    let known = State::read(&directory, device).ok().flatten();
    let served = known.as_ref().is_some_and(State::is_served);
    if let (Err(_), Some(_), false) = (ublk::info(device), &known, served) {
        // The kernel has forgotten it, in a restart of the machine perhaps.
        state::forget(&directory, device);
        return Ok(0);
    }
    if ublk::delete(device, if_unused).map_err(failed)? == Deletion::Lingering {
        let message =
            format!("device {device} is stopped, and goes when nobody has it open any more");
        return Err(Failure::new(message));
    }
    // Its server flushes and closes the image, and forgets the device by itself.
    let deadline = Instant::now() + PATIENCE;
    while let Some(state) = State::read(&directory, device).ok().flatten() {
        if !state.is_served() || Instant::now() > deadline {
            state::forget(&directory, device);
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(0)
}

fn features(output: Output, out: &mut dyn Write) -> Result<u8, Failure> {
    let features = ublk::features().map_err(failed)?;
    let names: Vec<&str> = features.names().collect();
    match output {
        Output::Human => {
            for name in names {
                writeln!(out, "{name}")?;
            }
        }
        Output::Json => json::write(out, &names)?,
    }
    Ok(0)
}
