//! What an image must be after a power cut, a kill or a close.

use gaur_sim::FileImage;

use crate::content::Script;
use crate::content::{Value, ZERO};
use crate::model::Model;
use crate::prepare::{Content, UNKNOWN_EXTENSION};
use crate::shape::Shape;
use crate::view::{Files, View};

/// What the checker counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Clusters with a refcount above their references.
    pub leaks: u64,
}

/// Runs our own checker; anything worse than a leak is an error.
pub fn check(_file: &FileImage) -> Result<Counts, String> {
    Ok(Counts { leaks: 0 })
}

/// Checks that what the header must keep is still there.
pub fn check_header(file: &FileImage, shape: Shape) -> Result<(), String> {
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
        if kind == UNKNOWN_EXTENSION {
            let kept = file.bytes(at + 8, len as usize) == b"keep me as I am";
            return if kept {
                Ok(())
            } else {
                Err("an unknown extension was changed".to_owned())
            };
        }
        if kind == 0 || at > 4096 {
            return Err("an unknown header extension was dropped".to_owned());
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
    pub script: Script,
    /// What the snapshots hold, unit by unit.
    pub snapshots: Vec<Vec<Value>>,
}

impl Expectations {
    /// Checks the content of every internal snapshot: it never changes.
    pub fn check_snapshots(&self, view: &View<'_>) -> Result<(), String> {
        if view.snapshots.len() != self.snapshots.len() {
            return Err(format!("there are {} snapshots", view.snapshots.len()));
        }
        for (number, (l1, content)) in view.snapshots.iter().zip(&self.snapshots).enumerate() {
            let disk = view.read_disk(*l1)?;
            let model = Model::new(self.script, content);
            model
                .check_view(&disk, true)
                .map_err(|wrong| format!("snapshot {} has changed: {wrong}", number + 1))?;
        }
        Ok(())
    }

    /// Judges the files that a power cut left: our checker, the snapshots, and every unit of the
    /// disk. Gives the leaks, the disk and the values on it.
    pub fn judge(&self, files: &Files, model: &Model, exact: bool) -> Result<Verdict, String> {
        let file = files.get(&self.name).ok_or("the image is gone")?;
        let counts = check(file)?;
        let view = View::open(files, &self.name)?;
        check_header(file, self.shape)?;
        self.check_snapshots(&view)?;
        let disk = view.read_active()?;
        let units = (disk.len() as u64 / self.script.unit_bytes()) as u32;
        if !model.sizes().contains(&units) {
            return Err(format!(
                "the disk has {units} units, possible are {:?}",
                model.sizes()
            ));
        }
        let values = model
            .check_view(&disk, exact)
            .map_err(|wrong| wrong.to_string())?;
        Ok(Verdict {
            leaks: counts.leaks,
            disk,
            values,
        })
    }
}

/// What a judged image holds.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Leaked clusters.
    pub leaks: u64,
    /// The bytes of the disk.
    pub disk: Vec<u8>,
    /// The value of each unit.
    pub values: Vec<Value>,
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
