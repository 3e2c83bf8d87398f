//! Memory for metadata: QEMU's options, defaults and limits.

use gaur_format::geometry::Geometry;

use crate::error::{ErrorKind, ImageError};

/// What the user says about the metadata caches of an image. The names of the fields' options are
/// QEMU's, and so is what follows from those that are not given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheOptions {
    /// `cache-size`: most bytes for L2 slices and refcount blocks together.
    pub total_bytes: Option<u64>,
    /// `l2-cache-size`: most bytes for L2 slices.
    pub l2_bytes: Option<u64>,
    /// `l2-cache-entry-size`: bytes of a slice, a power of two from 512 to the cluster size.
    pub l2_entry_bytes: Option<u64>,
    /// `refcount-cache-size`: most bytes for refcount blocks.
    pub refcount_bytes: Option<u64>,
    /// `decompressed-cache-size`: most bytes for decompressed clusters of the image, and as many for those below it
    /// together, 16 MiB by default. Two clusters are kept whatever it says. QEMU has no such cache.
    pub decompressed_bytes: Option<u64>,
}

/// The sizes that follow for one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheSizes {
    /// Most bytes for L2 slices.
    pub(crate) l2_bytes: u64,
    /// Bytes of an L2 slice.
    pub(crate) l2_entry_bytes: u64,
    /// Most bytes for refcount blocks.
    pub(crate) refcount_bytes: u64,
}

/// Most bytes for L2 slices if the user does not say.
const L2_BYTES_DEFAULT: u64 = 32 << 20;
/// Most bytes for decompressed clusters if the user does not say.
const DECOMPRESSED_BYTES_DEFAULT: u64 = 16 << 20;
/// Bytes of an L2 slice if the user does not say, unless clusters are smaller.
const L2_ENTRY_BYTES_DEFAULT: u64 = 4096;
/// Shortest L2 slice: a sector.
const L2_ENTRY_BYTES_MIN: u64 = 512;
/// Most entries of a cache, as in QEMU.
const ENTRIES_MAX: u64 = i32::MAX as u64;
/// Fewest refcount blocks for which there is memory.
const REFCOUNT_CLUSTERS_MIN: u64 = 4;

impl CacheOptions {
    /// Most bytes for decompressed clusters.
    pub(crate) fn decompressed(&self) -> u64 {
        self.decompressed_bytes
            .unwrap_or(DECOMPRESSED_BYTES_DEFAULT)
    }

    /// The sizes for an image of `size_bytes` guest bytes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the options contradict each other or a limit.
    pub(crate) fn resolve(
        &self,
        geometry: &Geometry,
        size_bytes: u64,
    ) -> Result<CacheSizes, ImageError> {
        let invalid = |text: String| Err(ImageError::new(ErrorKind::InvalidInput, text));
        let cluster = geometry.cluster_size();
        let l2_entry_bytes = self
            .l2_entry_bytes
            .unwrap_or(L2_ENTRY_BYTES_DEFAULT.min(cluster));
        let entry_fits = (L2_ENTRY_BYTES_MIN..=cluster).contains(&l2_entry_bytes);
        if !entry_fits || !l2_entry_bytes.is_power_of_two() {
            return invalid(format!(
                "l2-cache-entry-size is {l2_entry_bytes}; it must be a power of two from \
                 {L2_ENTRY_BYTES_MIN} to the cluster size, {cluster}"
            ));
        }
        let all_entries = geometry.clusters_for(size_bytes) * geometry.l2_entry_size();
        let l2_all = all_entries.next_multiple_of(cluster);
        let refcount_min = REFCOUNT_CLUSTERS_MIN * cluster;
        let (l2, refcount) = match (self.total_bytes, self.l2_bytes, self.refcount_bytes) {
            (None, l2, refcount) => (l2.unwrap_or(L2_BYTES_DEFAULT), refcount.unwrap_or(0)),
            (Some(_), Some(_), Some(_)) => {
                return invalid(
                    "cache-size, l2-cache-size and refcount-cache-size exclude each other; give \
                     two of them"
                        .to_owned(),
                );
            }
            (Some(total), Some(l2), None) if l2 <= total => (l2, total - l2),
            (Some(total), None, Some(refcount)) if refcount <= total => {
                (total - refcount, refcount)
            }
            (Some(total), None, None) if total >= l2_all + refcount_min => (l2_all, total - l2_all),
            (Some(total), None, None) => {
                let refcount = total.min(refcount_min);
                (total - refcount, refcount)
            }
            (Some(total), Some(l2), None) => {
                return invalid(format!(
                    "l2-cache-size is {l2}, more than cache-size, {total}"
                ));
            }
            (Some(total), None, Some(refcount)) => {
                return invalid(format!(
                    "refcount-cache-size is {refcount}, more than cache-size, {total}"
                ));
            }
        };
        let l2 = l2.min(l2_all);
        for (what, entries) in [
            ("l2-cache-size", l2 / l2_entry_bytes),
            ("refcount-cache-size", refcount / cluster),
        ] {
            if entries > ENTRIES_MAX {
                let text = format!("{what} is too much: {entries} entries, {ENTRIES_MAX} at most");
                return invalid(text);
            }
        }
        Ok(CacheSizes {
            l2_bytes: l2,
            l2_entry_bytes,
            refcount_bytes: if refcount == 0 {
                refcount_min
            } else {
                refcount
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use gaur_format::geometry::Version;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn geometry(extended_l2: bool) -> Geometry {
        Geometry::new(Version::V3, 16, extended_l2, 4).expect("a valid geometry")
    }

    fn resolve(options: CacheOptions) -> Result<CacheSizes, String> {
        let sizes = options.resolve(&geometry(false), 40 * GIB);
        sizes.map_err(|error| error.to_string())
    }

    #[test]
    fn without_options_the_whole_table_fits_up_to_a_limit() {
        let sizes = resolve(CacheOptions::default()).expect("defaults are valid");
        assert_eq!((sizes.l2_bytes, sizes.l2_entry_bytes), (5 << 20, 4096));
        assert_eq!(sizes.refcount_bytes, 256 << 10);
        let large = CacheOptions::default().resolve(&geometry(true), 1 << 40);
        assert_eq!(large.expect("defaults are valid").l2_bytes, 32 << 20);
    }

    #[test]
    fn a_total_goes_to_the_l2_tables_first() {
        let total = |bytes| {
            resolve(CacheOptions {
                total_bytes: Some(bytes),
                ..CacheOptions::default()
            })
            .expect("a total alone is valid")
        };
        let much = total(8 << 20);
        assert_eq!((much.l2_bytes, much.refcount_bytes), (5 << 20, 3 << 20));
        let little = total(1 << 20);
        assert_eq!(
            (little.l2_bytes, little.refcount_bytes),
            (768 << 10, 256 << 10)
        );
    }

    #[test]
    fn contradictions_are_refused() {
        let all = CacheOptions {
            total_bytes: Some(1 << 20),
            l2_bytes: Some(1 << 19),
            refcount_bytes: Some(1 << 19),
            ..CacheOptions::default()
        };
        assert!(resolve(all).is_err());
        let more = CacheOptions {
            refcount_bytes: None,
            l2_bytes: Some(2 << 20),
            ..all
        };
        let text = resolve(more).expect_err("more than the total");
        assert_eq!(
            text,
            "l2-cache-size is 2097152, more than cache-size, 1048576"
        );
        let much = CacheOptions {
            refcount_bytes: Some(256 << 40),
            ..CacheOptions::default()
        };
        let text = resolve(much).expect_err("too much");
        assert!(
            text.starts_with("refcount-cache-size is too much"),
            "{text}"
        );
        for entry in [0, 256, 5000, 128 << 10] {
            let options = CacheOptions {
                l2_entry_bytes: Some(entry),
                ..CacheOptions::default()
            };
            assert!(resolve(options).is_err(), "{entry}");
        }
    }
}
