//! Metadata of a new snapshot: id, date, guest clock, instruction count.

use std::time::{SystemTime, UNIX_EPOCH};

use gaur_engine::NewSnapshot;

use crate::failure::Failure;

/// What the command line says of it.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct MetadataArgs {
    /// Its id (the number after the highest there is by default)
    #[arg(long)]
    id: Option<String>,
    /// When it was made, in seconds since 1970 (now by default)
    #[arg(long, value_name = "SECONDS")]
    date: Option<u32>,
    /// Time the guest has run, in nanoseconds
    #[arg(long, value_name = "NS", default_value_t = 0)]
    vm_clock: u64,
    /// Instructions the guest has executed
    #[arg(long, value_name = "N")]
    icount: Option<u64>,
}

impl MetadataArgs {
    /// The new snapshot called `name`.
    pub fn snapshot(&self, name: &str) -> Result<NewSnapshot, Failure> {
        let (date_sec, date_nsec) = match self.date {
            Some(seconds) => (seconds, 0),
            None => now()?,
        };
        Ok(NewSnapshot {
            name: name.to_owned(),
            id: self.id.clone(),
            date_sec,
            date_nsec,
            vm_clock_nsec: self.vm_clock,
            icount: self.icount,
        })
    }
}

/// Seconds since 1970, and nanoseconds beyond.
pub fn now() -> Result<(u32, u32), Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    let seconds = u32::try_from(now.as_secs()).map_err(|_| {
        let failure = Failure::new("the clock shows a time that no snapshot can have");
        failure.hint("--date sets it, up to the year 2106")
    })?;
    Ok((seconds, now.subsec_nanos()))
}
