//! An open image, the requests under way to it, and the commands that are not requests.

use std::ffi::{OsStr, OsString};
use std::future::{Future, poll_fn};
use std::io::Write;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use futures_util::stream::{FuturesUnordered, Stream};
use gaur_block::{Device, Payload, Request};
use gaur_engine::{ErrorKind, Format, Job, Keys, OpenOptions, Queue, References};
use gaur_format::plan::Preallocation;
use gaur_reactor::{ReactorFile, sleep};
use gaur_server::key_values::{JSON_PREFIX, KeyValues};
use gaur_server::temporary;

use super::How;
use super::commands::{COMMANDS, Command, Needs, Next, number};
use super::flags::Words;
use super::report::{reason, size};
use super::transfer::Finished;
use crate::failure::Failure;
use crate::image_spec::{Aio, ImageSpec};
use crate::notice;
use crate::open::{Bases, CacheMode};
use crate::resize::PreallocationArg;
use crate::shared_image::SharedImage;

/// What became of a command: the error was printed already.
pub(super) type Outcome = Result<(), Wrong>;

/// Why a command did not work.
pub(super) enum Wrong {
    /// Its words; the command's line is shown.
    Usage,
    /// A line for standard output.
    Line(String),
    /// A message.
    Message(Failure),
    /// It was told already.
    Told,
}

impl From<Failure> for Wrong {
    fn from(failure: Failure) -> Wrong {
        Wrong::Message(failure)
    }
}

impl From<std::io::Error> for Wrong {
    fn from(error: std::io::Error) -> Wrong {
        Wrong::Message(error.into())
    }
}

impl From<String> for Wrong {
    fn from(line: String) -> Wrong {
        Wrong::Line(line)
    }
}

/// An image that is open.
pub(super) struct OpenImage {
    file: OsString,
    image_opts: bool,
    format: Option<Format>,
    how: How,
    image: SharedImage,
    /// Corruption that was found has been told.
    told: bool,
    pub(super) queue: Rc<Queue<ReactorFile>>,
}

impl OpenImage {
    fn open(
        (file, image_opts): (&OsStr, bool),
        format: Option<Format>,
        how: &How,
        keys: &Keys,
    ) -> Result<OpenImage, Failure> {
        let spec = ImageSpec::parse(file, image_opts, format)?;
        let spec = spec.with_probed_format(false)?;
        let direct = how.nocache || how.cache.is_some_and(CacheMode::direct);
        if (how.native_aio || how.aio == Some(Aio::Native)) && !direct {
            return Err(spec.native_without_direct());
        }
        let read_only = how.read_only || spec.is_read_only();
        let copy_on_read = how.copy_on_read || spec.copies_on_read();
        if copy_on_read && read_only && !how.snapshot {
            return Err(spec.refuses_copy_on_read());
        }
        let options = OpenOptions {
            read_only,
            copy_on_read,
            force_share: how.force_share,
            direct,
            keys: keys.clone(),
            mark_zeros: true,
            ..OpenOptions::new(References::Any)
        };
        let image = match how.snapshot {
            true => temporary::open(&spec, &options, &Bases::default())?,
            false => SharedImage::open(&spec, &options)?,
        };
        Ok(OpenImage {
            file: file.to_owned(),
            image_opts,
            format,
            how: How {
                read_only: options.read_only,
                ..how.clone()
            },
            queue: Rc::new(image.queue()),
            image,
            told: false,
        })
    }

    /// Says that the image was found corrupt, the first time that it was, as QEMU's program does.
    fn tell_corruption(&mut self) {
        let found = match self.told {
            true => None,
            false => self.image.image().corruption(),
        };
        let Some(report) = found else {
            return;
        };
        self.told = true;
        let what = match report.layer == 0 && !self.is_read_only() {
            true => "Marking image as corrupt",
            false => "Image is corrupt",
        };
        eprintln!("qcow2: {what}: {report}; further corruption events will be suppressed");
    }

    /// Whether the image is open for reading only.
    fn is_read_only(&self) -> bool {
        self.how.read_only && !self.how.snapshot
    }

    /// Whether writes are durable before they are done.
    pub(super) fn is_writethrough(&self) -> bool {
        self.how.cache.is_some_and(CacheMode::writethrough)
    }

    /// Whether discards do nothing.
    pub(super) fn ignores_discards(&self) -> bool {
        matches!(self.how.discard.as_deref(), Some("ignore" | "off"))
    }
}

/// Options, or what they begin with, that `reopen` takes as new, as in QEMU: those of earlier openings are forgotten.
const OF_ONE_OPENING: [&str; 8] = [
    "cache-size",
    "cache-clean-interval",
    "discard-no-unref",
    "l2-cache-",
    "lazy-refcounts",
    "overlap-check",
    "pass-discard-",
    "refcount-cache-",
];

/// What all commands share.
pub struct Session<'o> {
    keys: Keys,
    /// Standard output.
    pub out: &'o mut dyn Write,
    opened: Option<OpenImage>,
    pub(super) pending: FuturesUnordered<LocalBoxFuture<'static, Finished>>,
}

impl<'o> Session<'o> {
    /// Without an image.
    pub fn new(keys: Keys, out: &'o mut dyn Write) -> Session<'o> {
        Session {
            keys,
            out,
            opened: None,
            pending: FuturesUnordered::new(),
        }
    }

    /// Opens an image.
    pub fn open(
        &mut self,
        file: &OsStr,
        image_opts: bool,
        format: Option<Format>,
        how: &How,
    ) -> Result<(), Failure> {
        let opened = OpenImage::open((file, image_opts), format, how, &self.keys)?;
        self.opened = Some(opened);
        Ok(())
    }

    /// Finishes what is under way and closes the image, if one is open.
    pub async fn close(&mut self) -> Result<(), Failure> {
        self.finish_all().await?;
        let Some(opened) = self.opened.take() else {
            return Ok(());
        };
        drop(opened.queue);
        opened.image.close().map_err(|mut failure| {
            // The same corruption again; anything else is told.
            failure.silent |= opened.told && failure.kind == Some(ErrorKind::Corrupt);
            failure
        })
    }

    /// The image; commands that need one are not run without.
    pub(super) fn image(&self) -> Result<&OpenImage, Wrong> {
        self.opened.as_ref().ok_or(Wrong::Told)
    }

    /// Waits for all requests in the background.
    pub async fn finish_all(&mut self) -> Result<(), Failure> {
        while let Some(finished) = poll_fn(|cx| pin!(&mut self.pending).poll_next(cx)).await {
            // Whether it failed is not the failure of a command.
            finished.print(self.out)?;
        }
        Ok(())
    }

    /// Does `work`, while requests in the background go on.
    pub(super) async fn beside<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        let mut work = pin!(work);
        let (pending, out) = (&mut self.pending, &mut *self.out);
        poll_fn(|cx| {
            if let Poll::Ready(done) = work.as_mut().poll(cx) {
                return Poll::Ready(Ok(done));
            }
            while let Poll::Ready(Some(finished)) = pin!(&mut *pending).poll_next(cx) {
                if let Err(error) = finished.print(out) {
                    return Poll::Ready(Err(error.into()));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Runs a line.
    pub async fn execute(&mut self, line: &str) -> Result<Next, Failure> {
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let Some((name, words)) = words.split_first() else {
            return Ok(Next::Go { worked: true });
        };
        let said = |line: String| {
            eprintln!("{line}");
            Ok(Next::Go { worked: false })
        };
        let Some(command) = Command::find(name) else {
            return said(format!("command \"{name}\" not found"));
        };
        if command.needs != Needs::Nothing && self.opened.is_none() {
            return said("no file open, try 'help open'".to_owned());
        }
        if let Some(wrong) = command.miscounted(words.len()) {
            return said(wrong);
        }
        if command.name == "quit" {
            return Ok(Next::Quit);
        }
        let outcome = match Words::sort(words, command.flags) {
            Err(wrong) => {
                eprintln!("{}: {wrong}", command.name);
                Err(Wrong::Usage)
            }
            Ok(words) => self.run(command, &words).await,
        };
        if let Some(opened) = &mut self.opened {
            opened.tell_corruption();
        }
        match outcome {
            Ok(()) => return Ok(Next::Go { worked: true }),
            Err(Wrong::Usage) => writeln!(self.out, "{}", command.line())?,
            Err(Wrong::Line(line)) => writeln!(self.out, "{line}")?,
            // Told when it was found, and no reason to end.
            Err(Wrong::Message(failure))
                if failure.silent && failure.kind == Some(ErrorKind::Corrupt) => {}
            Err(Wrong::Message(failure)) if failure.silent => return Err(failure),
            Err(Wrong::Message(failure)) => notice::say(&failure),
            Err(Wrong::Told) => {}
        }
        Ok(Next::Go { worked: false })
    }

    async fn run(&mut self, command: &Command, words: &Words) -> Outcome {
        let read_only = self.opened.as_ref().is_some_and(OpenImage::is_read_only);
        if command.needs == Needs::Writable && read_only {
            return Err(Failure::about(self.image()?.image.name(), "open read-only").into());
        }
        match command.name {
            "read" => self.read(words).await,
            "readv" => self.readv(words).await,
            "write" => self.write(words).await,
            "writev" => self.writev(words).await,
            "aio_read" => self.aio_read(words),
            "aio_write" => self.aio_write(words),
            "aio_flush" => Ok(self.finish_all().await?),
            "discard" => self.discard(words).await,
            "flush" => self.flush().await,
            "alloc" => self.alloc(words).await,
            "map" => self.map().await,
            "length" => {
                let bytes = self.image()?.queue.size_bytes();
                Ok(writeln!(self.out, "{}", size(bytes as f64))?)
            }
            "truncate" => self.truncate(words).await,
            "info" => self.info(),
            "open" => self.open_command(words),
            "reopen" => self.reopen(words).await,
            "close" => Ok(self.close().await?),
            "sleep" => self.sleep(words).await,
            "sigraise" => self.raise(words),
            "abort" => {
                self.out.flush()?;
                std::process::abort()
            }
            "help" => self.help(words),
            _ => Err(Wrong::Usage),
        }
    }

    /// Sends a signal to this process, which may end by it: what was said goes out before.
    fn raise(&mut self, words: &Words) -> Outcome {
        let [text] = &words.operands[..] else {
            return Err(Wrong::Usage);
        };
        let signal = text
            .parse()
            .ok()
            .and_then(rustix::process::Signal::from_named_raw);
        let signal = signal.ok_or_else(|| format!("{text} is not a valid number"))?;
        self.out.flush()?;
        let sent = rustix::process::kill_process(rustix::process::getpid(), signal);
        Ok(sent.map_err(std::io::Error::from)?)
    }

    async fn flush(&mut self) -> Outcome {
        let opened = self.image()?;
        if opened.how.cache == Some(CacheMode::Unsafe) {
            return Ok(());
        }
        let queue = Rc::clone(&opened.queue);
        let flushed = async move { queue.submit(Request::Flush, Payload::None).await };
        self.beside(flushed)
            .await?
            .map_err(|errno| Wrong::Line(format!("flush failed: {}", reason(errno))))
    }

    async fn truncate(&mut self, words: &Words) -> Outcome {
        let [text] = &words.operands[..] else {
            return Err(Wrong::Usage);
        };
        let mode: Option<PreallocationArg> = named(words.value('m'), "way to preallocate")?;
        let mode = mode.map_or(Preallocation::Off, Preallocation::from);
        let bytes = number(text)?;
        let opened = self.image()?;
        let queue = Rc::clone(&opened.queue);
        let name = opened.image.name().to_owned();
        let resized = async move {
            let job = Job::default();
            queue.resize_preallocated(bytes, true, mode, &job).await
        };
        let resized = self.beside(resized).await?;
        Ok(resized.map_err(|error| Failure::image(&name, &error))?)
    }

    async fn sleep(&mut self, words: &Words) -> Outcome {
        let [text] = &words.operands[..] else {
            return Err(Wrong::Usage);
        };
        let milliseconds = text.parse();
        let milliseconds = milliseconds.map_err(|_| format!("{text} is not a valid number"))?;
        Ok(self
            .beside(sleep(Duration::from_millis(milliseconds)))
            .await?)
    }

    fn info(&mut self) -> Outcome {
        let opened = self.image()?;
        let layer = opened
            .image
            .image()
            .layers()
            .iter()
            .next()
            .ok_or(Wrong::Told)?;
        let (name, cluster, state) = match layer.header() {
            None => (layer.format().name(), 0.0, 0.0),
            Some(header) => {
                let geometry = header.geometry();
                let state = geometry.l1_entries_for(opened.queue.size_bytes())
                    * geometry.guest_bytes_per_l2();
                (
                    layer.format().name(),
                    geometry.cluster_size() as f64,
                    state as f64,
                )
            }
        };
        writeln!(self.out, "format name: {name}")?;
        writeln!(self.out, "cluster size: {}", size(cluster))?;
        Ok(writeln!(self.out, "vm state offset: {}", size(state))?)
    }

    fn help(&mut self, words: &Words) -> Outcome {
        if let Some(name) = words.operands.first() {
            return match Command::find(name) {
                Some(command) => Ok(writeln!(self.out, "{}", command.line())?),
                None => Err(Wrong::Line(format!("command {name} not found"))),
            };
        }
        for command in &COMMANDS {
            writeln!(self.out, "{}", command.line())?;
        }
        Ok(writeln!(
            self.out,
            "\nUse 'help commandname' for extended help."
        )?)
    }

    fn open_command(&mut self, words: &Words) -> Outcome {
        if self.opened.is_some() {
            return Err(Failure::new("file open already, try 'help close'").into());
        }
        let how = How {
            read_only: words.has('r'),
            snapshot: words.has('s'),
            nocache: words.has('n'),
            copy_on_read: words.has('C'),
            force_share: words.has('U'),
            cache: cache_mode(words.value('t'))?,
            discard: words.value('d').map(str::to_owned),
            aio: aio(words.value('i'))?,
            native_aio: words.has('k'),
        };
        let mut options: Vec<String> = words.values('o').map(str::to_owned).collect();
        let file = match &words.operands[..] {
            [] if options.is_empty() => return Err(Wrong::Usage),
            [] => {
                return Ok(self.open(options.join(",").as_ref(), true, None, &how)?);
            }
            [path] => path,
            _ => return Err(Wrong::Usage),
        };
        if options.is_empty() {
            return Ok(self.open(file.as_ref(), false, None, &how)?);
        }
        options.push(format!("file.filename={}", file.replace(',', ",,")));
        Ok(self.open(options.join(",").as_ref(), true, None, &how)?)
    }

    async fn reopen(&mut self, words: &Words) -> Outcome {
        if !words.operands.is_empty() {
            return Err(Wrong::Usage);
        }
        if words.has('r') && words.has('w') {
            return Err(Failure::new("only one of -r and -w may be given").into());
        }
        let cache = cache_mode(words.value('c'))?;
        let opened = self.image()?;
        let (file, image_opts, format) = (opened.file.clone(), opened.image_opts, opened.format);
        let old = opened.how.clone();
        let how = How {
            read_only: (old.read_only || words.has('r')) && !words.has('w'),
            cache: cache.or(old.cache),
            ..old.clone()
        };
        let options: Vec<&str> = words.values('o').collect();
        let (changed, is_options) = match options.is_empty() {
            true => (file.clone(), image_opts),
            false => {
                let given = file.to_string_lossy();
                let base = match image_opts {
                    true => KeyValues::from_option_string(&given)?,
                    false if given.starts_with(JSON_PREFIX) => KeyValues::from_file_name(&given)?,
                    false => {
                        let driver = format.or_else(|| self.format()).unwrap_or(Format::Qcow2);
                        let path = given.replace(',', ",,");
                        let text = format!("driver={driver},file.filename={path}");
                        KeyValues::from_option_string(&text)?
                    }
                };
                let base = base.without(&OF_ONE_OPENING).option_string();
                (format!("{base},{}", options.join(",")).into(), true)
            }
        };
        // Words that are wrong are told before the image is closed.
        ImageSpec::parse(&changed, is_options, format.filter(|_| !is_options))?;
        self.close().await?;
        let reopened = self.open(&changed, is_options, format.filter(|_| !is_options), &how);
        if let Err(failure) = reopened {
            self.open(&file, image_opts, format, &old)?;
            return Err(failure.into());
        }
        Ok(())
    }

    /// The format of the image.
    fn format(&self) -> Option<Format> {
        let image = self.opened.as_ref()?.image.image();
        Some(image.layers().top().format())
    }
}

fn cache_mode(name: Option<&str>) -> Result<Option<CacheMode>, Failure> {
    named(name, "cache mode")
}

fn aio(name: Option<&str>) -> Result<Option<Aio>, Failure> {
    named(name, "way to reach files")
}

/// The value that a flag names.
fn named<T: clap::ValueEnum>(name: Option<&str>, what: &str) -> Result<Option<T>, Failure> {
    let wrong = |name: &str| Failure::new(format!("{name:?} is no {what}"));
    name.map(|name| T::from_str(name, false).map_err(|_| wrong(name)))
        .transpose()
}
