//! Holes of the image file inside allocated clusters.
//!
//! A qcow2 image with preallocated metadata maps every cluster to a hole of the file. Its tables say
//! data; only the file knows better. Asking the file about every cluster is slow, so, as
//! qemu-img does, it is asked only when it has clearly less space than its refcounts say: a tenth
//! less, and two clusters. Sizes and offsets are bytes of the file.

use gaur_block::{Errno, File};
use gaur_engine::{Format, Image, ImageFiles, Layer, MapExtent};
use gaur_format::{Geometry, Header, refcount};
use gaur_reactor::{BlockingFile, block_on};

use crate::image_file::read_bytes;

/// The file of a layer.
struct LayerFile {
    file: BlockingFile,
    len: u64,
    /// Asked when it is first needed, because it takes reading all refcounts.
    sparse: Option<bool>,
}

/// The files of a chain of images, the top one first.
pub struct FileHoles(Vec<LayerFile>);

impl FileHoles {
    /// Of an open image.
    pub fn new(files: &ImageFiles<BlockingFile>) -> Result<FileHoles, Errno> {
        let layer = |file: &BlockingFile| {
            Ok(LayerFile {
                len: block_on(file.len())?,
                file: file.clone(),
                sparse: None,
            })
        };
        // Data files come behind those of the layers.
        let own = files.own.iter().take(1);
        own.chain(files.below.iter())
            .map(layer)
            .collect::<Result<_, _>>()
            .map(FileHoles)
    }

    /// Makes `extent` say zero where the file has a hole, and cuts it where that changes.
    pub fn refine(&mut self, image: &Image, extent: &mut MapExtent) -> Result<(), Errno> {
        let depth = extent.depth as usize;
        let (Some(host), Some(layer), Some(held)) = (
            extent.host_offset,
            image.layers().get(depth),
            self.0.get_mut(depth),
        ) else {
            return Ok(());
        };
        // The holes of a data file are in the extent already, and those of an encrypted layer decrypt to noise.
        let known = extent.zero || layer.data_file().is_some() || layer.is_encrypted();
        if !extent.data || known || !held.is_sparse(layer)? {
            return Ok(());
        }
        if host >= held.len {
            extent.zero = true;
            return Ok(());
        }
        let run = block_on(held.file.extent_at(host))?;
        extent.zero = !run.data;
        // What lies beyond the end of the file goes on as the hole before it.
        if run.data || host.saturating_add(run.len) < held.len {
            extent.len_bytes = extent.len_bytes.min(run.len);
        }
        Ok(())
    }
}

impl LayerFile {
    fn is_sparse(&mut self, layer: &Layer) -> Result<bool, Errno> {
        if let Some(sparse) = self.sparse {
            return Ok(sparse);
        }
        let sparse = match (layer.format(), layer.header()) {
            (Format::Qcow2, Some(header)) => self.has_fewer_bytes_than_refcounts(header)?,
            _ => false,
        };
        self.sparse = Some(sparse);
        Ok(sparse)
    }

    fn has_fewer_bytes_than_refcounts(&self, header: &Header) -> Result<bool, Errno> {
        let geometry = header.geometry();
        let allocated = match self.file.open_file().allocated_bytes() {
            // Only its server knows.
            Err(Errno::EOPNOTSUPP) => return Ok(false),
            allocated => allocated? / geometry.cluster_size(),
        };
        let threshold = (allocated.saturating_mul(10) / 9).max(allocated.saturating_add(2));
        let mut left = geometry.clusters_for(self.len);
        let table_len = u64::from(header.refcount_table_clusters) * geometry.cluster_size();
        let table = read_bytes(
            &self.file,
            header.refcount_table_offset.0,
            table_len.min(self.len),
        )?;
        let mut counted = 0;
        for entry in table.as_chunks::<8>().0 {
            let block_entries = geometry.refcount_block_entries().min(left);
            if block_entries == 0 || counted >= threshold {
                break;
            }
            let entry = refcount::decode_table_entry(u64::from_be_bytes(*entry), &geometry);
            if let Some(block) = entry.map_err(|_| Errno::EIO)? {
                let block = read_bytes(&self.file, block.0, geometry.cluster_size())?;
                counted += count_used(&block, &geometry, block_entries);
            }
            left -= block_entries;
        }
        Ok(counted >= threshold)
    }
}

/// How many of the first `entries` clusters of a refcount block are used.
fn count_used(block: &[u8], geometry: &Geometry, entries: u64) -> u64 {
    let order = geometry.refcount_order();
    (0..entries)
        .filter(|index| refcount::get(block, order, *index) > 0)
        .count() as u64
}
