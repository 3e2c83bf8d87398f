//! One request against the device, up to its finished reply.
//!
//! A request was checked against the export by the protocol. Nothing of a reply is sent before all
//! of it is there, so an error always replaces the reply as a whole.

use std::ops::Range;
use std::rc::Rc;

use gaur_block::{Device, Errno, Request};

use super::connection::Connection;
use super::job::{Job, PARTS_MAX};
use crate::nbd::proto::wire::{
    ALLOCATION_CONTEXT_ID, BITMAP_CONTEXT_ID, DEPTH_CONTEXT_ID, STATE_DIRTY,
};
use crate::nbd::proto::{Command, Contexts, Kind, Style, reply};
use crate::serve::Disk;

/// Reads of this length and longer ask for zeros first, which then need not travel; for shorter
/// ones asking costs more than it saves.
const SPARSE_MIN_BYTES: u64 = 64 << 10;
/// Most runs of one sparse read, each a header and maybe data.
const RUNS_MAX: usize = PARTS_MAX / 2;
/// A shorter run of zeros is sent as data: a chunk of its own costs as much.
const HOLE_MIN_BYTES: u64 = 4096;
/// Most memory that a reply to block status takes.
const STATUS_BYTES_MAX: usize = 64 << 10;
/// Memory of a chunk's header, and of an extent, at most.
const STATUS_CHUNK_BYTES: usize = 64;
const EXTENT_BYTES: usize = 16;
/// Most extents of one context in it.
const EXTENTS_MAX: usize = 2000;
/// Most questions to the device for one block status request.
const LOOKUPS_MAX: u32 = 4096;
/// Reading ahead goes in pieces of this length.
const CACHE_PIECE_BYTES: u64 = 1 << 20;
/// Most that one request reads ahead; it is a hint, and not meant for reading a whole disk.
const CACHE_MAX_BYTES: u64 = 256 << 20;

/// Payload memory a command needs in bytes.
pub(super) fn payload_bytes(command: &Command) -> usize {
    match command.kind {
        Kind::Read { .. } | Kind::Write => command.len_bytes as usize,
        Kind::Cache => command.len_bytes.min(CACHE_PIECE_BYTES) as usize,
        // Room in the budget for the head, which grows to that at most.
        Kind::BlockStatus { one: false, .. } => STATUS_BYTES_MAX,
        Kind::BlockStatus { one: true, .. } => 0,
        Kind::Flush | Kind::Trim | Kind::WriteZeroes { .. } => 0,
    }
}

pub(super) async fn run<D: Device + 'static>(
    connection: &Rc<Connection<D>>,
    job: &mut Job,
) -> Result<(), Errno> {
    let command = job.command;
    let (offset_bytes, len_bytes, fua) = (command.offset_bytes, command.len_bytes, command.fua);
    let disk = connection.disk();
    match command.kind {
        Kind::Read { unfragmented } => {
            let simple = connection.session.style == Style::Simple;
            if !simple && !unfragmented && len_bytes >= SPARSE_MIN_BYTES {
                return sparse_read(disk, job).await;
            }
            read(disk, job, 0..len_bytes as usize).await?;
            job.succeed_with_payload(len_bytes as u32);
            return Ok(());
        }
        Kind::BlockStatus { one, contexts } => {
            return block_status(connection, job, one, contexts).await;
        }
        Kind::Cache => cache(connection, job).await?,
        Kind::Write => {
            let source = (&job.payload()[..len_bytes as usize]).into();
            disk.write(offset_bytes, source, fua).await?;
        }
        Kind::Flush => disk.ask(Request::Flush).await?,
        Kind::WriteZeroes { .. } | Kind::Trim if len_bytes == 0 => {}
        // A client that asks so would rather know than wait; it writes zeros then.
        Kind::WriteZeroes { fast: true, .. } if !disk.zeroes_fast() => {
            return Err(Errno::EOPNOTSUPP);
        }
        Kind::WriteZeroes { may_unmap, .. } => {
            let request = Request::WriteZeroes {
                offset_bytes,
                len_bytes,
                fua,
                may_unmap,
            };
            disk.ask(request).await?;
        }
        Kind::Trim => trim(disk, command).await?,
    }
    job.succeed();
    Ok(())
}

async fn trim<D: Device>(disk: &Disk<D>, command: Command) -> Result<(), Errno> {
    let discard = Request::Discard {
        offset_bytes: command.offset_bytes,
        len_bytes: command.len_bytes,
    };
    match disk.ask(discard).await {
        // A discard is a hint; a device that cannot has done what it could.
        Ok(()) | Err(Errno::EOPNOTSUPP) if command.fua => disk.ask(Request::Flush).await,
        Err(Errno::EOPNOTSUPP) => Ok(()),
        done => done,
    }
}

/// Fills a range of the payload from where it lies in the export.
async fn read<D: Device>(disk: &Disk<D>, job: &mut Job, range: Range<usize>) -> Result<(), Errno> {
    let offset_bytes = job.command.offset_bytes + range.start as u64;
    let target = (&mut job.payload()[range]).into();
    disk.read(offset_bytes, target).await
}

/// Reads ahead by reading and forgetting: devices have no other way to be warmed up.
async fn cache<D: Device + 'static>(
    connection: &Rc<Connection<D>>,
    job: &mut Job,
) -> Result<(), Errno> {
    let len_bytes = job.command.len_bytes.min(CACHE_MAX_BYTES) as usize;
    let mut at = 0;
    while at < len_bytes && !connection.draining() {
        let len = job.payload().len().min(len_bytes - at);
        let offset_bytes = job.command.offset_bytes + at as u64;
        let target = (&mut job.payload()[..len]).into();
        connection.disk().read(offset_bytes, target).await?;
        at += len;
    }
    Ok(())
}

/// A run of a sparse read.
#[derive(Clone, Copy)]
struct Run {
    len: usize,
    zero: bool,
}

async fn sparse_read<D: Device>(disk: &Disk<D>, job: &mut Job) -> Result<(), Errno> {
    let (offset_bytes, len_bytes) = (job.command.offset_bytes, job.command.len_bytes);
    let mut runs = [Run {
        len: 0,
        zero: false,
    }; RUNS_MAX];
    let count = find_runs(disk, offset_bytes, len_bytes as usize, &mut runs).await;
    let mut at = 0;
    for run in &runs[..count] {
        if !run.zero {
            read(disk, job, at..at + run.len).await?;
        }
        at += run.len;
    }
    let asked = job.asked;
    let mut at = 0;
    for (index, run) in runs[..count].iter().enumerate() {
        let done = index + 1 == count;
        let offset_bytes = offset_bytes + at as u64;
        let len_bytes = run.len as u32;
        if run.zero {
            job.reply_bytes(&reply::hole(&asked, offset_bytes, len_bytes, done));
        } else {
            job.reply_bytes(&reply::data(&asked, offset_bytes, len_bytes, done));
            job.reply_payload(at..at + run.len);
        }
        at += run.len;
    }
    Ok(())
}

/// Cuts a range into runs of zeros and of data; returns how many. When there are too many, or the
/// device cannot say, the rest counts as data.
async fn find_runs<D: Device>(
    disk: &Disk<D>,
    offset_bytes: u64,
    len: usize,
    runs: &mut [Run; RUNS_MAX],
) -> usize {
    let (mut count, mut at, mut lookups) = (0, 0, 0);
    while at < len {
        let left = len - at;
        let mut run = Run {
            len: left,
            zero: false,
        };
        lookups += 1;
        if count < RUNS_MAX - 1
            && lookups <= 4 * RUNS_MAX
            && let Ok(found) = disk.status(offset_bytes + at as u64, left as u64).await
        {
            run.len = found.len_bytes.clamp(1, left as u64) as usize;
            run.zero = found.zero && found.len_bytes >= HOLE_MIN_BYTES;
        }
        match runs[..count].last_mut() {
            Some(last) if last.zero == run.zero => last.len += run.len,
            _ => {
                runs[count] = run;
                count += 1;
            }
        }
        at += run.len;
    }
    count
}

/// A chunk for each context.
async fn block_status<D: Device + 'static>(
    connection: &Rc<Connection<D>>,
    job: &mut Job,
    one: bool,
    contexts: Contexts,
) -> Result<(), Errno> {
    let disk = connection.disk();
    let export = &connection.device.entry().export;
    let count = contexts.count().max(1) as usize;
    let room = STATUS_BYTES_MAX / count - STATUS_CHUNK_BYTES;
    let most = if one {
        1
    } else {
        (room / EXTENT_BYTES).min(EXTENTS_MAX)
    };
    for (at, id) in contexts.ids().enumerate() {
        let asked = ContextAsked {
            id,
            done: at + 1 == count,
            most: most as u32,
        };
        match id {
            ALLOCATION_CONTEXT_ID => {
                let state_at = async |offset, left| {
                    let found = disk.status(offset, left).await?;
                    Ok((found.len_bytes, reply::state(found.allocated, found.zero)))
                };
                context_status(job, asked, state_at).await?;
            }
            DEPTH_CONTEXT_ID => {
                let state_at = async |offset, left| disk.allocation_depth(offset, left).await;
                context_status(job, asked, state_at).await?;
            }
            _ => {
                let at = (id - BITMAP_CONTEXT_ID) as usize;
                let bitmap = export.bitmaps.get(at).ok_or(Errno::EINVAL)?;
                let state_at = async |offset, left| {
                    let (len, is_marked) = (bitmap.run_at)(offset, left);
                    Ok((len, if is_marked { STATE_DIRTY } else { 0 }))
                };
                context_status(job, asked, state_at).await?;
            }
        }
    }
    Ok(())
}

/// A context whose chunk is written.
#[derive(Clone, Copy)]
struct ContextAsked {
    id: u32,
    /// It is the last.
    done: bool,
    /// Most extents.
    most: u32,
}

/// The chunk of one context.
async fn context_status(
    job: &mut Job,
    context: ContextAsked,
    state_at: impl AsyncFn(u64, u64) -> Result<(u64, u32), Errno>,
) -> Result<(), Errno> {
    let (offset_bytes, len_bytes) = (job.command.offset_bytes, job.command.len_bytes);
    let asked = job.asked;
    let ContextAsked { id, done, most } = context;
    let (mut at, mut extents) = (0, 0);
    // Length and state of the extent that still grows.
    let mut last = (0, 0);
    // The header says how many extents there are, so it is written over at the end.
    let start = job.reply_len();
    job.reply_bytes(&reply::status(&asked, id, 0, done));
    for _ in 0..LOOKUPS_MAX {
        if at == len_bytes {
            break;
        }
        let left = len_bytes - at;
        let (len, state) = state_at(offset_bytes + at, left).await?;
        let len = len.clamp(1, left);
        at += len;
        if last.0 > 0 && last.1 == state {
            last.0 += len;
            continue;
        }
        if last.0 > 0 {
            extents += 1;
            job.reply_bytes(&reply::extent(&asked, last.0, last.1));
            if extents == most {
                last.0 = 0;
                break;
            }
        }
        last = (len, state);
    }
    if last.0 > 0 {
        extents += 1;
        job.reply_bytes(&reply::extent(&asked, last.0, last.1));
    }
    job.rewrite(start, &reply::status(&asked, id, extents, done));
    debug_assert!(
        (1..=most).contains(&extents),
        "a status reply has an extent at least"
    );
    Ok(())
}
