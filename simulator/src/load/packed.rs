//! Writes of compressed clusters.

use std::ops::Range;

use gaur_engine::{CompressedCluster, Compressor, ErrorKind, Queue};
use gaur_sim::{Random, SimFile};

use super::Load;

/// Most clusters in a row.
const CLUSTERS_MAX: u64 = 4;

impl Load {
    /// The units of each cluster that a write of `units` stores compressed; `None` if it is an ordinary one.
    /// Drawn apart, so that loads without such writes are what they were.
    pub(super) fn clusters_to_pack(&self, units: &Range<u32>) -> Option<Vec<Range<u32>>> {
        let mut apart = Random::new(u64::from(self.tag.get() + 1) ^ 0x1f83_d9ab_fb41_bd6b);
        if !apart.chance(self.config.packed_per_mille) {
            return None;
        }
        let end = self.model.borrow().len_units();
        let step = (self.config.image.shape.cluster_bytes() / self.unit_bytes()) as u32;
        // Only the last cluster of a disk may be shorter, and which that is a resize changes.
        let resized = self.config.weights.resize > 0 || self.config.snapshot_load.is_some();
        let first = units.start / step;
        let count = apart.between(1, CLUSTERS_MAX) as u32;
        let clusters = (first..first.saturating_add(count))
            .map(|number| number * step..(number * step).saturating_add(step).min(end))
            .filter(|cluster| cluster.start < cluster.end)
            .filter(|cluster| !resized || cluster.end - cluster.start == step);
        let clusters: Vec<_> = clusters.collect();
        (!clusters.is_empty()).then_some(clusters)
    }

    /// Stores clusters compressed, one request each. What does not get smaller is stored as it is.
    pub(super) async fn write_packed(&self, queue: &Queue<SimFile>, clusters: Vec<Range<u32>>) {
        // Encrypted images and those with a data file cannot have such clusters.
        let mut compressor = match Compressor::new(queue.image(), Some(1)) {
            Ok(compressor) => compressor,
            Err(error) if error.kind() == ErrorKind::Unsupported => return,
            Err(error) => return self.fail(format!("no compressor: {error}")),
        };
        for units in clusters {
            // Set to a shorter snapshot since the list was drawn.
            if units.end > self.model.borrow().len_units() {
                return;
            }
            let value = self.next_value();
            let bytes = self.bytes(&units);
            let script = self.model.borrow().script();
            let plain = script.bytes_of(value, bytes.start, bytes.end - bytes.start);
            let mut packed = CompressedCluster::default();
            compressor.compress(&plain, &mut packed);
            let tag = self.begin(format_args!("write packed {units:?} value {value}"));
            let issued = self.model.borrow_mut().write(units, value);
            self.stats.borrow_mut().packed += 1;
            let poisoned = self.poisoned.get();
            let result = queue.write_compressed(bytes.start, &plain, &packed).await;
            self.changed(tag, issued, &result, (poisoned, false));
        }
    }
}
