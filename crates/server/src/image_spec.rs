//! Image specification on the command line: a path, `json:{..}`, or with `--image-opts` a string of
//! `key=value,..`. The keys are QEMU's; an unknown one is refused, never ignored.
//!
//! Only the command line may use these forms. A backing file's name comes out of an image, which may be
//! hostile, so the engine takes paths only.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gaur_engine::{
    AllocationPolicy, BackingFile, CacheOptions, DetectZeroes, ErrorKind, Format, Keys,
    OpenOptions, Opened, PassDiscard, References,
};
use gaur_format::header::CryptMethod;
use gaur_reactor::BlockingFile;
use gaur_reactor::nbd::{Patience, Remote};

use crate::failure::Failure;
use crate::handover;
use crate::image_file::ImageFile;
use crate::key_values::{JSON_PREFIX, KeyValues, Value, shown};
use crate::notice::say;
use crate::open::{self, Bases, Place};

/// An image and how it is to be opened.
#[derive(Clone, Debug, Default)]
pub struct ImageSpec {
    given: OsString,
    path: PathBuf,
    /// The path as text.
    shown: String,
    format: Option<Format>,
    /// How the command line would tell it: `-f` for most.
    switch: Option<&'static str>,
    /// Where it is, if that is not a file as a whole.
    place: Option<Place>,
    /// The options name a protocol alone, without a format above it.
    protocol: bool,
    changes: Overrides,
}

/// What the options say; `None` is what the verb does without them.
#[derive(Clone, Debug, Default)]
struct Overrides {
    read_only: Option<bool>,
    force_share: Option<bool>,
    lock: Option<bool>,
    direct: Option<bool>,
    backing_direct: Option<bool>,
    no_flush: Option<bool>,
    discard: Option<bool>,
    pass_discard: PassDiscard,
    discard_no_unref: Option<bool>,
    detect_zeroes: Option<DetectZeroes>,
    copy_on_read: Option<bool>,
    allocation: Option<AllocationPolicy>,
    ignore_discards: Option<bool>,
    without_backing: bool,
    /// Depths in the chain, and the names of their secrets.
    secrets: Vec<(usize, String)>,
    /// Depths in the chain, and how the images there are said to be encrypted.
    encryption: Vec<(usize, CryptMethod)>,
    data_file: Option<PathBuf>,
    backing_files: Vec<BackingFile>,
    cache: CacheOptions,
    clean_interval_seconds: Option<u32>,
    aio: Option<Aio>,
    /// One of the options that only qcow2 has, if there was one.
    only_for_qcow2: Option<String>,
}

/// QEMU's names for ways to reach a file. Here it is io_uring wherever that works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Aio {
    /// Any way
    Threads,
    /// Any way, with O_DIRECT
    Native,
    /// io_uring or nothing
    #[cfg_attr(feature = "clap", value(name = "io_uring"))]
    Uring,
}

const AIO: [(&str, Aio); 3] = [
    ("threads", Aio::Threads),
    ("native", Aio::Native),
    ("io_uring", Aio::Uring),
];

/// Options of QEMU that ask for something that is not here.
const UNSUPPORTED: [&str; 6] = [
    "backing.",
    "data-file.",
    "file.file.",
    "file.pr-manager",
    "pr-manager",
    "file.x-check-cache-dropped",
];

/// Options that only qcow2 has, or what they start with.
const ONLY_FOR_QCOW2: [&str; 11] = [
    "allocation",
    "backing",
    "cache-",
    "discard-no-unref",
    "l2-cache-",
    "encrypt.",
    "lazy-refcounts",
    "overlap-check",
    "pass-discard-",
    "refcount-cache-",
    "data-file",
];

/// Seconds after which unused metadata is dropped from the caches, as in QEMU on Linux.
const CLEAN_INTERVAL_SECONDS: u32 = 600;

/// The path that a name stands for: QEMU's `file:` before it is dropped, and what is left is no other protocol's.
pub fn local_path(name: &OsStr) -> PathBuf {
    let Some(rest) = name.as_encoded_bytes().strip_prefix(b"file:") else {
        return name.into();
    };
    let path = Path::new(OsStr::from_bytes(rest));
    match path.is_relative() && rest.contains(&b':') {
        true => Path::new(".").join(path),
        false => path.into(),
    }
}

impl ImageSpec {
    /// Reads what the command line says. `format` is that of `-f`, which counts more than a driver in
    /// JSON.
    pub fn parse(
        given: impl AsRef<OsStr>,
        image_opts: bool,
        format: Option<Format>,
    ) -> Result<ImageSpec, Failure> {
        let given = given.as_ref();
        if !image_opts && !given.as_encoded_bytes().starts_with(JSON_PREFIX.as_bytes()) {
            return Ok(ImageSpec::plain(given, format));
        }
        let keys = match (given.to_str(), image_opts) {
            (Some(text), true) => KeyValues::from_option_string(text),
            (Some(text), false) => KeyValues::from_file_name(text),
            (None, _) => Err(Failure::new(
                "options are text, and this is not valid UTF-8",
            )),
        };
        keys.and_then(|keys| OptionReader { keys }.read(given, format))
            .map_err(|failure| failure.with_subject(&given.to_string_lossy()))
    }

    /// The image at a path.
    pub fn plain(path: impl AsRef<OsStr>, format: Option<Format>) -> ImageSpec {
        let given = path.as_ref();
        let path = local_path(given);
        ImageSpec {
            given: given.to_owned(),
            shown: path.to_string_lossy().into_owned(),
            path,
            format,
            switch: None,
            place: zeros::place_of(given),
            protocol: false,
            changes: Overrides::default(),
        }
    }

    /// The same image, whose format another switch than `-f` names.
    pub fn format_switch(mut self, switch: &'static str) -> ImageSpec {
        self.switch = Some(switch);
        self
    }

    /// The same image with its format, found out if it is not told. For commands that write what their
    /// caller asks for, and not what a guest does. An `untrusted` image is not found to be raw.
    pub fn with_probed_format(mut self, untrusted: bool) -> Result<ImageSpec, Failure> {
        if self.format.is_none() {
            let look = open::reading(None, true, References::Nothing);
            let format =
                self.format_of(&ImageFile::open_in_place(&self.path, self.place, &look)?)?;
            if untrusted && format == Format::Raw {
                let message =
                    "taken for a raw image by its content, which --untrusted does not trust";
                let hint = format!("say {} if it is one", self.raw_words());
                return Err(Failure::about(&self.shown, message).hint(hint));
            }
            self.format = Some(format);
        }
        Ok(self)
    }

    /// The format of the image, whose file this is: the given one, else the probed one.
    pub fn format_of(&self, file: &ImageFile) -> Result<Format, Failure> {
        match self.format {
            Some(format) => Ok(format),
            None => file.probe().map_err(|failure| self.advise(failure)),
        }
    }

    /// Says how to insist when the image was taken for one of a format that is not supported.
    fn advise(&self, failure: Failure) -> Failure {
        match failure.kind {
            Some(ErrorKind::ForeignFormat) => {
                failure.hint(format!("{} takes its bytes as they are", self.raw_words()))
            }
            Some(ErrorKind::HasBitmaps) => failure.hint("--drop-bitmaps removes them"),
            _ => failure,
        }
    }

    /// How the command line would say that the image is raw.
    pub fn raw_words(&self) -> String {
        match self.given == self.path.as_os_str() {
            true => format!("{} raw", self.switch.unwrap_or("-f")),
            false => "driver=raw".to_owned(),
        }
    }

    /// What the command line says, word by word.
    pub fn given(&self) -> &OsStr {
        &self.given
    }

    /// The path of its file as text, to be shown; [`ImageSpec::file_path`] is for opening it.
    pub fn path(&self) -> &str {
        &self.shown
    }

    /// The path of its file.
    pub fn file_path(&self) -> &Path {
        &self.path
    }

    /// Its name as QEMU tells it: with the options that make it another image than its file alone would be.
    pub fn qemu_name(&self) -> String {
        let key = match self.format {
            Some(Format::Luks) => "key-secret",
            _ => "encrypt.key-secret",
        };
        let mut secrets = self.changes.secrets.iter();
        let Some((_, secret)) = secrets.find(|(depth, _)| *depth == 0) else {
            return ImageSpec::qemu_path(&self.shown);
        };
        let driver = self.format.map_or("qcow2", Format::name);
        let file = serde_json::json!({ "driver": "file", "filename": self.shown });
        let node = serde_json::json!({ key: secret, "driver": driver, "file": file });
        format!("{JSON_PREFIX}{node}")
    }

    /// A path as QEMU tells it: the name of an export says nothing of how it is reached.
    pub fn qemu_path(path: &str) -> String {
        match Remote::parse(path.as_bytes()) {
            Some(Ok(remote)) => {
                let plain = Remote {
                    tls: None,
                    context: None,
                    patience: Patience::default(),
                    ..remote
                };
                plain.to_string()
            }
            _ => path.to_owned(),
        }
    }

    /// Whether the options name a protocol alone, without a format above it.
    pub fn is_protocol(&self) -> bool {
        self.protocol
    }

    /// Its format, if one is given.
    pub fn format(&self) -> Option<Format> {
        self.format
    }

    /// Refuses an image that is a part of its file or in none, for what would use all of it.
    pub fn check_whole(&self) -> Result<(), Failure> {
        match self.place {
            None => Ok(()),
            Some(_) => Err(Failure::about(
                &self.shown,
                "options 'offset' and 'size', and driver 'null-co', cannot be used for this",
            )),
        }
    }

    /// Whether the options forbid writing.
    pub fn is_read_only(&self) -> bool {
        self.changes.read_only == Some(true)
    }

    /// Whether the options say that what is read stays in the image.
    pub fn copies_on_read(&self) -> bool {
        self.changes.copy_on_read == Some(true)
    }

    /// Whether the options say that flushes do nothing.
    pub fn ignores_flushes(&self) -> bool {
        self.changes.no_flush == Some(true)
    }

    /// Whether the guest's discards do nothing, if the options say so or the opposite.
    pub fn ignores_discards(&self) -> Option<bool> {
        self.changes.ignore_discards
    }

    /// The way to reach the file, if the options say one.
    pub fn aio(&self) -> Option<Aio> {
        self.changes.aio
    }

    /// How often unused metadata is to be given back; `None` for never.
    pub fn clean_interval(&self) -> Option<Duration> {
        let seconds = self.changes.clean_interval_seconds;
        match seconds.unwrap_or(CLEAN_INTERVAL_SECONDS) {
            0 => None,
            seconds => Some(Duration::from_secs(u64::from(seconds))),
        }
    }

    /// How it is to be opened by a verb that opens images by `base`.
    pub fn open_options(&self, base: &OpenOptions) -> Result<OpenOptions, Failure> {
        self.options_with(base, self.keys(&base.keys)?)
    }

    fn options_with(&self, base: &OpenOptions, keys: Keys) -> Result<OpenOptions, Failure> {
        let changes = &self.changes;
        let fail = |message: &str| Err(Failure::about(&self.shown, message));
        if self.is_read_only() && !base.read_only {
            return fail("the options say read-only=on, but this command writes");
        }
        if base.force_share && changes.force_share == Some(false) {
            return fail("-U and force-share=off contradict each other");
        }
        let options = OpenOptions {
            format: self.format.or(base.format),
            direct: changes.direct.unwrap_or(base.direct),
            backing_direct: Some(changes.backing_direct.unwrap_or(base.direct)),
            lock: changes.lock.unwrap_or(base.lock),
            force_share: changes.force_share.unwrap_or(base.force_share),
            backing: base.backing && !changes.without_backing,
            keys,
            cache: changes.cache,
            data_file: changes.data_file.clone().or(base.data_file.clone()),
            backing_files: changes.backing_files.clone(),
            discard: changes.discard.unwrap_or(base.discard),
            pass_discard: changes.pass_discard,
            discard_no_unref: changes.discard_no_unref.unwrap_or(base.discard_no_unref),
            detect_zeroes: changes.detect_zeroes.unwrap_or(base.detect_zeroes),
            // Whoever only reads leaves nothing.
            copy_on_read: changes.copy_on_read.unwrap_or(base.copy_on_read) && !base.read_only,
            allocation: changes.allocation.or(base.allocation),
            ..base.clone()
        };
        if options.detect_zeroes == DetectZeroes::Unmap && !options.discard {
            return fail("detect-zeroes=unmap needs discard=unmap");
        }
        if changes.aio == Some(Aio::Native) && !options.direct {
            return Err(self.native_without_direct());
        }
        Ok(options)
    }

    /// The keys, and which layer is opened with which.
    fn keys(&self, base: &Keys) -> Result<Keys, Failure> {
        let mut keys = base.clone();
        for (depth, name) in &self.changes.secrets {
            if !keys.assign(*depth, name) {
                let message = format!("there is no secret '{name}'");
                let hint = format!("--object secret,id={name},file=PATH makes it");
                return Err(Failure::about(&self.shown, message).hint(hint));
            }
        }
        Ok(keys)
    }

    /// QEMU's rule about Linux's native asynchronous I/O.
    pub fn native_without_direct(&self) -> Failure {
        let failure = Failure::about(&self.shown, "aio=native needs O_DIRECT");
        failure.hint("say cache.direct=on, or a cache mode of none or directsync")
    }

    /// Why what is read cannot stay in an image that is only read.
    pub fn refuses_copy_on_read(&self) -> Failure {
        let message = "copy-on-read writes to the image, which is opened read-only";
        Failure::about(&self.shown, message).kind(ErrorKind::InvalidInput)
    }

    /// Opens the image and its chain.
    pub fn open(&self, base: &OpenOptions) -> Result<Opened<BlockingFile>, Failure> {
        self.open_sharing(base, &Bases::default())
    }

    /// The same; its backing chain may be shared with images that were opened with the same `bases`.
    pub fn open_sharing(
        &self,
        base: &OpenOptions,
        bases: &Bases,
    ) -> Result<Opened<BlockingFile>, Failure> {
        let options = self.open_options(base)?;
        let opened = match self.place {
            None => open::open_sharing(&self.path, &options, bases),
            Some(place) => open::open_in_place(&self.path, place, &options, bases),
        };
        let opened = opened.map_err(|failure| self.advise(failure))?;
        let other = opened.image.layers().top().format();
        if other != Format::Qcow2 {
            let option = base.allocation.map(|_| "--allocation".to_owned());
            let key = self.changes.only_for_qcow2.as_ref();
            if let Some(option) = option.or(key.map(|key| format!("option '{key}'"))) {
                let message = format!("{option} is for qcow2, but the image is {other}");
                return Err(Failure::about(&self.shown, message));
            }
        }
        open::check_encryption(&self.shown, &self.changes.encryption, &opened.image)?;
        if let Some(lost) = opened.image.lost_bitmaps() {
            say(format!("{}: {}", self.shown, lost.describe()));
        }
        // A caller with a commit log reports after it has read the log.
        if let (Some(unclosed), None) = (opened.image.unclosed(), &base.commit_log) {
            handover::tell(&self.shown, unclosed, false);
        }
        Ok(opened)
    }

    /// Opens the file alone, to read metadata, which needs no key.
    pub fn open_file(&self, base: &OpenOptions) -> Result<ImageFile, Failure> {
        let options = self.options_with(base, base.keys.clone())?;
        ImageFile::open_in_place(&self.path, self.place, &options)
    }
}

/// Takes the options that are known.
struct OptionReader {
    keys: KeyValues,
}

impl OptionReader {
    fn read(mut self, given: &OsStr, format: Option<Format>) -> Result<ImageSpec, Failure> {
        let filter = self.copy_on_read()?;
        let told = self.keys.take_text("driver")?;
        if matches!(told.as_deref(), Some("null-co" | "null-aio"))
            && format.is_none_or(|format| format == Format::Raw)
        {
            return self.zeros(given);
        }
        let driver = format.map(Format::name).or(told.as_deref());
        // A protocol may stand alone; otherwise it is below the format.
        let (format, below) = match driver {
            None => (None, "file."),
            Some("file" | "host_device" | "nbd") => (Some(Format::Raw), ""),
            Some(name) => match Format::from_name(name) {
                Some(format) => (Some(format), "file."),
                None => {
                    let failure = Failure::new(format!("driver '{name}' is not supported"));
                    let hint = format!("{}, file and nbd are", open::known_formats());
                    return Err(failure.hint(hint));
                }
            },
        };
        let qcow2 = |key: &str| ONLY_FOR_QCOW2.iter().any(|start| key.starts_with(start));
        let mut changes = Overrides {
            only_for_qcow2: self.keys.find_key(qcow2).map(str::to_owned),
            ..Overrides::default()
        };
        let (window, below, between) = self.window(driver, below)?;
        let below = below.as_str();
        let path = self.protocol(below, driver, &mut changes)?;
        let file = self.node(below)?.above(&between);
        let top = match below {
            "" => file.clone(),
            _ => self.node("")?,
        };
        let top = top.above(&filter);
        if matches!(format, None | Some(Format::Qcow2)) {
            self.backing(&mut changes)?;
            self.qcow2(&mut changes)?;
        }
        if format == Some(Format::Luks) {
            let secret = self.keys.take_text("key-secret")?;
            changes.secrets.extend(secret.map(|name| (0, name)));
        }
        changes.merge(&top, &file);
        self.check_all_taken(driver.unwrap_or("qcow2"))?;
        Ok(ImageSpec {
            given: given.to_owned(),
            shown: path.clone(),
            path: path.into(),
            format,
            switch: None,
            place: window.map(Place::Window),
            protocol: below.is_empty(),
            changes,
        })
    }

    /// Refuses what is left.
    fn check_all_taken(&self, driver: &str) -> Result<(), Failure> {
        let Some(key) = self.keys.find_key(|_| true) else {
            return Ok(());
        };
        let what = match UNSUPPORTED.iter().any(|start| key.starts_with(start)) {
            true => "is not supported",
            false => "is unknown",
        };
        let message = format!("option '{key}' {what} (driver {driver})");
        Err(Failure::new(message))
    }

    /// The options of a file; returns its path.
    fn protocol(
        &mut self,
        below: &str,
        driver: Option<&str>,
        changes: &mut Overrides,
    ) -> Result<String, Failure> {
        let keys = &mut self.keys;
        let key = |name: &str| format!("{below}{name}");
        if !below.is_empty()
            && let Some(node) = keys.take("file")
        {
            let message = format!(
                "option 'file' is {}, which would be another node",
                shown(&node)
            );
            return Err(Failure::new(message).hint("name a file with file.filename"));
        }
        let told = match below {
            "" => driver.map(str::to_owned),
            _ => {
                let drivers = ["file", "host_device", "nbd"].map(|name| (name, name));
                let told = keys.take_choice(&key("driver"), &drivers)?;
                told.map(str::to_owned)
            }
        };
        if told.as_deref() == Some("nbd") {
            return self.nbd(below);
        }
        changes.aio = keys.take_choice(&key("aio"), &AIO)?;
        let locking = [("auto", true), ("on", true), ("off", false)];
        changes.lock = keys.take_choice(&key("locking"), &locking)?;
        // How QEMU fills its queues and what it does after a migration: nothing to do here.
        keys.take_number(&key("aio-max-batch"))?;
        keys.take_bool(&key("drop-cache"))?;
        match keys.take_text(&key("filename"))? {
            // Whose driver is told is a path, whatever it looks like.
            Some(path) if told.is_some() && Remote::is_name(path.as_bytes()) => {
                Ok(format!("./{path}"))
            }
            Some(path) if !path.is_empty() => Ok(path),
            _ => Err(Failure::new(format!(
                "option '{}' is missing, which names the file",
                key("filename")
            ))),
        }
    }

    /// The options that every level has.
    fn node(&mut self, level: &str) -> Result<Overrides, Failure> {
        let keys = &mut self.keys;
        let key = |name: &str| format!("{level}{name}");
        // No node refers to another here, and only verbs that write open files for writing.
        keys.take_text(&key("node-name"))?;
        keys.take_bool(&key("auto-read-only"))?;
        let discards = [
            ("ignore", false),
            ("off", false),
            ("unmap", true),
            ("on", true),
        ];
        let discard = keys.take_choice(&key("discard"), &discards)?;
        let detect_zeroes = keys.take_choice(&key("detect-zeroes"), &open::DETECT_ZEROES)?;
        Ok(Overrides {
            direct: keys.take_bool(&key("cache.direct"))?,
            no_flush: keys.take_bool(&key("cache.no-flush"))?,
            read_only: keys.take_bool(&key("read-only"))?,
            force_share: keys.take_bool(&key("force-share"))?,
            discard,
            detect_zeroes,
            copy_on_read: keys.take_bool(&key("copy-on-read"))?,
            ..Overrides::default()
        })
    }

    /// The options of qcow2.
    fn qcow2(&mut self, changes: &mut Overrides) -> Result<(), Failure> {
        let keys = &mut self.keys;
        changes.cache = CacheOptions {
            total_bytes: keys.take_size("cache-size")?,
            l2_bytes: keys.take_size("l2-cache-size")?,
            l2_entry_bytes: keys.take_size("l2-cache-entry-size")?,
            refcount_bytes: keys.take_size("refcount-cache-size")?,
            decompressed_bytes: keys.take_size("decompressed-cache-size")?,
        };
        changes.allocation = keys.take_choice("allocation", &open::ALLOCATION_POLICIES)?;
        changes.clean_interval_seconds = keys.take_number("cache-clean-interval")?;
        match keys.take("backing") {
            None => {}
            Some(Value::Null) => changes.without_backing = true,
            Some(Value::String(text)) if text.is_empty() || text == "null" => {
                changes.without_backing = true;
            }
            Some(node) => {
                let message = format!(
                    "option 'backing' is {}, which would be another node",
                    shown(&node)
                );
                return Err(Failure::new(message).hint("null opens the image without its chain"));
            }
        }
        keys.take_choice("data-file.driver", &[("file", ()), ("host_device", ())])?;
        changes.data_file = keys.take_text("data-file.filename")?.map(PathBuf::from);
        changes.pass_discard = PassDiscard {
            request: keys.take_bool("pass-discard-request")?,
            snapshot: keys.take_bool("pass-discard-snapshot")?,
            other: keys.take_bool("pass-discard-other")?,
        };
        changes.discard_no_unref = keys.take_bool("discard-no-unref")?;
        // Allowed, but never done: refcounts are not put off, and no write to metadata goes unchecked.
        keys.take_bool("lazy-refcounts")?;
        let templates = ["none", "constant", "cached", "all"].map(|name| (name, name));
        let short = keys.take_choice("overlap-check", &templates)?;
        let long = keys.take_choice("overlap-check.template", &templates)?;
        if short.is_some() && long.is_some() && short != long {
            let message =
                "options 'overlap-check' and 'overlap-check.template' contradict each other";
            return Err(Failure::new(message));
        }
        for structure in OVERLAP_STRUCTURES {
            keys.take_bool(&format!("overlap-check.{structure}"))?;
        }
        Ok(())
    }
}

/// What `overlap-check` tells apart.
const OVERLAP_STRUCTURES: [&str; 9] = [
    "main-header",
    "active-l1",
    "active-l2",
    "refcount-table",
    "refcount-block",
    "snapshot-table",
    "inactive-l1",
    "inactive-l2",
    "bitmap-directory",
];

impl Overrides {
    /// What a node says, together with one right above it.
    fn above(self, node: &Overrides) -> Overrides {
        let discards = [self.discard, node.discard].into_iter().flatten();
        Overrides {
            direct: self.direct.or(node.direct),
            no_flush: either(self.no_flush, node.no_flush),
            read_only: either(self.read_only, node.read_only),
            force_share: either(self.force_share, node.force_share),
            discard: discards.reduce(|one, two| one && two),
            detect_zeroes: self.detect_zeroes.or(node.detect_zeroes),
            copy_on_read: either(self.copy_on_read, node.copy_on_read),
            ..self
        }
    }

    /// A file is opened as its own options say, and where they do not, as those of the image.
    fn merge(&mut self, top: &Overrides, file: &Overrides) {
        self.direct = file.direct.or(top.direct);
        self.backing_direct = top.direct;
        self.no_flush = either(top.no_flush, file.no_flush);
        self.read_only = either(top.read_only, file.read_only);
        self.force_share = either(top.force_share, file.force_share);
        self.ignore_discards = top.discard.map(|discard| !discard);
        self.detect_zeroes = top.detect_zeroes.or(file.detect_zeroes);
        self.copy_on_read = either(top.copy_on_read, file.copy_on_read);
        let discards = [top.discard, file.discard];
        self.discard = discards.into_iter().flatten().reduce(|one, two| one && two);
        if file.discard == Some(false) {
            // The file has no holes made in it, whatever for.
            self.pass_discard = PassDiscard::default();
        }
    }
}

/// Whether one of two says so.
fn either(one: Option<bool>, two: Option<bool>) -> Option<bool> {
    match (one, two) {
        (Some(one), Some(two)) => Some(one || two),
        (one, two) => one.or(two),
    }
}

mod backing;
mod copy_on_read;
mod nbd;
#[cfg(test)]
mod tests;
mod window;
mod zeros;
