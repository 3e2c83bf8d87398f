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
        })
    }

    /// Says what chunks in a row are; more than one are zeros. Each chunk is told once.
    pub fn add(&mut self, chunk: u64, count: u64, stored: Stored) {
        // Both are below the largest disk's number of chunks.
        let (chunk, count) = (chunk as u32, count as u32);
        let what = match stored {
            // A chunk of a whole disk that is not named is zeros.
            Stored::Zero if self.parent.is_none() => return,
            Stored::Zero => Run::Zeros(count),
            Stored::Plain(digest) => Run::Plain(digest),
            Stored::Zstd(digest) => Run::Zstd(digest),
        };
        self.entries.push(Entry { chunk, what });
    }

    /// Chunks that are stored.
    pub fn stored_chunks(&self) -> usize {
        let stored = |entry: &&Entry| !matches!(entry.what, Run::Zeros(_));
        self.entries.iter().filter(stored).count()
    }

    /// The manifest as it is in the store, and its digest.
    pub fn finish(mut self) -> (Bytes, Digest) {
        self.entries.sort_unstable_by_key(|entry| entry.chunk);
        self.entries
            .dedup_by(|next, run| match (run.what, next.what) {
                (Run::Zeros(first), Run::Zeros(more)) if run.end() == u64::from(next.chunk) => {
                    run.what = Run::Zeros(first + more);
                    true
                }
                _ => false,
            });
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
        }
        let digest = Digest::of(text.as_bytes());
        let _ = writeln!(text, "end {digest}");
        (text.into(), digest)
    }
}

/// Reads a manifest, piece by piece.
#[derive(Default)]
pub(super) struct Parser {
    /// Of the line that has not ended yet.
    line: Vec<u8>,
    hasher: blake3::Hasher,
    head: Option<(u64, Option<Parent>)>,
    entries: Vec<Entry>,
    digest: Option<Digest>,
}

impl Parser {
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
        format!("line {} of the manifest {what}", self.entries.len() + 2)
    }

    fn take_line(&mut self, line: &[u8]) -> Result<(), String> {
        if self.digest.is_some() {
            return Err(self.wrong("comes after its end"));
        }
        let Ok(text) = std::str::from_utf8(line) else {
            return Err(self.wrong("is no text"));
        };
        let Some((size_bytes, _)) = self.head else {
            self.head = Some(parse_head(text)?);
            self.hash(line);
            return Ok(());
        };
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
        let start = self.entries.last().map_or(0, Entry::end);
        if u64::from(entry.chunk) < start {
            return Err(self.wrong("is not in order"));
        }
        if entry.end() > size_bytes.div_ceil(CHUNK_BYTES) {
            return Err(self.wrong("is beyond the end of the disk"));
        }
        self.entries.push(entry);
        self.hash(line);
        Ok(())
    }

    fn hash(&mut self, line: &[u8]) {
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
        let mut parser = Parser::default();
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
        builder.add(9, 1, Stored::Plain(Digest::of(b"9")));
        builder.add(3, 2, Stored::Zero);
        builder.add(5, 1, Stored::Zero);
        builder.add(1, 1, Stored::Zstd(Digest::of(b"1")));
        builder.finish()
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
