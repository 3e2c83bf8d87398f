//! Runs one seed from beginning to end.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use gaur_engine::{CacheOptions, Format, Image, ImageFiles, Keys, OpenOptions, Queue, References};
use gaur_sim::{
    FaultKind, Faults, FileImage, Random, Scheduler, SimFile, SimHost, Stop, Survivors, Trace,
};

use crate::config::{Bitmaps, Config, FaultPlan};
use crate::content::{Value, ValueEncoding};
use crate::data_file::{self, DATA, DataFile};
use crate::encryption::Encryption;
use crate::handover::{KeptLog, Marks, StaleLog, empty_memory, until_killed};
use crate::judge::{Expectations, Verdict};
use crate::load::Load;
use crate::machine::{Machine, TOP};
use crate::model::Model;
use crate::reopen::{open, to_end};
use crate::stats::Stats;
use crate::view::Files;
use crate::watch::{Phase, Watch};

/// Steps after which an epoch counts as hanging: many times what the longest needs.
pub(crate) const STEPS_MAX: u64 = 3_000_000;

/// A rule of the write order that can be broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "verbatim")]
#[allow(missing_docs, reason = "the rules are in docs/ordering.md")]
pub enum Rule {
    O1,
    O2,
    O3,
    O4,
    O5,
    O7,
    O8,
    /// A region changes before its mark in the write-intent map is durable.
    O9,
    Data,
    Log,
    /// A check of the open image is not told what changes meanwhile.
    Watch,
    /// A copy-on-read does not look again whether the guest has written there since.
    Copy,
}

/// How seeds are run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Break this rule; needs the feature `broken-order`.
    pub broken: Option<Rule>,
    /// Images in a thousand that QEMU's tools judge as well.
    pub qemu_per_mille: u32,
    /// Start from an image that QEMU's tools have made.
    pub by_qemu: bool,
    /// Store every write that covers a cluster compressed.
    pub packed: bool,
    /// Every image is encrypted, or none; `None` as the seed has it.
    pub encrypted: Option<bool>,
    /// The image has an external data file.
    pub data_file: bool,
    /// The image has bitmaps that are kept.
    pub bitmaps: bool,
    /// Print the trace.
    pub print_trace: bool,
    /// Where the files of a failure go: as they were when its epoch began, and what was judged.
    pub dump: Option<PathBuf>,
}

impl Options {
    /// What the seed draws, as far as it is not asked for.
    fn configure(&self, seed: u64) -> Config {
        let mut config = Config::draw(seed);
        if self.by_qemu {
            config.unit_bytes = 512;
        }
        match self.encrypted.unwrap_or(config.image.encryption.is_some()) {
            true if !self.by_qemu => config = config.with_encryption(),
            _ => config.image.encryption = None,
        }
        if self.bitmaps && config.image.shape.version == 3 {
            config.image.bitmaps = Some(Bitmaps::Valid);
            config.keeps_bitmaps = true;
        }
        if self.packed {
            config.packed_per_mille = 1000;
        }
        config
    }
}

/// A seed that found something.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// What was found, and when.
    pub what: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "seed {}: {}", self.seed, self.what)
    }
}

impl std::error::Error for Failure {}

/// Runs a seed; what it did and the hash of its trace, or what it found.
pub fn run_seed(seed: u64, options: &Options) -> Result<(Stats, u64), Failure> {
    caught(seed, || Run::new(seed, options)?.play())
}

/// What `run` finds, a panic included.
pub(crate) fn caught<T>(seed: u64, run: impl FnOnce() -> Result<T, String>) -> Result<T, Failure> {
    let run = std::panic::AssertUnwindSafe(run);
    let outcome = std::panic::catch_unwind(run).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("without a message")))
    });
    outcome.map_err(|what| Failure { seed, what })
}

/// How an epoch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EpochEnd {
    /// The power goes while requests are in flight, or after the last.
    PowerCut,
    /// The process is killed; the host's cache survives.
    Kill,
    /// The image is closed.
    Close,
}

pub(crate) struct Run<'a> {
    config: Config,
    pub(crate) options: &'a Options,
    pub(crate) random: Random,
    trace: Trace,
    expectations: Expectations,
    pub(crate) host: SimHost,
    model: Model,
    next_value: Value,
    /// The disk at each snapshot that there is from the start.
    past: Vec<Vec<u8>>,
    leaks: u64,
    /// Where the L1 table and the refcount table were.
    tables: (u64, u64),
    /// What the running process has committed, for the next one if it is killed.
    pub(crate) log: Option<Arc<KeptLog>>,
    /// The log of a killed process that no process has taken over yet.
    pub(crate) stale: Option<StaleLog>,
    /// What becomes of logs, without a part in what else a seed does.
    pub(crate) aside: Random,
    /// Where processes are killed while they store to their logs.
    pub(crate) torn: Random,
    /// What the header said when the epoch began.
    opened_with: Marks,
    /// Bitmaps that were good then.
    bitmaps_opened: usize,
    /// Faults that had struck then.
    faults_before: u64,
    pub(crate) stats: Stats,
}

impl<'a> Run<'a> {
    fn new(seed: u64, options: &'a Options) -> Result<Run<'a>, String> {
        let mut config = options.configure(seed);
        let data_file = options.data_file.then(|| data_file::configure(&mut config));
        let mut random = Random::new(seed ^ 0x9d1e_6f04_77a3_15cb);
        let trace = match options.print_trace {
            true => Trace::with_sink(|line| println!("{line}")),
            false => Trace::default(),
        };
        if options.print_trace {
            println!("{config:#?}");
        }
        let script = ValueEncoding::new(seed, config.unit_bytes);
        let mut next_value = 0;
        let mut machine = match options.by_qemu {
            true => Machine::by_qemu(&config, script, &mut next_value, &mut random)?,
            false => Machine::build(&config, script, &mut next_value, &mut random),
        };
        if let Some(kind) = data_file {
            data_file::add(&mut machine, &config, kind);
        }
        let scheduler = Scheduler::new(random.number(), Trace::default());
        let host = SimHost::new(&scheduler.handle());
        for (name, image, profile) in machine.files {
            host.add(&name, image, profile);
        }
        let expectations = Expectations {
            name: TOP.to_owned(),
            shape: config.image.shape,
            script,
            has_extension: machine.has_extension,
            stored_allocation: config.image.allocation,
            bitmaps: config.image.bitmaps,
            recorded_since: None,
            below: machine.below.into(),
            data_file,
        };
        let model = Model::new(script, &machine.active, machine.below_values.into());
        let stats = Stats::default();
        Ok(Run {
            config,
            options,
            random,
            trace,
            expectations,
            host,
            model,
            next_value,
            past: machine.snapshots,
            leaks: 0,
            tables: (0, 0),
            log: None,
            stale: None,
            aside: Random::new(seed ^ 0x2f80_d6b5_914c_37ea),
            torn: Random::new(seed ^ 0x61d3_0a7e_c852_f49b),
            opened_with: Marks::default(),
            bitmaps_opened: 0,
            faults_before: 0,
            stats,
        })
    }

    fn play(mut self) -> Result<(Stats, u64), String> {
        self.recall()?;
        let verdict = self.judge(&self.host.images(), true)?;
        self.settle(&verdict);
        self.tables = verdict.tables;
        if self.config.keeps_bitmaps {
            self.expectations.recorded_since = Some(verdict.disk.into());
        }
        for epoch in 0..self.config.epochs {
            self.dump("before", &self.host.images())?;
            let mishaps = self.config.mishaps != FaultPlan::None && self.random.chance(600);
            self.epoch(mishaps)
                .map_err(|what| format!("epoch {epoch}: {what}"))?;
        }
        self.stats.seeds = 1;
        self.stats.faults += self.host.faults_struck();
        Ok((self.stats, self.trace.hash()))
    }

    /// What is known of the snapshots that the image was made with.
    fn recall(&mut self) -> Result<(), String> {
        let snapshots = self.expectations.snapshots(&self.host.images())?;
        let disks = snapshots.iter().map(|seen| &*seen.disk);
        if !disks.eq(self.past.iter().map(Vec::as_slice)) {
            return Err("the snapshots are not as they were made".to_owned());
        }
        self.model = self.model.clone().with_snapshots(snapshots);
        Ok(())
    }

    fn dump(&self, name: &str, files: &Files) -> Result<(), String> {
        match &self.options.dump {
            Some(directory) => crate::qemu::write_files(&directory.join(name), files),
            None => Ok(()),
        }
    }

    pub(crate) fn judge(&mut self, files: &Files, exact: bool) -> Result<Verdict, String> {
        self.dump("judged", files)?;
        self.expectations.judge(files, &mut self.model, exact)
    }

    /// What was found on the disk is what the model starts from now.
    fn settle(&mut self, verdict: &Verdict) {
        self.model = self
            .model
            .restarted(&verdict.values, verdict.snapshots.clone());
        self.leaks = verdict.leaks + verdict.leaks_beyond;
    }

    fn scheduler(&mut self) -> Scheduler {
        Scheduler::new(self.random.number(), std::mem::take(&mut self.trace))
    }

    pub(crate) fn engine_options(&self) -> OpenOptions {
        let mut keys = Keys::default();
        keys.for_others(Encryption::passphrase());
        OpenOptions {
            format: Some(Format::Qcow2),
            data_file: self.options.data_file.then(|| DATA.into()),
            direct: self.config.direct,
            cache: CacheOptions {
                l2_bytes: Some(self.config.l2_cache_bytes),
                l2_entry_bytes: self.config.l2_entry_bytes,
                refcount_bytes: Some(self.config.refcount_cache_bytes),
                ..CacheOptions::default()
            },
            discard: self.config.discard,
            pass_discard: self.config.space.pass_discard,
            discard_no_unref: self.config.space.no_unref,
            detect_zeroes: self.config.space.detect_zeroes,
            mark_zeros: self.config.space.mark_zeros,
            copy_on_read: self.config.copy_on_read,
            allocation: self.config.allocation,
            drop_bitmaps: !self.config.keeps_bitmaps,
            keys,
            #[cfg(feature = "broken-order")]
            broken: self.options.broken.and_then(|rule| match rule {
                Rule::O1 => Some(gaur_engine::BrokenRule::O1),
                Rule::O2 => Some(gaur_engine::BrokenRule::O2),
                Rule::O3 => Some(gaur_engine::BrokenRule::O3),
                Rule::O4 => Some(gaur_engine::BrokenRule::O4),
                Rule::O5 => Some(gaur_engine::BrokenRule::O5),
                Rule::O7 => Some(gaur_engine::BrokenRule::O7),
                Rule::O8 => Some(gaur_engine::BrokenRule::O8),
                Rule::O9 => Some(gaur_engine::BrokenRule::O9),
                Rule::Data => Some(gaur_engine::BrokenRule::DataFlush),
                Rule::Watch => Some(gaur_engine::BrokenRule::Watch),
                Rule::Copy => Some(gaur_engine::BrokenRule::Copy),
                Rule::Log => None,
            }),
            ..OpenOptions::new(References::Any)
        }
    }

    /// From open to close or crash.
    fn epoch(&mut self, mishaps: bool) -> Result<(), String> {
        self.stats.epochs += 1;
        let struck_before = self.host.faults_struck();
        self.faults_before = struck_before;
        let mut scheduler = self.scheduler();
        self.host = self.host.restarted(&scheduler.handle());
        if mishaps {
            let faults = self.draw_faults();
            self.set_backing_faults(faults.read_per_mille);
            self.host.set_faults(TOP, faults);
            if self.options.data_file {
                let faults = self.draw_faults();
                self.host.set_faults(DATA, faults);
            }
        }
        let marks = self.host.images().get(TOP).map(Marks::of);
        self.opened_with = marks.unwrap_or_default();
        self.bitmaps_opened = self.good_bitmaps(&self.host.images())?;
        let keeps_log = self.config.keeps_log && (self.stale.is_none() || self.aside.chance(500));
        let number = 1 + self.aside.below((1 << 48) - 1);
        self.log = None;
        if keeps_log {
            let kill_at = self.torn.chance(200).then(|| 1 + self.torn.below(3000));
            let log = self.log(&empty_memory(), number, kill_at)?;
            log.begin();
            self.log = Some(log);
        }
        let opened = open(&mut scheduler, &self.host, self.load_options())?;
        let outcome = match opened {
            Ok((image, files)) => self.loaded(&mut scheduler, image, files, mishaps),
            Err(_) if self.host.faults_struck() > struck_before => Ok(EpochEnd::Kill),
            Err(error) => Err(format!("the engine does not open the image: {error}")),
        };
        self.host.set_faults(TOP, Faults::default());
        self.set_backing_faults(0);
        self.stats.steps += scheduler.steps();
        self.trace = scheduler.take_trace();
        drop(scheduler);
        let struck = self.host.faults_struck() > struck_before || self.is_full(mishaps);
        self.judge_end(outcome?, struck)
    }

    fn set_backing_faults(&self, read_per_mille: u32) {
        let faults = Faults {
            read_per_mille,
            ..Faults::default()
        };
        for name in self.host.images().keys().filter(|name| *name != TOP) {
            self.host.set_faults(name, faults.clone());
        }
    }

    fn is_full(&self, mishaps: bool) -> bool {
        mishaps && self.config.mishaps == FaultPlan::Full
    }

    fn draw_faults(&mut self) -> Faults {
        let random = &mut self.random;
        let kinds = [
            FaultKind::Read,
            FaultKind::Write,
            FaultKind::NoSpace,
            FaultKind::Flush,
        ];
        match self.config.mishaps {
            FaultPlan::None => Faults::default(),
            FaultPlan::Once => {
                let kind = random.pick(&kinds);
                let rare = matches!(kind, FaultKind::Flush | FaultKind::NoSpace);
                let count = random.below(if rare { 8 } else { 60 });
                Faults {
                    nth: Some((kind, count)),
                    ..Faults::default()
                }
            }
            FaultPlan::Writes(per_mille) => Faults {
                write_per_mille: per_mille,
                ..Faults::default()
            },
            FaultPlan::Random(per_mille) => Faults {
                read_per_mille: random.pick(&[0, per_mille]),
                write_per_mille: random.pick(&[0, per_mille]),
                no_space_per_mille: random.pick(&[0, per_mille]),
                flush_per_mille: random.pick(&[0, per_mille]),
                ..Faults::default()
            },
            FaultPlan::Full => {
                let room = random.below(16) * self.config.image.shape.cluster_bytes();
                let len = self.host.images().get(TOP).map_or(0, FileImage::len_bytes);
                Faults {
                    max_len_bytes: Some(len + room),
                    ..Faults::default()
                }
            }
        }
    }

    /// The load on an open image, until it is over or the power goes.
    fn loaded(
        &mut self,
        scheduler: &mut Scheduler,
        image: Arc<Image>,
        files: ImageFiles<SimFile>,
        mishaps: bool,
    ) -> Result<EpochEnd, String> {
        let load = Load::new(
            &self.config,
            scheduler.handle(),
            &self.host,
            &self.expectations,
            self.model.clone(),
            self.next_value,
        );
        // A device of fixed length can be full at any time: leaks stay.
        load.may_fail
            .set(mishaps || self.config.profile.device.is_some());
        let mut queues = Vec::new();
        for number in 0..self.config.queues {
            let queue = Rc::new(image.queue(files.clone()));
            for task in 0..self.config.depth {
                let work = Rc::clone(&load).work(
                    Rc::clone(&queue),
                    self.random.fork(),
                    self.config.requests,
                );
                scheduler
                    .handle()
                    .spawn(&format!("queue {number} task {task}"), work);
            }
            queues.push(queue);
        }
        drop(files);
        if let Some(wanted) = self.config.snapshot_load {
            for number in 0..wanted.tasks {
                let work = Rc::clone(&load).manage(queues.clone(), self.random.fork(), wanted);
                let name = format!("snapshots {number}");
                scheduler.handle().spawn(&name, work);
            }
        }
        if self.config.online_checks > 0 {
            let random = Random::new(self.config.seed ^ self.stats.epochs ^ 0x6f1d_93a0_c52e_847b);
            let work = Rc::clone(&load).check_online(queues.clone(), random, self.leaks);
            scheduler.handle().spawn("check", work);
        }
        if self.config.streams > 0 {
            let random = Random::new(self.config.seed ^ self.stats.epochs ^ 0x83b2_4e60_1f7d_c9a5);
            let work = Rc::clone(&load).stream(queues.clone(), random);
            scheduler.handle().spawn("stream", work);
        }
        let end = until_killed(|| self.drive(scheduler, &load)).unwrap_or(Ok(EpochEnd::Kill));
        self.model = load.model.borrow().clone();
        self.next_value = load.next_value.get();
        self.stats += *load.stats.borrow();
        self.stats.holes += image.holes().holes;
        self.stats.copied_bytes += image.copies().bytes;
        match end? {
            EpochEnd::Close => {
                let is_fixed = self.config.profile.device.is_some();
                let may_fail = (mishaps, is_fixed);
                until_killed(|| close(scheduler, queues, may_fail)).unwrap_or(Ok(EpochEnd::Kill))
            }
            end => Ok(end),
        }
    }

    /// Moves the load on, and looks at what a power cut would leave at moments of its choosing.
    fn drive(&mut self, scheduler: &mut Scheduler, load: &Rc<Load>) -> Result<EpochEnd, String> {
        let mut watch = Watch::draw(&mut self.random, self.config.snapshot_load.is_some());
        let start = scheduler.steps();
        loop {
            let stop = watch
                .run(scheduler, &self.host, &mut self.random)
                .map_err(|stuck| stuck.to_string())?;
            if let Some(what) = load.failure.borrow().clone() {
                return if what.is_empty() {
                    Ok(EpochEnd::Kill)
                } else {
                    Err(what)
                };
            }
            if stop == Stop::Done {
                break;
            }
            let taken = scheduler.steps() - start;
            if taken > STEPS_MAX {
                return Err(format!("no end after {taken} steps: {}", scheduler.stuck()));
            }
            if taken >= watch.crash_at {
                let kills = if self.config.keeps_log { 600 } else { 150 };
                return Ok(if self.random.chance(kills) {
                    EpochEnd::Kill
                } else {
                    EpochEnd::PowerCut
                });
            }
            let changing = load.saving.get() > 0 || load.model.borrow().is_changing();
            let moment = watch.look(&self.host, &mut self.random, changing);
            let Some(moment) = moment else {
                continue;
            };
            self.look(scheduler, &mut load.model.borrow_mut())?;
            let often = match moment {
                Phase::Any => continue,
                Phase::Change => 8,
                // These moments are few.
                Phase::Switch => 50,
            };
            self.stats.snapshot_crashes += 1;
            if self.random.chance(often) {
                return Ok(self.random.pick(&[EpochEnd::PowerCut, EpochEnd::Kill]));
            }
        }
        Ok(match self.random.below(6) {
            0 => EpochEnd::PowerCut,
            1 => EpochEnd::Kill,
            _ => EpochEnd::Close,
        })
    }

    /// Judges what a power cut now would leave; the load does not notice.
    fn look(&mut self, scheduler: &Scheduler, model: &mut Model) -> Result<(), String> {
        let survivors = Survivors::draw(&mut self.random);
        let files = self.host.crash_images(survivors, &mut self.random);
        let steps = scheduler.steps();
        self.dump("judged", &files)?;
        let verdict = self.expectations.judge(&files, model, false);
        let verdict =
            verdict.map_err(|what| format!("power cut at step {steps} ({survivors:?}): {what}"))?;
        self.judge_leaks(&files, &verdict)
            .map_err(|what| format!("power cut at step {steps}: {what}"))?;
        self.stats.crash_points += 1;
        self.judge_bitmaps(&files)
            .map_err(|what| format!("power cut at step {steps}: {what}"))?;
        if self.random.chance(250) {
            self.reopen(&files, &verdict)
                .map_err(|what| format!("power cut at step {steps}, reopened: {what}"))?;
        }
        self.ask_qemu(&files, &verdict)
    }

    fn ask_qemu(&mut self, files: &Files, verdict: &Verdict) -> Result<(), String> {
        // QEMU's tools would look for the data file by its name, and want the key.
        let encrypted = self.config.image.encryption.is_some();
        let asked = !self.options.data_file && !encrypted;
        if asked && self.random.chance(self.options.qemu_per_mille) {
            self.stats.qemu += 1;
            let (disk, snapshots) = (&verdict.disk, &verdict.snapshots);
            crate::qemu::judge(files, TOP, disk, snapshots, Some(verdict.leaks))?;
        }
        Ok(())
    }

    /// Judges what the end of an epoch left, and goes on from there.
    fn judge_end(&mut self, end: EpochEnd, struck: bool) -> Result<(), String> {
        // What a failed flush has dropped may still be in the host's cache, where the next process
        // would find it; no engine can know. Only the power clears that up.
        let end = if end == EpochEnd::Kill && struck {
            EpochEnd::PowerCut
        } else {
            end
        };
        if end != EpochEnd::Close || struck {
            // A write that was given up may be in a raw data file, and not mapped.
            let data_file = &mut self.expectations.data_file;
            *data_file = data_file.map(|_| DataFile::Mapped);
        }
        let files = self.files_after(end);
        let exact = end == EpochEnd::Close;
        let verdict = self
            .judge(&files, exact)
            .map_err(|what| format!("after {end:?}: {what}"))?;
        if end == EpochEnd::Close {
            self.judge_close(&verdict, struck)?;
            self.judge_withdrawn(&files)?;
            let good = self.good_bitmaps(&files)?;
            if self.config.keeps_bitmaps && good != self.bitmaps_opened {
                let before = self.bitmaps_opened;
                return Err(format!(
                    "of {before} good bitmaps {good} are left after the close"
                ));
            }
            self.stats.bitmaps += good as u64;
        } else {
            self.judge_leaks(&files, &verdict)?;
            self.judge_bitmaps(&files)?;
        }
        self.reopen(&files, &verdict)
            .map_err(|what| format!("after {end:?}, reopened: {what}"))?;
        self.ask_qemu(&files, &verdict)?;
        self.leaks = verdict.leaks + verdict.leaks_beyond;
        self.stats.l1_moves += u64::from(self.tables.0 != verdict.tables.0);
        self.stats.reftable_moves += u64::from(self.tables.1 != verdict.tables.1);
        self.tables = verdict.tables;
        match end {
            // The log has gone, too.
            EpochEnd::PowerCut => self.stale = None,
            EpochEnd::Kill | EpochEnd::Close => self.find_stale_log()?,
        }
        match end {
            EpochEnd::Kill => self.go_on_after_kill(verdict)?,
            EpochEnd::Close | EpochEnd::PowerCut => self.settle(&verdict),
        }
        if end == EpochEnd::PowerCut {
            self.replace_files(files);
        }
        Ok(())
    }

    /// The next process finds what was in the host's cache, and if there is a log more than that.
    fn go_on_after_kill(&mut self, verdict: Verdict) -> Result<(), String> {
        let left = match &self.log {
            Some(log) => log.left()?.map(|left| (log.memory(), left.commits.len())),
            None => None,
        };
        // A device of fixed length may have no room for the tables.
        let left = left.filter(|_| self.config.profile.device.is_none());
        if let Some((memory, commits)) = left {
            if verdict.snapshots.is_empty() && self.aside.chance(200) {
                self.leave_log(memory)?;
                self.model.survived_kill(&verdict.values);
                self.model.snapshots_survived_kill(verdict.snapshots);
                return Ok(());
            }
            let verdict = self
                .take_over(&memory)
                .map_err(|what| format!("{commits} commits taken over: {what}"))?;
            self.stats.adopted += commits as u64;
            self.tables = verdict.tables;
            self.settle(&verdict);
            return Ok(());
        }
        self.model.survived_kill(&verdict.values);
        self.model.snapshots_survived_kill(verdict.snapshots);
        Ok(())
    }

    /// No bitmap is lost in a crash, unless the write-intent map could not be made.
    fn judge_bitmaps(&mut self, files: &Files) -> Result<(), String> {
        let file = files.get(TOP).ok_or("the image is gone")?;
        let good = crate::bitmaps::valid(file)?;
        let recovered = good.iter().filter(|one| one.is_recovered());
        self.stats.recovered += recovered.count() as u64;
        let is_lost = self.config.keeps_bitmaps && good.len() < self.bitmaps_opened;
        let is_full = self.config.mishaps == FaultPlan::Full;
        let is_struck = is_full || self.host.faults_struck() > self.faults_before;
        match is_lost && !is_struck && self.config.profile.device.is_none() {
            false => Ok(()),
            true => Err(format!(
                "of {} good bitmaps {} are left",
                self.bitmaps_opened,
                good.len()
            )),
        }
    }

    /// How many bitmaps would be believed.
    fn good_bitmaps(&self, files: &Files) -> Result<usize, String> {
        let file = files.get(TOP).ok_or("the image is gone")?;
        Ok(crate::bitmaps::valid(file)?.len())
    }

    /// What is on the disks after the end of an epoch.
    fn files_after(&mut self, end: EpochEnd) -> Files {
        match end {
            EpochEnd::PowerCut => {
                self.stats.crash_points += 1;
                let survivors = Survivors::draw(&mut self.random);
                self.host.crash_images(survivors, &mut self.random)
            }
            EpochEnd::Kill => {
                self.stats.kills += 1;
                // In-flight requests complete or not before the image is looked at.
                let scheduler = Scheduler::new(self.random.number(), Trace::default());
                self.host = self.host.restarted(&scheduler.handle());
                self.host.images()
            }
            EpochEnd::Close => {
                self.stats.closes += 1;
                self.host.images()
            }
        }
    }

    /// A close leaks nothing and leaves nothing that a power cut could take back.
    fn judge_close(&mut self, verdict: &Verdict, struck: bool) -> Result<(), String> {
        let (before, after) = (self.leaks, verdict.leaks + verdict.leaks_beyond);
        if !struck && after > before {
            return Err(format!(
                "close leaves {after} leaked clusters, there were {before}: {}",
                verdict.last_leak
            ));
        }
        let files = self.host.crash_images(Survivors::Nothing, &mut self.random);
        let durable = self
            .judge(&files, true)
            .map_err(|what| format!("power cut behind the close: {what}"))?;
        if durable.values != verdict.values {
            return Err("a power cut behind the close changes the disk".to_owned());
        }
        self.stats.crash_points += 1;
        Ok(())
    }

    /// Opening the image has to report leaks.
    fn judge_leaks(&self, files: &Files, verdict: &Verdict) -> Result<(), String> {
        let marks = files.get(TOP).map(Marks::of).unwrap_or_default();
        if marks.endangers_snapshots() {
            return Err(format!(
                "a repair by QEMU deletes the snapshots: {marks:x?}"
            ));
        }
        let leaks = verdict.leaks + verdict.leaks_beyond;
        if self.config.image.shape.version == 3 && !marks.is_in_use() && leaks > self.leaks {
            return Err(format!("{leaks} leaked clusters are not reported"));
        }
        Ok(())
    }

    /// After a close there is no writer and no log.
    fn judge_withdrawn(&self, files: &Files) -> Result<(), String> {
        let before = self.opened_with;
        let after = files.get(TOP).map(Marks::of).unwrap_or_default();
        match after.follow(before) {
            true => Ok(()),
            false => Err(format!("{before:x?} became {after:x?} after the close")),
        }
    }

    pub(crate) fn replace_files(&mut self, files: Files) {
        let scheduler = Scheduler::new(self.random.number(), Trace::default());
        let host = SimHost::new(&scheduler.handle());
        for (name, image) in files {
            let profile = self.host.profile(&name).unwrap_or_default();
            host.add(&name, image, profile);
        }
        self.stats.faults += self.host.faults_struck();
        self.host = host;
    }
}

/// Closes the image by its last queue.
fn close(
    scheduler: &mut Scheduler,
    mut queues: Vec<Rc<Queue<SimFile>>>,
    (mishaps, is_fixed): (bool, bool),
) -> Result<EpochEnd, String> {
    let last = queues.pop().and_then(Rc::into_inner);
    drop(queues);
    let queue = last.ok_or("a task outlives the load")?;
    match to_end(scheduler, "close", async move { queue.close().await })? {
        Ok(()) => Ok(EpochEnd::Close),
        Err(_) if mishaps => Ok(EpochEnd::Kill),
        // A device may have no space for what bitmaps were in use with; then they stay so.
        Err(error) if is_fixed && error.errno() == gaur_block::Errno::ENOSPC => Ok(EpochEnd::Kill),
        Err(error) => Err(format!("close fails on a healthy disk: {error:#}")),
    }
}
