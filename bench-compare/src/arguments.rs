//! Arguments that all benchmarks have.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::machine;

/// The program that is measured, and where its figures go.
#[derive(clap::Args, Clone)]
pub struct Common {
    /// The gaur binary [default: built in release mode]
    #[arg(long)]
    gaur: Option<PathBuf>,
    /// The machine-readable record; tables that are not measured stay in it
    #[arg(long)]
    json: Option<PathBuf>,
    /// The page whose sections between markers are written
    #[arg(long)]
    pub markdown: Option<PathBuf>,
}

impl Common {
    /// The gaur binary.
    pub fn gaur(&self) -> Result<PathBuf> {
        match &self.gaur {
            Some(path) => Ok(path.clone()),
            None => machine::build_gaur(),
        }
    }

    /// The record as an earlier run has left it.
    pub fn earlier_record<T: DeserializeOwned + Default>(&self) -> Result<T> {
        let Some(path) = self.json.as_ref().filter(|path| path.exists()) else {
            return Ok(T::default());
        };
        let text = std::fs::read_to_string(path)?;
        serde_json::from_str(&text).with_context(|| format!("{}", path.display()))
    }

    /// Writes the record if it is wanted.
    pub fn write_record(&self, record: &impl Serialize) -> Result<()> {
        let Some(path) = &self.json else {
            return Ok(());
        };
        let text = serde_json::to_string_pretty(record)? + "\n";
        std::fs::write(path, text).with_context(|| format!("{}", path.display()))
    }

    /// Writes a section of the page if there is one.
    pub fn write_section(&self, name: &str, text: &str) -> Result<()> {
        match &self.markdown {
            Some(path) => crate::markdown::update(path, name, text),
            None => Ok(()),
        }
    }
}
