//! Commit and rebase: whatever a cut leaves shows the same disk.

use std::cell::RefCell;
use std::rc::Rc;

use futures_util::future::join;
use gaur_block::{Device, Payload, Request, Source, Target};
use gaur_engine::{
    Compressor, Format, ImageError, Job, OpenOptions, Opened, Queue, References, Shares, create,
    open as open_image,
};
use gaur_format::Version;
use gaur_format::plan::CreateOptions;
use gaur_sim::{FileImage, Random, SimFile, SimHost};

use crate::judge;
use crate::shape::Shape;
use crate::verbs::{Cuts, Work, broken_rule, header, open, profile};
use crate::view::Files;

const TOP: &str = "top";
const BASE: &str = "base";
/// Too long for the first sector of an image.
const OTHER: &str = concat!(
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other-",
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other-",
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other-",
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other-",
    "other-other-other-other-other-other-other-other-other-other-other-other-other-other-other",
);

/// What is done to the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// The overlay into its base.
    Commit,
    /// The overlay onto another base, whose name does not fit into the first sector.
    Rebase,
    /// The overlay onto none.
    StandAlone,
}

impl Merge {
    /// All of them.
    pub const ALL: [Merge; 3] = [Merge::Commit, Merge::Rebase, Merge::StandAlone];
}

fn shape(seed: u64) -> Shape {
    let extended = seed.is_multiple_of(3);
    Shape {
        version: if !extended && seed % 5 == 1 { 2 } else { 3 },
        cluster_bits: if extended {
            14
        } else {
            [10, 12][seed as usize / 2 % 2]
        },
        extended,
        refcount_order: 4,
    }
}

fn made(seed: u64, clusters: u64, backing: Option<&str>) -> CreateOptions {
    let shape = shape(seed);
    CreateOptions {
        version: if shape.version == 2 {
            Version::V2
        } else {
            Version::V3
        },
        cluster_bits: shape.cluster_bits,
        extended_l2: shape.extended,
        size_bytes: (clusters << shape.cluster_bits) - 512,
        backing_file: backing.map(|name| name.as_bytes().to_vec()),
        backing_format: backing.map(|_| "qcow2".to_owned()),
        ..CreateOptions::default()
    }
}

fn options(breaks: bool) -> OpenOptions {
    OpenOptions {
        format: Some(Format::Qcow2),
        broken: broken_rule(breaks),
        ..OpenOptions::new(References::Any)
    }
}

fn queue(opened: Opened<SimFile>) -> Queue<SimFile> {
    opened.image.queue(opened.files)
}

fn two_queues(opened: Opened<SimFile>) -> (Queue<SimFile>, Queue<SimFile>) {
    let first = opened.image.queue(opened.files.clone());
    (first, opened.image.queue(opened.files))
}

fn failed(error: ImageError) -> String {
    format!("{error:#}")
}

async fn change(queue: &Queue<SimFile>, random: &mut Random) -> Result<(), String> {
    let size = queue.size_bytes();
    for _ in 0..25 {
        let offset_bytes = random.below(size / 512) * 512;
        let len = (512 * random.between(1, 20)).min(size - offset_bytes);
        let request = match random.below(3) {
            0 => Request::WriteZeroes {
                offset_bytes,
                len_bytes: len,
                fua: false,
                may_unmap: random.below(2) == 0,
            },
            _ => Request::Write {
                offset_bytes,
                fua: false,
            },
        };
        let bytes = vec![random.below(256) as u8; len as usize];
        let payload = match request {
            Request::Write { .. } => Payload::Write(Source::memory(&bytes)),
            _ => Payload::None,
        };
        let done = queue.submit(request, payload).await;
        done.map_err(|errno| errno.to_string())?;
    }
    Ok(())
}

async fn make(host: SimHost, seed: u64) -> Result<(), String> {
    let random = &mut Random::new(seed);
    let clusters = [12, 9, 14].map(|few| few + random.below(4));
    for (name, clusters, backing) in [
        (BASE, clusters[0], None),
        (OTHER, clusters[1], None),
        (TOP, clusters[2], Some(BASE)),
    ] {
        let file = open(&host, name).await?;
        let plan = made(seed, clusters, backing);
        create(&file, &plan, &Job::default())
            .await
            .map_err(failed)?;
        drop(file);
        let opened = open_image(&host, name, &options(false)).await;
        let queue = queue(opened.map_err(failed)?);
        change(&queue, random).await?;
        queue.close().await.map_err(failed)?;
    }
    Ok(())
}

async fn commit(host: &SimHost, breaks: bool) -> Result<(), ImageError> {
    let (shares, job) = (shares(), Job::default());
    let base = open_image(host, BASE, &options(breaks)).await?;
    let above = OpenOptions {
        stop_at: base.image.layers()[0].id(),
        lock: false,
        ..options(breaks)
    };
    let (top, second) = two_queues(open_image(host, TOP, &above).await?);
    let (base, into) = two_queues(base);
    let both = join(
        top.commit_into(&base, &shares, &job),
        second.commit_into(&into, &shares, &job),
    );
    let (one, two) = both.await;
    one.and(two)?;
    drop((second, into));
    base.close().await?;
    top.make_empty(&job).await?;
    top.close().await
}

async fn rebase(
    host: &SimHost,
    seed: u64,
    onto: Option<&str>,
    breaks: bool,
) -> Result<(), ImageError> {
    let (shares, job) = (shares(), Job::default());
    let (top, second) = two_queues(open_image(host, TOP, &options(breaks)).await?);
    let new = match onto {
        Some(name) => Some(two_queues(open_image(host, name, &reading()).await?)),
        None => None,
    };
    // Every other run stores what it copies compressed.
    let compressor = |queue: &Queue<SimFile>| match seed.is_multiple_of(2) {
        true => Compressor::new(queue.image(), None).map(Some),
        false => Ok(None),
    };
    let (over, under) = new.as_ref().map(|(one, two)| (one, two)).unzip();
    let both = join(
        top.rebase_onto(over, None, compressor(&top)?, &shares, &job),
        second.rebase_onto(under, None, compressor(&second)?, &shares, &job),
    );
    let (one, two) = both.await;
    one.and(two)?;
    drop(second);
    let format = onto.map(|_| "qcow2");
    top.set_backing(onto.map(str::as_bytes), format).await?;
    top.close().await
}

/// Small ones, so that two queues find some.
fn shares() -> Shares {
    Shares::new(4096)
}

fn reading() -> OpenOptions {
    OpenOptions {
        read_only: true,
        ..options(false)
    }
}

/// The disk that the chain shows; an error where it cannot be opened.
fn disk(seed: u64, files: &Files, name: &'static str) -> Result<Vec<u8>, String> {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let slot = Rc::clone(&seen);
    let files = files.iter().map(|(name, file)| (name, file.clone()));
    let work = Work::begin(seed, files, profile(seed), async move |host| {
        let queue = queue(open_image(&host, name, &reading()).await.map_err(failed)?);
        let mut bytes = vec![0; queue.size_bytes() as usize];
        let payload = Payload::Read(Target::memory(&mut bytes));
        let done = queue.submit(Request::Read { offset_bytes: 0 }, payload);
        done.await.map_err(|errno| errno.to_string())?;
        slot.replace(bytes);
        Ok(())
    });
    work.finish()?;
    Ok(seen.take())
}

/// Does it to a chain that it has made.
pub fn commit_or_rebase(seed: u64, what: Merge, breaks: bool) -> Cuts {
    let empty = [BASE, OTHER, TOP].map(|name| (name, FileImage::new(0)));
    let made = Work::begin(seed, empty, profile(seed), |host| make(host, seed));
    let files = made.finish()?;
    let before = disk(seed, &files, TOP)?;
    let mut work = Work::begin(seed, files, profile(seed), async move |host| {
        let done = match what {
            Merge::Commit => commit(&host, breaks).await,
            Merge::Rebase => rebase(&host, seed, Some(OTHER), breaks).await,
            Merge::StandAlone => rebase(&host, seed, None, breaks).await,
        };
        done.map_err(failed)
    });
    let same = |files: &Files| {
        if disk(seed, files, TOP)? != before {
            return Err("another disk".to_owned());
        }
        for (name, file) in files {
            judge::check(file, shape(seed)).map_err(|wrong| format!("{name}: {wrong}"))?;
        }
        Ok(())
    };
    let cuts = work.judged(seed, 20, same)?;
    judge_end(seed, &work.host.images(), &before, what)?;
    Ok(cuts)
}

/// What the work was for.
fn judge_end(seed: u64, files: &Files, before: &[u8], what: Merge) -> Result<(), String> {
    for (name, file) in files {
        let leaks = judge::check(file, shape(seed))?.leaks;
        if leaks > 0 {
            return Err(format!("{name} has {leaks} leaked clusters"));
        }
    }
    let header = header(&files[TOP])?;
    let done = match what {
        Merge::Commit => disk(seed, files, BASE)?.starts_with(before),
        Merge::Rebase => header.backing_file() == Some(OTHER.as_bytes()),
        Merge::StandAlone => header.backing_file().is_none(),
    };
    match done {
        true => Ok(()),
        false => Err(format!("{what:?} has ended and is not done")),
    }
}
