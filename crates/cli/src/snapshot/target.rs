//! The target of a snapshot verb: an image that it opens, or one that a server has open.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use gaur_engine::{Format, OpenOptions};

use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::image_spec::ImageSpec;
use crate::open::{CacheMode, KeyOptions, ReferenceOptions, format_parser};
use crate::shared_image::SharedImage;

/// Where the image is.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TargetArgs {
    /// Format of the image (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// IMAGE is a list of options, driver=qcow2,file.filename=PATH,..
    #[arg(long, conflicts_with = "format")]
    pub image_opts: bool,
    /// Act on the image that 'gaur serve --control SOCKET' has open; no IMAGE is given then
    #[arg(long, value_name = "SOCKET", 
          conflicts_with_all = ["format", "image_opts", "allow", "allow_any", "untrusted"])]
    pub control: Option<PathBuf>,
    /// Name of the export, if the server has several
    #[arg(short = 'x', long, value_name = "NAME", requires = "control")]
    pub export_name: Option<String>,
    /// Seconds the server may be silent before it counts as hung (30)
    #[arg(long, value_name = "SECONDS", requires = "control",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub timeout: Option<u32>,
}

/// How something is done to it.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ChangeArgs {
    #[command(flatten)]
    pub references: ReferenceOptions,
    #[command(flatten)]
    pub keys: KeyOptions,
    /// Use of the host's cache
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    pub cache: CacheMode,
    /// Remove the image's persistent bitmaps with the first change instead of keeping them
    #[arg(long)]
    pub drop_bitmaps: bool,
    /// Show progress
    #[arg(short, long)]
    pub progress: bool,
    /// Print only errors
    #[arg(short, long)]
    pub quiet: bool,
    /// How files are reached
    #[arg(long, default_value = "auto", hide = true)]
    pub host: HostKind,
}

/// A server, and one of its exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its control socket.
    pub socket: PathBuf,
    /// The export; the only one if not told.
    pub export: Option<String>,
    /// How long it may be silent.
    pub timeout: Duration,
}

/// How long a server may be silent, in seconds, unless told.
const TIMEOUT_DEFAULT: u32 = 30;

impl Server {
    /// The server behind a control socket.
    pub fn new(socket: PathBuf, export: Option<String>, timeout: Option<u32>) -> Server {
        let seconds = timeout.unwrap_or(TIMEOUT_DEFAULT);
        Server {
            socket,
            export,
            timeout: Duration::from_secs(u64::from(seconds)),
        }
    }
}

/// An image here, or one there.
#[derive(Clone, Debug)]
pub enum Target {
    /// To be opened.
    Image(Box<ImageSpec>),
    /// Open in a server.
    Server(Server),
}

const LOCKED_HINT: &str =
    "if 'gaur serve --control SOCKET' has it open, say --control SOCKET instead of the image";
const LOCKED_READ_HINT: &str = "-U reads it all the same, --control SOCKET asks a server";

impl TargetArgs {
    /// The target, and the words that are not the image: as many as `wanted` says what they are.
    pub fn split<const N: usize>(
        &self,
        words: &[OsString],
        wanted: [&str; N],
    ) -> Result<(Target, [String; N]), Failure> {
        let (target, rest) = match &self.control {
            Some(socket) => {
                let (socket, export) = (socket.clone(), self.export_name.clone());
                let server = Server::new(socket, export, self.timeout);
                (Target::Server(server), words)
            }
            None => {
                let (first, rest) = words.split_first().ok_or_else(|| {
                    Failure::new("an image is needed").hint("or --control SOCKET")
                })?;
                let spec = ImageSpec::parse(first, self.image_opts, self.format)?;
                (Target::Image(Box::new(spec)), rest)
            }
        };
        let text = |word: &OsString| {
            let wrong = || Failure::about(word, "not valid UTF-8, which a snapshot's name must be");
            word.to_str().map(str::to_owned).ok_or_else(wrong)
        };
        let names: Result<Vec<String>, Failure> = rest.iter().map(text).collect();
        if let Ok(names) = <[String; N]>::try_from(names?) {
            return Ok((target, names));
        }
        let given = rest.len();
        let message = match rest.get(N) {
            Some(more) => format!("'{}' is one word too many", more.to_string_lossy()),
            None => format!("{} is missing", wanted.get(given).unwrap_or(&"a name")),
        };
        let hint = match &self.control {
            Some(_) => "with --control the image is not named",
            None => "the image comes first",
        };
        Err(Failure::new(message).hint(hint))
    }
}

impl ChangeArgs {
    /// Opens the image to change it.
    pub fn open(&self, spec: &ImageSpec) -> Result<SharedImage, Failure> {
        let options = OpenOptions {
            direct: self.cache.direct(),
            drop_bitmaps: self.drop_bitmaps,
            keys: self.keys.keys()?,
            ..OpenOptions::new(self.references.references())
        };
        let spec = spec.clone().with_probed_format(self.references.untrusted)?;
        SharedImage::open(&spec, &options).map_err(|failure| failure.hint_if_locked(LOCKED_HINT))
    }
}

/// Adds what to do about an image that another program has open.
pub fn explain_lock(failure: Failure) -> Failure {
    failure.hint_if_locked(LOCKED_READ_HINT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn image_is_first_word_unless_control_socket_given() {
        let plain = TargetArgs::default();
        let (target, [name]) = plain
            .split(&words(&["a.qcow2", "monday"]), ["a name"])
            .expect("two words");
        assert!(matches!(target, Target::Image(spec) if spec.path() == "a.qcow2"));
        assert_eq!(name, "monday");

        let remote = TargetArgs {
            control: Some("sock".into()),
            export_name: Some("x".to_owned()),
            ..TargetArgs::default()
        };
        let (target, [name]) = remote
            .split(&words(&["monday"]), ["a name"])
            .expect("one word");
        let Target::Server(server) = target else {
            panic!("a server is asked");
        };
        assert_eq!((server.socket, name), ("sock".into(), "monday".to_owned()));
        assert_eq!(server.export.as_deref(), Some("x"));
    }

    #[test]
    fn wrong_number_of_words_is_refused() {
        let refused = |args: &TargetArgs, list: &[&str]| {
            let split = args.split(&words(list), ["the snapshot's name", "the new name"]);
            split.map(|_| ()).expect_err("wrong words").to_string()
        };
        let plain = TargetArgs::default();
        assert!(refused(&plain, &[]).contains("an image"));
        assert!(refused(&plain, &["i", "a"]).contains("the new name is missing"));
        assert!(refused(&plain, &["i", "a", "b", "c"]).contains("'c'"));
        let remote = TargetArgs {
            control: Some("sock".into()),
            ..TargetArgs::default()
        };
        assert!(refused(&remote, &["i", "a", "b"]).contains("the image is not named"));
    }
}
