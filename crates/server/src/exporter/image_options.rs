//! How the image of an export is opened, as the command line and the control socket say it.

use std::path::PathBuf;

use gaur_engine::{AllocationPolicy, ErrorKind, Format, OpenOptions};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::cached_device::Policy;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::kept::Kept;
use crate::keys::KeyOptions;
use crate::open::{Bases, CacheMode};
#[cfg(feature = "clap")]
use crate::open::{allocation_parser, format_parser};
use crate::references::ReferenceOptions;
use crate::shared_image::SharedImage;
use crate::temporary;

/// What a client's discard does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Discard {
    /// Give the space back to the host
    #[default]
    Unmap,
    /// Nothing
    Ignore,
}

/// What a client's write of zeros does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum DetectZeroes {
    /// Write them
    #[default]
    Off,
    /// Mark zeros in the image, with their space
    On,
    /// The same, and give the space back to the host
    Unmap,
}

/// How an image is opened for an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct ImageOptions {
    /// Format of the images (probed by default)
    #[serde(
        serialize_with = "write_format",
        deserialize_with = "read_format",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "clap", arg(short, long, value_name = "FMT", value_parser = format_parser()))]
    pub format: Option<Format>,
    /// The images are lists of options, driver=qcow2,file.filename=PATH,..
    #[cfg_attr(feature = "clap", arg(long, conflicts_with = "format"))]
    pub image_opts: bool,
    /// Which files the images may refer to.
    #[serde(skip_serializing_if = "ReferenceOptions::is_default")]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub references: ReferenceOptions,
    /// Where the keys of the images are.
    #[serde(skip_serializing_if = "KeyOptions::is_default")]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub keys: KeyOptions,
    /// Refuse writes
    #[cfg_attr(feature = "clap", arg(short, long))]
    pub read_only: bool,
    /// Serve the disk as it was when this internal snapshot (an id or a name) was made; it cannot be
    /// written to, unless --temporary is given
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME"))]
    pub snapshot: Option<String>,
    /// What clients write is kept beside the image, in $TMPDIR, and forgotten at the end
    #[cfg_attr(feature = "clap", arg(long, conflicts_with = "read_only"))]
    pub temporary: bool,
    /// Use of the host's cache
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "MODE", default_value = "writeback")
    )]
    pub cache: CacheMode,
    /// What a client's discard does
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "MODE", default_value = "unmap")
    )]
    pub discard: Discard,
    /// What a client's write of nothing but zeros does
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "MODE", default_value = "off")
    )]
    pub detect_zeroes: DetectZeroes,
    /// What clients read from backing files stays in the image
    #[cfg_attr(feature = "clap", arg(long, conflicts_with = "read_only"))]
    pub copy_on_read: bool,
    /// What to do with the host's space, whatever the image says
    #[serde(
        serialize_with = "write_policy",
        deserialize_with = "read_policy",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "clap", arg(long, value_name = "POLICY", value_parser = allocation_parser()))]
    pub allocation: Option<AllocationPolicy>,
    /// Remove the images' persistent bitmaps with the first write instead of keeping them
    #[cfg_attr(feature = "clap", arg(long))]
    pub drop_bitmaps: bool,
    /// Show this persistent bitmap to NBD clients, as qemu:dirty-bitmap:NAME (any number of times)
    #[serde(
        serialize_with = "one_or_more::write",
        deserialize_with = "one_or_more::read",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[cfg_attr(
        feature = "clap",
        arg(short = 'B', long = "bitmap", value_name = "NAME")
    )]
    pub bitmap: Vec<String>,
    /// Show NBD clients how deep in the backing chain data lies, as qemu:allocation-depth
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[cfg_attr(feature = "clap", arg(short = 'A', long))]
    pub allocation_depth: bool,
    /// Show the disk from this byte on
    #[serde(skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "BYTES", value_parser = crate::size::parse_size, default_value_t = 0))]
    pub offset: u64,
    /// Keep in FILE (in /run, or where else a reboot forgets it) what clients have been told is written
    /// and the image does not say yet; what a server that was killed left there is taken over, unless
    /// somebody else has written to the image since
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "FILE", conflicts_with_all = ["read_only", "snapshot", "temporary"]))]
    pub handover: Option<PathBuf>,
    /// The same, without being asked to.
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub kept: Option<Box<Kept>>,
    /// The image was found to be raw, and clients must not make it look like another.
    #[serde(skip)]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub guard_format: bool,
}

/// A text, or a list of texts.
mod one_or_more {
    use super::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Texts {
        One(String),
        More(Vec<String>),
    }

    pub(super) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        Ok(match Texts::deserialize(from)? {
            Texts::One(text) => vec![text],
            Texts::More(texts) => texts,
        })
    }

    pub(super) fn write<S: Serializer>(texts: &[String], into: S) -> Result<S::Ok, S::Error> {
        match texts {
            [one] => one.serialize(into),
            texts => texts.serialize(into),
        }
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl ImageOptions {
    /// Whether clients may not write.
    pub fn refuses_writes(&self, spec: &ImageSpec) -> bool {
        let kept = self.snapshot.is_some() && !self.temporary;
        self.read_only || kept || (spec.is_read_only() && !self.temporary)
    }

    /// Whether the image's file is written to.
    pub fn writes_file(&self, spec: &ImageSpec) -> bool {
        !self.temporary && !self.refuses_writes(spec)
    }

    /// Opens the image; its backing chain is shared with others that were opened with the same `bases`.
    pub fn open(&self, spec: &ImageSpec, bases: &Bases) -> Result<SharedImage, Failure> {
        let read_only = self.refuses_writes(spec);
        if read_only && (self.copy_on_read || spec.copies_on_read()) {
            return Err(spec.refuses_copy_on_read());
        }
        let options = OpenOptions {
            read_only,
            direct: self.cache.direct(),
            discard: self.discard == Discard::Unmap,
            detect_zeroes: match self.detect_zeroes {
                DetectZeroes::Off => gaur_engine::DetectZeroes::Off,
                DetectZeroes::On => gaur_engine::DetectZeroes::On,
                DetectZeroes::Unmap => gaur_engine::DetectZeroes::Unmap,
            },
            copy_on_read: self.copy_on_read || spec.copies_on_read(),
            allocation: self.allocation,
            snapshot: self.snapshot.clone(),
            drop_bitmaps: self.drop_bitmaps,
            keys: self.keys.keys()?,
            ..OpenOptions::new(self.references.references())
        };
        let handover = self.handover.as_deref().filter(|_| !read_only);
        let image = match (self.temporary, handover, &self.kept) {
            (true, ..) => temporary::open(spec, &options, bases),
            (_, Some(path), _) => SharedImage::open_with_handover(spec, &options, path, bases),
            (_, None, Some(kept)) => SharedImage::open_with_kept(spec, &options, kept, bases),
            (_, None, None) => SharedImage::open_to_serve(spec, &options, bases),
        };
        image.map_err(|failure| match failure.kind {
            Some(ErrorKind::FormatNotTold) => {
                let raw = spec.raw_words();
                failure.hint(format!("say {raw} if it is one, or -r to only read it"))
            }
            _ => failure,
        })
    }

    /// What is done to clients' requests.
    pub fn policy(&self, spec: &ImageSpec) -> Policy {
        let policy = Policy::of(self.cache, spec);
        Policy {
            // Nothing of a temporary overlay outlives the process.
            ignore_flush: policy.ignore_flush || self.temporary,
            ignore_discard: spec
                .ignores_discards()
                .unwrap_or(self.discard == Discard::Ignore),
            guard_format: self.guard_format,
            offset_bytes: self.offset,
            ..policy
        }
    }
}

/// Reads a value by its name; the error says `what` it is.
fn by_name<'de, D: Deserializer<'de>, T>(
    from: D,
    what: &str,
    find: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, D::Error> {
    let name = Option::<String>::deserialize(from)?;
    let unknown = |name: &str| D::Error::custom(format!("{what} {name:?} is unknown"));
    let read = |name: String| find(&name).ok_or_else(|| unknown(&name));
    name.map(read).transpose()
}

fn read_format<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Format>, D::Error> {
    by_name(from, "format", Format::from_name)
}

fn write_format<S: Serializer>(format: &Option<Format>, into: S) -> Result<S::Ok, S::Error> {
    format.map(Format::name).serialize(into)
}

fn read_policy<'de, D: Deserializer<'de>>(from: D) -> Result<Option<AllocationPolicy>, D::Error> {
    by_name(from, "allocation", AllocationPolicy::from_name)
}

fn write_policy<S: Serializer>(
    policy: &Option<AllocationPolicy>,
    into: S,
) -> Result<S::Ok, S::Error> {
    policy.map(AllocationPolicy::name).serialize(into)
}
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_read_back_from_json() {
        let options = ImageOptions {
            format: Some(Format::Raw),
            read_only: true,
            snapshot: Some("one".to_owned()),
            cache: CacheMode::Directsync,
            discard: Discard::Ignore,
            allocation: Some(AllocationPolicy::Compact),
            references: ReferenceOptions {
                allow: vec!["/bases".into()],
                ..ReferenceOptions::default()
            },
            ..ImageOptions::default()
        };
        for options in [options, ImageOptions::default()] {
            let json = serde_json::to_value(&options).expect("json");
            let read: ImageOptions = serde_json::from_value(json).expect("the same");
            assert_eq!(read, options);
        }
        for wrong in [
            r#"{"format":"qed"}"#,
            r#"{"cache":"warm"}"#,
            r#"{"colour":1}"#,
            r#"{"references":{"allow":"/bases"}}"#,
            r#"{"references":{"colour":1}}"#,
        ] {
            assert!(
                serde_json::from_str::<ImageOptions>(wrong).is_err(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn snapshots_are_read_only_and_temporary_overlays_leave_the_file_alone() {
        let spec = ImageSpec::plain("disk", None);
        let writes = |change: fn(&mut ImageOptions)| {
            let mut options = ImageOptions::default();
            change(&mut options);
            (!options.refuses_writes(&spec), options.writes_file(&spec))
        };
        assert_eq!(writes(|_| {}), (true, true));
        assert_eq!(writes(|options| options.read_only = true), (false, false));
        assert_eq!(writes(|options| options.temporary = true), (true, false));
        let back_then = Some("one".to_owned());
        let options = ImageOptions {
            snapshot: back_then,
            ..ImageOptions::default()
        };
        assert!(options.refuses_writes(&spec));
    }
}
