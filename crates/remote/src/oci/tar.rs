//! Finds a disk in a tar file by its headers alone.

use std::ops::Range;

use super::Found;
use crate::store::Fault;

const BLOCK: u64 = 512;
/// Bytes that are read at once: the headers of a layer with one file lie close together.
const WINDOW: u64 = 16 << 10;
/// Most headers that are looked at.
const HEADERS_MAX: usize = 256;
/// Longest extended header.
const EXTENDED_MAX: u64 = 64 << 10;

/// A file in a layer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct File {
    pub(super) name: String,
    pub(super) bytes: Range<u64>,
}

/// What a header says.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    name: String,
    len_bytes: u64,
    kind: u8,
}

/// The first regular file below `disk/`.
pub(super) async fn find_disk(layer: &Found, layer_bytes: u64) -> Result<Option<File>, Fault> {
    let mut window = Window {
        layer,
        layer_bytes,
        start: 0,
        bytes: Vec::new(),
    };
    let mut at = 0;
    let (mut long_name, mut long_len) = (None, None);
    for _ in 0..HEADERS_MAX {
        let Some(block) = window.get(at..at + BLOCK).await? else {
            return Ok(None);
        };
        let Some(header) = Header::parse(&block)? else {
            return Ok(None);
        };
        let content = at + BLOCK;
        if matches!(header.kind, b'x' | b'L') {
            if header.len_bytes > EXTENDED_MAX {
                return Err(broken());
            }
            let text = window.get(content..content + header.len_bytes).await?;
            let text = text.ok_or_else(broken)?;
            match header.kind {
                b'L' => long_name = Some(until_zero(&text)),
                _ if is_sparse(&text) => return Err(sparse()),
                _ => (long_name, long_len) = extended(&text),
            }
            at = content + header.len_bytes.next_multiple_of(BLOCK);
            continue;
        }
        let name = long_name.take().unwrap_or(header.name);
        let len_bytes = long_len.take().unwrap_or(header.len_bytes);
        let end = content
            .checked_add(len_bytes)
            .filter(|end| *end <= layer_bytes);
        let end = end.ok_or_else(broken)?;
        let is_file = matches!(header.kind, b'0' | 0);
        let inside = name.trim_start_matches("./").trim_start_matches('/');
        if header.kind == b'S' {
            return Err(sparse());
        }
        if is_file && len_bytes > 0 && inside.starts_with("disk/") {
            let bytes = content..end;
            return Ok(Some(File { name, bytes }));
        }
        at = content + len_bytes.next_multiple_of(BLOCK);
    }
    Ok(None)
}

fn broken() -> Fault {
    Fault::last("its layer is no tar file that is understood")
}

/// The bytes of such a file lie there without its holes.
fn sparse() -> Fault {
    Fault::last(
        "its layer has sparse files, which cannot be read by ranges: pack it without --sparse",
    )
}

/// Whether an extended header is of a sparse file.
fn is_sparse(text: &[u8]) -> bool {
    let key = b"GNU.sparse.";
    text.windows(key.len()).any(|part| part == key)
}

struct Window<'a> {
    layer: &'a Found,
    layer_bytes: u64,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// Bytes of the layer; nothing when they are not all there.
    async fn get(&mut self, range: Range<u64>) -> Result<Option<Vec<u8>>, Fault> {
        if range.end > self.layer_bytes {
            return Ok(None);
        }
        let end = self.start + self.bytes.len() as u64;
        if range.start < self.start || range.end > end {
            let wanted = range.end.max(range.start + WINDOW).min(self.layer_bytes);
            self.bytes = self.layer.range(range.start..wanted).await?.to_vec();
            self.start = range.start;
        }
        let from = (range.start - self.start) as usize;
        let to = (range.end - self.start) as usize;
        Ok(self.bytes.get(from..to).map(<[u8]>::to_vec))
    }
}

impl Header {
    /// Nothing at the end of the archive.
    fn parse(block: &[u8]) -> Result<Option<Header>, Fault> {
        let block: &[u8; BLOCK as usize] = block.try_into().map_err(|_| broken())?;
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let told = octal(&block[148..156]).ok_or_else(broken)?;
        let sum = |(at, byte): (usize, &u8)| match at {
            148..156 => u64::from(b' '),
            _ => u64::from(*byte),
        };
        if block.iter().enumerate().map(sum).sum::<u64>() != told {
            return Err(broken());
        }
        let mut name = until_zero(&block[..100]);
        // The name's first part, of POSIX archives only: GNU has other things there.
        if block[257..263] == *b"ustar\0" && block[345] != 0 {
            name = format!("{}/{name}", until_zero(&block[345..500]));
        }
        Ok(Some(Header {
            name,
            len_bytes: number(&block[124..136]).ok_or_else(broken)?,
            kind: block[156],
        }))
    }
}

fn until_zero(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// A number in octal, or in binary after a set bit.
fn number(field: &[u8]) -> Option<u64> {
    match field.split_first()? {
        (0x80, rest) => {
            let (high, low) = rest.split_at_checked(rest.len().checked_sub(8)?)?;
            let fits = high.iter().all(|byte| *byte == 0);
            fits.then(|| low.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
        }
        _ => octal(field),
    }
}

fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    let text = text.trim_matches(['\0', ' ']);
    match text.is_empty() {
        true => Some(0),
        false => u64::from_str_radix(text, 8).ok(),
    }
}

/// Path and size of an extended header: lines of `LENGTH KEY=VALUE`.
fn extended(text: &[u8]) -> (Option<String>, Option<u64>) {
    let text = String::from_utf8_lossy(text);
    let value = |key: &str| {
        let mut lines = text.lines();
        lines.find_map(|line| line.split_once(' ')?.1.strip_prefix(key)?.strip_prefix('='))
    };
    let size = value("size").and_then(|size| size.parse().ok());
    (value("path").map(str::to_owned), size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, len: &str, kind: u8) -> [u8; 512] {
        let mut block = [0; 512];
        block[..name.len()].copy_from_slice(name.as_bytes());
        block[124..124 + len.len()].copy_from_slice(len.as_bytes());
        block[156] = kind;
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        block
    }

    #[test]
    fn a_header_is_read_and_one_that_is_damaged_is_refused() {
        let good = header("disk/a", "00000001000", b'0');
        let found = Header::parse(&good).unwrap().unwrap();
        assert_eq!(
            (found.name.as_str(), found.len_bytes, found.kind),
            ("disk/a", 512, b'0')
        );
        assert_eq!(Header::parse(&[0; 512]).unwrap(), None);
        let mut bad = good;
        bad[0] ^= 1;
        assert!(Header::parse(&bad).is_err() && Header::parse(&good[..500]).is_err());
        assert!(Header::parse(&header("disk/a", "0000000100x", b'0')).is_err());
    }

    #[test]
    fn numbers_are_octal_or_binary() {
        assert_eq!(number(b"00000000017\0"), Some(15));
        let mut large = [0; 12];
        (large[0], large[4], large[11]) = (0x80, 1, 2);
        assert_eq!(number(&large), Some((1 << 56) + 2));
        assert_eq!(number(&[0x80, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]), None);
    }

    #[test]
    fn extended_headers_have_longer_names_and_sizes() {
        let text = b"20 size=8589934592\n17 path=disk/long\n";
        let expected = (Some("disk/long".to_owned()), Some(8_589_934_592));
        assert_eq!(extended(text), expected);
        assert_eq!(extended(b"\xff\xfe no lines"), (None, None));
        assert!(!is_sparse(text) && is_sparse(b"22 GNU.sparse.major=1\n"));
    }
}
