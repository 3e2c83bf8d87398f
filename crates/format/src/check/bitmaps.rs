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
    /// For a repair: what is kept.
    salvage: Option<DirectoryChange>,
    /// The bitmap whose table is being read, and what is wrong with it.
    current: Option<(Bitmap, Option<String>)>,
}

/// The directory that is to take the place of a damaged one.
#[derive(Clone, Debug, Default)]
pub(super) struct DirectoryChange {
    pub(super) bitmaps: Vec<Bitmap>,
    /// What differs, one line each.
    pub(super) actions: Vec<String>,
}

impl Bitmaps {
    /// Nothing at all when the image has no bitmaps, or a writer that does not know them was here.
    pub(super) fn new(header: &Header, tally: &mut Tally, salvage: bool) -> Bitmaps {
        let mut stage = Bitmaps {
            count: 0,
            reader: Reader::default(),
            directory: None,
            waiting: Vec::new().into_iter(),
            name: String::new(),
            salvage: salvage.then(DirectoryChange::default),
            current: None,
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
                self.parse(&directory, tally);
                continue;
            }
            self.close();
            let next = self.waiting.next()?;
            self.open(&next, tally);
        }
    }

    fn parse(&mut self, directory: &[u8], tally: &mut Tally) {
        let entries = match bitmap::parse_entries(directory, self.count, &tally.geometry) {
            Ok(entries) => entries,
            Err(error) => {
                tally.corrupt(1, format_args!("{error}"));
                match &mut self.salvage {
                    Some(change) => change.actions.push(alloc::format!(
                        "bitmap directory is dropped, with all bitmaps: {error}"
                    )),
                    None => tally.unfollowed = true,
                }
                return;
            }
        };
        let mut sound = Vec::new();
        for (bitmap, checked) in entries {
            match (checked, &mut self.salvage) {
                (Ok(()), _) => sound.push(bitmap),
                (Err(error), Some(change)) => {
                    tally.corrupt(1, format_args!("{error}"));
                    let name = label(&bitmap.name);
                    change.actions.push(removed(&name, &error));
                }
                // QEMU reads none of them then.
                (Err(error), None) => {
                    tally.unfollowed = true;
                    return tally.corrupt(1, format_args!("{error}"));
                }
            }
        }
        self.waiting = sound.into_iter();
    }

    /// The bitmap whose table was read is kept, unless something is wrong with it.
    fn close(&mut self) {
        if let (Some((bitmap, wrong)), Some(change)) = (self.current.take(), &mut self.salvage) {
            match wrong {
                None => change.bitmaps.push(bitmap),
                Some(why) => change.actions.push(removed(&self.name, &why)),
            }
        }
    }

    /// What a repair makes of the directory.
    pub(super) fn finish(self) -> Option<DirectoryChange> {
        self.salvage.filter(|change| !change.actions.is_empty())
    }

    fn open(&mut self, bitmap: &Bitmap, tally: &mut Tally) {
        self.name = label(&bitmap.name);
        let table = format_args!("table of bitmap '{}'", self.name);
        self.reader = tally.open_table(bitmap.table_offset.0, bitmap.table_entries, table);
        if self.salvage.is_some() {
            let len = u64::from(bitmap.table_entries).saturating_mul(8);
            let range = Range::new(bitmap.table_offset.0, len);
            let wrong = is_outside(range, tally)
                .then(|| String::from("its table lies outside of the file"));
            self.current = Some((bitmap.clone(), wrong));
        }
    }

    pub(super) fn feed(&mut self, tally: &mut Tally, piece: &[u8]) {
        let first = self.reader.index;
        self.reader.advance(piece.len() as u64);
        if let Some(directory) = &mut self.directory {
            directory.extend_from_slice(piece);
            return;
        }
        let name = &self.name;
        let mut wrong = None;
        for (index, raw) in (first..).zip(bytes::u64s(piece)) {
            match bitmap::decode_table_entry(raw, &tally.geometry) {
                Ok(BitmapCluster::Stored(offset)) => {
                    let range = Range::new(offset.0, tally.geometry.cluster_size());
                    tally.refer(
                        range,
                        1,
                        format_args!("bitmap '{name}', index {index}: bits"),
                    );
                    if is_outside(range, tally) {
                        wrong.get_or_insert("some of its bits lie outside of the file");
                    }
                }
                Ok(BitmapCluster::Zeros | BitmapCluster::Ones) => {}
                Err(corruption) => {
                    tally.unfollowed |= self.salvage.is_none();
                    wrong.get_or_insert("its table has entries that are none");
                    tally.corrupt(
                        1,
                        format_args!("bitmap '{name}', index {index}: {corruption}"),
                    );
                }
            }
        }
        if let (Some((_, why)), Some(wrong)) = (&mut self.current, wrong) {
            why.get_or_insert_with(|| wrong.into());
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

/// How a bitmap is called in messages.
fn label(name: &[u8]) -> String {
    alloc::format!("{}", String::from_utf8_lossy(name).escape_debug())
}

fn removed(name: &str, why: &dyn core::fmt::Display) -> String {
    alloc::format!("bitmap '{name}' is removed: {why}")
}

/// Whether more than a cut last cluster lies behind the end of the file.
fn is_outside(range: Range, tally: &Tally) -> bool {
    let end = range.offset.saturating_add(range.len);
    end.saturating_sub(tally.file_len) >= tally.geometry.cluster_size()
}
