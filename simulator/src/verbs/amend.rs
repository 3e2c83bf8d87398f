//! Amend: whatever a cut leaves is a whole image with the same content.

use std::cell::Cell;
use std::rc::Rc;

use gaur_engine::{
    Amendment, BitmapAction, ErrorKind, ImageError, Job, Keys, OpenOptions, References,
    amend_breaking, check_amendment, open as open_image,
};
use gaur_format::{AllocationPolicy, Version};
use gaur_sim::{FileImage, Random, SimFile, SimHost};

use crate::config::Config;
use crate::content::ValueEncoding;
use crate::encryption::Encryption;
use crate::judge;
use crate::machine::{Machine, TOP};
use crate::verbs::{Cuts, Work, broken_rule, header, open, profile};
use crate::view::{Files, View};

fn amendment(seed: u64) -> Amendment {
    let random = &mut Random::new(seed ^ 0xa3e4d);
    let down = random.below(2) == 0;
    let order = if down { 4 } else { random.below(7) as u32 };
    Amendment {
        version: Some(if down { Version::V2 } else { Version::V3 }),
        refcount_order: (down || random.below(4) > 0).then_some(order),
        lazy_refcounts: (!down && random.below(2) == 0).then(|| random.below(2) == 0),
        allocation: (random.below(3) == 0).then_some(AllocationPolicy::Compact),
        ..Amendment::default()
    }
}

/// As the command does it.
async fn change(
    host: &SimHost,
    file: SimFile,
    wanted: &Amendment,
    breaks: bool,
) -> Result<(), ImageError> {
    check_amendment(&file, wanted).await?;
    let job = Job::default();
    if wanted.version == Some(Version::V2) {
        let mut keys = Keys::default();
        keys.for_others(Encryption::passphrase());
        let options = OpenOptions {
            keys,
            lock: false,
            ..OpenOptions::new(References::Any)
        };
        let opened = open_image(host, TOP, &options).await?;
        let queue = opened.image.queue(opened.files);
        for bitmap in queue.bitmaps().await? {
            let remove = [BitmapAction::Remove];
            queue.change_bitmap(&bitmap.name, &remove, &job).await?;
        }
        queue.expand_zeros(&job).await?;
        queue.close().await?;
    }
    amend_breaking(&file, wanted, &job, broken_rule(breaks)).await
}

/// Amends a prepared image, which may have backing files.
pub fn amend(seed: u64, breaks: bool) -> Cuts {
    let mut config = Config::draw(seed);
    config.profile = profile(seed);
    let script = ValueEncoding::new(seed, config.unit_bytes);
    let machine = Machine::build(&config, script, &mut 0, &mut Random::new(seed));
    let below = machine.below;
    let contents = |file: &FileImage| View::open(file, &below)?.contents();
    let files = machine.files.into_iter();
    let files: Files = files.map(|(name, file, _)| (name, file)).collect();
    let (before, shape) = (contents(&files[TOP])?, config.image.shape);
    let leaks = judge::check(&files[TOP], shape)?.leaks;
    let old = header(&files[TOP])?;
    let wanted = amendment(seed);
    let expected = wanted.clone();
    let refused = Rc::new(Cell::new(false));
    let says = Rc::clone(&refused);
    let mut work = Work::begin(seed, files, profile(seed), async move |host| {
        let file = open(&host, TOP).await?;
        match change(&host, file, &wanted, breaks).await {
            Err(error) if is_refusal(error.kind()) => says.set(true),
            Err(error) => return Err(format!("{error:#}")),
            Ok(()) => {}
        }
        Ok(())
    });
    let cuts = work.judged(seed, 12, |left| {
        if contents(&left[TOP])? != before {
            return Err("another disk".to_owned());
        }
        judge::check(&left[TOP], shape).map(drop)
    })?;
    let whole = &work.host.images()[TOP];
    let left = judge::check(whole, shape)?.leaks;
    if left > leaks {
        return Err(format!("{left} clusters are leaked, {leaks} were before"));
    }
    let new = header(whole)?;
    let (order, version) = match refused.get() {
        // Each change is made by itself; the width may be one that is too narrow.
        true => (
            None,
            expected.version.filter(|version| *version == new.version),
        ),
        false => (expected.refcount_order, expected.version),
    };
    let done = new.refcount_order == order.unwrap_or(old.refcount_order)
        && new.version == version.unwrap_or(old.version)
        && (new.version == Version::V3 || new.bitmaps().is_none());
    match done {
        true => Ok(cuts),
        false => Err(format!("it is not what was wanted: {new:?}")),
    }
}

fn is_refusal(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::InvalidInput | ErrorKind::Unsupported)
}
