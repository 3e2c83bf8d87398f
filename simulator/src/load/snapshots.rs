//! Snapshot workload: a task that makes, applies, deletes and renames internal snapshots while the guest runs.
//!
//! The task informs the [`Model`](crate::model::Model) before and after every operation, so that a power
//! cut in the middle finds a table that may be as before or as after. Some are cancelled, some ask
//! for what cannot be.

use std::rc::Rc;

use gaur_block::Device;
use gaur_engine::{ErrorKind, ImageError, Job, NewSnapshot, Queue, Snapshot};
use gaur_sim::{Random, SimFile};

use super::Load;
use crate::config::SnapshotLoad;
use crate::model::{ChangeId, FoundSnapshot, ModelSnapshot, PendingCreate};
use crate::view::Times;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Create,
    Delete,
    Apply,
    Rename,
    List,
    Violation,
    Save,
    ReadState,
}

const ACTIONS: [Action; 8] = [
    Action::Create,
    Action::Delete,
    Action::Apply,
    Action::Rename,
    Action::List,
    Action::Violation,
    Action::Save,
    Action::ReadState,
];

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// It failed, and nothing has changed.
    Nothing,
    /// It failed, and only the next open will tell how far it came.
    Unknown,
}

/// An operation that has begun.
pub(super) struct RunningOperation {
    tag: u32,
    what: String,
    /// The image refused writes already.
    poisoned: bool,
    pub(super) job: Rc<Job>,
    cancelled: bool,
}

impl Load {
    /// A task that changes snapshots.
    pub async fn manage(
        self: Rc<Self>,
        queues: Vec<Rc<Queue<SimFile>>>,
        mut random: Random,
        load: SnapshotLoad,
    ) {
        let random = &mut random;
        for _ in 0..load.operations {
            self.handle.doing("pausing".to_owned());
            self.handle.sleep(random.below(load.pause_ns)).await;
            while self.exclusive.get() {
                self.handle.sleep(3_000).await;
            }
            if self.failure.borrow().is_some() {
                return;
            }
            self.active.set(self.active.get() + 1);
            let queue = &queues[random.index(queues.len())];
            match ACTIONS[random.weighted(&load.weights)] {
                Action::Create => self.create(queue, random, &load).await,
                Action::Delete => self.delete(queue, random, &load).await,
                Action::Apply => self.apply(queue, random, &load).await,
                Action::Rename => self.rename(queue, random).await,
                Action::List => self.list(queue).await,
                Action::Violation => self.ask_wrongly(queue, random).await,
                Action::Save if self.is_full_of_snapshots(&load) => {
                    self.delete(queue, random, &load).await;
                }
                Action::Save => self.save(&queues, random, &load).await,
                Action::ReadState => self.read_state(queue, random).await,
            }
            self.active.set(self.active.get() - 1);
        }
        self.handle.doing("done".to_owned());
    }

    pub(super) fn start(
        &self,
        what: String,
        random: &mut Random,
        cancel_per_mille: u32,
    ) -> RunningOperation {
        let tag = self.begin(&what);
        let what = format!("{what} tag {tag}");
        let cancelled = random.chance(cancel_per_mille);
        let job = self.impatient_job(cancelled, random);
        RunningOperation {
            tag,
            what,
            poisoned: self.poisoned.get(),
            job,
            cancelled,
        }
    }

    /// Judges the answer to an operation; `excuse` says why it may fail on a healthy disk.
    pub(super) fn finish(
        &self,
        queue: &Queue<SimFile>,
        begun: &RunningOperation,
        result: Result<&Snapshot, &ImageError>,
        excuse: bool,
    ) -> Outcome {
        let code = u64::from(result.is_ok());
        let (tag, what) = (begun.tag, &begun.what);
        self.handle
            .trace()
            .record(&[6, u64::from(tag), code], || match result {
                Ok(snapshot) => format!("answer {tag}: snapshot {:?}", snapshot.id),
                Err(error) => format!("answer {tag}: {error:#}"),
            });
        let error = match result {
            Ok(_) if begun.poisoned => {
                self.fail(format!("{what} goes well after a flush has failed"));
                return Outcome::Done;
            }
            Ok(_) => {
                self.stats.borrow_mut().snapshots += 1;
                return Outcome::Done;
            }
            Err(error) => error,
        };
        self.stats.borrow_mut().snapshots_refused += 1;
        let asked = begun.cancelled && error.kind() == ErrorKind::Cancelled;
        let poisoned = queue.image().poisoned().is_some();
        if !asked && !excuse && !poisoned && !self.may_fail.get() {
            self.fail(format!("{what} fails on a healthy disk: {error:#}"));
        }
        match poisoned {
            true => Outcome::Unknown,
            false => Outcome::Nothing,
        }
    }

    /// One of the snapshots that no task is about to change.
    pub(super) fn pick_saved(&self, random: &mut Random) -> Option<ModelSnapshot> {
        let model = self.model.borrow();
        let free: Vec<&ModelSnapshot> = model.saved().iter().filter(|saved| !saved.busy).collect();
        match free.len() {
            0 => None,
            count => Some(free[random.index(count)].clone()),
        }
    }

    /// The least of what a refcount has to bear is more than it can.
    pub(super) fn may_overflow(&self) -> bool {
        let shape = self.config.image.shape;
        let snapshots = self.model.borrow().saved().len() as u64;
        let packed = self.config.image.compressed_per_mille + self.config.packed_per_mille;
        let shared = if packed > 0 { 10 } else { 1 };
        // Those that are being made or deleted count as well, by another task.
        shape.refcount_max() < (snapshots + 4) * shared
    }

    async fn create(&self, queue: &Queue<SimFile>, random: &mut Random, load: &SnapshotLoad) {
        let resizing = self.growing.get() || self.exclusive.get();
        if self.config.image.shape.version == 2 && resizing {
            return;
        }
        if self.is_full_of_snapshots(load) {
            return self.delete(queue, random, load).await;
        }
        let new = self.draw_new(random);
        let begun = self.start(
            format!("create {:.20}", new.name),
            random,
            load.cancel_per_mille,
        );
        let change = self.model.borrow_mut().create(PendingCreate {
            name: new.name.clone(),
            times: times(&new),
            state: Rc::new([]),
        });
        let result = queue.create_snapshot(&new, &begun.job).await;
        let result = result.as_ref();
        match self.finish(queue, &begun, result, self.may_overflow()) {
            Outcome::Done => self.created(&begun, change, &new, result.ok()),
            Outcome::Nothing => self.model.borrow_mut().undo_change(change),
            Outcome::Unknown => {}
        }
    }

    fn is_full_of_snapshots(&self, load: &SnapshotLoad) -> bool {
        self.model.borrow().saved().len() >= load.most as usize
    }

    /// The name with something behind it, so that the table of snapshots becomes long.
    fn lengthened(&self, name: String, random: &mut Random) -> String {
        let longest = self.config.longest_name.max(name.len() as u64);
        let len = random.between(name.len() as u64, longest) as usize;
        format!("{name:.<len$}")
    }

    pub(super) fn draw_new(&self, random: &mut Random) -> NewSnapshot {
        let number = self.next_value();
        let icount = random.chance(300).then(|| random.below(1 << 40));
        NewSnapshot {
            name: self.lengthened(format!("made {number}"), random),
            id: random.chance(150).then(|| format!("id {number}")),
            date_sec: random.number() as u32,
            date_nsec: random.below(1_000_000_000) as u32,
            vm_clock_nsec: random.below(1 << 50),
            icount,
        }
    }

    /// Looks at once at what was made; from then on it has a content.
    pub(super) fn created(
        &self,
        begun: &RunningOperation,
        change: ChangeId,
        new: &NewSnapshot,
        snapshot: Option<&Snapshot>,
    ) {
        let made = snapshot.ok_or("there is none".to_owned());
        let outcome = made.and_then(|snapshot| {
            let id = String::from_utf8_lossy(&snapshot.id);
            if new.id.as_ref().is_some_and(|wanted| *wanted != id) {
                return Err(format!("its id is {id}"));
            }
            let seen = self.expectations.snapshot(&self.host.images(), &id)?;
            check_description(snapshot, &seen)?;
            self.model.borrow_mut().end_create(change, seen)
        });
        if let Err(what) = outcome {
            self.fail(format!("after {}: {what}", begun.what));
        }
    }

    async fn delete(&self, queue: &Queue<SimFile>, random: &mut Random, load: &SnapshotLoad) {
        let Some(saved) = self.pick_saved(random) else {
            return;
        };
        let which = either_name(&saved, random);
        let begun = self.start(format!("delete {which:.20}"), random, load.cancel_per_mille);
        let change = self.model.borrow_mut().delete(&saved.seen.id);
        let result = queue.delete_snapshot(&which, &begun.job).await;
        match self.finish(queue, &begun, result.as_ref(), false) {
            Outcome::Done => self.model.borrow_mut().end_change(change),
            Outcome::Nothing => self.model.borrow_mut().undo_change(change),
            Outcome::Unknown => {}
        }
        self.check_answer(&begun, result.ok(), &saved.seen);
    }

    async fn rename(&self, queue: &Queue<SimFile>, random: &mut Random) {
        let Some(saved) = self.pick_saved(random) else {
            return;
        };
        let which = either_name(&saved, random);
        let name = self.lengthened(format!("called {}", self.next_value()), random);
        let begun = self.start(format!("rename {which:.20} to {name:.20}"), random, 0);
        let change = self.model.borrow_mut().rename(&saved.seen.id, &name);
        let result = queue.rename_snapshot(&which, &name).await;
        match self.finish(queue, &begun, result.as_ref(), false) {
            Outcome::Done => self.model.borrow_mut().end_change(change),
            Outcome::Nothing => self.model.borrow_mut().undo_change(change),
            Outcome::Unknown => {}
        }
        let renamed = FoundSnapshot { name, ..saved.seen };
        self.check_answer(&begun, result.ok(), &renamed);
    }

    fn check_answer(
        &self,
        begun: &RunningOperation,
        answer: Option<Snapshot>,
        expected: &FoundSnapshot,
    ) {
        if let Some(snapshot) = answer
            && let Err(what) = check_description(&snapshot, expected)
        {
            self.fail(format!("{} answers that {what}", begun.what));
        }
    }

    /// Sets the disk to a snapshot. Others go on meanwhile, also when it becomes shorter.
    async fn apply(&self, queue: &Queue<SimFile>, random: &mut Random, load: &SnapshotLoad) {
        if self.growing.get() || self.exclusive.get() {
            return;
        }
        let Some(saved) = self.pick_saved(random) else {
            return;
        };
        self.growing.set(true);
        let shrinks = saved.values.len() < self.model.borrow().len_units() as usize;
        let alone = random.chance(200);
        if alone {
            self.exclusive.set(true);
            while self.active.get() > 1 {
                self.handle.sleep(3_000).await;
            }
        }
        self.shrinking.set(shrinks);
        let which = either_name(&saved, random);
        let begun = self.start(format!("apply {which:.20}"), random, load.cancel_per_mille);
        // Others were awaited since it was picked; it may be gone.
        let applying = self.model.borrow_mut().apply(&saved.seen.id);
        if let Some(applying) = applying {
            let result = queue.apply_snapshot(&which, &begun.job).await;
            let excuse = self.may_overflow();
            match self.finish(queue, &begun, result.as_ref(), excuse) {
                Outcome::Done => {
                    self.model.borrow_mut().end_apply(&applying);
                    self.check_size(&begun, queue, saved.seen.disk.len() as u64);
                }
                Outcome::Nothing => self.model.borrow_mut().undo_apply(&applying),
                Outcome::Unknown => self.fail_quietly(),
            }
            self.model.borrow_mut().release(&saved.seen.id);
            self.check_answer(&begun, result.ok(), &saved.seen);
        }
        if shrinks {
            self.shrunk_at.set(self.tag.get());
        }
        self.shrinking.set(false);
        self.exclusive.set(self.exclusive.get() && !alone);
        self.growing.set(false);
    }

    fn check_size(&self, begun: &RunningOperation, queue: &Queue<SimFile>, bytes: u64) {
        let size = queue.size_bytes();
        if size != bytes {
            self.fail(format!(
                "after {} the size is {size} instead of {bytes}",
                begun.what
            ));
        }
    }

    async fn list(&self, queue: &Queue<SimFile>) {
        let tag = self.begin("list");
        let expected = |load: &Load| {
            let model = load.model.borrow();
            let seen = model.saved().iter().map(|saved| saved.seen.clone());
            (!model.is_changing()).then(|| seen.collect::<Vec<FoundSnapshot>>())
        };
        let before = expected(self);
        let result = queue.snapshots().await;
        let after = expected(self);
        match result {
            Err(error) if !self.may_fail.get() => {
                self.fail(format!("list {tag} fails: {error:#}"));
            }
            Ok(list) if before.is_some() && before == after => {
                if let Err(what) = check_list(&list, &after.unwrap_or_default()) {
                    self.fail(format!("list {tag}: {what}"));
                }
            }
            _ => {}
        }
    }

    /// What must be refused.
    async fn ask_wrongly(&self, queue: &Queue<SimFile>, random: &mut Random) {
        let new = self.draw_new(random);
        let pair = match (self.pick_saved(random), self.pick_saved(random)) {
            (Some(one), Some(other)) if random.chance(500) => Some([one, other]),
            _ => None,
        };
        let Some([one, other]) = pair else {
            return self.ask_for_nothing(queue, random, new).await;
        };
        let id = one.seen.id.clone();
        let name = either_name(&one, random);
        let held = [&one.seen.id, &other.seen.id];
        held.iter().for_each(|id| self.model.borrow_mut().hold(id));
        let job = Job::default();
        let (what, tag, result) = match random.below(3) {
            0 if id != other.seen.id => {
                let tag = self.begin(format_args!("rename to {name} again"));
                let result = queue.rename_snapshot(&other.seen.id, &name).await;
                ("rename to a name twice", tag, result)
            }
            1 => {
                let tag = self.begin(format_args!("create with id {id} again"));
                let new = NewSnapshot {
                    id: Some(id),
                    ..new
                };
                let result = queue.create_snapshot(&new, &job).await;
                ("create of an id twice", tag, result)
            }
            _ => {
                let tag = self.begin(format_args!("create {name} again"));
                let new = NewSnapshot { name, ..new };
                let result = queue.create_snapshot(&new, &job).await;
                ("create of a name twice", tag, result)
            }
        };
        held.iter()
            .for_each(|id| self.model.borrow_mut().release(id));
        if result.is_ok() {
            self.fail(format!("{what} {tag} goes well"));
        }
    }

    async fn ask_for_nothing(&self, queue: &Queue<SimFile>, random: &mut Random, new: NewSnapshot) {
        let job = Job::default();
        let what = random.below(4);
        let tag = self.begin(format_args!("ask for nothing ({what})"));
        let (what, result) = match what {
            0 => ("delete", queue.delete_snapshot("none", &job).await),
            1 => ("apply", queue.apply_snapshot("none", &job).await),
            2 => ("rename", queue.rename_snapshot("none", &new.name).await),
            _ => {
                let new = NewSnapshot {
                    name: String::new(),
                    ..new
                };
                ("create", queue.create_snapshot(&new, &job).await)
            }
        };
        if result.is_ok() {
            self.fail(format!("{what} {tag} of nothing goes well"));
        }
    }
}

pub(super) fn times(new: &NewSnapshot) -> Times {
    Times {
        date: (new.date_sec, new.date_nsec),
        vm_clock_nsec: new.vm_clock_nsec,
        icount: new.icount,
    }
}

fn either_name(saved: &ModelSnapshot, random: &mut Random) -> String {
    match random.chance(500) {
        true => saved.seen.id.clone(),
        false => saved.seen.name.clone(),
    }
}

/// Whether the engine describes a snapshot as the reader does.
pub(crate) fn check_description(snapshot: &Snapshot, seen: &FoundSnapshot) -> Result<(), String> {
    let described = Times {
        date: (snapshot.date_sec, snapshot.date_nsec),
        vm_clock_nsec: snapshot.vm_clock_nsec,
        icount: snapshot.icount,
    };
    let same = snapshot.id == seen.id.as_bytes()
        && snapshot.name == seen.name.as_bytes()
        && snapshot.vm_state_size == seen.state.len() as u64
        && snapshot
            .disk_size
            .is_none_or(|bytes| bytes == seen.disk.len() as u64)
        && described == seen.times;
    if same {
        return Ok(());
    }
    Err(format!(
        "{snapshot:?} is snapshot {} ({}) of {} bytes with {} of state, {:?}",
        seen.id,
        seen.name,
        seen.disk.len(),
        seen.state.len(),
        seen.times
    ))
}

/// Whether the engine lists what the reader does.
pub(crate) fn check_list(list: &[Snapshot], seen: &[FoundSnapshot]) -> Result<(), String> {
    if list.len() != seen.len() {
        return Err(format!(
            "{} snapshots instead of {}",
            list.len(),
            seen.len()
        ));
    }
    list.iter()
        .zip(seen)
        .try_for_each(|(one, other)| check_description(one, other))
}
