//! The report of `gaur info` as qemu-img prints it: JSON (`ImageInfo`) and text.
//!
//! The JSON is qemu-img's `ImageInfo`, the lines for people are laid out the same way as its, so
//! that scripts which search them go on working.

use std::io::Write;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::size::human;
use crate::snapshot_report::{self, SnapshotInfo, printable};

/// One image, without its backing files.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ImageInfo {
    /// The files it lies in.
    pub children: Vec<ChildNode>,
    /// Format of the backing file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename_format: Option<String>,
    /// Internal snapshots; absent when there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotInfo>,
    /// Size the guest sees, in bytes.
    pub virtual_size: u64,
    /// Name as given.
    pub filename: String,
    /// Bytes of a cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    /// `qcow2`, `raw`; of a child `file` or `host_device`.
    pub format: String,
    /// Bytes allocated on the host, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub actual_size: Option<u64>,
    /// What only this format has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format_specific: Option<Value>,
    /// Where the backing file is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_backing_filename: Option<String>,
    /// The backing file as the image names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename: Option<String>,
    /// Its guest data is encrypted; absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
    /// It was not closed cleanly and its refcounts may be out of date. Absent where its server alone could know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_flag: Option<bool>,
}

/// A file that an image lies in.
#[derive(Debug, Serialize)]
pub struct ChildNode {
    /// Its role.
    pub name: &'static str,
    /// What it is.
    pub info: ImageInfo,
}

/// An object of those facts that are there.
pub fn facts<const N: usize>(facts: [(&str, Value); N]) -> Value {
    let there = facts.into_iter().filter(|(_, fact)| !fact.is_null());
    there.map(|(key, fact)| (key.to_owned(), fact)).collect()
}

impl ImageInfo {
    /// Prints the image for people.
    pub fn print(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let ImageInfo {
            filename, format, ..
        } = self;
        writeln!(out, "image: {}", printable(filename))?;
        writeln!(out, "file format: {format}")?;
        let size = self.virtual_size;
        writeln!(out, "virtual size: {} ({size} bytes)", human(size))?;
        writeln!(out, "disk size: {}", disk_size(self.actual_size))?;
        if self.encrypted == Some(true) {
            writeln!(out, "encrypted: yes")?;
        }
        if let Some(cluster_size) = self.cluster_size {
            writeln!(out, "cluster_size: {cluster_size}")?;
        }
        if self.dirty_flag == Some(true) {
            writeln!(out, "cleanly shut down: no")?;
        }
        self.print_backing(out)?;
        if !self.snapshots.is_empty() {
            snapshot_report::print_table(&self.snapshots, out)?;
        }
        let specific = self.format_specific.as_ref();
        let is_empty = |specific: &&Value| specific["data"].as_object().is_some_and(Map::is_empty);
        if let Some(specific) = specific.filter(|specific| !is_empty(specific)) {
            writeln!(out, "Format specific information:")?;
            print_value(&specific["data"], 1, out)?;
        }
        for child in &self.children {
            child.print(out)?;
        }
        Ok(())
    }

    fn print_backing(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let Some(backing) = &self.backing_filename else {
            return Ok(());
        };
        write!(out, "backing file: {}", printable(backing))?;
        match &self.full_backing_filename {
            Some(full) if full != backing => {
                writeln!(out, " (actual path: {})", printable(full))?;
            }
            _ => writeln!(out)?,
        }
        if let Some(format) = &self.backing_filename_format {
            writeln!(out, "backing file format: {}", printable(format))?;
        }
        Ok(())
    }
}

/// As qemu-img tells it.
fn disk_size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unavailable".to_owned(), human)
}

impl ChildNode {
    fn print(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let info = &self.info;
        let size = info.virtual_size;
        writeln!(out, "Child node '/{}':", self.name)?;
        writeln!(out, "    filename: {}", printable(&info.filename))?;
        writeln!(out, "    protocol type: {}", info.format)?;
        writeln!(out, "    file length: {} ({size} bytes)", human(size))?;
        writeln!(out, "    disk size: {}", disk_size(info.actual_size))?;
        Ok(())
    }
}

/// Prints a tree of facts: a key a line, dashes as spaces, four spaces a level.
fn print_value(value: &Value, level: usize, out: &mut dyn Write) -> Result<(), Failure> {
    match value {
        Value::Object(members) => {
            for (key, member) in members {
                print_member(&key.replace('-', " "), member, level, out)?;
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                print_member(&format!("[{index}]"), item, level, out)?;
            }
        }
        _ => {}
    }
    Ok(())
}

fn print_member(
    key: &str,
    value: &Value,
    level: usize,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let indent = level * 4;
    match value {
        Value::Object(_) | Value::Array(_) => {
            writeln!(out, "{:indent$}{key}:", "")?;
            print_value(value, level + 1, out)
        }
        Value::String(text) => Ok(writeln!(out, "{:indent$}{key}: {}", "", printable(text))?),
        _ => Ok(writeln!(out, "{:indent$}{key}: {value}", "")?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_specific_values_are_indented() {
        let mut text = Vec::new();
        let tree = serde_json::json!({"lazy-refcounts": false, "bitmaps": [{"flags": ["auto"]}]});
        print_value(&tree, 1, &mut text).expect("writing to memory");
        assert_eq!(
            String::from_utf8_lossy(&text),
            "    lazy refcounts: false\n    bitmaps:\n        [0]:\n            flags:\n                [0]: auto\n"
        );
    }
}
