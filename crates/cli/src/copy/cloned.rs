//! Copies that the file system makes: source and target share space until one of them is written to (reflinks).
//!
//! A raw target has each byte where the guest has it, so a run of data that a layer of the source has as it is can be cloned
//! instead of copied. Zeros in it stay data, which costs nothing: the space is the source's. Where the file system
//! cannot, it says so at the first piece.

use std::sync::atomic::{AtomicBool, Ordering};

use gaur_block::Errno;
use gaur_engine::{Format, MapExtent};
use gaur_reactor::{BlockingFile, OpenFile};

use super::{Copy, CopyTask};
use crate::shared_image::SharedImage;

/// Where the bytes of a piece are as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    depth: usize,
    offset: u64,
}

/// Whether the file system clones.
#[derive(Default)]
pub(super) struct Cloning {
    refused: AtomicBool,
}

impl Copy {
    /// Where the bytes of an extent are, if a clone of them would do.
    pub(super) fn place(&self, source: usize, extent: &MapExtent) -> Option<Place> {
        let cloneable = self.clones && extent.data && !extent.compressed;
        let offset = extent.host_offset.filter(|_| cloneable)?;
        let depth = extent.depth as usize;
        let layer = self.sources.get(source)?.image().layers().get(depth)?;
        let plain = matches!(layer.format(), Format::Raw | Format::Qcow2)
            && layer.data_file().is_none()
            && !layer.is_encrypted();
        plain.then_some(Place { depth, offset })
    }

    /// Clones a piece; false when it is to be copied.
    pub(super) fn clone_piece(&self, cloning: &Cloning, piece: &CopyTask) -> bool {
        let Some(place) = piece.place else {
            return false;
        };
        let source = self.sources.get(piece.source);
        let source = source.and_then(|source| layer_file(source, place.depth));
        let target = self.target.top_file();
        let (Some(source), Some(target)) = (source, target) else {
            return false;
        };
        if cloning.refused.load(Ordering::Relaxed) {
            return false;
        }
        let from = (source, place.offset);
        let done = target
            .open_file()
            .clone_range(piece.target_offset, from, piece.len);
        // What does not lie on the file system's blocks is copied; any other answer is one for all pieces.
        if done.is_err_and(|errno| errno != Errno::EINVAL) {
            cloning.refused.store(true, Ordering::Relaxed);
        }
        done.is_ok()
    }
}

/// The file of a layer.
fn layer_file(image: &SharedImage, depth: usize) -> Option<&OpenFile> {
    let files = image.files();
    let file = match depth.checked_sub(1) {
        None => files.own.first(),
        Some(below) => files.below.get(below),
    };
    file.map(BlockingFile::open_file)
}
