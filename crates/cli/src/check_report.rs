//! The report of `gaur check` as qemu-img prints it: JSON (`ImageCheck`) and text.

use std::io::Write;

use serde::Serialize;

use crate::failure::Failure;
use crate::size::human;

/// The counts of a check. What is zero is left out of the JSON, apart from the errors.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ImageCheck {
    /// Where the clusters in use end, in bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub image_end_offset: u64,
    /// Guest clusters that are compressed.
    #[serde(skip_serializing_if = "is_zero")]
    pub compressed_clusters: u64,
    /// Clusters of the guest.
    #[serde(skip_serializing_if = "is_zero")]
    pub total_clusters: u64,
    /// Contradictions that may cost data.
    #[serde(skip_serializing_if = "is_zero")]
    pub corruptions: u64,
    /// Failures of the check itself.
    pub check_errors: u64,
    /// Clusters that are counted but not used.
    #[serde(skip_serializing_if = "is_zero")]
    pub leaks: u64,
    /// Guest clusters that have data.
    #[serde(skip_serializing_if = "is_zero")]
    pub allocated_clusters: u64,
    /// Name as given.
    pub filename: String,
    /// Its format.
    pub format: &'static str,
    /// Guest clusters whose data does not follow that of the one before.
    #[serde(skip_serializing_if = "is_zero")]
    pub fragmented_clusters: u64,
    /// Bytes of the file that the image's policy would have given back; Gaur's own.
    #[serde(skip_serializing_if = "is_zero")]
    pub reclaimable_bytes: u64,
    /// Clusters that are mapped behind the end of the disk; Gaur's own.
    #[serde(skip_serializing_if = "is_zero")]
    pub clusters_behind_end: u64,
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands out references"
)]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The image has contradictions.
const EXIT_CORRUPT: u8 = 2;
/// The image has nothing worse than leaks.
const EXIT_LEAKS: u8 = 3;
/// The check did not come to its end.
const EXIT_INCOMPLETE: u8 = 1;

impl ImageCheck {
    /// The code to exit with.
    pub fn exit_code(&self) -> u8 {
        if self.check_errors > 0 {
            EXIT_INCOMPLETE
        } else if self.corruptions > 0 {
            EXIT_CORRUPT
        } else if self.leaks > 0 {
            EXIT_LEAKS
        } else {
            0
        }
    }

    /// Prints the counts for people.
    pub fn print(&self, out: &mut dyn Write) -> Result<(), Failure> {
        let ImageCheck {
            corruptions,
            leaks,
            check_errors,
            ..
        } = self;
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
        let (total, allocated) = (self.total_clusters, self.allocated_clusters);
        let percent = |part: u64, of: u64| part as f64 * 100.0 / of as f64;
        if total != 0 && allocated != 0 {
            writeln!(
                out,
                "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
                percent(allocated, total),
                percent(self.fragmented_clusters, allocated),
                percent(self.compressed_clusters, allocated)
            )?;
        }
        if self.image_end_offset > 0 {
            writeln!(out, "Image end offset: {}", self.image_end_offset)?;
        }
        if self.clusters_behind_end > 0 {
            let count = self.clusters_behind_end;
            writeln!(
                out,
                "{count} clusters are mapped behind the end of the disk; they read as zeros when 'gaur resize' makes it longer"
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
        let check = ImageCheck {
            image_end_offset: 1_703_936,
            total_clusters: 16384,
            allocated_clusters: 17,
            ..ImageCheck::default()
        };
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
        let mut check = ImageCheck {
            leaks: 2,
            ..ImageCheck::default()
        };
        assert_eq!(check.exit_code(), EXIT_LEAKS);
        check.corruptions = 1;
        assert_eq!(check.exit_code(), EXIT_CORRUPT);
        assert!(print(&check).starts_with("\n1 errors were found"));
        assert!(print(&check).contains("\n\n2 leaked clusters"));
        check.check_errors = 1;
        assert_eq!(check.exit_code(), EXIT_INCOMPLETE);
    }

    #[test]
    fn zero_counts_are_omitted_from_json() {
        let check = ImageCheck {
            filename: "x".into(),
            format: "qcow2",
            ..ImageCheck::default()
        };
        let json = serde_json::to_string(&check).expect("json");
        assert_eq!(
            json,
            r#"{"check-errors":0,"filename":"x","format":"qcow2"}"#
        );
    }
}
