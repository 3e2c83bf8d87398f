//! `gaur bitmap`: make, change and remove persistent bitmaps.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::sync::Arc;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use gaur_engine::{BitmapAction, BitmapSource, Format, Job, OpenOptions};
use gaur_reactor::ReactorFile;

use crate::drive::{drive, watch};
use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::image_spec::ImageSpec;
use crate::notice::is_qemu;
use crate::open::{SourceOptions, format_parser};
use crate::progress::Progress;
use crate::shared_image::SharedImage;
use crate::size::parse_size;

/// Make, change and remove the persistent bitmaps of an image, which record what is written to it
///
/// Several things are done in the order of the command line, all of them or none.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    steps: Steps,
    /// Bytes for each bit of a new bitmap, a power of two from 512 (a cluster, but 4 to 64 KiB)
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, requires = "add")]
    granularity: Option<u64>,
    /// The image that has the bitmaps to merge, if it is another
    #[arg(short = 'b', long, value_name = "FILE", requires = "merge")]
    source_file: Option<OsString>,
    /// Format of that image (probed by default)
    #[arg(short = 'F', long, value_name = "FMT", value_parser = format_parser(), requires = "source_file")]
    source_format: Option<Format>,
    #[command(flatten)]
    how: SourceOptions,
    /// The image
    image: OsString,
    /// Name of the bitmap
    name: String,
}

/// A thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    Merge(String),
}

/// What is to be done, in the order of the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Steps(Vec<Step>);

/// The switches without a value, and their help.
const SWITCHES: [(&str, Step, &str); 5] = [
    ("add", Step::Add, "Make the bitmap; it records from then on"),
    ("remove", Step::Remove, "Remove the bitmap"),
    ("clear", Step::Clear, "Forget what it has recorded"),
    ("enable", Step::Enable, "Record what is written from now on"),
    ("disable", Step::Disable, "Do not record any more"),
];

impl clap::Args for Steps {
    fn augment_args(mut command: Command) -> Command {
        for (name, _, help) in SWITCHES {
            let switch = Arg::new(name).long(name).help(help);
            let switch = switch.action(ArgAction::Append).num_args(0);
            command = command.arg(switch.default_missing_value("true"));
        }
        let merge = Arg::new("merge").long("merge").value_name("SOURCE");
        let help = "Record also what the bitmap SOURCE has recorded";
        command.arg(merge.action(ArgAction::Append).help(help))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Steps::augment_args(command)
    }
}

impl FromArgMatches for Steps {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Steps, clap::Error> {
        let mut found = Vec::new();
        let given = |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
        for (name, step, _) in SWITCHES.iter().filter(|(name, ..)| given(name)) {
            let places = matches.indices_of(name).into_iter().flatten();
            found.extend(places.map(|at| (at, step.clone())));
        }
        let sources = matches.get_many::<String>("merge").into_iter().flatten();
        let places = matches.indices_of("merge").into_iter().flatten();
        found.extend(places.zip(sources.cloned().map(Step::Merge)));
        found.sort_by_key(|(at, _)| *at);
        let steps = found.into_iter().map(|(_, step)| step);
        Ok(Steps(steps.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Steps::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Does what the command line says, in its order.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    if args.steps.0.is_empty() {
        let message = "nothing to do: --add, --remove, --clear, --enable, --disable or --merge";
        return Err(Failure::new(message));
    }
    let source = match &args.source_file {
        None => None,
        Some(file) => Some(open_source(args, file)?),
    };
    let spec = args.how.spec(&args.image)?;
    let spec = spec.with_probed_format(args.how.is_untrusted())?;
    let options = OpenOptions {
        keys: args.how.keys()?,
        ..OpenOptions::new(args.how.references())
    };
    out.flush()?;
    let image = SharedImage::open(&spec, &options)?;
    let job = Arc::new(Job::default());
    let progress = Progress::new(None, false, true, false);
    let changed = drive(
        &image,
        HostKind::Auto,
        progress,
        watch(&job),
        async |queue| {
            let mut actions = Vec::new();
            for step in &args.steps.0 {
                actions.push(action(args, step, source.as_ref()).await?);
            }
            let changed = queue.change_bitmap(&args.name, &actions, &job).await;
            changed.map_err(|error| Failure::image(spec.path(), &error))
        },
    );
    changed.and(image.close())?;
    Ok(0)
}

/// Opens the image whose bitmaps are merged.
fn open_source(args: &Args, file: &OsStr) -> Result<SharedImage, Failure> {
    let are_options = args.how.is_options() && args.source_format.is_none();
    let spec = ImageSpec::parse(file, are_options, args.source_format)?;
    let options = OpenOptions {
        read_only: true,
        backing: false,
        keys: args.how.keys()?,
        ..OpenOptions::new(args.how.references())
    };
    SharedImage::open(&spec, &options)
}

async fn action(
    args: &Args,
    step: &Step,
    source: Option<&SharedImage>,
) -> Result<BitmapAction, Failure> {
    Ok(match step {
        Step::Add => BitmapAction::Add {
            granularity_bytes: args.granularity.filter(|bytes| !is_qemu() || *bytes > 0),
        },
        Step::Remove => BitmapAction::Remove,
        Step::Clear => BitmapAction::Clear,
        Step::Enable => BitmapAction::Enable,
        Step::Disable => BitmapAction::Disable,
        Step::Merge(name) => BitmapAction::Merge(match source {
            None => BitmapSource::Named(name.clone()),
            Some(image) => {
                let bits = image.queue::<ReactorFile>().bitmap_bits(name).await;
                BitmapSource::Bits(bits.map_err(|error| Failure::image(image.name(), &error))?)
            }
        }),
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Line::try_parse_from(["bitmap"].into_iter().chain(line.split(' '))).map(|line| line.args)
    }

    #[test]
    fn steps_are_taken_in_the_order_of_the_command_line() {
        let args = parse("--merge a i --clear --merge=b --disable --add -g 4k --enable n").unwrap();
        let merge = |name: &str| Step::Merge(name.to_owned());
        assert_eq!(
            args.steps.0,
            [
                merge("a"),
                Step::Clear,
                merge("b"),
                Step::Disable,
                Step::Add,
                Step::Enable
            ]
        );
        assert_eq!(args.granularity, Some(4096));
        let twice = parse("--add i --remove n --add").unwrap();
        assert_eq!(twice.steps.0, [Step::Add, Step::Remove, Step::Add]);
        assert_eq!(parse("i n").unwrap().steps, Steps::default());
        assert_eq!((args.image, args.name.as_str()), ("i".into(), "n"));
    }

    #[test]
    fn options_go_with_their_steps() {
        for line in [
            "--remove -g 4k i n",
            "--add -b s i n",
            "--merge a -F qcow2 i n",
            "--add i",
        ] {
            parse(line).unwrap_err();
        }
        parse("--merge a -b s -F qcow2 i n").unwrap();
    }
}
