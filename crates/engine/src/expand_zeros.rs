//! Making an image do without marks of zeros, which version 2 of the format does not have.
//!
//! Crash rule: the guest's disk is the same at any moment; every step is an ordinary request.

use futures_util::{TryStreamExt, pin_mut};
use gaur_block::{Errno, File};

use crate::error::ImageError;
use crate::job::Job;
use crate::map::MapExtent;
use crate::merge::{PIECE_BYTES, Piece, Shares, ZEROES_BYTES};
use crate::queue::Queue;
use crate::range::GuestRange;

impl<F: File> Queue<F> {
    /// Clusters of the top image that are marked as zeros become zeros that are written, where there is a backing file, and
    /// clusters without space elsewhere. Snapshots keep their marks. Afterwards all is durable.
    ///
    /// # Errors
    /// Those of the host. If it fails, or `job` is cancelled, some marks are left.
    pub async fn expand_zeros(&self, job: &Job) -> Result<(), ImageError> {
        let explain = |errno| self.image.explain(errno, "cannot write the image's zeros");
        let active = self.changing()?;
        active.announce().await.map_err(explain)?;
        let through = self.image.layers().len() > 1;
        let most = if through { PIECE_BYTES } else { ZEROES_BYTES };
        let expanded = async {
            let shares = Shares::default();
            let pieces = self.pieces(
                &shares,
                job,
                (PIECE_BYTES, most),
                async |extent: &MapExtent, _| {
                    let marked = extent.depth == 0 && extent.present && extent.zero;
                    Ok((marked, extent.len_bytes))
                },
            );
            pin_mut!(pieces);
            while let Some(piece) = pieces.try_next().await? {
                self.expand(piece, through, job).await?;
            }
            active.flush_all().await
        };
        expanded.await.map_err(explain)
    }

    async fn expand(&self, piece: Piece, through: bool, job: &Job) -> Result<(), Errno> {
        let active = self.active().ok_or(Errno::EROFS)?;
        let range = piece.range;
        if through {
            let _epoch = self.enter_open().await;
            active.write_zero_bytes(range).await?;
        } else {
            let end = range
                .end()
                .next_multiple_of(active.geometry().cluster_size());
            let whole = GuestRange::between(range.start, end);
            active.forget(whole, &Job::default()).await?;
        }
        active.relieve().await;
        job.step(range.len)
    }
}
