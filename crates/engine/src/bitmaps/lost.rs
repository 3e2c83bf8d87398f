//! Removal of all persistent bitmaps of an image, when the process that writes to it gives them up and says so.
//!
//! They go with the first change, wholly: the extension that leads to them, and their clusters. What
//! remains of bitmaps that another writer has made useless is hidden as well. QEMU 10 takes such an
//! image for one without snapshots when it repairs leaks.
//!
//! Crash rule: nothing leads to the clusters any more before their counts go down (O3). The extension
//! goes before the autoclear bit is cleared, together where both lie in one sector.

use gaur_block::File;
use gaur_format::bitmap::{self, BitmapCluster};
use gaur_format::check::{Check, Report, Step};
use gaur_format::extension::{self, BitmapsExtension};
use gaur_format::header::Header;

use crate::error::{ErrorKind, ImageError};
use crate::layer::LayerReader;
use crate::range::ClusterRange;

/// Bytes of a bitmap's table read at once.
const PIECE_BYTES: u64 = 1 << 20;
/// Most names told in an error.
const NAMES_TOLD: usize = 8;

/// The bitmaps that the first change to an image removes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LostBitmaps {
    /// Their names, bytes that are not UTF-8 as U+FFFD; none of bitmaps that were useless before.
    pub names: Vec<String>,
    /// What they refer to.
    pub(crate) frees: Vec<ClusterRange>,
}

impl LostBitmaps {
    /// What happens to them, on one line.
    pub fn describe(&self) -> String {
        match self.names.is_empty() {
            true => {
                "another program has made its persistent bitmaps useless, the first change removes \
                     what is left of them"
                    .to_owned()
            }
            false => format!(
                "the first change removes its persistent bitmaps {}",
                listed(&self.names)
            ),
        }
    }
}

impl<F: File> LayerReader<'_, F> {
    /// What is removed of an image's bitmaps when it is written to; `None` if it has none.
    pub(crate) async fn lost_bitmaps(
        &self,
        header: &Header,
    ) -> Result<Option<LostBitmaps>, ImageError> {
        if header.extension(extension::BITMAPS).is_none() {
            return Ok(None);
        }
        let Some(pointer) = header.bitmaps() else {
            return Ok(Some(LostBitmaps::default()));
        };
        let list = self.bitmap_directory(header, pointer).await?;
        let names = list.iter().filter(|bitmap| !bitmap.is_write_intent_map());
        let names: Vec<String> = names
            .map(|bitmap| String::from_utf8_lossy(&bitmap.name).into_owned())
            .collect();
        let damaged = |text: String| {
            let text = format!("cannot remove the bitmaps: {text}; check the image first");
            ImageError::new(ErrorKind::Corrupt, text)
        };
        // What they refer to may belong to other structures as well, in an image that is damaged.
        let report = self.report(header).await?;
        if report.corruptions + report.check_errors > 0 {
            return Err(damaged("the image is damaged".to_owned()));
        }
        let mut frees = Vec::new();
        let size = header.geometry().cluster_size();
        let mut free_bytes = |offset: u64, len: u64| {
            ClusterRange::new(offset / size, len.div_ceil(size)).join(&mut frees);
        };
        free_bytes(pointer.directory_offset.0, pointer.directory_len_bytes);
        for bitmap in &list {
            free_bytes(bitmap.table_offset.0, u64::from(bitmap.table_entries) * 8);
        }
        for bitmap in &list {
            let found = self.bitmap_clusters(header, bitmap, &mut frees).await;
            found.map_err(|error| damaged(format!("{error:#}")))?;
        }
        Ok(Some(LostBitmaps { names, frees }))
    }

    pub(super) async fn bitmap_directory(
        &self,
        header: &Header,
        pointer: BitmapsExtension,
    ) -> Result<Vec<bitmap::Bitmap>, ImageError> {
        let (offset, len) = (pointer.directory_offset.0, pointer.directory_len_bytes);
        let bytes = self.bytes("bitmap directory", offset, len).await?;
        bitmap::parse_directory(&bytes, pointer.count, &header.geometry())
            .map_err(ImageError::format)
    }

    /// The clusters with the bits of one bitmap.
    async fn bitmap_clusters(
        &self,
        header: &Header,
        bitmap: &bitmap::Bitmap,
        frees: &mut Vec<ClusterRange>,
    ) -> Result<(), ImageError> {
        const WHAT: &str = "table of a bitmap";
        let geometry = header.geometry();
        let len = u64::from(bitmap.table_entries) * 8;
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(PIECE_BYTES);
            let at = bitmap.table_offset.0 + done;
            let bytes = self.bytes(WHAT, at, piece).await?;
            for raw in bytes.as_chunks().0 {
                let cluster = bitmap::decode_table_entry(u64::from_be_bytes(*raw), &geometry)
                    .map_err(|what| ImageError::corrupt(what, WHAT))?;
                if let BitmapCluster::Stored(offset) = cluster {
                    ClusterRange::new(offset.0 / geometry.cluster_size(), 1).join(frees);
                }
            }
            done += piece;
        }
        Ok(())
    }

    /// What the checker says of the image.
    async fn report(&self, header: &Header) -> Result<Report, ImageError> {
        let cluster = header.geometry().cluster_size().min(self.len_bytes);
        let bytes = self.bytes("header", 0, cluster).await?;
        let mut check = Check::new(&bytes, self.len_bytes).map_err(ImageError::format)?;
        loop {
            match check.next() {
                Step::Need { offset, len } => {
                    let inside = self.len_bytes.saturating_sub(offset).min(len);
                    match self.bytes("tables", offset, inside).await {
                        Ok(bytes) => check.feed(&bytes),
                        Err(_) => check.fail(),
                    }
                }
                Step::Done(report) => return Ok(report),
            }
        }
    }
}

/// Some names, and how many more there are.
fn listed(names: &[String]) -> String {
    let told: Vec<String> = names
        .iter()
        .take(NAMES_TOLD)
        .map(|name| format!("{name:?}"))
        .collect();
    let more = match names.len().saturating_sub(NAMES_TOLD) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    told.join(", ") + &more
}
