//! What the entries of an L2 table, or of a part of one, refer to, and their COPIED flags. Entries are
//! taken as they stand: what they mean for the guest does not matter here.

use gaur_format::geometry::Geometry;
use gaur_format::l1::{COPIED, OFFSET_MASK};
use gaur_format::{CompressedDescriptor, Corruption};

use crate::range::ClusterRange;

const COMPRESSED: u64 = 1 << 62;

/// What one entry refers to.
pub(crate) enum Reference {
    Nothing,
    /// A cluster that may carry the flag.
    Cluster(u64),
    /// Clusters with compressed data.
    Compressed(ClusterRange),
}

/// What an entry refers to.
pub(crate) fn reference(raw: u64, geometry: &Geometry) -> Result<Reference, Corruption> {
    if raw & COMPRESSED != 0 {
        let descriptor = CompressedDescriptor::decode(raw, geometry)?;
        let (first, count) = descriptor.clusters(geometry);
        return Ok(Reference::Compressed(ClusterRange::new(first.0, count)));
    }
    // An offset inside a cluster counts as the cluster; a read through it finds the damage.
    match (raw & OFFSET_MASK) >> geometry.cluster_bits() {
        0 => Ok(Reference::Nothing),
        cluster => Ok(Reference::Cluster(cluster)),
    }
}

fn raw_of(entry: &[u8]) -> u64 {
    entry
        .first_chunk::<8>()
        .map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// Calls `visit` with every run of clusters that entries next to each other refer to.
pub(crate) fn each_run<E: From<Corruption>>(
    entries: &[u8],
    geometry: &Geometry,
    mut visit: impl FnMut(ClusterRange) -> Result<(), E>,
) -> Result<(), E> {
    let mut run = ClusterRange::default();
    for entry in entries.chunks_exact(geometry.l2_entry_size() as usize) {
        let next = match reference(raw_of(entry), geometry)? {
            Reference::Nothing => continue,
            Reference::Cluster(cluster) => ClusterRange::new(cluster, 1),
            Reference::Compressed(clusters) => clusters,
        };
        if !run.is_empty() && next.start == run.end() {
            run.len += next.len;
            continue;
        }
        if !run.is_empty() {
            visit(run)?;
        }
        run = next;
    }
    if !run.is_empty() {
        visit(run)?;
    }
    Ok(())
}

/// Takes the flag from every entry; whether any had it.
pub(crate) fn clear_flags(entries: &mut [u8], geometry: &Geometry) -> bool {
    let mut any = false;
    for entry in entries.chunks_exact_mut(geometry.l2_entry_size() as usize) {
        let raw = raw_of(entry);
        if raw & COMPRESSED == 0
            && raw & COPIED != 0
            && let Some(bytes) = entry.first_chunk_mut::<8>()
        {
            any = true;
            *bytes = (raw & !COPIED).to_be_bytes();
        }
    }
    any
}

/// Sets or takes the flag of entries as `single` says, which is asked for a cluster whether one
/// reference to it is all there is, and answers `None` where nothing has changed. Says whether any
/// entry is another now.
pub(crate) fn set_flags(
    entries: &mut [u8],
    geometry: &Geometry,
    single: impl Fn(u64) -> Option<bool>,
) -> bool {
    let mut any = false;
    for entry in entries.chunks_exact_mut(geometry.l2_entry_size() as usize) {
        let raw = raw_of(entry);
        let Ok(Reference::Cluster(cluster)) = reference(raw, geometry) else {
            continue;
        };
        let Some(single) = single(cluster) else {
            continue;
        };
        if (raw & COPIED != 0) != single
            && let Some(bytes) = entry.first_chunk_mut::<8>()
        {
            any = true;
            *bytes = (raw ^ COPIED).to_be_bytes();
        }
    }
    any
}

#[cfg(test)]
mod tests {
    use gaur_format::Version;

    use super::*;

    fn geometry() -> Geometry {
        Geometry::new(Version::V3, 16, false, 4).unwrap()
    }

    fn table(entries: &[u64]) -> Vec<u8> {
        entries.iter().flat_map(|raw| raw.to_be_bytes()).collect()
    }

    fn runs(entries: &[u64]) -> Vec<(u64, u64)> {
        let mut runs = Vec::new();
        each_run(&table(entries), &geometry(), |run| {
            runs.push((run.start, run.len));
            Ok::<(), Corruption>(())
        })
        .unwrap();
        runs
    }

    #[test]
    fn neighbours_are_one_run_and_compressed_data_counts_all_its_clusters() {
        let size = geometry().cluster_size();
        let two = COMPRESSED | (8 * size - 512) | 1 << (70 - geometry().cluster_bits());
        assert_eq!(
            runs(&[
                0,
                COPIED | (3 * size),
                COPIED | (4 * size),
                1,
                6 * size,
                two,
                two
            ]),
            [(3, 2), (6, 3), (7, 2)]
        );
    }

    #[test]
    fn flags_change_where_they_are_wrong_and_never_on_compressed_data() {
        let size = geometry().cluster_size();
        let compressed = COMPRESSED | (9 * size);
        let mut entries = table(&[0, 1, COPIED | (3 * size), 4 * size, compressed]);
        let before = entries.clone();
        assert!(!set_flags(&mut entries, &geometry(), |_| None));
        assert_eq!(entries, before);
        assert!(set_flags(&mut entries, &geometry(), |cluster| Some(
            cluster == 4
        )));
        assert_eq!(
            entries,
            table(&[0, 1, 3 * size, COPIED | (4 * size), compressed])
        );
        assert!(clear_flags(&mut entries, &geometry()));
        assert_eq!(entries, table(&[0, 1, 3 * size, 4 * size, compressed]));
        assert!(!clear_flags(&mut entries, &geometry()));
    }
}
