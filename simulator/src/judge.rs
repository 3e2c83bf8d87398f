//! The judge: what an image must be after a power cut, a kill or a close.

use std::rc::Rc;

use gaur_format::check::{Check, Severity, Step};
use gaur_sim::FileImage;

use crate::bitmaps;
use crate::config::Bitmaps;
use crate::content::ValueEncoding;
use crate::content::{Value, ZERO};
use crate::data_file::{DATA, DataFile};
use crate::extension::{
    ALLOCATION_EXTENSION, BITMAPS_EXTENSION, UNKNOWN_EXTENSION, allocation_data,
};
use crate::model::{FoundSnapshot, Model};
use crate::prepare::Content;
use crate::shape::Shape;
use crate::view::{Files, Snapshot, View};

/// What the checker counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Clusters with a refcount above their references.
    pub leaks: u64,
    /// The last of them, for a person.
    pub last_leak: String,
}

/// Runs our own checker; anything worse than a leak is an error.
pub fn check(file: &FileImage, shape: Shape) -> Result<Counts, String> {
    let head = file.bytes(0, shape.cluster_bytes() as usize);
    let mut check = Check::new(&head, file.len_bytes())
        .map_err(|error| format!("the header is refused: {error}"))?;
    let report = loop {
        match check.next() {
            Step::Need { offset, len } => check.feed(&file.bytes(offset, len as usize)),
            Step::Done(report) => break report,
        }
    };
    if !report.only_leaks() {
        let worst = report
            .messages
            .iter()
            .filter(|finding| finding.severity != Severity::Leak);
        let findings: Vec<String> = worst.take(4).map(ToString::to_string).collect();
        return Err(format!(
            "check finds {} corruptions and {} errors: {}",
            report.corruptions,
            report.check_errors,
            findings.join("; ")
        ));
    }
    Ok(Counts {
        leaks: report.leaks,
        last_leak: report
            .messages
            .last()
            .map_or_else(String::new, ToString::to_string),
    })
}

/// Checks that the header still has the extensions that everybody must keep.
pub fn check_header(
    file: &FileImage,
    shape: Shape,
    stored_allocation: Option<u8>,
    bitmaps: Option<Bitmaps>,
) -> Result<(), String> {
    let valid = file.bytes(95, 1) == [1];
    let mut kept = vec![(UNKNOWN_EXTENSION, b"keep me as I am".to_vec())];
    kept.extend(
        stored_allocation.map(|policy| (ALLOCATION_EXTENSION, allocation_data(policy).into())),
    );
    let mut at = if shape.version == 3 { 112 } else { 72 };
    loop {
        let head = file.bytes(at, 8);
        let (kind, len) = match head.as_slice() {
            [a, b, c, d, e, f, g, h] => (
                u32::from_be_bytes([*a, *b, *c, *d]),
                u32::from_be_bytes([*e, *f, *g, *h]),
            ),
            _ => return Err("a header extension is cut short".to_owned()),
        };
        if kind == 0 && kept.is_empty() {
            return Ok(());
        }
        if kind == 0 || at > 4096 {
            return Err(format!("a header extension was dropped: {kept:x?}"));
        }
        if kind == BITMAPS_EXTENSION && !valid && bitmaps != Some(Bitmaps::Stale) {
            // QEMU takes it for an image without snapshots when it repairs leaks.
            return Err("bitmaps were made useless and are there".to_owned());
        }
        if let Some(index) = kept.iter().position(|(wanted, _)| *wanted == kind) {
            let (_, data) = kept.swap_remove(index);
            if file.bytes(at + 8, len as usize) != data {
                return Err(format!("the header extension {kind:#x} was changed"));
            }
        }
        at += 8 + u64::from(len).next_multiple_of(8);
    }
}

/// What is known of a machine beside the active disk.
#[derive(Clone, Debug)]
pub struct Expectations {
    /// Name of the top image.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// The script of the content.
    pub script: ValueEncoding,
    /// The header has the unknown extension.
    pub has_extension: bool,
    /// The policy for space that the header says.
    pub stored_allocation: Option<u8>,
    /// It had these bitmaps.
    pub bitmaps: Option<Bitmaps>,
    /// The disk as it was at first, when its bitmaps have to tell how it differs.
    pub recorded_since: Option<Rc<[u8]>>,
    /// The disk below the top image.
    pub below: Rc<[u8]>,
    /// It has an external data file, which is or is not the disk by itself.
    pub data_file: Option<DataFile>,
}

impl Expectations {
    fn view<'a>(&'a self, files: &'a Files, file: &'a FileImage) -> Result<View<'a>, String> {
        let data = self.data_file.and_then(|_| files.get(DATA));
        Ok(View::open(file, &self.below)?.with_data(data))
    }

    /// After a close a raw data file is the disk, however it is mapped.
    fn check_raw(&self, files: &Files, disk: &[u8]) -> Result<(), String> {
        let data = files
            .get(DATA)
            .filter(|_| self.data_file == Some(DataFile::Raw));
        match data {
            Some(data) if data.bytes(0, disk.len()) != disk => {
                Err("the raw data file is not the disk".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// The snapshot called `id`, as the reader sees it.
    pub fn snapshot(&self, files: &Files, id: &str) -> Result<FoundSnapshot, String> {
        let file = files.get(&self.name).ok_or("the image is gone")?;
        let view = self.view(files, file)?;
        let found = view.snapshots.iter().find(|snapshot| snapshot.id == id);
        read_snapshot(&view, found.ok_or("it is not in the table")?)
    }

    /// The snapshots of an image, as the reader sees them.
    pub fn snapshots(&self, files: &Files) -> Result<Vec<FoundSnapshot>, String> {
        let file = files.get(&self.name).ok_or("the image is gone")?;
        read_snapshots(&self.view(files, file)?)
    }

    /// Judges the files that a power cut left: our checker, the snapshots, and every unit of the
    /// disk. Gives the leaks, the disk and the values on it.
    pub fn judge(&self, files: &Files, model: &mut Model, exact: bool) -> Result<Verdict, String> {
        let file = files.get(&self.name).ok_or("the image is gone")?;
        let counts = check(file, self.shape)?;
        let view = self.view(files, file)?;
        if self.has_extension {
            check_header(file, self.shape, self.stored_allocation, self.bitmaps)?;
        }
        let snapshots = read_snapshots(&view)?;
        model.check_snapshots(&snapshots)?;
        let disk = view.read_disk(view.active)?;
        let units = (disk.len() as u64 / self.script.unit_bytes()) as u32;
        if !model.sizes().contains(&units) {
            return Err(format!(
                "the disk has {units} units, possible are {:?}",
                model.sizes()
            ));
        }
        if exact {
            self.check_raw(files, &disk)?;
        }
        let values = model
            .check_view(&disk, exact)
            .map_err(|wrong| wrong.to_string())?;
        if let Some(first) = &self.recorded_since {
            bitmaps::check(file, &disk, first)?;
        }
        Ok(Verdict {
            leaks: counts.leaks,
            leaks_beyond: view.leaks_beyond_end(),
            last_leak: counts.last_leak,
            tables: (view.active.offset, view.refcount_table()),
            disk,
            values,
            snapshots,
        })
    }
}

/// Every snapshot with its content.
pub fn read_snapshots(view: &View<'_>) -> Result<Vec<FoundSnapshot>, String> {
    let snapshots = view.snapshots.iter();
    snapshots.map(|one| read_snapshot(view, one)).collect()
}

fn read_snapshot(view: &View<'_>, snapshot: &Snapshot) -> Result<FoundSnapshot, String> {
    let within = |what| format!("snapshot {} ({}): {what}", snapshot.id, snapshot.name);
    Ok(FoundSnapshot {
        id: snapshot.id.clone(),
        name: snapshot.name.clone(),
        times: snapshot.times,
        disk: view.read_disk(snapshot.l1).map_err(within)?.into(),
        state: view.read_state(snapshot).map_err(within)?.into(),
    })
}

/// What a judged image holds.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Leaked clusters that the checker counts.
    pub leaks: u64,
    /// Leaked clusters beyond the end of the file.
    pub leaks_beyond: u64,
    /// The last of them, for a person.
    pub last_leak: String,
    /// Where the active L1 table is, and the refcount table.
    pub tables: (u64, u64),
    /// The bytes of the disk.
    pub disk: Vec<u8>,
    /// The value of each unit.
    pub values: Vec<Value>,
    /// The snapshots.
    pub snapshots: Vec<FoundSnapshot>,
}

/// What each unit holds, where `content` leaves it to a layer below that holds `below`.
pub fn resolve(content: &Content, below: &[Value]) -> Vec<Value> {
    let under = |unit: usize| below.get(unit).copied().unwrap_or(ZERO);
    content
        .iter()
        .enumerate()
        .map(|(unit, value)| value.unwrap_or_else(|| under(unit)))
        .collect()
}
