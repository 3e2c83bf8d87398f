//! Closing an image so that nothing leaks: flush, count down, trim the tail of the file.

use gaur_block::File;

use crate::active::Active;
use crate::error::{ErrorKind, ImageError};
use crate::job::Job;
use crate::queue::Queue;

/// Passes after which nothing can be left to give back: one removes the references, one counts
/// them down, one writes the counts.
const PASSES_MAX: usize = 6;

impl<F: File> Queue<F> {
    /// Closes the image: call it on the last queue, when no request is in flight on any. Everything
    /// written is durable afterwards, unused reservations are given back and the file ends where
    /// its last cluster does. Dropping the queue instead is safe but may leak clusters.
    pub async fn close(self) -> Result<(), ImageError> {
        if self.image.read_only {
            return Ok(());
        }
        if let Some(errno) = self.image.poisoned() {
            let text = "closed after an earlier error; writes since the last flush may be lost";
            return Err(self.image.explain(errno, text));
        }
        let fail = |errno| ImageError::io(errno, "cannot write back what was changed");
        let Some(active) = self.active() else {
            self.flush_all().await.map_err(fail)?;
            return self.trim_raw().await;
        };
        // What fails here leaves them in use, and the rest is closed all the same.
        let stored = active.store_bitmaps().await;
        active.give_back_local();
        active.give_back_packed();
        active.writer.alloc.lock().unreserve_all();
        for _ in 0..PASSES_MAX {
            self.flush_all().await.map_err(fail)?;
            active.release_freed(&Job::default()).await;
            if active.settled() {
                break;
            }
        }
        if !active.settled() {
            let text = "some freed clusters could not be given back; they are leaked";
            return Err(ImageError::new(ErrorKind::Io, text));
        }
        active.trim().await?;
        active.trim_data_file().await?;
        let withdrawn = active.withdraw().await;
        withdrawn.map_err(|errno| ImageError::io(errno, "cannot say that the image is closed"))?;
        stored
    }

    /// Cuts a raw file back to the size of the disk: where only whole blocks can be written, the
    /// last one may have lengthened it.
    async fn trim_raw(&self) -> Result<(), ImageError> {
        let fail = |errno| ImageError::io(errno, "cannot trim the end of the file");
        let file = self.top_file();
        let end = self.image.top.flat_host(self.image.size_bytes());
        let limits = file.limits();
        let blocks = limits.resizable && limits.request_alignment > 1;
        if blocks && file.len().await.map_err(fail)? > end {
            file.set_len(end).await.map_err(fail)?;
            file.flush().await.map_err(fail)?;
        }
        Ok(())
    }
}

impl<F: File> Active<'_, F> {
    /// Cuts off what the file grew by and no cluster uses.
    async fn trim(&self) -> Result<(), ImageError> {
        let (end, grown) = {
            let mut alloc = self.writer.alloc.lock();
            alloc.settle_end();
            let end = alloc.bump * alloc.geometry.cluster_size();
            (end.max(alloc.opened_end), alloc.physical_end)
        };
        let fail = |errno| ImageError::io(errno, "cannot trim the end of the file");
        let file = self.queue.top_file();
        // Growth by another process is not ours to cut.
        if self.writer.limits.resizable && grown > end && file.len().await.map_err(fail)? == grown {
            file.set_len(end).await.map_err(fail)?;
            file.flush().await.map_err(fail)?;
            self.writer.alloc.lock().physical_end = end;
        }
        Ok(())
    }

    /// Whether nothing waits to be written or given back.
    fn settled(&self) -> bool {
        let maps = &self.qcow2.maps;
        let alloc = self.writer.alloc.lock();
        let clean = maps.slices.dirty() == 0 && maps.l1.is_clean() && alloc.blocks.dirty() == 0;
        clean && !alloc.has_pending()
    }
}

#[cfg(test)]
mod tests {
    use gaur_block::{Device, Payload, Request, Source};

    use crate::chain::open;
    use crate::options::{Format, OpenOptions};
    use crate::references::References;
    use crate::test_file::{TestFile, TestHost, block_on, direct_limits};

    #[test]
    fn a_raw_file_keeps_its_length_although_its_last_block_is_written_whole() {
        let file = TestFile::new(vec![7; 5120], direct_limits(4096));
        let mut host = TestHost::default();
        host.add("raw", file.clone());
        let options = OpenOptions {
            format: Some(Format::Raw),
            ..OpenOptions::new(References::Any)
        };
        let opened = block_on(open(&host, "raw", &options)).unwrap();
        let queue = opened.image.queue(opened.files);
        let write = Request::Write {
            offset_bytes: 5119,
            fua: false,
        };
        block_on(queue.submit(write, Payload::Write(Source::memory(&[9])))).unwrap();
        assert_eq!(file.bytes().len(), 8192, "the reason for the trim");
        block_on(queue.close()).unwrap();
        let mut expected = vec![7; 5120];
        expected[5119] = 9;
        assert!(file.bytes() == expected);
    }
}
