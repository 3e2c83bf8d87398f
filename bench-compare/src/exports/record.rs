//! What was measured, as it is kept.

use serde::{Deserialize, Serialize};

use crate::machine::Machine;

/// What the name of a contestant ends with that an older Gaur serves.
pub const BEFORE: &str = ", before";

/// Everything that was measured in one run of a guest.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Record {
    /// The machine that the guest ran on.
    pub host: Machine,
    /// Release of the guest's kernel.
    pub guest_kernel: String,
    /// Processors of the guest, each one of the host's.
    #[serde(default)]
    pub guest_processors: usize,
    /// Versions of the peers, a line each.
    pub peers: Vec<String>,
    /// The day.
    pub date: String,
    /// Where the images are.
    #[serde(default)]
    pub store: String,
    /// Seconds of each measurement.
    pub seconds: u64,
    /// Size of the disk in MiB.
    pub size_mib: u64,
    /// What a reader must know.
    pub notes: Vec<String>,
    /// All cells.
    pub cells: Vec<Cell>,
}

/// One combination of what is varied, and what each contestant made of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cell {
    /// `full` or `empty`.
    pub image: String,
    /// `randread`, `randwrite`, `mix`, `read` or `write`.
    pub load: String,
    /// Requests in flight of each job.
    pub depth: u32,
    /// Jobs at once.
    pub jobs: u32,
    /// In the order in which they were measured.
    pub series: Vec<Series>,
}

/// What one contestant did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Series {
    /// Its name.
    pub who: String,
    /// Requests a second, of each round. A round that failed is a zero.
    pub iops: Vec<f64>,
    /// 99th percentile of the time a request takes in microseconds, of each round.
    pub p99_us: Vec<f64>,
}

impl Cell {
    /// Requests a second of a contestant, round by round.
    pub fn iops(&self, who: &str) -> &[f64] {
        let found = self.series.iter().find(|series| series.who == who);
        found.map_or(&[], |series| &series.iops)
    }

    /// Median of the ratios of two, round by round; `None` when one was not measured, or failed.
    pub fn ratio(&self, over: &str, under: &str) -> Option<f64> {
        let ratios = crate::statistics::ratios(self.iops(over), self.iops(under));
        let ratio = crate::statistics::median(&ratios);
        ratio.is_finite().then_some(ratio)
    }

    /// Whether requests are 512 KiB long and in order.
    pub fn is_sequential(&self) -> bool {
        matches!(self.load.as_str(), "read" | "write")
    }
}
