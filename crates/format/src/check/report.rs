//! The checker's report: counters and findings.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::addr::HostOffset;
use crate::limit;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Space is lost, nothing else: a refcount is higher than the references.
    Leak,
    /// Data is wrong or will be: a reference without refcount, an entry that cannot be right.
    Corruption,
    /// Part of the image could not be checked.
    Error,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// How often it counts: an entry of an L2 table that several snapshots share is as many faults.
    pub times: u64,
    /// What and where, one line in lower case.
    pub message: String,
    /// The counts, where they are what is wrong.
    pub miscount: Option<Miscount>,
}

/// A cluster whose refcount is not the number of references to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miscount {
    /// Number of the cluster in the file.
    pub cluster: u64,
    /// What the image says.
    pub refcount: u64,
    /// References found.
    pub references: u64,
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Leak => "leak",
            Severity::Corruption => "corruption",
            Severity::Error => "error",
        };
        write!(out, "{severity}: {}", self.message)?;
        if self.times > 1 {
            write!(out, " ({} times)", self.times)?;
        }
        Ok(())
    }
}

/// The counters of a check, with the meaning they have in `qemu-img check`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Faults that break data, now or at the next write.
    pub corruptions: u64,
    /// Clusters whose refcount is higher than the references to them.
    pub leaks: u64,
    /// What could not be checked.
    pub check_errors: u64,
    /// Where the last cluster in use ends, in bytes of the file.
    pub image_end_offset: u64,
    /// Clusters of the virtual disk.
    pub total_clusters: u64,
    /// Clusters of the virtual disk that have space, in the active image.
    pub allocated_clusters: u64,
    /// Those of them that do not follow their predecessor in the file.
    pub fragmented_clusters: u64,
    /// Those of them that are compressed.
    pub compressed_clusters: u64,
    /// Clusters with space that the active L1 table maps behind the end of the virtual disk. No fault: a
    /// program that applied a snapshot may have left the state of a machine there.
    pub clusters_behind_end: u64,
    /// What was found, at most [`limit::CHECK_FINDINGS_MAX`].
    pub messages: Vec<Finding>,
    /// Findings that were counted but not kept as messages.
    pub messages_dropped: u64,
}

impl Report {
    /// No fault of any kind.
    pub fn is_clean(&self) -> bool {
        self.corruptions == 0 && self.leaks == 0 && self.check_errors == 0
    }

    /// Nothing worse than lost space, and all of the image was checked.
    pub fn only_leaks(&self) -> bool {
        self.corruptions == 0 && self.check_errors == 0
    }

    /// Takes over the findings and counters of a part.
    pub(super) fn join(&mut self, part: Report) {
        let pairs = [
            (&mut self.corruptions, part.corruptions),
            (&mut self.leaks, part.leaks),
            (&mut self.check_errors, part.check_errors),
            (&mut self.allocated_clusters, part.allocated_clusters),
            (&mut self.fragmented_clusters, part.fragmented_clusters),
            (&mut self.compressed_clusters, part.compressed_clusters),
            (&mut self.clusters_behind_end, part.clusters_behind_end),
            (&mut self.messages_dropped, part.messages_dropped),
        ];
        for (counter, more) in pairs {
            *counter = counter.saturating_add(more);
        }
        let room = limit::CHECK_FINDINGS_MAX.saturating_sub(self.messages.len());
        let dropped = part.messages.len().saturating_sub(room) as u64;
        self.messages_dropped = self.messages_dropped.saturating_add(dropped);
        self.messages.extend(part.messages.into_iter().take(room));
    }

    /// Counts a finding; `message` is made only when it is kept.
    pub(super) fn add(&mut self, severity: Severity, times: u64, message: impl FnOnce() -> String) {
        self.keep(severity, times, || (message(), None));
    }

    /// Counts a refcount that is wrong; the cluster begins at `offset`.
    pub(super) fn add_miscount(&mut self, wrong: Miscount, offset: HostOffset) {
        let Miscount {
            cluster,
            refcount,
            references,
        } = wrong;
        let severity = match refcount < references {
            true => Severity::Corruption,
            false => Severity::Leak,
        };
        self.keep(severity, 1, || {
            let message = alloc::format!(
                "cluster {cluster} at {offset:#x} has refcount {refcount}, references: {references}"
            );
            (message, Some(wrong))
        });
    }

    fn keep(
        &mut self,
        severity: Severity,
        times: u64,
        text: impl FnOnce() -> (String, Option<Miscount>),
    ) {
        let counter = match severity {
            Severity::Leak => &mut self.leaks,
            Severity::Corruption => &mut self.corruptions,
            Severity::Error => &mut self.check_errors,
        };
        *counter = counter.saturating_add(times);
        if self.messages.len() < limit::CHECK_FINDINGS_MAX {
            let (message, miscount) = text();
            self.messages.push(Finding {
                severity,
                times,
                message,
                miscount,
            });
        } else {
            self.messages_dropped = self.messages_dropped.saturating_add(1);
        }
    }
}
