//! The commands that move data, or ask where it is.

use std::fs::File;
use std::io::{self, Read, Write};
use std::rc::Rc;
use std::time::Instant;

use gaur_block::{Device, Errno, Payload, Request, Source, Target};
use gaur_engine::{CompressedCluster, Compressor, MapExtent, Queue};
use gaur_reactor::ReactorFile;

use super::commands::{number, pattern};
use super::flags::Words;
use super::report::{Served, Told, dump, reason, size};
use super::session::{OpenImage, Outcome, Session, Wrong};
use crate::failure::Failure;

/// Most bytes of a request, as in QEMU.
const REQUEST_BYTES_MAX: u64 = (1 << 31) - 512;
/// What is written unless a pattern is given.
const PATTERN: u8 = 0xcd;
/// What memory has before it is read into.
const UNREAD: u8 = 0xab;

type Disk = Rc<Queue<ReactorFile>>;

/// A range of the disk.
#[derive(Clone, Copy)]
struct Span {
    offset: u64,
    bytes: u64,
}

impl Span {
    fn of(offset: &str, lengths: &[String]) -> Result<Span, Wrong> {
        let offset = number(offset)?;
        let mut bytes = 0;
        for text in lengths {
            let len = number(text)?;
            bytes += len;
            if len > REQUEST_BYTES_MAX || bytes > REQUEST_BYTES_MAX {
                let line = format!("length cannot exceed {REQUEST_BYTES_MAX}, given {text}");
                return Err(Wrong::Line(line));
            }
        }
        Ok(Span { offset, bytes })
    }

    /// The operands of a command: where, and one length or `many`.
    fn read(words: &Words, many: bool) -> Result<Span, Wrong> {
        match &words.operands[..] {
            [offset, lengths @ ..] if lengths.len() == 1 || many && !lengths.is_empty() => {
                Span::of(offset, lengths)
            }
            _ => Err(Wrong::Usage),
        }
    }

    /// Compressed data comes in whole sectors.
    fn check_sectors(self) -> Result<(), Wrong> {
        for (value, what) in [(self.offset, "offset"), (self.bytes, "count")] {
            if value % 512 != 0 {
                let line = format!("{value} is not a sector-aligned value for '{what}'");
                return Err(Wrong::Line(line));
            }
        }
        Ok(())
    }

    /// As QEMU, which fails requests that reach beyond the disk with EIO.
    fn check(self, disk: &Disk) -> Result<(), Errno> {
        let end = self.offset.checked_add(self.bytes);
        match end.is_some_and(|end| end <= disk.size_bytes()) {
            true => Ok(()),
            false => Err(Errno::EIO),
        }
    }

    fn served(self, what: &'static str, since: Instant, told: Told) -> Served {
        Served {
            what,
            offset: self.offset as i64,
            bytes: self.bytes,
            time: since.elapsed(),
            told,
        }
    }
}

/// A part of what is read that is compared with a byte.
#[derive(Clone, Copy)]
struct Expected {
    pattern: u8,
    skip: u64,
    bytes: u64,
}

impl Expected {
    /// What `-P`, `-s` and `-l` say of a request of so many bytes.
    fn read(words: &Words, bytes: u64) -> Result<Option<Expected>, Wrong> {
        let Some(text) = words.value('P') else {
            return match words.has('l') || words.has('s') {
                true => Err(Wrong::Usage),
                false => Ok(None),
            };
        };
        let pattern = pattern(text)?;
        let skip = words.value('s').map_or(Ok(0), number)?;
        let left = bytes.checked_sub(skip);
        let len = words.value('l').map(number).transpose()?.or(left);
        match (left, len) {
            (Some(left), Some(len)) if len <= left => Ok(Some(Expected {
                pattern,
                skip,
                bytes: len,
            })),
            _ => Err(Wrong::Line(
                "pattern verification range exceeds end of read data".to_owned(),
            )),
        }
    }
}

/// A read that has ended.
struct Seen {
    span: Span,
    bytes: Vec<u8>,
    expected: Option<Expected>,
    dumped: bool,
    served: Served,
}

impl Seen {
    /// Prints what came of it. Returns whether all is as expected.
    fn print(&self, out: &mut dyn Write) -> io::Result<bool> {
        let wrong = self.expected.filter(|expected| {
            let part = self.bytes.iter().skip(expected.skip as usize);
            part.take(expected.bytes as usize)
                .any(|byte| *byte != expected.pattern)
        });
        if let Some(wrong) = wrong {
            let (at, len) = (self.span.offset + wrong.skip, wrong.bytes);
            writeln!(
                out,
                "Pattern verification failed at offset {at}, {len} bytes"
            )?;
        }
        if self.served.told != Told::Nothing {
            if self.dumped {
                dump(out, self.span.offset, &self.bytes)?;
            }
            self.served.print(out)?;
        }
        Ok(wrong.is_none())
    }
}

/// A request of the background that has ended.
pub struct Finished(Result<Ended, (&'static str, Errno)>);

enum Ended {
    Read(Seen),
    Write(Served),
}

impl Finished {
    /// Prints what came of it.
    pub fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.0 {
            Ok(Ended::Read(seen)) => seen.print(out).map(drop),
            Ok(Ended::Write(served)) => served.print(out),
            Err((what, errno)) => writeln!(out, "{what} failed: {}", reason(*errno)),
        }
    }
}

/// What a write does.
enum Data {
    Bytes(Vec<u8>),
    Compressed(Vec<u8>),
    Zeros { may_unmap: bool },
}

fn told(words: &Words) -> Told {
    match (words.has('q'), words.has('C')) {
        (true, _) => Told::Nothing,
        (_, true) => Told::Numbers,
        _ => Told::Lines,
    }
}

fn failed(what: &str, errno: Errno) -> Wrong {
    Wrong::Line(format!("{what} failed: {}", reason(errno)))
}

async fn read(disk: &Disk, span: Span) -> Result<Vec<u8>, Errno> {
    span.check(disk)?;
    let mut bytes = vec![UNREAD; span.bytes as usize];
    let offset_bytes = span.offset;
    let payload = Payload::Read(Target::memory(&mut bytes));
    disk.submit(Request::Read { offset_bytes }, payload).await?;
    Ok(bytes)
}

async fn write(disk: &Disk, span: Span, data: &Data, fua: bool) -> Result<(), Errno> {
    span.check(disk)?;
    let offset_bytes = span.offset;
    match data {
        Data::Bytes(bytes) => {
            let payload = Payload::Write(Source::memory(bytes));
            disk.submit(Request::Write { offset_bytes, fua }, payload)
                .await
        }
        Data::Zeros { may_unmap } => {
            let request = Request::WriteZeroes {
                offset_bytes,
                len_bytes: span.bytes,
                fua,
                may_unmap: *may_unmap,
            };
            disk.submit(request, Payload::None).await
        }
        Data::Compressed(bytes) => write_compressed(disk, offset_bytes, bytes).await,
    }
}

/// Stores whole clusters compressed, where the image has none of its own.
async fn write_compressed(disk: &Disk, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
    let level = None;
    let compressor = Compressor::new(disk.image(), level).map_err(|_| Errno::EOPNOTSUPP)?;
    let mut compressor = compressor.storing_zeros();
    let cluster = compressor.cluster_bytes();
    let end = offset + bytes.len() as u64;
    let whole = |at: u64| at.is_multiple_of(cluster as u64);
    if !whole(offset) || !whole(end) && end != disk.size_bytes() {
        return Err(Errno::EINVAL);
    }
    let mut packed = CompressedCluster::default();
    for (plain, at) in bytes.chunks(cluster).zip((offset..).step_by(cluster)) {
        let there = disk.map(at, plain.len() as u64).await?;
        if is_own(&there) && there.host_offset.is_some() {
            return Err(Errno::EIO);
        }
        compressor.compress(plain, &mut packed);
        disk.write_compressed(at, plain, &packed).await?;
    }
    Ok(())
}

/// Whether the image itself has the extent, not one below it.
fn is_own(extent: &MapExtent) -> bool {
    extent.depth == 0 && extent.present
}

impl Session<'_> {
    fn disk(&self) -> Result<Disk, Wrong> {
        Ok(Rc::clone(&self.image()?.queue))
    }

    /// `read`.
    pub(super) async fn read(&mut self, words: &Words) -> Outcome {
        if words.has('b') {
            return Err(Failure::new("-b: VM state is read by 'gaur snapshot extract'").into());
        }
        let span = Span::read(words, false)?;
        self.read_span(words, span, "read").await
    }

    /// `readv`.
    pub(super) async fn readv(&mut self, words: &Words) -> Outcome {
        let span = Span::read(words, true)?;
        self.read_span(words, span, "readv").await
    }

    async fn read_span(&mut self, words: &Words, span: Span, name: &str) -> Outcome {
        let expected = Expected::read(words, span.bytes)?;
        let disk = self.disk()?;
        let since = Instant::now();
        let bytes = self.beside(read(&disk, span)).await?;
        let bytes = bytes.map_err(|errno| failed(name, errno))?;
        let seen = Seen {
            span,
            bytes,
            expected,
            dumped: words.has('v'),
            served: span.served("read", since, told(words)),
        };
        match seen.print(self.out)? {
            true => Ok(()),
            false => Err(Wrong::Told),
        }
    }

    /// `write`.
    pub(super) async fn write(&mut self, words: &Words) -> Outcome {
        let has = |flag| words.has(flag);
        let refuse = |line: &str| Err(Wrong::Line(line.to_owned()));
        if has('b') {
            return Err(Failure::new("-b: VM state is written by 'gaur snapshot save'").into());
        }
        if has('f') && has('c') {
            return refuse("-f and -b or -c cannot be specified at the same time");
        }
        if has('n') && !has('z') {
            return refuse("-n requires -z to be specified");
        }
        if has('u') && !has('z') {
            return refuse("-u requires -z to be specified");
        }
        if ['z', 'P', 's']
            .into_iter()
            .filter(|flag| has(*flag))
            .count()
            > 1
        {
            return refuse("Only one of -z, -P, and -s can be specified at the same time");
        }
        let span = Span::read(words, false)?;
        if has('c') {
            span.check_sectors()?;
        }
        let fill = words.value('P').map_or(Ok(PATTERN), pattern)?;
        let data = match words.value('s') {
            _ if has('z') => Data::Zeros {
                may_unmap: has('u'),
            },
            Some(path) => Data::Bytes(repeated(path, span.bytes as usize)?),
            None => Data::Bytes(vec![fill; span.bytes as usize]),
        };
        let data = match data {
            Data::Bytes(bytes) if has('c') => Data::Compressed(bytes),
            data => data,
        };
        self.write_span(words, span, "write", &data).await
    }

    /// `writev`.
    pub(super) async fn writev(&mut self, words: &Words) -> Outcome {
        let span = Span::read(words, true)?;
        let fill = words.value('P').map_or(Ok(PATTERN), pattern)?;
        let data = Data::Bytes(vec![fill; span.bytes as usize]);
        self.write_span(words, span, "writev", &data).await
    }

    async fn write_span(&mut self, words: &Words, span: Span, name: &str, data: &Data) -> Outcome {
        let fua = words.has('f') || self.image()?.is_writethrough();
        let disk = self.disk()?;
        let since = Instant::now();
        let written = self.beside(write(&disk, span, data, fua)).await?;
        written.map_err(|errno| failed(name, errno))?;
        let served = span.served("wrote", since, told(words));
        Ok(served.print(self.out)?)
    }

    /// `aio_read`.
    pub(super) fn aio_read(&mut self, words: &Words) -> Outcome {
        let span = Span::read(words, true)?;
        let expected = Expected::read(words, span.bytes)?;
        let (dumped, told) = (words.has('v'), told(words));
        let disk = self.disk()?;
        let since = Instant::now();
        if words.has('i') {
            return Ok(());
        }
        self.pending.push(Box::pin(async move {
            let bytes = read(&disk, span).await.map_err(|errno| ("readv", errno));
            Finished(bytes.map(|bytes| {
                Ended::Read(Seen {
                    span,
                    bytes,
                    expected,
                    dumped,
                    served: span.served("read", since, told),
                })
            }))
        }));
        Ok(())
    }

    /// `aio_write`.
    pub(super) fn aio_write(&mut self, words: &Words) -> Outcome {
        let refuse = |line: &str| Err(Wrong::Line(line.to_owned()));
        if words.has('z') && words.operands.len() != 2 {
            return refuse("-z supports only a single length parameter");
        }
        if words.has('u') && !words.has('z') {
            return refuse("-u requires -z to be specified");
        }
        let span = Span::read(words, true)?;
        let fill = words.value('P').map_or(Ok(PATTERN), pattern)?;
        let data = match words.has('z') {
            true => Data::Zeros {
                may_unmap: words.has('u'),
            },
            false => Data::Bytes(vec![fill; span.bytes as usize]),
        };
        let fua = words.has('f') || self.image()?.is_writethrough();
        let (disk, told) = (self.disk()?, told(words));
        let since = Instant::now();
        if words.has('i') {
            return Ok(());
        }
        self.pending.push(Box::pin(async move {
            let written = write(&disk, span, &data, fua).await;
            let written = written.map_err(|errno| ("aio_write", errno));
            Finished(written.map(|()| Ended::Write(span.served("wrote", since, told))))
        }));
        Ok(())
    }

    /// `discard`.
    pub(super) async fn discard(&mut self, words: &Words) -> Outcome {
        let span = Span::read(words, false)?;
        let ignored = self.image().is_ok_and(OpenImage::ignores_discards);
        let disk = self.disk()?;
        let since = Instant::now();
        let discarded = async {
            span.check(&disk)?;
            if ignored {
                return Ok(());
            }
            let request = Request::Discard {
                offset_bytes: span.offset,
                len_bytes: span.bytes,
            };
            disk.submit(request, Payload::None).await
        };
        let discarded = self.beside(discarded).await?;
        discarded.map_err(|errno| failed("discard", errno))?;
        let served = span.served("discard", since, told(words));
        Ok(served.print(self.out)?)
    }

    /// `alloc`.
    pub(super) async fn alloc(&mut self, words: &Words) -> Outcome {
        let Some(offset) = words.operands.first() else {
            return Err(Wrong::Usage);
        };
        let offset = number(offset)?;
        let count = words.operands.get(1).map_or("512", String::as_str);
        let disk = self.disk()?;
        let left = disk.size_bytes().saturating_sub(offset);
        let count = number(count)?.min(left);
        let (mut at, mut own) = (offset, 0);
        while at < offset + count {
            let extent = self.extent(&disk, at, offset + count - at).await?;
            own += u64::from(is_own(&extent)) * extent.len_bytes;
            at += extent.len_bytes;
        }
        let place = size(offset as f64);
        Ok(writeln!(
            self.out,
            "{own}/{count} bytes allocated at offset {place}"
        )?)
    }

    /// `map`.
    pub(super) async fn map(&mut self) -> Outcome {
        let disk = self.disk()?;
        let end = disk.size_bytes();
        let mut run: Option<(u64, bool)> = None;
        let mut at = 0;
        while at < end {
            let extent = self.extent(&disk, at, end - at).await?;
            let own = is_own(&extent);
            if let Some((start, before)) = run.filter(|(_, before)| *before != own) {
                self.print_run(start, at, before)?;
                run = None;
            }
            run.get_or_insert((at, own));
            at += extent.len_bytes;
        }
        match run {
            Some((start, own)) => self.print_run(start, end, own),
            None => Ok(()),
        }
    }

    fn print_run(&mut self, start: u64, end: u64, own: bool) -> Outcome {
        let bytes = end - start;
        let (len, place) = (size(bytes as f64), size(start as f64));
        let what = if own {
            "    allocated"
        } else {
            "not allocated"
        };
        Ok(writeln!(
            self.out,
            "{len} ({bytes:#x}) bytes {what} at offset {place} ({start:#x})"
        )?)
    }

    async fn extent(&mut self, disk: &Disk, at: u64, len: u64) -> Result<MapExtent, Wrong> {
        let extent = self.beside(disk.map(at, len)).await?;
        let mut extent = extent.map_err(|errno| failed("map", errno))?;
        // What a raw file has not got are zeros of its own.
        extent.present |= extent.depth == 0 && disk.image().layers().len() == 1 && is_raw(disk);
        Ok(extent)
    }
}

fn is_raw(disk: &Disk) -> bool {
    let layers = disk.image().layers();
    layers
        .iter()
        .next()
        .is_some_and(|layer| layer.header().is_none())
}

/// The bytes of a file, over and over until there are so many.
fn repeated(path: &str, len: usize) -> Result<Vec<u8>, Wrong> {
    let failed = |error: io::Error| {
        let errno = Errno::from_raw(error.raw_os_error().unwrap_or_default());
        eprintln!("{path}: {}", reason(errno));
        Wrong::Told
    };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(len as u64)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.is_empty() {
        eprintln!("{path}: file is empty");
        return Err(Wrong::Told);
    }
    Ok(bytes.into_iter().cycle().take(len).collect())
}
