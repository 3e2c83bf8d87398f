//! Image creation: the options of a new image, and writing it. Used by `create`, `convert` and
//! `serve --create`.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use gaur_block::{Access, Errno, File, FileId};
use gaur_engine::ErrorKind::{Cancelled, ForeignFormat, KeyMissing, NotFound};
use gaur_engine::{BadName, Compressor, Format, Job, Keys, OpenOptions, References};
use gaur_format::feature::Incompatible;
use gaur_format::header::CompressionType;
use gaur_format::plan::{CreateOptions, LuksArea, Preallocation};
use gaur_format::{AllocationPolicy, ErrorKind, ImageFormat, Version};
use gaur_reactor::{BlockingFile, CreateFile, OpenFile, block_on};

use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::image_spec::local_path;
use crate::luks;
use crate::new_image::file_hints::FileHints;
use crate::new_luks::{self, LuksChoice};
use crate::notice::{is_qemu, say};
use crate::open;
use crate::options::{OptionList, wrong_value};
use crate::size::{SIZE_MAX, parse_whole_number};

mod data_file;
mod file_hints;
mod flat;
pub mod layout;
mod written_zeros;

pub use data_file::stored_name;

/// What a new image is to be.
#[derive(Debug)]
pub struct NewImage {
    path: PathBuf,
    /// The path as text.
    name: String,
    format: Format,
    /// Of a raw image only the size and the preallocation count.
    plan: CreateOptions,
    /// The version as given.
    compat: Option<&'static str>,
    /// The preallocation as given.
    preallocation: Option<&'static str>,
    /// An external data file that is there keeps what it holds, if it is raw.
    keeps_data: bool,
    /// Size of the backing file, if it was looked at.
    backing_size: Option<u64>,
    /// Which files the backing file may refer to; without it that is neither opened nor checked.
    check_backing: Option<References>,
    /// What the file system is asked for.
    hints: FileHints,
    /// Encryption of the image.
    luks: Option<LuksChoice>,
    /// Keys of the image and of those below it.
    keys: Keys,
    /// It need not be durable when it is made.
    skips_flushes: bool,
}

const FORMAT_NEEDED: &str = "a backing file needs its format too";

/// Values of `compat`.
const VERSIONS: [(&str, Version); 4] = [
    ("0.10", Version::V2),
    ("v2", Version::V2),
    ("1.1", Version::V3),
    ("v3", Version::V3),
];
const COMPRESSION_TYPES: [(&str, CompressionType); 2] = [
    (CompressionType::Deflate.name(), CompressionType::Deflate),
    (CompressionType::Zstd.name(), CompressionType::Zstd),
];
/// The second is for qcow2 alone.
const PREALLOCATIONS: [(&str, Preallocation); 4] = [
    ("off", Preallocation::Off),
    ("metadata", Preallocation::Metadata),
    ("falloc", Preallocation::Falloc),
    ("full", Preallocation::Full),
];

/// Options that other tools have and this one does not, with what they would do.
const UNSUPPORTED: [(&str, &str); 1] = [("encrypt.", "this part of encryption")];

/// The format of a new file that is not told by `switch`: qcow2 when the name says so, otherwise raw. A
/// raw file by the name of a `.vmdk` would be mistaken for one. Always raw under the name of QEMU's program.
pub fn format_by_name(path: impl AsRef<Path>, switch: &str) -> Result<Format, Failure> {
    if is_qemu() {
        return Ok(Format::Raw);
    }
    let path = path.as_ref();
    let extension = path.extension().and_then(|text| text.to_str());
    let extension = extension.unwrap_or_default().to_ascii_lowercase();
    match ImageFormat::by_extension(&extension) {
        Some(ImageFormat::Qcow2) => Ok(Format::Qcow2),
        Some(other) => {
            let message =
                format!("its name says {other}, but only qcow2, raw and luks can be written");
            let hint = format!("say {switch} qcow2 or {switch} raw, whatever it is called");
            Err(Failure::about(path, message).hint(hint))
        }
        None => Ok(Format::Raw),
    }
}

impl NewImage {
    /// From the options of the command line. `size` is `None` when it is to come from the options
    /// or the backing file.
    pub fn new(
        path: impl AsRef<Path>,
        format: Format,
        mut options: OptionList,
        size: Option<u64>,
        check_backing: Option<References>,
        keys: Keys,
    ) -> Result<NewImage, Failure> {
        let path = path.as_ref();
        let name = &*path.to_string_lossy();
        let about = |failure: Failure| failure.with_subject(name);
        if name.starts_with("json:") {
            let message = "a new image is named by its path, not by options in JSON";
            return Err(Failure::about(name, message));
        }
        let size_option = options.take_size("size").map_err(about)?;
        let mut image = NewImage {
            path: local_path(path.as_os_str()),
            name: name.to_owned(),
            format,
            plan: CreateOptions::default(),
            compat: None,
            preallocation: None,
            keeps_data: false,
            backing_size: None,
            check_backing,
            hints: FileHints::take(&mut options).map_err(about)?,
            luks: None,
            keys,
            skips_flushes: false,
        };
        image.take_preallocation(&mut options).map_err(about)?;
        let backing = options.take_path("backing_file");
        image.plan.backing_file = backing.map(OsString::into_encoded_bytes);
        image.plan.backing_format = options.take("backing_fmt");
        match format {
            Format::Qcow2 => image.take_qcow2(&mut options).map_err(about)?,
            Format::Raw | Format::Luks if image.plan.backing_file.is_some() => {
                let message = format!("a {format} image cannot have a backing file");
                return Err(Failure::about(name, message));
            }
            Format::Raw => {}
            Format::Luks => {
                let luks = LuksChoice::take_container(&mut options).map_err(about)?;
                image.luks = Some(luks);
            }
            Format::Foreign(other) => {
                let message = format!("{} images can only be read", other.shown());
                let hint = "qcow2, raw and luks can be written";
                return Err(Failure::about(name, message).hint(hint));
            }
        }
        if let Some(key) = options.rest().next() {
            return Err(Failure::about(name, unknown_option(key, format))
                .hint("'-o help' lists the options"));
        }
        if size.is_some() && size_option.is_some() {
            return Err(Failure::about(name, "the size is told twice"));
        }
        let size = size.or(size_option);
        image.backing_size = image.examine_backing(size.is_none())?;
        let size = size.or(image.backing_size);
        image.plan.size_bytes = size.or_else(|| image.data_size()).ok_or_else(|| {
            Failure::about(name, "a new image needs a size").hint("for example 10G")
        })?;
        image.round_flat_size();
        if image.plan.size_bytes > SIZE_MAX {
            let message = format!("the size is larger than {SIZE_MAX} bytes");
            return Err(Failure::about(name, message));
        }
        Ok(image)
    }

    /// It need not be durable when it is made: who makes it has said so.
    pub fn skip_flushes(&mut self) {
        self.skips_flushes = true;
    }

    /// Whether its space is taken when it is made.
    pub fn is_preallocated(&self) -> bool {
        self.preallocation.is_some_and(|name| name != "off")
    }

    fn take_preallocation(&mut self, options: &mut OptionList) -> Result<(), Failure> {
        let possible: Vec<_> = PREALLOCATIONS
            .into_iter()
            .filter(|(_, mode)| self.format == Format::Qcow2 || *mode != Preallocation::Metadata)
            .collect();
        if let Some((name, mode)) = options.take_choice("preallocation", &possible, None)? {
            self.preallocation = Some(name);
            self.plan.preallocation = mode;
        }
        Ok(())
    }

    /// Takes the options that only qcow2 has.
    fn take_qcow2(&mut self, options: &mut OptionList) -> Result<(), Failure> {
        if options.take_bool("encryption")? == Some(true) {
            let message = "option 'encryption' makes images as old ones are, which are only read";
            return Err(Failure::new(message).hint("encrypt.format=luks encrypts"));
        }
        self.luks = LuksChoice::take(options)?;
        let plan = &mut self.plan;
        plan.luks = self.luks.as_ref().map(LuksChoice::measured);
        if let Some((name, version)) = take_version(options)? {
            self.compat = Some(name);
            plan.version = version;
        }
        if let Some(size) = options.take_size("cluster_size")? {
            if !(size.is_power_of_two() && (512..=2 << 20).contains(&size)) {
                let allowed = "powers of two from 512 to 2M";
                return Err(wrong_value("cluster_size", &size.to_string(), allowed));
            }
            plan.cluster_bits = size.trailing_zeros();
        }
        plan.extended_l2 = options.take_bool("extended_l2")?.unwrap_or(false);
        if let Some(order) = take_refcount_order(options)? {
            plan.refcount_order = order;
        }
        let data_file = options.take_path("data_file");
        plan.data_file = data_file.map(|name| stored_name(name.into_encoded_bytes()));
        plan.data_file_raw = options.take_bool("data_file_raw")?.unwrap_or(false);
        plan.lazy_refcounts = options.take_bool("lazy_refcounts")?.unwrap_or(false);
        let compression = options.take_choice("compression_type", &COMPRESSION_TYPES, None)?;
        plan.compression_type = compression.map(|(_, value)| value).unwrap_or_default();
        let allocation = options.take_choice("allocation", &open::ALLOCATION_POLICIES, None)?;
        plan.allocation = allocation.map(|(_, policy)| policy);
        Ok(())
    }

    /// Checks that the backing file can be opened, and returns its size.
    fn examine_backing(&self, need_size: bool) -> Result<Option<u64>, Failure> {
        let fail = |message: String| Failure::about(&self.name, message);
        let Some(backing) = &self.plan.backing_file else {
            return match &self.plan.backing_format {
                Some(_) => Err(fail("a backing format without a backing file".to_owned())),
                None => Ok(None),
            };
        };
        let path = self.backing_path(backing)?;
        let Some(path) = path else {
            let needed = || fail(FORMAT_NEEDED.to_owned()).hint("say -F raw or -F qcow2");
            let told = self.plan.backing_format.is_some();
            return told.then_some(None).ok_or_else(needed);
        };
        if same_file(&self.path, &path) {
            return Err(fail("the image cannot be its own backing file".to_owned()));
        }
        let format = match &self.plan.backing_format {
            None => return Err(self.missing_backing_format(&path)),
            Some(format) => Format::from_name(format),
        };
        let Some(references) = self.check_backing.clone() else {
            return Ok(None);
        };
        if format.is_none() {
            let format = self.plan.backing_format.as_deref().unwrap_or_default();
            return Err(
                wrong_value("backing_fmt", format, &open::known_formats()).with_subject(&self.name)
            );
        }
        let options = OpenOptions {
            keys: self.keys.clone(),
            ..open::reading(format, false, references)
        };
        let opened = match open::open(&path, &options) {
            // An overlay needs no key of what is below.
            Err(failure) if failure.kind == Some(KeyMissing) => {
                return self.locked_size(&path, format, &failure);
            }
            opened => opened,
        };
        let opened = opened.map_err(|failure| {
            let failed = self.backing_failed(&failure);
            match need_size || failed.hint.is_some() {
                true => failed,
                false => failed.hint("-u makes the image without looking at it"),
            }
        })?;
        let own = file_id(&self.path);
        let below =
            |id: Option<FileId>| id.is_some() && opened.files.iter().any(|file| file.id() == id);
        if below(own) {
            let message = "the image is below its own backing file, and would be overwritten";
            return Err(fail(message.to_owned()));
        }
        if below(self.data_path().as_deref().and_then(file_id)) {
            let message = "its data file is below its backing file, and would be overwritten";
            return Err(fail(message.to_owned()));
        }
        Ok(Some(opened.image.size_bytes()))
    }

    /// The size of a backing file that did not open for want of a key.
    fn locked_size(
        &self,
        path: &Path,
        format: Option<Format>,
        locked: &Failure,
    ) -> Result<Option<u64>, Failure> {
        let look = open::reading(format, false, References::Nothing);
        let file = ImageFile::open(path, &look)?;
        let (size, is_alone) = match format {
            Some(Format::Luks) => (luks::disk_of(&file)?.map(|(_, size)| size), true),
            _ => {
                let header = file.header()?;
                let is_alone = header.backing_file().is_none()
                    && !header.incompatible.has(Incompatible::DATA_FILE);
                (Some(header.size_bytes), is_alone)
            }
        };
        let data = self.data_path().as_deref().and_then(file_id);
        if data == Some(file.open_file().id()) {
            let message = "its data file is its backing file, and would be overwritten";
            return Err(Failure::about(&self.name, message));
        }
        // What lies below was not looked at, and may be what would be overwritten.
        if !is_alone && (data.is_some() || file_id(&self.path).is_some()) {
            let hint = format!("or remove {} first", self.name);
            return Err(self.backing_failed(locked).hint(hint));
        }
        match size {
            Some(size) => Ok(Some(size)),
            None => Err(Failure::about(path, "there is no luks header of version 1")),
        }
    }

    /// The path of the backing file; `None` when it is no file and is not to be checked.
    fn backing_path(&self, backing: &[u8]) -> Result<Option<PathBuf>, Failure> {
        let fail = |message: String| Failure::about(&self.name, message);
        if backing.starts_with(b"json:") {
            let message = "a backing file is named by its path, not by options in JSON";
            return Err(fail(message.to_owned()));
        }
        let error = match gaur_engine::resolve_backing(&self.path, backing) {
            Ok(path) => return Ok(Some(path)),
            Err(error) => error,
        };
        // What is a file by this name cannot be opened by it, by us or by QEMU.
        let as_file = [b"./", backing].concat();
        let is_file =
            gaur_engine::resolve_backing(&self.path, &as_file).is_ok_and(|path| path.exists());
        let protocol = matches!(error, BadName::Protocol(_));
        if protocol && !is_file && self.check_backing.is_none() {
            return Ok(None);
        }
        let shown = String::from_utf8_lossy(backing);
        let failure = fail(format!("backing file {shown:?}: {error}"));
        Err(match protocol && !shown.contains("//") {
            true => failure.hint(format!("'./{shown}' is the file of that name")),
            false => failure,
        })
    }

    fn missing_backing_format(&self, path: &Path) -> Failure {
        let fail = |message: &str| Failure::about(&self.name, message);
        let message = FORMAT_NEEDED;
        let file = ImageFile::open(path, &open::reading(None, true, References::Nothing));
        match file.and_then(|file| file.probe()) {
            Ok(format) => {
                fail(message).hint(format!("say -F {format}, which is what it looks like"))
            }
            Err(failure) if failure.kind == Some(ForeignFormat) => {
                fail(&format!("{message}: {failure}")).hint("-F raw takes its bytes as they are")
            }
            Err(failure) if self.check_backing.is_some() => self
                .backing_failed(&failure)
                .hint("and -F tells its format"),
            Err(_) => fail(message).hint("say -F raw or -F qcow2"),
        }
    }

    /// The backing file cannot be opened.
    fn backing_failed(&self, failure: &Failure) -> Failure {
        let message = format!("cannot open the backing file: {failure}");
        let failed = Failure::about(&self.name, message);
        let backing = self.plan.backing_file.as_deref();
        let from_here = backing.is_some_and(|name| Path::new(OsStr::from_bytes(name)).exists());
        match failure.kind {
            Some(NotFound) if from_here => {
                failed.hint("a relative name counts from the folder of the new image")
            }
            _ => failed,
        }
    }

    /// Checks a level of compression.
    pub fn check_level(&self, level: Option<u32>) -> Result<(), Failure> {
        let level = Compressor::level(self.plan.compression_type, level);
        level
            .map(drop)
            .map_err(|error| Failure::image(&self.name, &error))
    }

    /// The path of the backing file, if it was looked at.
    pub fn checked_backing(&self) -> Option<PathBuf> {
        self.check_backing.as_ref()?;
        let backing = self.plan.backing_file.as_deref()?;
        gaur_engine::resolve_backing(&self.path, backing).ok()
    }

    /// Says what it takes to open the image, if its backing file or data file lies where images may not refer to.
    pub fn tell_distant_backing(&self) {
        for (what, path) in [
            ("backing file", self.checked_backing()),
            ("data file", self.data_path()),
        ] {
            if let Some(path) = path {
                self.tell_if_distant(what, &path);
            }
        }
    }

    fn tell_if_distant(&self, what: &str, path: &Path) {
        let places = References::Beside.places(&self.path);
        let look = Access {
            write: false,
            direct: false,
            lock: false,
            force_share: true,
        };
        match OpenFile::open_within(path, places.within(), look) {
            Err(error) if error.errno == Errno::EXDEV => say(format!(
                "{}: its {what} is not in its directory, so it opens with --allow {}",
                self.name,
                path.display()
            )),
            _ => {}
        }
    }

    /// What it is to be, as the format sees it.
    pub fn plan(&self) -> &CreateOptions {
        &self.plan
    }

    /// How many bytes of it the backing file provides.
    pub fn backing_bytes(&self) -> Option<u64> {
        self.backing_size.map(|size| size.min(self.plan.size_bytes))
    }

    /// What is going to be made, on one line, as qemu-img tells it.
    pub fn describe(&self) -> String {
        let mut text = format!("Formatting '{}', fmt={}", self.name, self.format.name());
        let mut add = |key: &str, value: Option<String>| {
            if let Some(value) = value {
                let _ = write!(text, " {key}={}", value.replace(',', ",,"));
            }
        };
        let preallocation = self.preallocation.map(str::to_owned);
        let plan = &self.plan;
        let on_off = |on: bool| Some(if on { "on" } else { "off" }.to_owned());
        let nocow = self.hints.nocow().and_then(on_off);
        let extent_size = self.hints.extent_size().map(|size| size.to_string());
        if self.format != Format::Qcow2 {
            add("size", Some(plan.size_bytes.to_string()));
            for (key, value) in self.luks.iter().flat_map(LuksChoice::options).skip(1) {
                let key = key.strip_prefix(new_luks::PREFIX).unwrap_or(key);
                add(key, Some(value.to_owned()));
            }
            add("nocow", nocow);
            add("preallocation", preallocation);
            add("extent_size_hint", extent_size);
            return text;
        }
        let lossy = |name: &Vec<u8>| String::from_utf8_lossy(name).into_owned();
        let power = |bits: u32| Some((1_u64 << bits).to_string());
        let allocation = plan.allocation.map(AllocationPolicy::name);
        add("cluster_size", power(plan.cluster_bits));
        for (key, value) in self.luks.iter().flat_map(LuksChoice::options) {
            add(key, Some(value.to_owned()));
        }
        add("extended_l2", on_off(plan.extended_l2));
        add("preallocation", preallocation);
        add(
            "compression_type",
            Some(plan.compression_type.name().to_owned()),
        );
        add("size", Some(plan.size_bytes.to_string()));
        add("compat", self.compat.map(str::to_owned));
        add("backing_file", plan.backing_file.as_ref().map(lossy));
        add("backing_fmt", plan.backing_format.clone());
        add("data_file", plan.data_file.as_ref().map(lossy));
        add("data_file_raw", on_off(true).filter(|_| plan.data_file_raw));
        add("lazy_refcounts", on_off(plan.lazy_refcounts));
        add("refcount_bits", power(plan.refcount_order));
        add("nocow", nocow);
        add("extent_size_hint", extent_size);
        add("allocation", allocation.map(str::to_owned));
        text
    }

    /// Makes it, unless the job is cancelled. An existing file is overwritten once its locks are held,
    /// unless `keep_existing`.
    pub fn make(&self, keep_existing: bool, job: &Job) -> Result<(), Failure> {
        if self.format == Format::Qcow2 {
            self.check_plan()?;
        }
        let plan = CreateOptions {
            luks: self.make_luks()?,
            ..self.made_plan()
        };
        self.make_data_file(job)?;
        let existed = self.path.exists();
        let options = CreateFile {
            direct: false,
            lock: true,
            truncate_existing: !keep_existing,
        };
        let file = OpenFile::create(&self.path, options)
            .map_err(|error| Failure::about(&self.name, format!("cannot create: {error}")))?;
        if self.skips_flushes {
            file.skip_flushes();
        }
        self.hints.apply(&file, &self.name);
        let file = BlockingFile::new(file);
        let made = match self.format {
            Format::Qcow2 => block_on(gaur_engine::create(&file, &plan, job))
                .map_err(|error| Failure::image(&self.name, &error)),
            Format::Raw | Format::Luks | Format::Foreign(_) => {
                self.make_flat(&file, plan.luks.as_ref(), job)
            }
        };
        drop(file);
        let made = made.and_then(|()| self.write_zeros(job));
        let made = made.map_err(|failure| match failure.kind {
            Some(Cancelled) => Failure::interrupted().with_subject(&self.name),
            _ => failure,
        });
        if made.is_err() && !existed {
            // Half an image is of no use to anyone; the error above is what counts.
            let _ = std::fs::remove_file(&self.path);
        }
        made
    }

    /// The header with the key of an encrypted image.
    fn make_luks(&self) -> Result<Option<LuksArea>, Failure> {
        let Some(luks) = &self.luks else {
            return Ok(None);
        };
        let about = |failure: Failure| failure.with_subject(&self.name);
        let keys = self.open_keys();
        let prefix = match self.format {
            Format::Luks => "",
            _ => new_luks::PREFIX,
        };
        let passphrase = keys.of_layer(0).ok_or_else(|| {
            let message = match &luks.secret {
                Some(id) => format!("there is no secret '{id}' ({prefix}key-secret)"),
                None => "the image is to be encrypted, and no key is given for it".to_owned(),
            };
            about(Failure::new(message).hint(format!(
                "--object secret,id=ID,file=PATH with {prefix}key-secret=ID, or --key-file PATH"
            )))
        })?;
        luks.make(passphrase).map(Some).map_err(about)
    }

    /// Whether its guest data will be encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.luks.is_some()
    }

    /// The keys that open the image once it is made.
    pub fn open_keys(&self) -> Keys {
        let mut keys = self.keys.clone();
        if let Some(id) = self.luks.as_ref().and_then(|luks| luks.secret.as_ref()) {
            keys.assign(0, id);
        }
        keys
    }

    /// Asked before the file is touched, so that a wrong option does not destroy an image.
    fn check_plan(&self) -> Result<(), Failure> {
        let planned = gaur_format::plan::create(&self.first_plan());
        planned.map(drop).map_err(|error| {
            let failure = Failure::about(&self.name, error.to_string());
            match error.kind() {
                ErrorKind::TooLarge => failure.hint("larger clusters allow larger images"),
                _ => failure,
            }
        })
    }
}

/// Takes the version of the format, as given and as it is.
pub fn take_version(options: &mut OptionList) -> Result<Option<(&'static str, Version)>, Failure> {
    options.take_choice("compat", &VERSIONS, Some("v2 or 0.10, v3 or 1.1"))
}

/// Takes the width of refcounts, as a power of two.
pub fn take_refcount_order(options: &mut OptionList) -> Result<Option<u32>, Failure> {
    let Some(value) = options.take("refcount_bits") else {
        return Ok(None);
    };
    match parse_whole_number::<u32>(&value) {
        Ok(bits) if bits.is_power_of_two() && bits <= 64 => Ok(Some(bits.trailing_zeros())),
        _ => Err(wrong_value(
            "refcount_bits",
            &value,
            "1, 2, 4, 8, 16, 32, 64",
        )),
    }
}

fn unknown_option(key: &str, format: Format) -> String {
    let known = UNSUPPORTED
        .iter()
        .find(|(name, _)| *name == key || (name.ends_with('.') && key.starts_with(name)));
    match known {
        Some((_, what)) => format!("option '{key}' is not supported: {what}"),
        None => format!("{} images have no option '{key}'", format.name()),
    }
}

/// Whether both names lead to one file, if only by a second name of it. Those of files that do not exist
/// lead nowhere.
fn same_file(left: &Path, right: &Path) -> bool {
    match (file_id(left), file_id(right)) {
        (Some(left), Some(right)) => left == right,
        _ => left == right,
    }
}

/// Which file a path leads to.
pub fn file_id(path: &Path) -> Option<FileId> {
    if let Some(id) = gaur_reactor::nbd::file_id(path) {
        return Some(id);
    }
    let found = std::fs::metadata(path).ok()?;
    Some(FileId {
        device: found.dev(),
        inode: found.ino(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(options: &str) -> Result<NewImage, Failure> {
        let options = OptionList::parse(&[options.to_owned()])?;
        NewImage::new(
            "new.qcow2",
            Format::Qcow2,
            options,
            Some(1 << 20),
            None,
            Keys::default(),
        )
    }

    fn refused(options: &str) -> String {
        image(options)
            .expect_err("an option that cannot be")
            .to_string()
    }

    #[test]
    fn new_image_description_shows_effective_options() {
        let text = image("compat=v3,cluster_size=4k,refcount_bits=1").map(|new| new.describe());
        assert_eq!(
            text.expect("valid options"),
            "Formatting 'new.qcow2', fmt=qcow2 cluster_size=4096 extended_l2=off \
             compression_type=zlib size=1048576 compat=v3 lazy_refcounts=off refcount_bits=1"
        );
    }

    #[test]
    fn invalid_option_value_lists_allowed_values() {
        assert_eq!(
            refused("compat=v4"),
            "new.qcow2: option 'compat' cannot be 'v4' (possible values: v2 or 0.10, v3 or 1.1)"
        );
        for (option, allowed) in [
            ("cluster_size=3000", "powers of two from 512 to 2M"),
            ("cluster_size=4M", "powers of two from 512 to 2M"),
            ("refcount_bits=7", "1, 2, 4, 8, 16, 32, 64"),
            ("compression_type=lz4", "zlib, zstd"),
            ("preallocation=some", "off, metadata, falloc, full"),
            ("lazy_refcounts=1", "on, off"),
            ("allocation=tight", "compact, contiguous"),
        ] {
            assert!(refused(option).contains(allowed), "{option}");
        }
    }

    #[test]
    fn options_of_other_tools_are_refused_by_name() {
        let text = refused("encrypt.format=luks,encrypt.detached-header=on");
        assert!(
            text.contains("'encrypt.detached-header' is not supported"),
            "{text}"
        );
        let text = refused("colour=red");
        assert!(text.contains("no option 'colour'"), "{text}");
    }

    #[test]
    fn a_new_image_needs_a_size_and_a_raw_one_has_no_backing_file() {
        let none = NewImage::new(
            "x",
            Format::Raw,
            OptionList::default(),
            None,
            None,
            Keys::default(),
        );
        assert!(
            none.expect_err("no size")
                .to_string()
                .contains("needs a size")
        );
        let options = OptionList::parse(&["backing_file=b".to_owned()]).expect("a list");
        let raw = NewImage::new("x", Format::Raw, options, Some(1), None, Keys::default());
        assert!(
            raw.expect_err("raw on a base")
                .to_string()
                .contains("backing")
        );
    }

    #[test]
    fn format_defaults_to_the_file_extension() {
        let by_name =
            |name: &str| format_by_name(name, "-O").map_err(|failure| failure.to_string());
        assert_eq!(by_name("a/b.qcow2"), Ok(Format::Qcow2));
        assert_eq!(by_name("a.QCOW2"), Ok(Format::Qcow2));
        for raw in ["qcow2", "a.img", "a.raw", "a.vmdk/b", "/dev/vg/lv"] {
            assert_eq!(by_name(raw), Ok(Format::Raw));
        }
        for foreign in [
            "a.vmdk", "a.VHD", "a.vhdx", "a.vdi", "a.qed", "a.dmg", "a.qcow",
        ] {
            let refused = by_name(foreign).expect_err(foreign);
            assert!(refused.contains("say -O qcow2 or -O raw"), "{refused}");
        }
    }
}
