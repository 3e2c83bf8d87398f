//! Block status: what a run of guest bytes is, for `map`, `convert` and NBD.

use gaur_block::{Errno, File, Status};

use crate::metadata::maps::{Extent, Kind};
use crate::options::Format;
use crate::queue::Queue;
use crate::range::GuestRange;

/// A run of guest bytes of one kind, with the fields of `qemu-img map`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapExtent {
    /// Length in bytes, at least 1.
    pub len_bytes: u64,
    /// Index of the layer that has it, 0 for the top; the last layer's for what no layer has.
    pub depth: u32,
    /// Some layer allocates it (data, or zeros it knows of).
    pub present: bool,
    /// It reads as zeros.
    pub zero: bool,
    /// It has bytes in some file.
    pub data: bool,
    /// Those bytes are compressed.
    pub compressed: bool,
    /// Where they are in the layer's file or its data file, unless compressed.
    pub host_offset: Option<u64>,
}

impl From<Extent> for MapExtent {
    fn from(extent: Extent) -> MapExtent {
        let (present, zero, host_offset) = match extent.kind {
            Kind::Unallocated { host } => (false, true, host),
            Kind::Zero { host } => (true, true, host),
            Kind::Data { host, .. } => (true, false, Some(host)),
            Kind::Compressed { .. } => (true, false, None),
        };
        MapExtent {
            len_bytes: extent.len,
            depth: extent.layer as u32,
            present,
            zero,
            data: !zero,
            compressed: matches!(extent.kind, Kind::Compressed { .. }),
            host_offset,
        }
    }
}

impl From<MapExtent> for Status {
    fn from(extent: MapExtent) -> Status {
        Status {
            len_bytes: extent.len_bytes,
            // As QEMU: what has no bytes in a file is a hole.
            allocated: extent.data,
            zero: extent.zero,
        }
    }
}

impl<F: File> Queue<F> {
    /// The run that starts at guest offset `offset_bytes` and is at most `len_bytes` (1 or more)
    /// long. Runs next to each other may be of the same kind.
    pub async fn map(&self, offset_bytes: u64, len_bytes: u64) -> Result<MapExtent, Errno> {
        let _epoch = self.enter_open().await;
        let left = self
            .image
            .size_bytes()
            .checked_sub(offset_bytes)
            .filter(|left| *left > 0);
        let max = len_bytes.min(left.ok_or(Errno::EINVAL)?).max(1);
        let found = self.find(GuestRange::new(offset_bytes, max)).await?;
        let mut extent = MapExtent::from(found);
        if let Kind::Data { host, .. } = found.kind {
            self.look_for_hole(found.layer, offset_bytes, host, &mut extent)
                .await?;
        }
        Ok(extent)
    }

    /// A raw layer knows of zeros only by the holes of its file, and so does a foreign one that lies in one piece. Of a
    /// data file they are zeros that are mapped; of an encrypted one they are noise.
    async fn look_for_hole(
        &self,
        layer: usize,
        at: u64,
        host: u64,
        extent: &mut MapExtent,
    ) -> Result<(), Errno> {
        let Some(found) = self.image.layers().get(layer) else {
            return Ok(());
        };
        if found.container.is_some() {
            // What lies there is not what the guest reads.
            extent.host_offset = None;
            return Ok(());
        }
        let flat = found
            .foreign
            .as_ref()
            .is_some_and(|foreign| foreign.is_flat(at));
        let raw = found.format() == Format::Raw || flat;
        let mapped = found.data_file.is_some() && !found.is_encrypted();
        if let Some(file) = self.file_at(layer, at).filter(|_| raw || mapped) {
            let file_len = file.len().await?;
            if host >= file_len {
                // The disk ends with a whole sector, the file before it does.
                extent.data = mapped;
                extent.zero = true;
                return Ok(());
            }
            let run = file.extent_at(host).await?;
            extent.len_bytes = extent.len_bytes.min(run.len.clamp(1, file_len - host));
            extent.data = run.data || mapped;
            extent.zero = !run.data;
        }
        Ok(())
    }
}
