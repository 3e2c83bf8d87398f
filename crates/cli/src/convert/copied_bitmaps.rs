//! `convert --bitmaps`: the persistent bitmaps of the source, made in the target.

use std::sync::Arc;

use gaur_engine::{BitmapAction, BitmapBits, BitmapFacts, BitmapSource, Format, Job};
use gaur_format::Version;
use gaur_reactor::{BlockingFile, block_on};

use super::Args;
use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::notice::say;
use crate::shared_image::SharedImage;

/// The bitmaps of a source that are to be made in the target.
pub(super) struct CopiedBitmaps(Vec<(BitmapFacts, Arc<BitmapBits>)>);

impl CopiedBitmaps {
    /// Reads them if they are asked for, before anything is written. Those that are inconsistent are refused, or
    /// left out.
    pub(super) fn read(
        args: &Args,
        sources: &[SharedImage],
        target: &ImageSpec,
    ) -> Result<CopiedBitmaps, Failure> {
        let mut copied = Vec::new();
        if !args.bitmaps {
            return Ok(CopiedBitmaps(copied));
        }
        let [source] = sources else {
            return Err(Failure::new(
                "--bitmaps takes one source, but several are given",
            ));
        };
        if target.format() == Some(Format::Raw) {
            let message = "--bitmaps: a raw image has no bitmaps";
            return Err(
                Failure::about(target.path(), message).hint("-O qcow2 makes an image that has")
            );
        }
        let fail = |error| Failure::image(source.name(), &error);
        let queue = source.queue(BlockingFile::new);
        for facts in block_on(queue.bitmaps()).map_err(fail)? {
            if !facts.is_inconsistent {
                let bits = block_on(queue.bitmap_bits(&facts.name)).map_err(fail)?;
                copied.push((facts, bits));
                continue;
            }
            let what = format!("bitmap {:?} is inconsistent", facts.name);
            if !args.skip_broken_bitmaps {
                let failure = Failure::about(source.name(), what);
                return Err(failure.hint("--skip-broken-bitmaps leaves it out"));
            }
            say(format!("{}: {what} and is left out", source.name()));
        }
        Ok(CopiedBitmaps(copied))
    }

    /// Refuses a target that cannot have them.
    pub(super) fn check(&self, target: &SharedImage, source_bytes: u64) -> Result<(), Failure> {
        if self.0.is_empty() {
            return Ok(());
        }
        let header = target.image().layers().first().and_then(|top| top.header());
        let refused = match header.map(|header| header.version) {
            None => "a raw image has no bitmaps",
            Some(Version::V2) => "a version 2 image has no bitmaps",
            Some(Version::V3) if target.size_bytes() != source_bytes => {
                "bitmaps are copied to a disk of the same size only"
            }
            Some(Version::V3) => return Ok(()),
        };
        Err(Failure::about(
            target.name(),
            format!("--bitmaps: {refused}"),
        ))
    }

    /// Makes them, when all data is there.
    pub(super) fn store(self, target: &SharedImage, job: &Job) -> Result<(), Failure> {
        let queue = target.queue(BlockingFile::new);
        for (facts, bits) in self.0 {
            let mut actions = vec![
                BitmapAction::Add {
                    granularity_bytes: Some(facts.granularity_bytes),
                },
                BitmapAction::Merge(BitmapSource::Bits(bits)),
            ];
            if !facts.is_enabled {
                actions.push(BitmapAction::Disable);
            }
            let made = block_on(queue.change_bitmap(&facts.name, &actions, job));
            made.map_err(|error| Failure::image(target.name(), &error))?;
        }
        Ok(())
    }
}
