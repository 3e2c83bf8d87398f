//! What a check of an image that is served has found, in JSON: qemu-img's words, and more.

use gaur_engine::Checked;
use gaur_format::check::Report;
use serde::{Deserialize, Serialize};

/// A check of a served image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CheckFacts {
    /// The image.
    pub filename: String,
    /// Faults that break data, now or at the next write.
    pub corruptions: u64,
    /// Clusters whose refcount is too high.
    pub leaks: u64,
    /// What could not be checked.
    pub check_errors: u64,
    /// Where the last cluster in use ends.
    pub image_end_offset: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Those with space.
    pub allocated_clusters: u64,
    /// Those of them that do not follow their predecessor.
    pub fragmented_clusters: u64,
    /// Those of them that are compressed.
    pub compressed_clusters: u64,
    /// Clusters that are mapped behind the end of the disk.
    pub clusters_behind_end: u64,
    /// Clusters that changed too often to be judged.
    pub unsettled_clusters: u64,
    /// Walks over the tables.
    pub rounds: u32,
    /// What was found, one line each.
    pub findings: Vec<String>,
    /// Findings that were counted and are not told.
    pub findings_dropped: u64,
}

impl CheckFacts {
    /// Of the image called `filename`.
    pub fn new(filename: &str, checked: &Checked) -> CheckFacts {
        let report = &checked.report;
        CheckFacts {
            filename: filename.to_owned(),
            corruptions: report.corruptions,
            leaks: report.leaks,
            check_errors: report.check_errors,
            image_end_offset: report.image_end_offset,
            total_clusters: report.total_clusters,
            allocated_clusters: report.allocated_clusters,
            fragmented_clusters: report.fragmented_clusters,
            compressed_clusters: report.compressed_clusters,
            clusters_behind_end: report.clusters_behind_end,
            unsettled_clusters: checked.unsettled_clusters,
            rounds: checked.rounds,
            findings: report.messages.iter().map(ToString::to_string).collect(),
            findings_dropped: report.messages_dropped,
        }
    }

    /// The counters, as a check of a file has them; the findings stay text.
    pub fn report(&self) -> Report {
        Report {
            corruptions: self.corruptions,
            leaks: self.leaks,
            check_errors: self.check_errors,
            image_end_offset: self.image_end_offset,
            total_clusters: self.total_clusters,
            allocated_clusters: self.allocated_clusters,
            fragmented_clusters: self.fragmented_clusters,
            compressed_clusters: self.compressed_clusters,
            clusters_behind_end: self.clusters_behind_end,
            messages: Vec::new(),
            messages_dropped: self.findings_dropped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_back() {
        let report = Report {
            leaks: 3,
            image_end_offset: 1 << 20,
            messages_dropped: 2,
            ..Report::default()
        };
        let checked = Checked {
            report: report.clone(),
            unsettled_clusters: 7,
            rounds: 2,
        };
        let facts = CheckFacts::new("disk", &checked);
        let value = serde_json::to_value(&facts).expect("plain data");
        assert_eq!(value["unsettled-clusters"], 7);
        let back: CheckFacts = serde_json::from_value(value).expect("the same");
        assert_eq!((&back, back.report()), (&facts, report));
    }
}
