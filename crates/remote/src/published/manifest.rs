//! The manifest of a published image: a line of JSON, a line a chunk, and a line with the digest of those before.
//!
//! It is read piece by piece: nothing is kept of it but its entries, 40 bytes each, and one line.

use std::fmt::Write as _;

use bytes::Bytes;

use super::CHUNK_BYTES;
use super::chunk::{Digest, Stored};
use super::place::is_image_name;

/// The version of the format.
const VERSION: u64 = 1;
/// In the first line: what it is, with the version.
const MARK: &str = "gaur-published";
/// Largest disk, in bytes: 64 TiB.
const SIZE_MAX: u64 = 1 << 46;
/// Longest manifest, in bytes.
pub(super) const LEN_MAX: u64 = 1 << 30;
/// Most entries that are read, of an image and those below it together.
pub(super) const ENTRIES_MAX: usize = 1 << 24;
/// Shortest line of a chunk that is stored.
const STORED_LINE_MIN: u64 = 72;
/// Longest first line, and longest line of a chunk.
const HEAD_MAX: usize = 4096;
const LINE_MAX: usize = 128;

/// The image below, of which a top layer alone was published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The name of its manifest, beside this one.
    pub name: String,
    /// The digest of its manifest.
    pub digest: Digest,
}

/// Chunks in a row: one that is stored, or some of zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    chunk: u32,
    what: Run,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    Zeros(u32),
    Plain(Digest),
    Zstd(Digest),
}

impl Entry {
    fn end(&self) -> u64 {
        let count = match self.what {
            Run::Zeros(count) => count,
            Run::Plain(_) | Run::Zstd(_) => 1,
        };
        u64::from(self.chunk) + u64::from(count)
    }
}

/// What a published image is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    size_bytes: u64,
    parent: Option<Parent>,
    entries: Vec<Entry>,
    digest: Digest,
}

impl Manifest {
    /// Size of the guest's disk.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// What is below a top layer.
    pub fn parent(&self) -> Option<&Parent> {
        self.parent.as_ref()
    }

    /// The digest of the manifest, which stands for the image.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Objects that it names, as often as it names them.
    pub fn objects(&self) -> impl Iterator<Item = (Digest, bool)> {
        let object = |entry: &Entry| match entry.what {
            Run::Zeros(_) => None,
            Run::Plain(digest) => Some((digest, false)),
            Run::Zstd(digest) => Some((digest, true)),
        };
        self.entries.iter().filter_map(object)
    }

    /// Entries that are kept of it.
    pub(super) fn entries(&self) -> usize {
        self.entries.len()
    }

    #[cfg(test)]
    pub(super) fn parse(bytes: &[u8]) -> Result<Manifest, String> {
        let mut parser = Parser::new(ENTRIES_MAX);
        parser.feed(bytes)?;
        parser.finish()
    }

    /// What a chunk is; nothing when it is not named.
    pub(super) fn find(&self, chunk: u64) -> Option<Stored> {
        let after = |entry: &Entry| u64::from(entry.chunk) <= chunk;
        let behind = self.entries.partition_point(after);
        let entry = self.entries.get(behind.checked_sub(1)?)?;
        let found = match entry.what {
            Run::Zeros(_) => Stored::Zero,
            Run::Plain(digest) => Stored::Plain(digest),
            Run::Zstd(digest) => Stored::Zstd(digest),
        };
        (chunk < entry.end()).then_some(found)
    }
}

/// Collects what a new manifest says, in any order.
#[derive(Debug)]
pub struct Builder {
    size_bytes: u64,
    parent: Option<Parent>,
    entries: Vec<Entry>,
    stored: usize,
}

impl Builder {
    /// Of a disk of so many bytes.
    ///
    /// # Errors
    /// In words, when the disk is too large.
    pub fn new(size_bytes: u64, parent: Option<Parent>) -> Result<Builder, String> {
        if size_bytes > SIZE_MAX {
            return Err(format!("the disk is larger than {SIZE_MAX} bytes"));
        }
        Ok(Builder {
            size_bytes,
            parent,
            entries: Vec::new(),
            stored: 0,
        })
    }

    /// Says what chunks in a row are; more than one are zeros. Each chunk is told once.
    ///
    /// # Errors
    /// In words, when the manifest becomes too long.
    pub fn add(&mut self, chunk: u64, count: u64, stored: Stored) -> Result<(), String> {
        // Both are below the largest disk's number of chunks.
        let (chunk, count) = (chunk as u32, count as u32);
        let what = match stored {
            // A chunk of a whole disk that is not named is zeros.
            Stored::Zero if self.parent.is_none() => return Ok(()),
            Stored::Zero => Run::Zeros(count),
            Stored::Plain(digest) => Run::Plain(digest),
            Stored::Zstd(digest) => Run::Zstd(digest),
        };
        if !matches!(what, Run::Zeros(_)) {
            self.stored += 1;
        }
        if self.stored as u64 * STORED_LINE_MIN > LEN_MAX {
            return Err(too_long());
        }
        self.entries.push(Entry { chunk, what });
        Ok(())
    }

    /// Chunks that are stored.
    pub fn stored_chunks(&self) -> usize {
        self.stored
    }

    /// The manifest as it is in the store, and its digest.
    ///
    /// # Errors
    /// In words, when nobody would read it: it is too long.
    pub fn finish(self) -> Result<(Bytes, Digest), String> {
        self.finish_within(LEN_MAX)
    }

    fn finish_within(mut self, len_max: u64) -> Result<(Bytes, Digest), String> {
        self.entries.sort_unstable_by_key(|entry| entry.chunk);
        self.entries
            .dedup_by(|next, run| match (run.what, next.what) {
                (Run::Zeros(first), Run::Zeros(more)) if run.end() == u64::from(next.chunk) => {
                    run.what = Run::Zeros(first + more);
                    true
                }
                _ => false,
            });
        if self.entries.len() > ENTRIES_MAX {
            return Err(too_long());
        }
        let mut head = serde_json::json!({
            MARK: VERSION,
            "size_bytes": self.size_bytes,
            "chunk_bytes": CHUNK_BYTES,
            "digest": "blake3",
        });
        if let Some(Parent { name, digest }) = &self.parent {
            head["parent"] = serde_json::json!({"name": name, "digest": digest.to_string()});
        }
        let mut text = format!("{head}\n");
        for Entry { chunk, what } in &self.entries {
            // Writing to a string does not fail.
            let _ = match what {
                Run::Zeros(count) => writeln!(text, "{chunk} zero {count}"),
                Run::Plain(digest) => writeln!(text, "{chunk} plain {digest}"),
                Run::Zstd(digest) => writeln!(text, "{chunk} zstd {digest}"),
            };
            if text.len() as u64 > len_max {
                return Err(too_long());
            }
        }
        let digest = Digest::of(text.as_bytes());
        let _ = writeln!(text, "end {digest}");
        match text.len() as u64 > len_max {
            true => Err(too_long()),
            false => Ok((text.into(), digest)),
        }
    }
}

fn too_long() -> String {
    format!(
        "the manifest would be longer than {LEN_MAX} bytes or have more than {ENTRIES_MAX} lines: the disk holds too much"
    )
}

/// Reads a manifest, piece by piece.
pub(super) struct Parser {
    /// Of the line that has not ended yet.
    line: Vec<u8>,
    hasher: blake3::Hasher,
    head: Option<(u64, Option<Parent>)>,
    entries: Vec<Entry>,
    entries_max: usize,
    /// Lines that were taken, and where the last of them ends.
    lines: u64,
    end: u64,
    digest: Option<Digest>,
}

impl Parser {
    pub(super) fn new(entries_max: usize) -> Parser {
        Parser {
            line: Vec::new(),
            hasher: blake3::Hasher::new(),
            head: None,
            entries: Vec::new(),
            entries_max,
            lines: 0,
            end: 0,
            digest: None,
        }
    }

    /// Takes more bytes; the error is in words.
    pub(super) fn feed(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            let max = if self.head.is_none() {
                HEAD_MAX
            } else {
                LINE_MAX
            };
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let part = bytes.get(..end.unwrap_or(bytes.len())).unwrap_or_default();
            if self.line.len() + part.len() > max {
                return Err(match &self.head {
                    None => "it is no manifest of a published image".to_owned(),
                    Some(_) => self.wrong("is too long"),
                });
            }
            self.line.extend_from_slice(part);
            let Some(end) = end else {
                return Ok(());
            };
            bytes = bytes.get(end + 1..).unwrap_or_default();
            let line = std::mem::take(&mut self.line);
            self.take_line(&line)?;
        }
        Ok(())
    }

    /// All bytes were taken.
    pub(super) fn finish(self) -> Result<Manifest, String> {
        let (Some((size_bytes, parent)), Some(digest), true) =
            (self.head, self.digest, self.line.is_empty())
        else {
            return Err("the manifest has no end: it is cut off, or is none".to_owned());
        };
        Ok(Manifest {
            size_bytes,
            parent,
            entries: self.entries,
            digest,
        })
    }

    fn wrong(&self, what: &str) -> String {
        format!("line {} of the manifest {what}", self.lines + 1)
    }

    fn take_line(&mut self, line: &[u8]) -> Result<(), String> {
        if self.digest.is_some() {
            return Err(self.wrong("comes after its end"));
        }
        let Ok(text) = std::str::from_utf8(line) else {
            return Err(self.wrong("is no text"));
        };
        let Some((size_bytes, parent)) = &self.head else {
            self.head = Some(parse_head(text)?);
            self.hash(line);
            return Ok(());
        };
        let (size_bytes, is_top) = (*size_bytes, parent.is_some());
        if let Some(digest) = text.strip_prefix("end ") {
            let own = Digest(*self.hasher.finalize().as_bytes());
            if Digest::parse(digest) != Some(own) {
                return Err("the manifest was changed: its digest is another".to_owned());
            }
            self.digest = Some(own);
            return Ok(());
        }
        let Some(entry) = parse_entry(text) else {
            return Err(self.wrong("says nothing of a chunk"));
        };
        if u64::from(entry.chunk) < self.end {
            return Err(self.wrong("is not in order"));
        }
        if entry.end() > size_bytes.div_ceil(CHUNK_BYTES) {
            return Err(self.wrong("is beyond the end of the disk"));
        }
        self.end = entry.end();
        self.hash(line);
        self.keep(entry, is_top)
    }

    /// Keeps what is not known without it.
    fn keep(&mut self, entry: Entry, is_top: bool) -> Result<(), String> {
        if let Run::Zeros(more) = entry.what {
            if !is_top {
                return Ok(());
            }
            if let Some(last) = self.entries.last_mut()
                && last.end() == u64::from(entry.chunk)
                && let Run::Zeros(first) = &mut last.what
            {
                *first += more;
                return Ok(());
            }
        }
        if self.entries.len() >= self.entries_max {
            return Err(format!(
                "the manifest and those below it name more than {ENTRIES_MAX} chunks"
            ));
        }
        self.entries.push(entry);
        Ok(())
    }

    fn hash(&mut self, line: &[u8]) {
        self.lines += 1;
        self.hasher.update(line).update(b"\n");
    }
}

fn parse_head(line: &str) -> Result<(u64, Option<Parent>), String> {
    let none = || "it is no manifest of a published image".to_owned();
    let head: serde_json::Value = serde_json::from_str(line).map_err(|_| none())?;
    let version = head.get(MARK).ok_or_else(none)?;
    if version.as_u64() != Some(VERSION) {
        return Err(format!(
            "the manifest is of version {}, and only {VERSION} is known",
            version.as_u64().unwrap_or_default()
        ));
    }
    let chunk_bytes = head.get("chunk_bytes").and_then(serde_json::Value::as_u64);
    if chunk_bytes != Some(CHUNK_BYTES) || head.get("digest").is_some_and(|name| name != "blake3") {
        return Err(format!(
            "the manifest's chunks are not {CHUNK_BYTES} bytes by BLAKE3"
        ));
    }
    let size_bytes = head.get("size_bytes").and_then(serde_json::Value::as_u64);
    let size_bytes = size_bytes.filter(|size| *size <= SIZE_MAX);
    let size_bytes = size_bytes.ok_or("the manifest's size is none that a disk can have")?;
    let parent = match head.get("parent") {
        None | Some(serde_json::Value::Null) => None,
        Some(parent) => {
            let text = |key: &str| parent.get(key).and_then(serde_json::Value::as_str);
            let name = text("name").filter(|name| is_image_name(name));
            let digest = text("digest").and_then(Digest::parse);
            let (Some(name), Some(digest)) = (name, digest) else {
                return Err("the manifest's parent is none".to_owned());
            };
            let name = name.to_owned();
            Some(Parent { name, digest })
        }
    };
    Ok((size_bytes, parent))
}

fn parse_entry(line: &str) -> Option<Entry> {
    let mut words = line.split(' ');
    let (chunk, kind, value) = (words.next()?, words.next()?, words.next()?);
    let what = match kind {
        "zero" => Run::Zeros(number(value).filter(|count| *count > 0)?),
        "plain" => Run::Plain(Digest::parse(value)?),
        "zstd" => Run::Zstd(Digest::parse(value)?),
        _ => return None,
    };
    let chunk = number(chunk)?;
    words.next().is_none().then_some(Entry { chunk, what })
}

/// A number as it is written: digits, without zeros before.
fn number(text: &str) -> Option<u32> {
    let number: u32 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bytes: &[u8], step: usize) -> Result<Manifest, String> {
        let mut parser = Parser::new(ENTRIES_MAX);
        for piece in bytes.chunks(step) {
            parser.feed(piece)?;
            assert!(parser.line.len() <= HEAD_MAX);
        }
        parser.finish()
    }

    fn sample(parent: bool) -> (Bytes, Digest) {
        let parent = parent.then(|| Parent {
            name: "base.gaur".to_owned(),
            digest: Digest::of(b"base"),
        });
        let mut builder = Builder::new(9 * CHUNK_BYTES + 5, parent).unwrap();
        for (chunk, count, stored) in [
            (9, 1, Stored::Plain(Digest::of(b"9"))),
            (3, 2, Stored::Zero),
            (5, 1, Stored::Zero),
            (1, 1, Stored::Zstd(Digest::of(b"1"))),
        ] {
            builder.add(chunk, count, stored).unwrap();
        }
        builder.finish().unwrap()
    }

    /// The lines between head and end, with the right digest.
    fn with_lines(head: &str, lines: &str) -> String {
        let text = format!("{head}\n{lines}");
        let digest = Digest::of(text.as_bytes());
        format!("{text}end {digest}\n")
    }

    const HEAD: &str = r#"{"gaur-published":1,"size_bytes":1048577,"chunk_bytes":262144}"#;

    #[test]
    fn manifest_round_trips_in_pieces_of_any_size() {
        for parent in [true, false] {
            let (bytes, digest) = sample(parent);
            for step in [1, 7, 4096] {
                let manifest = parse(&bytes, step).unwrap();
                assert_eq!(manifest.digest(), digest);
                assert_eq!(manifest.size_bytes(), 9 * CHUNK_BYTES + 5);
                assert_eq!(manifest.find(1), Some(Stored::Zstd(Digest::of(b"1"))));
                assert_eq!(manifest.find(9), Some(Stored::Plain(Digest::of(b"9"))));
                let zeros = parent.then_some(Stored::Zero);
                assert_eq!(
                    [0, 2, 6, 8, 10].map(|chunk| manifest.find(chunk)),
                    [None; 5]
                );
                assert_eq!([3, 4, 5].map(|chunk| manifest.find(chunk)), [zeros; 3]);
                assert_eq!(manifest.objects().count(), 2);
            }
        }
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_noticed() {
        let (bytes, _) = sample(true);
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len], 64).is_err(), "{len} bytes");
        }
        for at in 0..bytes.len() {
            for bit in [1, 0x20, 0x80] {
                let mut wrong = bytes.to_vec();
                wrong[at] ^= bit;
                assert!(parse(&wrong, 64).is_err(), "byte {at}, bit {bit}");
            }
        }
        let more = [&bytes[..], b"0 zero 1\n"].concat();
        assert!(parse(&more, 64).is_err());
    }

    #[test]
    fn entries_are_bounded_and_zeros_in_a_row_are_one() {
        let digest = Digest::of(b"x");
        let parent = format!(
            r#"{}, "parent":{{"name":"b.gaur","digest":"{digest}"}}}}"#,
            &HEAD[..HEAD.len() - 1]
        );
        let entries = |head: &str, lines: &str, max: usize| {
            let mut parser = Parser::new(max);
            parser.feed(with_lines(head, lines).as_bytes())?;
            parser.finish().map(|manifest| manifest.entries())
        };
        let row = "0 zero 1\n1 zero 1\n2 zero 3\n";
        assert_eq!(entries(&parent, row, 1), Ok(1));
        assert_eq!(entries(HEAD, row, 0), Ok(0));
        let apart = "0 zero 1\n2 zero 1\n4 zero 1\n";
        assert_eq!(entries(&parent, apart, 3), Ok(3));
        assert!(entries(&parent, apart, 2).is_err());
    }

    #[test]
    fn a_manifest_that_is_too_long_is_not_made() {
        let mut builder = Builder::new(1 << 30, None).unwrap();
        for chunk in 0..100 {
            let stored = Stored::Plain(Digest::of(b"x"));
            builder.add(chunk, 1, stored).unwrap();
        }
        assert!(builder.finish_within(7000).is_err());
    }

    #[test]
    fn hostile_lines_are_refused_in_words() {
        let digest = Digest::of(b"x");
        assert!(parse(with_lines(HEAD, "").as_bytes(), 64).is_ok());
        assert!(parse(with_lines(HEAD, "4 zero 1\n").as_bytes(), 64).is_ok());
        for lines in [
            "5 zero 1\n".to_owned(),
            "0 zero 0\n".to_owned(),
            "0 zero 6\n".to_owned(),
            "0 zero 4294967295\n".to_owned(),
            "4294967295 zero 4294967295\n".to_owned(),
            "-1 zero 1\n".to_owned(),
            "+1 zero 1\n".to_owned(),
            "01 zero 1\n".to_owned(),
            "1 zero 1 1\n".to_owned(),
            "1  zero 1\n".to_owned(),
            "1 zero\n".to_owned(),
            "\n".to_owned(),
            "1 lz4 1\n".to_owned(),
            "2 zero 2\n3 zero 1\n".to_owned(),
            format!("1 plain {digest}\n1 plain {digest}\n"),
            format!("1 plain {digest}0\n"),
            format!("1 plain {}\n", digest.to_string().to_uppercase()),
            format!("1 plain {}\n", "é".repeat(32)),
            format!("{}\n", "1".repeat(1 << 20)),
        ] {
            assert!(
                parse(with_lines(HEAD, &lines).as_bytes(), 64).is_err(),
                "{lines}"
            );
        }
        let parent = |name: &str| {
            format!(
                r#"{}, "parent":{{"name":"{name}","digest":"{digest}"}}}}"#,
                &HEAD[..HEAD.len() - 1]
            )
        };
        assert!(parse(with_lines(&parent("b.gaur"), "").as_bytes(), 64).is_ok());
        for head in [
            HEAD.replace("1048577", "70368744177665"),
            HEAD.replace("1048577", "-1"),
            HEAD.replace("262144", "0"),
            HEAD.replace(":1,", ":2,"),
            "[".repeat(4000),
            "{}".to_owned(),
            "QFI\u{0}".to_owned(),
            parent("../b.gaur"),
            parent("a/b.gaur"),
            parent("b"),
            parent(".gaur"),
        ] {
            assert!(
                parse(with_lines(&head, "").as_bytes(), 64).is_err(),
                "{head}"
            );
        }
        // Without any line end nothing is kept.
        assert!(parse(&vec![b'{'; 1 << 20], 1 << 16).is_err());
    }
}
