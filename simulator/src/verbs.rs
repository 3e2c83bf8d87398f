//! Verbs under power cuts: what changes an image that nothing else has open.
//!
//! A seed makes files and begins the work on them. At random steps it looks at what a power cut would leave, which must
//! hold what the verb promises. With `breaks` the order of writes is broken on purpose (rule O5).

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use gaur_block::{Access, Host};
use gaur_engine::BrokenRule;
use gaur_format::Header;
use gaur_sim::{
    DiskProfile, FileImage, Random, Scheduler, SimFile, SimHost, Stop, Survivors, Trace,
};

use crate::config::Config;
use crate::content::ValueEncoding;
use crate::prepare::prepare;
use crate::run::STEPS_MAX;
use crate::view::{Files, View};

mod amend;
mod key_slots;
mod merge;
mod repair;

pub use amend::amend;
pub use key_slots::change_keys;
pub use merge::{Merge, commit_or_rebase};
pub use repair::{repair, repair_bitmaps, repair_snapshots};

/// How often the power was cut, or what a cut has left.
pub type Cuts = Result<u64, String>;

const NAME: &str = "top.qcow2";

fn broken_rule(breaks: bool) -> Option<BrokenRule> {
    breaks.then_some(BrokenRule::O5)
}

fn header(file: &FileImage) -> Result<Header, String> {
    let head = file.bytes(0, file.len_bytes().min(2 << 20) as usize);
    Header::parse(&head).map_err(|error| error.to_string())
}

/// What is read of an image: the disk, and of each snapshot the disk and the state.
fn contents(file: &FileImage) -> Result<Vec<Vec<u8>>, String> {
    View::open(file, &[])?.contents()
}

fn prepared(seed: u64, config: &Config, random: &mut Random) -> FileImage {
    let script = ValueEncoding::new(seed, config.unit_bytes);
    prepare(&config.image, script, &mut 0, random).file
}

fn profile(seed: u64) -> DiskProfile {
    DiskProfile {
        request_alignment: [1, 512][seed as usize % 2],
        memory_alignment: 512,
        ..DiskProfile::default()
    }
}

async fn open(host: &SimHost, name: &str) -> Result<SimFile, String> {
    let access = Access {
        write: true,
        direct: false,
        lock: true,
        force_share: false,
    };
    let opened = host.open(Path::new(name), access).await;
    opened.map_err(|error| format!("{name} cannot be opened: {error}"))
}

/// A machine with files, and work on them that has begun.
struct Work {
    scheduler: Scheduler,
    host: SimHost,
    outcome: Rc<RefCell<Result<(), String>>>,
}

impl Work {
    fn begin<W: Future<Output = Result<(), String>> + 'static>(
        seed: u64,
        files: impl IntoIterator<Item = (impl AsRef<str>, FileImage)>,
        profile: DiskProfile,
        work: impl FnOnce(SimHost) -> W,
    ) -> Work {
        let scheduler = Scheduler::new(seed, Trace::default());
        let handle = scheduler.handle();
        let host = SimHost::new(&handle);
        for (name, file) in files {
            host.add(name.as_ref(), file, profile);
        }
        let outcome = Rc::new(RefCell::new(Err("the work has not ended".to_owned())));
        let (slot, running) = (Rc::clone(&outcome), work(host.clone()));
        handle.spawn("work", async move {
            *slot.borrow_mut() = running.await;
        });
        Work {
            scheduler,
            host,
            outcome,
        }
    }

    /// Lets it go on for some steps; whether it has ended.
    fn run(&mut self, steps: u64) -> Result<bool, String> {
        let stop = self
            .scheduler
            .run(steps)
            .map_err(|hangs| hangs.to_string())?;
        match stop {
            Stop::Done => self.outcome.borrow().clone().map(|()| true),
            _ => Ok(false),
        }
    }

    /// To its end without a cut; the files then.
    fn finish(mut self) -> Result<Files, String> {
        match self.run(STEPS_MAX)? {
            true => Ok(self.host.images()),
            false => Err("the work does not end".to_owned()),
        }
    }

    /// What a power cut would leave now.
    fn cut(&self, random: &mut Random) -> Files {
        self.host.crash_images(Survivors::draw(random), random)
    }

    /// Cuts the power at many moments, never more than `apart` steps apart, and judges what each has left; then what
    /// there is in the end.
    fn judged(
        &mut self,
        seed: u64,
        apart: u64,
        judge: impl Fn(&Files) -> Result<(), String>,
    ) -> Cuts {
        let random = &mut Random::new(seed);
        for cuts in 1.. {
            let ended = self.run(1 + random.below(apart))?;
            let after = |what| format!("cut {cuts}: {what}");
            judge(&self.cut(random)).map_err(after)?;
            if ended {
                judge(&self.host.images())?;
                return Ok(cuts);
            }
        }
        Err("the work does not end".to_owned())
    }
}
