//! `gaur info`: show what an image is. Only its own metadata is read, so that images whose data cannot
//! be read here (encrypted, with an external data file) can be looked at too.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use gaur_block::{Errno, FileId};
use gaur_engine::{ForeignFormat, Format};
use gaur_format::bitmap::{self, Bitmap};
use gaur_format::feature::{Autoclear, Compatible, Incompatible};
use gaur_format::header::CryptMethod;
use gaur_format::{AllocationPolicy, Header, Version};
use gaur_reactor::block_on;
use serde_json::{Value, json};

use crate::bitmaps;
use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::image_spec::ImageSpec;
use crate::info_report::{ChildNode, ImageInfo, facts};
use crate::json;
use crate::luks;
use crate::notice::is_qemu;
use crate::open::{self, Output, SourceArgs};
use crate::snapshot_report::SnapshotInfo;
use crate::snapshot_table;

/// Show what an image is
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Show the backing files too
    #[arg(short, long)]
    backing_chain: bool,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
}

/// Prints the image, or the chain of images.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let chain = collect(args)?;
    match (args.output, args.backing_chain) {
        (Output::Json, true) => json::write(out, &chain)?,
        (Output::Json, false) => json::write(out, &chain.first())?,
        (Output::Human, _) => {
            for (index, info) in chain.iter().enumerate() {
                if index > 0 {
                    writeln!(out)?;
                }
                info.print(out)?;
            }
        }
    }
    Ok(0)
}

/// The image, and with `--backing-chain` everything below it.
fn collect(args: &Args) -> Result<Vec<ImageInfo>, Failure> {
    let mut chain = Vec::new();
    let mut seen: BTreeSet<FileId> = BTreeSet::new();
    let mut base = open::reading(None, args.force_share, args.source.references());
    base.keys = args.source.keys()?;
    let top = args.source.spec()?;
    let places = base.references.places(top.file_path());
    let mut next = Some(top);
    while let Some(spec) = next.take() {
        let name = spec.path();
        let file = match chain.is_empty() {
            true => spec.open_file(&base)?,
            false => ImageFile::open_within(spec.file_path(), places.within(), &base)?,
        };
        let image = Inspection { file };
        if !seen.insert(image.file.open_file().id()) {
            return Err(Failure::about(name, "the backing files form a loop"));
        }
        let mut info = image.inspect(spec.format_of(&image.file)?)?;
        if is_qemu() {
            info = as_qemu(info, &spec);
        }
        if args.backing_chain && info.backing_filename.is_some() {
            let path = backing_path(&spec, &image.file)?;
            let format = match info.backing_filename_format.as_deref() {
                None => None,
                Some(known) => Some(Format::from_name(known).ok_or_else(|| {
                    let message = format!("backing format '{known}' is not supported");
                    Failure::about(name, message)
                })?),
            };
            next = Some(ImageSpec::plain(&path, format));
        }
        chain.push(info);
    }
    Ok(chain)
}

/// The names that QEMU's program tells, and a protocol by itself where no format is above it.
fn as_qemu(mut info: ImageInfo, spec: &ImageSpec) -> ImageInfo {
    if spec.is_protocol()
        && let Some(child) = info.children.pop()
    {
        info = child.info;
    }
    info.filename = spec.qemu_name();
    for child in &mut info.children {
        child.info.filename = ImageSpec::qemu_path(&child.info.filename);
    }
    info
}

/// The path of the backing file that the image names.
fn backing_path(spec: &ImageSpec, file: &ImageFile) -> Result<PathBuf, Failure> {
    let header = file.header()?;
    let name = header.backing_file().unwrap_or_default();
    gaur_engine::resolve_backing(spec.file_path(), name).map_err(|error| {
        let name = String::from_utf8_lossy(name);
        Failure::about(
            spec.path(),
            format!("cannot use backing file {name:?}: {error}"),
        )
    })
}

/// Where the backing file `backing` of the image `overlay` is, as far as its name tells: a relative
/// path counts from the directory of the overlay; a name with a protocol is left alone.
fn full_backing_name(overlay: &str, backing: &str) -> String {
    match gaur_engine::resolve_backing(Path::new(overlay), backing.as_bytes()) {
        Ok(path) if !backing.starts_with("file:") => path.to_string_lossy().into_owned(),
        _ => backing.to_owned(),
    }
}

/// An image file whose description is collected.
struct Inspection {
    file: ImageFile,
}

impl Inspection {
    fn inspect(&self, format: Format) -> Result<ImageInfo, Failure> {
        // qemu-img rounds lengths up to whole sectors.
        let len = self.file.len_bytes().next_multiple_of(512);
        let mut info = self.raw_info("raw", len)?;
        let opened = self.file.open_file();
        let child = match (opened.is_block_device(), opened.is_nbd()) {
            (true, _) => "host_device",
            (_, true) => "nbd",
            _ => "file",
        };
        let mut child = self.raw_info(child, len)?;
        if !opened.is_nbd() {
            child.format_specific = Some(json!({ "type": "file", "data": {} }));
        }
        info.children.push(ChildNode {
            name: "file",
            info: child,
        });
        match format {
            Format::Qcow2 => self.add_qcow2(&mut info)?,
            Format::Raw => {}
            Format::Luks => self.add_luks(&mut info)?,
            Format::Foreign(format) => self.add_foreign(format, &mut info)?,
        }
        Ok(info)
    }

    fn raw_info(&self, format: &str, size: u64) -> Result<ImageInfo, Failure> {
        let actual_size = match self.file.open_file().allocated_bytes() {
            Ok(bytes) => Some(bytes),
            // Only its server knows.
            Err(Errno::EOPNOTSUPP) => None,
            Err(errno) => {
                let failure = Failure::system(self.file.name(), "cannot tell its space", errno);
                return Err(failure);
            }
        };
        Ok(ImageInfo {
            virtual_size: size,
            filename: self.file.name().to_owned(),
            format: format.to_owned(),
            actual_size,
            dirty_flag: (!self.file.open_file().is_nbd()).then_some(false),
            ..ImageInfo::default()
        })
    }

    fn add_foreign(&self, format: ForeignFormat, info: &mut ImageInfo) -> Result<(), Failure> {
        let found = block_on(gaur_engine::foreign_info(self.file.file(), format));
        let found = found.map_err(|error| Failure::image(self.file.name(), &error))?;
        info.format = format.name().to_owned();
        info.virtual_size = found.size_bytes;
        info.cluster_size = found.block_bytes;
        info.format_specific = found.descriptor.map(|descriptor| {
            let facts = json!({
                "cid": descriptor.cid,
                "parent-cid": u32::MAX,
                "create-type": descriptor.create_type,
            });
            json!({ "type": "vmdk", "data": facts })
        });
        Ok(())
    }

    fn add_luks(&self, info: &mut ImageInfo) -> Result<(), Failure> {
        let bytes = self.file.read(0, luks::HEADER_BYTES)?;
        let refused = |text: &str| Failure::about(self.file.name(), text);
        let mut facts =
            luks::facts(&bytes).ok_or_else(|| refused("there is no luks header of version 1"))?;
        let disk = luks::disk_of(&self.file)?;
        let (_, size) = disk.ok_or_else(|| refused("the file ends before the disk begins"))?;
        if let Some(facts) = facts.as_object_mut() {
            // It is the format.
            facts.shift_remove("format");
        }
        info.format = Format::Luks.name().to_owned();
        info.virtual_size = size;
        info.encrypted = Some(true);
        info.format_specific = Some(json!({ "type": "luks", "data": facts }));
        Ok(())
    }

    fn add_qcow2(&self, info: &mut ImageInfo) -> Result<(), Failure> {
        let header = self.file.header()?;
        info.format = Format::Qcow2.name().to_owned();
        info.virtual_size = header.size_bytes;
        info.cluster_size = Some(header.geometry().cluster_size());
        info.encrypted = (header.crypt_method != CryptMethod::None).then_some(true);
        info.dirty_flag = Some(header.incompatible.has(Incompatible::DIRTY));
        if let Some(backing) = header.backing_file_lossy() {
            info.full_backing_filename = Some(full_backing_name(self.file.name(), &backing));
            info.backing_filename = Some(backing.into_owned());
            info.backing_filename_format = header.backing_format().map(str::to_owned);
        }
        let snapshots = snapshot_table::read(&self.file, &header)?;
        info.snapshots = snapshots
            .iter()
            .map(|snapshot| SnapshotInfo::new(snapshot).of_qemu())
            .collect();
        let facts = self.qcow2_facts(&header)?;
        info.format_specific = Some(json!({ "type": "qcow2", "data": facts }));
        Ok(())
    }

    /// Facts of a qcow2 image. Those a version 2 image cannot have are absent there.
    fn qcow2_facts(&self, header: &Header) -> Result<Value, Failure> {
        let v3 = |value: bool| json!((header.version == Version::V3).then_some(value));
        let data_file = header.incompatible.has(Incompatible::DATA_FILE);
        let data_file_name = header.data_file_name().map(String::from_utf8_lossy);
        let raw = data_file.then(|| header.autoclear.has(Autoclear::RAW_DATA_FILE));
        let compat = match header.version {
            Version::V2 => "0.10",
            Version::V3 => "1.1",
        };
        let bitmaps = bitmaps::read(&self.file, header)?;
        let bitmaps: Vec<Value> = bitmaps.iter().map(bitmap_facts).collect();
        let bitmaps = Some(bitmaps).filter(|bitmaps| !bitmaps.is_empty());
        let lazy = header.compatible.has(Compatible::LAZY_REFCOUNTS);
        let extended = header.incompatible.has(Incompatible::EXTENDED_L2);
        Ok(facts([
            ("compat", json!(compat)),
            ("compression-type", json!(header.compression_type.name())),
            ("lazy-refcounts", v3(lazy)),
            ("bitmaps", json!(bitmaps)),
            ("refcount-bits", json!(header.geometry().refcount_bits())),
            ("encrypt", json!(self.encryption(header)?)),
            ("data-file", json!(data_file_name)),
            ("data-file-raw", json!(raw)),
            (
                "corrupt",
                v3(header.incompatible.has(Incompatible::CORRUPT)),
            ),
            ("extended-l2", v3(extended)),
            // Gaur's own.
            (
                "allocation",
                json!(header.allocation().map(AllocationPolicy::name)),
            ),
        ]))
    }

    fn encryption(&self, header: &Header) -> Result<Option<Value>, Failure> {
        let known = match (header.crypt_method, header.encryption()) {
            (CryptMethod::None, _) => return Ok(None),
            (CryptMethod::Aes, _) => return Ok(Some(json!({ "format": "aes" }))),
            (CryptMethod::Luks, None) => None,
            (CryptMethod::Luks, Some(pointer)) => {
                let bytes = self.file.read(pointer.offset.0, luks::HEADER_BYTES)?;
                luks::facts(&bytes)
            }
        };
        // A header that cannot be read does not hide the rest.
        Ok(Some(known.unwrap_or_else(|| json!({ "format": "luks" }))))
    }
}

/// A persistent dirty bitmap.
fn bitmap_facts(bitmap: &Bitmap) -> Value {
    let names = [(bitmap::IN_USE, "in-use"), (bitmap::AUTO, "auto")];
    let set = names.iter().filter(|(flag, _)| bitmap.flags & flag != 0);
    let granularity = 1_u64.checked_shl(u32::from(bitmap.granularity_bits));
    json!({
        "flags": set.map(|(_, name)| *name).collect::<Vec<_>>(),
        "name": String::from_utf8_lossy(&bitmap.name),
        "granularity": granularity.unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backing_files_are_found_from_the_directory_of_the_overlay() {
        assert_eq!(full_backing_name("d/o", "../b"), "d/../b");
        assert_eq!(full_backing_name("o", "b"), "b");
        assert_eq!(full_backing_name("d/o", "/b"), "/b");
        assert_eq!(full_backing_name("d/o", "nbd://x/y"), "nbd://x/y");
        assert_eq!(full_backing_name("d/o", "./a:b"), "d/./a:b");
    }
}
