//! Check stage: the bitmap directory and the bitmap tables.

use alloc::string::String;
use alloc::vec::{self, Vec};

use crate::bitmap::{self, Bitmap, BitmapCluster};
use crate::bytes;
use crate::check::reader::{Range, Reader};
use crate::check::tally::Tally;
use crate::header::Header;

#[derive(Clone, Debug)]
pub(super) struct Bitmaps {
    count: u32,
    reader: Reader,
    /// The directory as far as it was read; `None` once it is parsed.
    directory: Option<Vec<u8>>,
    waiting: vec::IntoIter<Bitmap>,
    name: String,
}

impl Bitmaps {
    /// Nothing at all when the image has no bitmaps, or a writer that does not know them was here.
    pub(super) fn new(header: &Header, tally: &mut Tally) -> Bitmaps {
        let mut stage = Bitmaps {
            count: 0,
            reader: Reader::default(),
            directory: None,
            waiting: Vec::new().into_iter(),
            name: String::new(),
        };
        if let Some(pointer) = header.bitmaps() {
            let (offset, len) = (pointer.directory_offset.0, pointer.directory_len_bytes);
            tally.refer(Range { offset, len }, 1, format_args!("bitmap directory"));
            stage.count = pointer.count;
            stage.reader = Reader::new(offset, len, tally.file_len);
            stage.directory = Some(Vec::new());
        }
        stage
    }

    pub(super) fn wanted(&mut self, tally: &mut Tally) -> Option<Range> {
        loop {
            if let Some(wanted) = self.reader.wanted() {
                return Some(wanted);
            }
            if let Some(directory) = self.directory.take() {
                match bitmap::parse_directory(&directory, self.count, &tally.geometry) {
                    Ok(list) => self.waiting = list.into_iter(),
                    Err(error) => {
                        tally.unfollowed = true;
                        tally.corrupt(1, format_args!("{error}"));
                    }
                }
                continue;
            }
            let next = self.waiting.next()?;
            self.open(&next, tally);
        }
    }

    fn open(&mut self, bitmap: &Bitmap, tally: &mut Tally) {
        self.name = alloc::format!("{}", String::from_utf8_lossy(&bitmap.name).escape_debug());
        let table = format_args!("table of bitmap '{}'", self.name);
        self.reader = tally.open_table(bitmap.table_offset.0, bitmap.table_entries, table);
    }

    pub(super) fn feed(&mut self, tally: &mut Tally, piece: &[u8]) {
        let first = self.reader.index;
        self.reader.advance(piece.len() as u64);
        if let Some(directory) = &mut self.directory {
            directory.extend_from_slice(piece);
            return;
        }
        let name = &self.name;
        for (index, raw) in (first..).zip(bytes::u64s(piece)) {
            match bitmap::decode_table_entry(raw, &tally.geometry) {
                Ok(BitmapCluster::Stored(offset)) => {
                    let range = Range::new(offset.0, tally.geometry.cluster_size());
                    tally.refer(
                        range,
                        1,
                        format_args!("bitmap '{name}', index {index}: bits"),
                    );
                }
                Ok(BitmapCluster::Zeros | BitmapCluster::Ones) => {}
                Err(corruption) => {
                    tally.unfollowed = true;
                    tally.corrupt(
                        1,
                        format_args!("bitmap '{name}', index {index}: {corruption}"),
                    );
                }
            }
        }
        tally.check_memory();
    }

    /// The last read failed.
    pub(super) fn failed(&mut self, len: u64) {
        self.reader.advance(len);
        if self.directory.is_some() {
            // Without all of the directory nothing in it can be believed.
            self.directory = None;
            self.reader = Reader::default();
        }
    }
}
