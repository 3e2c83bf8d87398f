//! `measure`: how large an image would be.

use crate::error::Error;
use crate::plan::layout::Layout;
use crate::plan::options::{CreateOptions, Preallocation};

/// Sizes of an image in bytes, with all its tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measure {
    /// For the data there is now. An upper bound: the tables are those of a full image.
    pub required: u64,
    /// When every cluster of the disk is allocated.
    pub fully_allocated: u64,
}

/// Measures an image made with `options` that holds `data_clusters` clusters of data, counted by
/// the caller, who knows the source.
pub fn measure(options: &CreateOptions, data_clusters: u64) -> Result<Measure, Error> {
    let geometry = options.check()?;
    let layout = Layout::new(
        &geometry,
        options.rounded_size_bytes()?,
        options.luks_bytes(),
        true,
    );
    let bytes = |clusters: u64| clusters.saturating_mul(geometry.cluster_size());
    let data = match options.preallocation {
        Preallocation::Falloc | Preallocation::Full => layout.data,
        Preallocation::Off | Preallocation::Metadata => data_clusters.min(layout.data),
    };
    Ok(Measure {
        required: bytes(layout.tables().saturating_add(data)),
        fully_allocated: bytes(layout.end()),
    })
}
