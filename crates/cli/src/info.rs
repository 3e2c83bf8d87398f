//! `gaur info`: what an image is. Only its own metadata is read, so that images whose data cannot
//! be read here (encrypted, with an external data file) can be looked at too.

use std::collections::BTreeSet;
use std::io::Write;

use gaur_block::{Access, File, FileId, Target};
use gaur_engine::Format;
use gaur_format::feature::{Autoclear, Compatible, Incompatible};
use gaur_format::header::{CryptMethod, MAGIC};
use gaur_format::snapshot::{self, Progress, Snapshot};
use gaur_format::{Header, Version, limit};
use gaur_reactor::{BlockingFile, OpenFile, block_on};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::info_report::{BitmapInfo, Child, ImageInfo, Qcow2Info, SnapshotInfo, Specific};
use crate::json;
use crate::open::{self, Output, format_parser};

/// Show what an image is
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Format of the image (probed by default)
    #[arg(short, long, value_name = "FMT", value_parser = format_parser())]
    format: Option<Format>,
    /// Show the backing files too
    #[arg(short, long)]
    backing_chain: bool,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The image
    file: String,
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
    let mut next = Some((args.file.clone(), args.format));
    while let Some((name, format)) = next.take() {
        let image = OpenImage::open(&name, args.force_share)?;
        if !seen.insert(image.file.open_file().id()) {
            return Err(Failure::about(name, "the backing files form a loop"));
        }
        let info = image.inspect(format)?;
        if let (true, Some(backing)) = (args.backing_chain, &info.backing_filename) {
            let path = open::backing_path(&name, backing);
            let format = match info.backing_filename_format.as_deref() {
                None => None,
                Some(known) => Some(Format::from_name(known).ok_or_else(|| {
                    let message = format!("backing format '{known}' is not supported");
                    Failure::about(&name, message)
                })?),
            };
            next = Some((path, format));
        }
        chain.push(info);
    }
    Ok(chain)
}

/// A file that may be an image.
struct OpenImage<'a> {
    name: &'a str,
    file: BlockingFile,
    len: u64,
}

impl<'a> OpenImage<'a> {
    fn open(name: &'a str, force_share: bool) -> Result<OpenImage<'a>, Failure> {
        let file = open_file(name, force_share)?;
        let len = block_on(file.len())
            .map_err(|errno| Failure::system(name, "cannot tell its size", errno))?;
        Ok(OpenImage { name, file, len })
    }

    fn inspect(&self, format: Option<Format>) -> Result<ImageInfo, Failure> {
        let format = match format {
            Some(format) => format,
            None if self.read(0, MAGIC.len() as u64)? == MAGIC => Format::Qcow2,
            None => Format::Raw,
        };
        let mut info = self.raw_info("raw", self.len.next_multiple_of(512))?;
        let child = if self.file.open_file().is_block_device() {
            "host_device"
        } else {
            "file"
        };
        let mut child = self.raw_info(child, self.len)?;
        child.format_specific = Some(Specific {
            kind: "file",
            data: json!({}),
        });
        info.children.push(Child {
            name: "file",
            info: child,
        });
        if format == Format::Qcow2 {
            self.add_qcow2(&mut info)?;
        }
        Ok(info)
    }

    fn raw_info(&self, format: &str, size: u64) -> Result<ImageInfo, Failure> {
        let allocated = self.file.open_file().allocated_bytes();
        let actual_size = allocated
            .map_err(|errno| Failure::system(self.name, "cannot tell its space", errno))?;
        Ok(ImageInfo {
            children: Vec::new(),
            snapshots: Vec::new(),
            backing_filename_format: None,
            virtual_size: size,
            filename: self.name.to_owned(),
            cluster_size: None,
            format: format.to_owned(),
            actual_size,
            encrypted: None,
            format_specific: None,
            full_backing_filename: None,
            backing_filename: None,
            dirty_flag: false,
        })
    }

    fn add_qcow2(&self, info: &mut ImageInfo) -> Result<(), Failure> {
        let header = self.header()?;
        info.format = Format::Qcow2.name().to_owned();
        info.virtual_size = header.size_bytes;
        info.cluster_size = Some(header.geometry().cluster_size());
        info.encrypted = (header.crypt_method != CryptMethod::None).then_some(true);
        info.dirty_flag = header.incompatible.has(Incompatible::DIRTY);
        if let Some(backing) = header.backing_file_lossy() {
            info.full_backing_filename = Some(open::full_backing_name(self.name, &backing));
            info.backing_filename = Some(backing.into_owned());
            info.backing_filename_format = header.backing_format().map(str::to_owned);
        }
        info.snapshots = self.snapshots(&header)?.iter().map(snapshot_info).collect();
        let data = serde_json::to_value(self.qcow2_info(&header)?);
        info.format_specific = Some(Specific {
            kind: "qcow2",
            data: data.unwrap_or(Value::Null),
        });
        Ok(())
    }

    fn header(&self) -> Result<Header, Failure> {
        let broken = |error: gaur_format::Error| Failure::about(self.name, error.to_string());
        let start = self.read(0, 512)?;
        let cluster_size = Header::cluster_size_of(&start).map_err(broken)?;
        let header = Header::parse(&self.read(0, cluster_size)?).map_err(broken)?;
        header.check_features().map_err(broken)?;
        Ok(header)
    }

    fn qcow2_info(&self, header: &Header) -> Result<Qcow2Info, Failure> {
        let v3 = |value: bool| (header.version == Version::V3).then_some(value);
        let data_file = header.incompatible.has(Incompatible::DATA_FILE);
        let data_file_name = header.data_file_name().map(String::from_utf8_lossy);
        Ok(Qcow2Info {
            compat: match header.version {
                Version::V2 => "0.10",
                Version::V3 => "1.1",
            },
            compression_type: header.compression_type.name(),
            lazy_refcounts: v3(header.compatible.has(Compatible::LAZY_REFCOUNTS)),
            bitmaps: self.bitmaps(header)?,
            refcount_bits: header.geometry().refcount_bits(),
            encrypt: match header.crypt_method {
                CryptMethod::None => None,
                CryptMethod::Aes => Some(json!({ "format": "aes" })),
                CryptMethod::Luks => Some(json!({ "format": "luks" })),
            },
            data_file: data_file_name.map(|name| name.into_owned()),
            data_file_raw: data_file.then(|| header.autoclear.has(Autoclear::RAW_DATA_FILE)),
            corrupt: v3(header.incompatible.has(Incompatible::CORRUPT)),
            extended_l2: v3(header.incompatible.has(Incompatible::EXTENDED_L2)),
        })
    }

    fn snapshots(&self, header: &Header) -> Result<Vec<Snapshot>, Failure> {
        let broken = |error: gaur_format::Error| Failure::about(self.name, error.to_string());
        let count = header.nb_snapshots;
        if count == 0 {
            return Ok(Vec::new());
        }
        let mut bytes = Vec::new();
        while let Progress::Need(len) = snapshot::table_len(&bytes, count).map_err(broken)? {
            if len <= bytes.len() as u64 || len > limit::SNAPSHOT_TABLE_BYTES_MAX {
                return Err(Failure::about(self.name, "the snapshot table is too long"));
            }
            bytes = self.read(header.snapshots_offset.0, len)?;
        }
        let (snapshots, _) =
            snapshot::parse_table(&bytes, count, &header.geometry()).map_err(broken)?;
        Ok(snapshots)
    }

    fn bitmaps(&self, header: &Header) -> Result<Vec<BitmapInfo>, Failure> {
        let Some(extension) = header.bitmaps() else {
            return Ok(Vec::new());
        };
        // Whoever changed the image without knowing of bitmaps left them out of date.
        if !header.autoclear.has(Autoclear::BITMAPS) {
            return Ok(Vec::new());
        }
        let _ = extension;
        Ok(Vec::new())
    }

    /// Reads `len` bytes at `offset`; what lies beyond the end of the file is zeros.
    fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, Failure> {
        // All lengths come from checked limits; no structure is longer than the longest of them.
        let len = usize::try_from(len.min(limit::SNAPSHOT_TABLE_BYTES_MAX)).unwrap_or(0);
        let mut buffer = vec![0; len];
        block_on(self.file.read_at(offset, Target::Memory(&mut buffer))).map_err(|errno| {
            Failure::system(self.name, &format!("cannot read offset {offset}"), errno)
        })?;
        Ok(buffer)
    }
}

/// Opens a file for looking at its metadata.
pub fn open_file(name: &str, force_share: bool) -> Result<BlockingFile, Failure> {
    let access = Access {
        write: false,
        direct: false,
        lock: true,
        force_share,
    };
    let file = OpenFile::open(name, access).map_err(|error| open::file_failed(name, &error))?;
    Ok(BlockingFile::new(file))
}

fn snapshot_info(snapshot: &Snapshot) -> SnapshotInfo {
    const NANOSECONDS: u64 = 1_000_000_000;
    SnapshotInfo {
        icount: snapshot.icount,
        vm_clock_nsec: snapshot.vm_clock_nsec % NANOSECONDS,
        name: String::from_utf8_lossy(&snapshot.name).into_owned(),
        date_sec: u64::from(snapshot.date_sec),
        date_nsec: snapshot.date_nsec,
        vm_clock_sec: snapshot.vm_clock_nsec / NANOSECONDS,
        id: String::from_utf8_lossy(&snapshot.id).into_owned(),
        vm_state_size: snapshot.vm_state_size,
    }
}
