//! The report of `gaur check` as qemu-img prints it: JSON (`ImageCheck`) and text.

use std::io::Write;

use gaur_engine::Format;
use gaur_format::check::{Repaired, Report};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::info_report::facts;
use crate::size::human;

/// A check, with the counts of its report. What is zero is left out of the JSON, apart from the errors.
#[derive(Clone, Debug, Default)]
pub struct ImageCheck {
    /// The counts.
    pub report: Report,
    /// Name as given.
    pub filename: String,
    /// Bytes of the file that the image's policy would have given back; Gaur's own.
    pub reclaimable_bytes: u64,
    /// Clusters that changed too often to be judged, in an image that is served; Gaur's own.
    pub unsettled_clusters: u64,
    /// What a repair did.
    pub fixed: Option<Fixed>,
}

/// The counts of a repair.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fixed {
    leaks: u64,
    corruptions: u64,
    /// It was only said what a repair would do.
    dry_run: bool,
}

impl Fixed {
    /// The counts of `repaired`.
    pub fn new(repaired: &Repaired, dry_run: bool) -> Fixed {
        Fixed {
            leaks: repaired.leaks_fixed,
            corruptions: repaired.corruptions_fixed,
            dry_run,
        }
    }

    fn print(self, out: &mut dyn Write) -> Result<(), Failure> {
        let Fixed {
            leaks,
            corruptions,
            dry_run,
        } = self;
        if leaks + corruptions > 0 {
            let (head, tail) = match dry_run {
                true => ("A repair would change:", ""),
                false => (
                    "The following inconsistencies were found and repaired:",
                    "\nDouble checking the fixed image now...\n",
                ),
            };
            writeln!(
                out,
                "{head}\n\n    {leaks} leaked clusters\n    {corruptions} corruptions"
            )?;
            write!(out, "{tail}")?;
        }
        Ok(())
    }
}

/// The image has contradictions.
const EXIT_CORRUPT: u8 = 2;
/// The image has nothing worse than leaks.
const EXIT_LEAKS: u8 = 3;
/// The check did not come to its end.
const EXIT_INCOMPLETE: u8 = 1;

impl ImageCheck {
    /// The JSON.
    pub fn json(&self) -> Value {
        let report = &self.report;
        let count = |count: u64| json!((count > 0).then_some(count));
        // What was not done is not told as done.
        let done = self
            .fixed
            .filter(|fixed| !fixed.dry_run)
            .unwrap_or_default();
        facts([
            ("image-end-offset", count(report.image_end_offset)),
            ("compressed-clusters", count(report.compressed_clusters)),
            ("total-clusters", count(report.total_clusters)),
            ("corruptions-fixed", count(done.corruptions)),
            ("corruptions", count(report.corruptions)),
            ("check-errors", json!(report.check_errors)),
            ("leaks", count(report.leaks)),
            ("leaks-fixed", count(done.leaks)),
            ("allocated-clusters", count(report.allocated_clusters)),
            ("filename", json!(self.filename)),
            ("format", json!(Format::Qcow2.name())),
            ("fragmented-clusters", count(report.fragmented_clusters)),
            ("reclaimable-bytes", count(self.reclaimable_bytes)),
            // Gaur's own, too.
            ("clusters-behind-end", count(report.clusters_behind_end)),
            ("unsettled-clusters", count(self.unsettled_clusters)),
        ])
    }

    /// The code to exit with.
    pub fn exit_code(&self) -> u8 {
        if self.report.check_errors > 0 {
            EXIT_INCOMPLETE
        } else if self.report.corruptions > 0 {
            EXIT_CORRUPT
        } else if self.report.leaks > 0 {
            EXIT_LEAKS
        } else {
            0
        }
    }

    /// Prints the counts for people.
    pub fn print(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let Report {
            corruptions,
            leaks,
            check_errors,
            ..
        } = &self.report;
        if let Some(fixed) = self.fixed {
            fixed.print(out)?;
        }
        if corruptions + leaks + check_errors == 0 {
            writeln!(out, "No errors were found on the image.")?;
        }
        if *corruptions > 0 {
            writeln!(out, "\n{corruptions} errors were found on the image.")?;
            writeln!(
                out,
                "Data may be corrupted, or further writes to the image may corrupt it."
            )?;
        }
        if *leaks > 0 {
            writeln!(out, "\n{leaks} leaked clusters were found on the image.")?;
            writeln!(out, "This means waste of disk space, but no harm to data.")?;
        }
        if *check_errors > 0 {
            writeln!(
                out,
                "\n{check_errors} internal errors have occurred during the check."
            )?;
        }
        self.print_clusters(out)
    }

    fn print_clusters(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let report = &self.report;
        let (total, allocated) = (report.total_clusters, report.allocated_clusters);
        let percent = |part: u64, of: u64| part as f64 * 100.0 / of as f64;
        if total != 0 && allocated != 0 {
            writeln!(
                out,
                "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
                percent(allocated, total),
                percent(report.fragmented_clusters, allocated),
                percent(report.compressed_clusters, allocated)
            )?;
        }
        if report.image_end_offset > 0 {
            writeln!(out, "Image end offset: {}", report.image_end_offset)?;
        }
        if report.clusters_behind_end > 0 {
            let count = report.clusters_behind_end;
            writeln!(
                out,
                "{count} clusters are mapped behind the end of the disk; they read as zeros when 'gaur resize' makes it longer"
            )?;
        }
        if self.unsettled_clusters > 0 {
            let count = self.unsettled_clusters;
            writeln!(
                out,
                "{count} clusters were written or freed all the time; whether their counts are right is not known"
            )?;
        }
        if self.reclaimable_bytes > 0 {
            let bytes = self.reclaimable_bytes;
            let size = human(bytes);
            writeln!(
                out,
                "{size} ({bytes} bytes) of its space hold no data; a discard by the guest gives them back"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(check: &ImageCheck) -> String {
        let mut text = Vec::new();
        check.print(&mut text).expect("writing to memory");
        String::from_utf8(text).expect("utf-8")
    }

    #[test]
    fn a_clean_image() {
        let mut check = ImageCheck::default();
        check.report.image_end_offset = 1_703_936;
        check.report.total_clusters = 16384;
        check.report.allocated_clusters = 17;
        assert_eq!(
            print(&check),
            "No errors were found on the image.\n\
             17/16384 = 0.10% allocated, 0.00% fragmented, 0.00% compressed clusters\n\
             Image end offset: 1703936\n"
        );
        assert_eq!(check.exit_code(), 0);
    }

    #[test]
    fn reclaimable_space_is_reported_without_error_code() {
        let check = ImageCheck {
            reclaimable_bytes: 3 << 19,
            ..ImageCheck::default()
        };
        assert_eq!(
            print(&check),
            "No errors were found on the image.\n\
             1.5 MiB (1572864 bytes) of its space hold no data; a discard by the guest gives them back\n"
        );
        assert_eq!(check.exit_code(), 0);
    }

    #[test]
    fn check_exit_code_order_is_incomplete_corrupt_leaks() {
        let mut check = ImageCheck::default();
        check.report.leaks = 2;
        assert_eq!(check.exit_code(), EXIT_LEAKS);
        check.report.corruptions = 1;
        assert_eq!(check.exit_code(), EXIT_CORRUPT);
        assert!(print(&check).starts_with("\n1 errors were found"));
        assert!(print(&check).contains("\n\n2 leaked clusters"));
        check.report.check_errors = 1;
        assert_eq!(check.exit_code(), EXIT_INCOMPLETE);
    }

    #[test]
    fn zero_counts_are_omitted_from_json() {
        let check = ImageCheck {
            filename: "x".into(),
            ..ImageCheck::default()
        };
        let json = check.json().to_string();
        assert_eq!(
            json,
            r#"{"check-errors":0,"filename":"x","format":"qcow2"}"#
        );
    }
}
