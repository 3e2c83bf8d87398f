//! The engine as a judge: it opens a copy of what a power cut left, and must read what the independent reader read.

use std::sync::Arc;

use gaur_block::{Device, Payload, Request, Target};
use gaur_engine::{Image, ImageFiles, OpenOptions, Queue, VmStateReader};
use gaur_sim::{Scheduler, SimFile, SimHost, Trace};

use crate::judge::Verdict;
use crate::load::{check_list, compare_state};
use crate::machine::TOP;
use crate::model::FoundSnapshot;
use crate::run::{Run, STEPS_MAX};
use crate::view::Files;

impl Run<'_> {
    /// Opens a copy of the files with the engine, which must read the same as the judge.
    pub(crate) fn reopen(&mut self, files: &Files, verdict: &Verdict) -> Result<(), String> {
        let mut scheduler = Scheduler::new(self.random.number(), Trace::default());
        let profile = |name: &str| self.host.profile(name).unwrap_or_default();
        let images = files
            .iter()
            .map(|(name, image)| (name.as_str(), image.clone(), profile(name)));
        let host = SimHost::from_images(&scheduler.handle(), images);
        let read_only = self.random.chance(500);
        let wanted = self.engine_options();
        let options = OpenOptions {
            read_only,
            copy_on_read: wanted.copy_on_read && !read_only,
            ..wanted
        };
        let (image, files) = open(&mut scheduler, &host, options)?
            .map_err(|error| format!("the engine does not open the image: {error}"))?;
        self.stats.reopened += 1;
        let queue = image.queue(files);
        let queue = compare(&mut scheduler, queue, &verdict.disk)?;
        compare_list(&mut scheduler, queue, &verdict.snapshots)?;
        drop(image);
        self.reopen_snapshot(&mut scheduler, &host, verdict)
    }

    /// Opens one of the snapshots with the engine.
    fn reopen_snapshot(
        &mut self,
        scheduler: &mut Scheduler,
        host: &SimHost,
        verdict: &Verdict,
    ) -> Result<(), String> {
        let count = verdict.snapshots.len();
        if count == 0 {
            return Ok(());
        }
        let seen = &verdict.snapshots[self.random.index(count)];
        let which = self.random.pick(&[&seen.id, &seen.name]);
        let options = OpenOptions {
            read_only: true,
            copy_on_read: false,
            snapshot: Some(which.clone()),
            ..self.engine_options()
        };
        let within = |what: String| format!("snapshot {which}: {what}");
        let (image, files) = open(scheduler, host, options)?.map_err(within)?;
        let queue = image.queue(files);
        compare(scheduler, queue, &seen.disk).map_err(within)?;
        self.reread_state(scheduler, host, seen).map_err(within)
    }

    /// Reads the state that a snapshot holds.
    fn reread_state(
        &mut self,
        scheduler: &mut Scheduler,
        host: &SimHost,
        seen: &FoundSnapshot,
    ) -> Result<(), String> {
        let options = OpenOptions {
            read_only: true,
            copy_on_read: false,
            ..self.engine_options()
        };
        let (image, files) = open(scheduler, host, options)??;
        let (seen, random) = (seen.clone(), self.random.fork());
        let queue = image.queue(files);
        let reading = async move {
            let mut reader = VmStateReader::open(&queue, &seen.id).await?;
            compare_state(&mut reader, &seen.state, random).await
        };
        match to_end(scheduler, "read a state", reading)? {
            Ok(None) => Ok(()),
            Ok(Some(wrong)) => Err(wrong),
            Err(error) => Err(format!("{error:#}")),
        }
    }
}

pub(crate) type Opened = Result<(Arc<Image>, ImageFiles<SimFile>), String>;

/// Opens the image; the outer error is a hang, the inner one what the engine says.
pub(crate) fn open(
    scheduler: &mut Scheduler,
    host: &SimHost,
    options: OpenOptions,
) -> Result<Opened, String> {
    let host = host.clone();
    let opening = async move { gaur_engine::open(&host, TOP, &options).await };
    let opened = to_end(scheduler, "open", opening)?;
    Ok(opened
        .map(|opened| (opened.image, opened.files))
        .map_err(|error| format!("{error:#}")))
}

/// Does something to its end; an error is a hang.
pub(crate) fn to_end<T: 'static>(
    scheduler: &mut Scheduler,
    what: &str,
    future: impl Future<Output = T> + 'static,
) -> Result<T, String> {
    let done = scheduler.block_on(what, STEPS_MAX, future);
    let done = done.map_err(|stuck| format!("{what}: {stuck}"))?;
    done.ok_or_else(|| format!("{what} does not end"))
}

/// Whether the engine knows of the same snapshots.
fn compare_list(
    scheduler: &mut Scheduler,
    queue: Queue<SimFile>,
    seen: &[FoundSnapshot],
) -> Result<(), String> {
    let listing = async move { queue.snapshots().await };
    let list = to_end(scheduler, "list snapshots", listing)?;
    check_list(&list.map_err(|error| format!("{error:#}"))?, seen)
}

/// Reads the whole disk through a queue and compares it.
fn compare(
    scheduler: &mut Scheduler,
    queue: Queue<SimFile>,
    disk: &[u8],
) -> Result<Queue<SimFile>, String> {
    let size = queue.size_bytes();
    if size != disk.len() as u64 {
        return Err(format!(
            "the engine sees a disk of {size} bytes instead of {}",
            disk.len()
        ));
    }
    let len = disk.len();
    let reading = async move {
        let mut memory = vec![0xa5; len];
        let step = queue.limits().max_transfer.clamp(1, 256 << 10) as usize;
        for (number, part) in memory.chunks_mut(step).enumerate() {
            let request = Request::Read {
                offset_bytes: (number * step) as u64,
            };
            let payload = Payload::Read(Target::memory(part));
            queue.submit(request, payload).await?;
        }
        Ok::<_, gaur_block::Errno>((memory, queue))
    };
    let read = to_end(scheduler, "read the disk", reading)?;
    let (read, queue) =
        read.map_err(|errno| format!("the engine cannot read the disk: {errno:?}"))?;
    match read.iter().zip(disk).position(|(one, other)| one != other) {
        Some(at) => Err(format!("the engine reads something else at byte {at}")),
        None => Ok(queue),
    }
}
