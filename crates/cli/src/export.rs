//! `gaur export`: exports of a running server, over its control socket.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use gaur_server::export_name::as_text;
use serde::de::DeserializeOwned;

use crate::control::client::Client;
use crate::control::protocol::{Command, Removing, Resizing};
use crate::exporter::{AddExport, ExportFacts, ImageOptions};
use crate::failure::Failure;
use crate::front_args::FrontArgs;
use crate::fronts::FrontConfig;
use crate::image_spec::ImageSpec;
use crate::json;
use crate::notice::one_line;
use crate::open::{self, Output};
use crate::progress::Progress;
use crate::serve;
use crate::size::{human, parse_new_size};
use crate::snapshot::Server;
use crate::table;

/// Add, list, remove and resize the exports of a running server
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Export one more image
    Add(Box<AddArgs>),
    /// List the exports
    List(ServerArgs),
    /// Remove an export: its clients' requests are finished, its image is flushed and closed
    #[command(visible_alias = "del", alias = "delete")]
    Remove(RemoveArgs),
    /// Change the size of an export's image
    Resize(ResizeArgs),
}

#[derive(Debug, clap::Args)]
struct ServerArgs {
    /// The control socket of 'gaur serve --control SOCKET'
    #[arg(long, value_name = "SOCKET")]
    control: PathBuf,
    /// Seconds the server may be silent before it counts as hung (30)
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    timeout: Option<u32>,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
}

#[derive(Debug, clap::Args)]
struct AddArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Name of the export (the file's name without extension)
    #[arg(short = 'x', long, value_name = "NAME")]
    export_name: Option<String>,
    /// Description of the export, for people
    #[arg(short = 'D', long, value_name = "TEXT")]
    description: Option<String>,
    #[command(flatten)]
    image: ImageOptions,
    #[command(flatten)]
    fronts: FrontArgs,
    /// The image: PATH, or NAME=PATH to call the export NAME
    #[arg(value_name = "[NAME=]FILE")]
    file: OsString,
}

#[derive(Debug, clap::Args)]
struct RemoveArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Seconds clients have to take what they have asked for; then they are cut off (as the server's
    /// own --drain-limit)
    #[arg(long, value_name = "SECONDS")]
    drain_limit: Option<u32>,
    /// The export
    name: String,
}

#[derive(Debug, clap::Args)]
struct ResizeArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Allow a smaller size; what lies beyond it is lost
    #[arg(long)]
    shrink: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// The export
    name: String,
    /// The new size, or how much to add (+SIZE) or take away (-SIZE); suffixes k M G T P E
    #[arg(value_name = "[+|-]SIZE", allow_hyphen_values = true)]
    size: String,
}

/// Does what is asked for.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    match &args.verb {
        Verb::Add(args) => add(args, out),
        Verb::List(args) => list(args, out),
        Verb::Remove(args) => {
            let name = Some(args.name.clone());
            let drain_limit = args.drain_limit;
            let command = Command::ExportRemove(Removing { drain_limit });
            let facts: ExportFacts = args.server.call(name, command, Progress::Quiet)?;
            args.server.conclude(&facts, out, |_, _| Ok(()))
        }
        Verb::Resize(args) => resize(args, out),
    }
}

impl ServerArgs {
    fn call<T: DeserializeOwned>(
        &self,
        export: Option<String>,
        command: Command,
        mut progress: Progress,
    ) -> Result<T, Failure> {
        let server = Server::new(self.control.clone(), export, self.timeout);
        Client::connect(&server)?.call(command, &mut progress)
    }

    /// Prints an export, for people as `print` does.
    fn conclude(
        &self,
        facts: &ExportFacts,
        out: &mut dyn Write,
        print: impl FnOnce(&ExportFacts, &mut dyn Write) -> std::io::Result<()>,
    ) -> Result<u8, Failure> {
        match self.output {
            Output::Json => json::write(out, facts)?,
            Output::Human => print(facts, out)?,
        }
        Ok(0)
    }
}

fn add(args: &AddArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let mut fronts = args.fronts.configs()?;
    if fronts.len() > 1 {
        let failure = Failure::new("an export has one front end, but several are asked for");
        return Err(failure.hint("add one export after the other"));
    }
    let (name, file) = serve::named_file(&args.file, &args.image);
    let name = args.export_name.clone().or(name.map(str::to_owned));
    let add = AddExport {
        file: absolute(&as_text(file)?, &args.image)?,
        description: args.description.clone().unwrap_or_default(),
        image: ImageOptions {
            references: args.image.references.clone().absolute()?,
            keys: args.image.keys.clone().absolute()?,
            ..args.image.clone()
        },
        front: fronts
            .pop()
            .map_or(FrontConfig::Nbd {}, FrontConfig::absolute),
    };
    add.fields()?;
    let command = Command::ExportAdd(Box::new(add));
    let facts: ExportFacts = args.server.call(name, command, Progress::Quiet)?;
    args.server
        .conclude(&facts, out, |facts, out| writeln!(out, "{}", facts.place))
}

/// The image as the server finds it, which may run in another directory.
fn absolute(file: &str, image: &ImageOptions) -> Result<String, Failure> {
    let spec = ImageSpec::parse(file, image.image_opts, image.format)?;
    let path = Path::new(spec.path());
    let whole = open::absolute(path)?;
    if whole == path {
        return Ok(file.to_owned());
    }
    if spec.path() != file {
        let failure = Failure::about(file, "the server needs the whole path of the image");
        return Err(failure.hint("begin the file's name with a slash"));
    }
    as_text(whole.as_os_str())
}

fn list(server: &ServerArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    let exports: Vec<ExportFacts> = server.call(None, Command::ExportList {}, Progress::Quiet)?;
    if server.output == Output::Json {
        json::write(out, &exports)?;
        return Ok(0);
    }
    let head = ["NAME", "TYPE", "SIZE", "MODE", "CLIENTS", "FILE", "PLACE"];
    table::print(head, exports.iter().map(row), out)?;
    for export in &exports {
        if let Some(trouble) = &export.trouble {
            writeln!(out, "{}: {}", name(export), one_line(trouble))?;
        }
    }
    Ok(0)
}

fn name(export: &ExportFacts) -> String {
    match export.name.as_str() {
        "" => "''".to_owned(),
        name => name.to_owned(),
    }
}

fn row(export: &ExportFacts) -> [String; 7] {
    let clients = export.clients.map(|count| count.to_string());
    [
        name(export),
        export.kind.clone(),
        human(export.virtual_size),
        if export.read_only { "ro" } else { "rw" }.to_owned(),
        clients.unwrap_or_else(|| "--".to_owned()),
        export.file.clone(),
        export.place.clone(),
    ]
}

fn resize(args: &ResizeArgs, out: &mut dyn Write) -> Result<u8, Failure> {
    parse_new_size(&args.size).map_err(Failure::new)?;
    let command = Command::ExportResize(Resizing::to(&args.size, args.shrink));
    let progress = Progress::new(None, args.progress, false, false);
    let name = Some(args.name.clone());
    let facts: ExportFacts = args.server.call(name, command, progress)?;
    args.server.conclude(&facts, out, |facts, out| {
        writeln!(out, "Image resized to {} bytes.", facts.virtual_size)
    })
}
