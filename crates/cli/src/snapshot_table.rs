//! Reads the snapshot table from an image file without opening the image's chain.

use gaur_format::snapshot::{self, Progress, Snapshot};
use gaur_format::{Header, limit};

use crate::failure::Failure;
use crate::image_file::ImageFile;

/// The snapshots of the image whose header is `header`, oldest first.
pub fn read(file: &ImageFile, header: &Header) -> Result<Vec<Snapshot>, Failure> {
    let broken = |error: gaur_format::Error| file.broken(&error);
    let count = header.nb_snapshots;
    if count == 0 {
        return Ok(Vec::new());
    }
    let mut bytes = Vec::new();
    while let Progress::Need(len) = snapshot::table_len(&bytes, count).map_err(broken)? {
        if len <= bytes.len() as u64 || len > limit::SNAPSHOT_TABLE_BYTES_MAX {
            return Err(Failure::about(
                file.name(),
                "the snapshot table is too long",
            ));
        }
        bytes = file.read(header.snapshots_offset.0, len)?;
    }
    let (snapshots, _) =
        snapshot::parse_table(&bytes, count, &header.geometry()).map_err(broken)?;
    Ok(snapshots)
}
