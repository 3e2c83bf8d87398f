//! `--bitmaps` of `convert` and `create`: the persistent bitmaps of one image, made in another.

use std::sync::Arc;

use gaur_engine::{BitmapAction, BitmapBits, BitmapFacts, BitmapSource, Job};
use gaur_format::Version;
use gaur_reactor::{BlockingFile, block_on};

use crate::failure::Failure;
use crate::notice::say;
use crate::shared_image::SharedImage;

/// The bitmaps of a source that are to be made in the target.
#[derive(Default)]
pub struct CopiedBitmaps(Vec<(BitmapFacts, Arc<BitmapBits>)>);

impl CopiedBitmaps {
    /// Reads them. Those that are inconsistent are refused, or left out.
    pub fn read(source: &SharedImage, skip_broken: bool) -> Result<CopiedBitmaps, Failure> {
        let mut copied = Vec::new();
        let fail = |error| Failure::image(source.name(), &error);
        let queue = source.queue::<BlockingFile>();
        for facts in block_on(queue.bitmaps()).map_err(fail)? {
            if !facts.is_inconsistent {
                let bits = block_on(queue.bitmap_bits(&facts.name)).map_err(fail)?;
                copied.push((facts, bits));
                continue;
            }
            let what = format!("bitmap {:?} is inconsistent", facts.name);
            if !skip_broken {
                let failure = Failure::about(source.name(), what);
                return Err(failure.hint("--skip-broken-bitmaps leaves it out"));
            }
            say(format!("{}: {what} and is left out", source.name()));
        }
        Ok(CopiedBitmaps(copied))
    }

    /// Refuses a target that cannot have them.
    pub fn check(&self, target: &SharedImage, source_bytes: u64) -> Result<(), Failure> {
        if self.0.is_empty() {
            return Ok(());
        }
        let header = target.image().layers().top().header();
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
    pub fn store(self, target: &SharedImage, job: &Job) -> Result<(), Failure> {
        let queue = target.queue::<BlockingFile>();
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
