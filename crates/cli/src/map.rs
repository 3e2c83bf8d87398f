//! `gaur map`: show where the guest's data lies.
//!
//! The extents are those that `qemu-img map` prints, merged by the same rules. The human form lists
//! data only; the JSON form has everything.

use std::io::Write;

use gaur_block::Errno;
use gaur_engine::{Format, MapExtent};
use gaur_nbd::wire::{STATE_HOLE, STATE_ZERO};
use gaur_reactor::BlockingFile;

use crate::failure::Failure;
use crate::file_holes::FileHoles;
use crate::guest::Guest;
use crate::open::{self, Output, SourceArgs};
use crate::size::parse_size;

/// Show where the data of an image is
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// How to print
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    /// First byte of the guest to look at
    #[arg(short, long, value_name = "OFFSET", value_parser = parse_size, default_value = "0")]
    start_offset: u64,
    /// How many bytes to look at (all by default)
    #[arg(short = 'l', long, value_name = "LENGTH", value_parser = parse_size)]
    max_length: Option<u64>,
    /// Open even if another program is writing
    #[arg(short = 'U', long)]
    force_share: bool,
}

/// A run of guest bytes of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MapEntry {
    start: u64,
    run: MapExtent,
}

impl MapEntry {
    /// Whether `next` goes on where `self` ends, in the guest and in the file, and is alike.
    fn merges_with(&self, next: &MapEntry) -> bool {
        let (here, there) = (&self.run, &next.run);
        let kind = |run: &MapExtent| MapExtent {
            len_bytes: 0,
            host_offset: None,
            ..*run
        };
        let follows = match (here.host_offset, there.host_offset) {
            (Some(at), Some(next)) => at.checked_add(here.len_bytes) == Some(next),
            (None, None) => true,
            _ => false,
        };
        here.len_bytes > 0 && follows && kind(here) == kind(there)
    }
}

/// Prints entries one after the other.
struct Printer<'a> {
    out: &'a mut dyn Write,
    output: Output,
    /// Files of each layer, the top one first, by the guest offsets from which each has the data.
    files: Vec<Vec<(u64, String)>>,
}

impl Printer<'_> {
    /// Prints `entry`. What follows it may be changed so that more of it merges.
    fn entry(&mut self, entry: &MapEntry, next: Option<&mut MapEntry>) -> Result<(), Failure> {
        match self.output {
            Output::Human => {
                self.human(entry)?;
                if let Some(next) = next
                    && (!next.run.data || next.run.zero)
                {
                    next.run.data = false;
                    next.run.zero = true;
                }
            }
            Output::Json => {
                self.json(entry)?;
                writeln!(self.out, "{}", if next.is_some() { "," } else { "]" })?;
            }
        }
        Ok(())
    }

    fn human(&mut self, entry: &MapEntry) -> Result<(), Failure> {
        let run = &entry.run;
        if !run.data {
            return Ok(());
        }
        let Some(offset) = run.host_offset else {
            let message =
                "the image has compressed or encrypted clusters, which have no offset to print";
            return Err(Failure::new(message).hint("use --output=json"));
        };
        if run.zero {
            return Ok(());
        }
        let files = self.files.get(run.depth as usize);
        let file = files.and_then(|files| files.iter().rfind(|(from, _)| *from <= entry.start));
        writeln!(
            self.out,
            "{:<16}{:<16}{:<16}{}",
            hexadecimal(entry.start),
            hexadecimal(run.len_bytes),
            hexadecimal(offset),
            file.map_or("", |(_, name)| name)
        )?;
        Ok(())
    }

    fn json(&mut self, entry: &MapEntry) -> Result<(), Failure> {
        let start = entry.start;
        let MapExtent {
            len_bytes,
            depth,
            present,
            zero,
            data,
            compressed,
            host_offset,
        } = entry.run;
        write!(
            self.out,
            "{{ \"start\": {start}, \"length\": {len_bytes}, \"depth\": {depth}, \
             \"present\": {present}, \"zero\": {zero}, \"data\": {data}, \
             \"compressed\": {compressed}"
        )?;
        if let Some(offset) = host_offset {
            write!(self.out, ", \"offset\": {offset}")?;
        }
        write!(self.out, "}}")?;
        Ok(())
    }
}

/// As C's `%#x`: zero has no prefix.
fn hexadecimal(value: u64) -> String {
    match value {
        0 => "0".to_owned(),
        _ => format!("{value:#x}"),
    }
}

/// Prints the entries that `extent_at` finds from `start` to `end`, merged.
fn print_map(
    printer: &mut Printer<'_>,
    start: u64,
    end: u64,
    mut extent_at: impl FnMut(u64, u64) -> Result<MapExtent, Failure>,
) -> Result<(), Failure> {
    match printer.output {
        Output::Human => writeln!(
            printer.out,
            "{:<16}{:<16}{:<16}File",
            "Offset", "Length", "Mapped to"
        )?,
        Output::Json => write!(printer.out, "[")?,
    }
    let mut current = MapEntry {
        start,
        ..MapEntry::default()
    };
    loop {
        let offset = current.start.saturating_add(current.run.len_bytes);
        if offset >= end {
            break;
        }
        let mut next = MapEntry {
            start: offset,
            run: extent_at(offset, end - offset)?,
        };
        next.run.len_bytes = next.run.len_bytes.min(end - offset);
        if current.merges_with(&next) {
            current.run.len_bytes += next.run.len_bytes;
            continue;
        }
        if current.run.len_bytes > 0 {
            printer.entry(&current, Some(&mut next))?;
        }
        current = next;
    }
    printer.entry(&current, None)
}

/// The extent that shows the bitmap of an export in the way of QEMU's `x-dirty-bitmap`, which backup programs read: the
/// flags of the bitmap are taken for those of allocation. What is dirty is no data; depths of a chain come as no
/// data (the top image), as zeros (one below it) and as data (none).
fn of_bitmap(file: &BlockingFile, at: u64, extent: &MapExtent) -> Result<MapExtent, Errno> {
    let (len_bytes, state) = file.nbd_context_at(at)?;
    let (data, zero) = (state & STATE_HOLE == 0, state & STATE_ZERO != 0);
    Ok(MapExtent {
        len_bytes: len_bytes.min(extent.len_bytes).max(1),
        present: data || zero,
        data,
        zero,
        host_offset: (data || zero).then_some(at),
        ..*extent
    })
}

/// Prints the map.
pub fn run(args: &Args, out: &mut dyn Write) -> Result<u8, Failure> {
    let spec = args.source.spec()?;
    let mut options = open::reading(None, args.force_share, args.source.references());
    options.keys = args.source.keys()?;
    let opened = spec.open(&options)?;
    let image = opened.image;
    let layers = image.layers();
    let files = layers
        .iter()
        .map(|layer| {
            let paths = layer.data_paths().into_iter();
            let shown = paths.map(|(from, path)| (from, path.to_string_lossy().into_owned()));
            shown.collect()
        })
        .collect();
    let end = match args.max_length {
        Some(length) => args
            .start_offset
            .saturating_add(length)
            .min(image.size_bytes()),
        None => image.size_bytes(),
    };
    // Below another format the offsets of the file are not the guest's.
    let is_raw = layers.top().format() == Format::Raw;
    let raw = opened.files.own.first().filter(|_| is_raw).cloned();
    let window = raw.as_ref().and_then(|file| file.open_file().window());
    let window = window.map_or(0, |window| window.offset_bytes);
    let bitmap = raw.filter(BlockingFile::has_nbd_context);
    let holes = FileHoles::new(&opened.files);
    let guest = Guest::new(image.queue(opened.files));
    let failed = |offset: u64, errno: Errno| {
        let what = format!("cannot map offset {offset}");
        guest.failed(spec.path(), &what, errno)
    };
    let mut holes = holes.map_err(|errno| failed(0, errno))?;
    let mut printer = Printer {
        out,
        output: args.output,
        files,
    };
    print_map(&mut printer, args.start_offset, end, |offset, len| {
        let extent = guest.map(offset, len).and_then(|mut extent| {
            holes.refine(&image, &mut extent)?;
            if let Some(host) = &mut extent.host_offset {
                *host += window;
            }
            match &bitmap {
                Some(file) => of_bitmap(file, offset, &extent),
                None => Ok(extent),
            }
        });
        extent.map_err(|errno| failed(offset, errno))
    })?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(len_bytes: u64, depth: u32, kind: &str, host_offset: Option<u64>) -> MapExtent {
        MapExtent {
            len_bytes,
            depth,
            present: kind.contains('p'),
            zero: kind.contains('z'),
            data: kind.contains('d'),
            compressed: kind.contains('c'),
            host_offset,
        }
    }

    fn print(output: Output, extents: &[MapExtent]) -> Result<String, Failure> {
        let mut text = Vec::new();
        let mut printer = Printer {
            out: &mut text,
            output,
            files: ["top", "base"]
                .map(|name| vec![(0, name.to_owned())])
                .into(),
        };
        let end = extents.iter().map(|extent| extent.len_bytes).sum();
        let mut rest = extents.iter();
        print_map(&mut printer, 0, end, |_, _| {
            Ok(*rest.next().expect("an extent for every offset"))
        })?;
        Ok(String::from_utf8(text).expect("utf-8"))
    }

    #[test]
    fn map_entries_merge_only_when_host_offsets_are_contiguous() {
        let text = print(
            Output::Human,
            &[
                extent(4096, 0, "pd", Some(0)),
                extent(4096, 0, "pd", Some(4096)),
                extent(4096, 0, "pd", Some(65536)),
                extent(4096, 1, "pd", Some(69632)),
                extent(4096, 0, "pz", None),
                extent(4096, 0, "z", None),
                extent(4096, 0, "pd", Some(0x5000)),
            ],
        );
        assert_eq!(
            text.expect("a map"),
            "Offset          Length          Mapped to       File\n\
             0               0x2000          0               top\n\
             0x2000          0x1000          0x10000         top\n\
             0x3000          0x1000          0x11000         base\n\
             0x6000          0x1000          0x5000          top\n"
        );
    }

    #[test]
    fn json_keeps_kinds_apart_and_has_no_comma_at_the_end() {
        let text = print(
            Output::Json,
            &[
                extent(512, 0, "pdc", None),
                extent(512, 0, "pdc", None),
                extent(512, 1, "z", None),
            ],
        );
        assert_eq!(
            text.expect("a map"),
            "[{ \"start\": 0, \"length\": 1024, \"depth\": 0, \"present\": true, \
             \"zero\": false, \"data\": true, \"compressed\": true},\n\
             { \"start\": 1024, \"length\": 512, \"depth\": 1, \"present\": false, \
             \"zero\": true, \"data\": false, \"compressed\": false}]\n"
        );
    }

    #[test]
    fn an_empty_image_has_one_empty_entry_in_json_and_none_for_people() {
        let text = print(Output::Json, &[]).expect("a map");
        assert!(
            text.starts_with("[{ \"start\": 0, \"length\": 0,"),
            "{text}"
        );
        let text = print(Output::Human, &[]).expect("a map");
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn compressed_clusters_have_no_human_form() {
        assert!(print(Output::Human, &[extent(512, 0, "pdc", None)]).is_err());
    }
}
