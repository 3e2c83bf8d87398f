//! Compression of guest clusters, apart from writing them: pure, and for any thread.
//!
//! * deflate: a raw stream with a window of 4 KiB, which is what QEMU writes, and the most that some readers
//!   take.
//! * zstd: one frame that says its length.
//!
//! Memory: the encoder and its input are of fixed size, made when they are first needed and kept.

use flate2::{Compress, Compression, FlushCompress, Status};
use gaur_format::header::CompressionType;
use zstd_safe::CCtx;

use crate::error::{ErrorKind, ImageError};
use crate::image::Image;

/// Window of deflate streams, as a power of two.
const DEFLATE_WINDOW_BITS: u8 = 12;
/// Levels of each codec, and the one that is used by default: what zlib makes at 6, as QEMU does, zlib-rs makes
/// at 7.
const DEFLATE_LEVELS: (u32, u32, u32) = (1, 9, 7);
const ZSTD_LEVELS: (u32, u32, u32) = (1, 22, 3);

/// Compresses clusters for one image. Make one for each thread.
pub struct Compressor {
    kind: CompressionType,
    level: u32,
    cluster_bytes: usize,
    stores_zeros: bool,
    deflate: Option<Compress>,
    zstd: Option<CCtx<'static>>,
    /// The last cluster of a disk, filled up with zeros.
    padded: Vec<u8>,
}

/// What [`Compressor::compress`] made of a cluster. Its memory is used again by the next call.
#[derive(Debug, Default)]
pub struct CompressedCluster {
    pub(crate) content: Content,
    pub(crate) kind: CompressionType,
    /// Guest bytes that were compressed.
    pub(crate) plain_bytes: usize,
    bytes: Vec<u8>,
    len: usize,
}

/// How a cluster is best stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Content {
    /// It has only zeros.
    #[default]
    Zeros,
    Compressed,
    /// It does not get smaller.
    Plain,
}

impl CompressedCluster {
    /// Bytes that it takes in the image: none for zeros.
    pub fn stored_bytes(&self) -> u64 {
        match self.content {
            Content::Zeros => 0,
            Content::Compressed => self.len as u64,
            Content::Plain => self.plain_bytes as u64,
        }
    }

    /// The compressed bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl Compressor {
    /// For clusters of the top layer of `image`, with its compression type. `level` is 1 to 9 for deflate
    /// (7 by default), 1 to 22 for zstd (3).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image is raw, encrypted, or has an external data file,
    /// [`ErrorKind::InvalidInput`] for another level.
    pub fn new(image: &Image, level: Option<u32>) -> Result<Compressor, ImageError> {
        let refuse = |what: &str| {
            let text = format!("{what} cannot have compressed clusters");
            Err(ImageError::new(ErrorKind::Unsupported, text))
        };
        let Some(top) = image.top.qcow2.as_ref() else {
            return refuse("a raw image");
        };
        if top.cipher.is_some() {
            return refuse("an encrypted image");
        }
        if image.data_file().is_some() {
            return refuse("an image with an external data file");
        }
        let level = Compressor::level(top.compression, level)?;
        let cluster_bytes = top.geometry.cluster_size() as usize;
        Ok(Compressor::with(top.compression, level, cluster_bytes))
    }

    /// The level that is meant by `level` with a compression type.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the type has no such level.
    pub fn level(kind: CompressionType, level: Option<u32>) -> Result<u32, ImageError> {
        let (least, most, usual) = match kind {
            CompressionType::Deflate => DEFLATE_LEVELS,
            CompressionType::Zstd => ZSTD_LEVELS,
        };
        let level = level.unwrap_or(usual);
        if (least..=most).contains(&level) {
            return Ok(level);
        }
        let kind = kind.name();
        let text = format!("{kind} has compression levels {least} to {most}, not {level}");
        Err(ImageError::new(ErrorKind::InvalidInput, text))
    }

    fn with(kind: CompressionType, level: u32, cluster_bytes: usize) -> Compressor {
        Compressor {
            kind,
            level,
            cluster_bytes,
            stores_zeros: false,
            deflate: None,
            zstd: None,
            padded: Vec::new(),
        }
    }

    /// The same for clusters of zeros that are to be stored as any others, not by a mark.
    pub fn storing_zeros(self) -> Compressor {
        Compressor {
            stores_zeros: true,
            ..self
        }
    }

    /// Bytes of a cluster.
    pub fn cluster_bytes(&self) -> usize {
        self.cluster_bytes
    }

    /// Compresses `plain`, a cluster; the last of a disk may be shorter.
    ///
    /// # Panics
    /// If it is empty or longer than a cluster.
    pub fn compress(&mut self, plain: &[u8], out: &mut CompressedCluster) {
        assert!(
            (1..=self.cluster_bytes).contains(&plain.len()),
            "one cluster is compressed at a time"
        );
        (out.kind, out.plain_bytes, out.len) = (self.kind, plain.len(), 0);
        if !self.stores_zeros && is_zero(plain) {
            out.content = Content::Zeros;
            return;
        }
        let mut padded = std::mem::take(&mut self.padded);
        let whole = if plain.len() < self.cluster_bytes {
            padded.clear();
            padded.extend_from_slice(plain);
            padded.resize(self.cluster_bytes, 0);
            &padded
        } else {
            plain
        };
        out.bytes.resize(longest(self.cluster_bytes), 0);
        let len = match self.kind {
            CompressionType::Deflate => self.deflate(whole, &mut out.bytes),
            CompressionType::Zstd => self.zstd(whole, &mut out.bytes),
        };
        // Worth it if it gets shorter at all.
        let len = len.filter(|len| *len < self.cluster_bytes);
        self.padded = padded;
        (out.content, out.len) = match len {
            Some(len) => (Content::Compressed, len),
            None => (Content::Plain, 0),
        };
    }

    /// How long the stream is. Its output has room for any, because zlib-rs 0.6 does not reset an encoder
    /// whose stream has not ended: the room for its own output shrinks each time, until it panics.
    fn deflate(&mut self, plain: &[u8], out: &mut [u8]) -> Option<usize> {
        let level = Compression::new(self.level);
        let encoder = self.deflate.get_or_insert_with(|| {
            Compress::new_with_window_bits(level, false, DEFLATE_WINDOW_BITS)
        });
        encoder.reset();
        let status = encoder.compress(plain, out, FlushCompress::Finish);
        let len = encoder.total_out() as usize;
        let ended = matches!(status, Ok(Status::StreamEnd));
        if !ended {
            self.deflate = None;
        }
        ended.then_some(len)
    }

    fn zstd(&mut self, plain: &[u8], out: &mut [u8]) -> Option<usize> {
        let encoder = match &mut self.zstd {
            Some(encoder) => encoder,
            None => self.zstd.insert(CCtx::try_create()?),
        };
        encoder.compress(out, plain, self.level as i32).ok()
    }
}

/// Most bytes that either codec makes of a cluster, with some to spare.
fn longest(cluster_bytes: usize) -> usize {
    cluster_bytes + cluster_bytes / 8 + 1024
}

pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compress::Decompressor;
    use crate::test_file::Random;
    use flate2::{Decompress, FlushDecompress};

    fn text(len: usize) -> Vec<u8> {
        let mut random = Random::new(5);
        (0..len)
            .map(|at| b"abcdefgh"[random.below(8) as usize] + (at % 3) as u8)
            .collect()
    }

    #[test]
    fn what_was_compressed_decompresses_at_every_level_and_cluster_size() {
        for (kind, levels) in [
            (CompressionType::Deflate, DEFLATE_LEVELS),
            (CompressionType::Zstd, ZSTD_LEVELS),
        ] {
            for cluster in [512, 4096, 65536, 2 << 20] {
                let plain = text(cluster);
                // The highest take long in large clusters.
                let highest = if cluster > 65536 { levels.2 } else { levels.1 };
                for level in [levels.0, highest, levels.2] {
                    let mut compressor = Compressor::with(kind, level, cluster);
                    let (mut packed, mut again) = (CompressedCluster::default(), vec![1; cluster]);
                    // The last cluster of a disk, and whole ones before and after it.
                    for len in [cluster, cluster - 100, cluster] {
                        compressor.compress(&plain[..len], &mut packed);
                        assert_eq!(
                            packed.content,
                            Content::Compressed,
                            "{kind:?} {level} {cluster}"
                        );
                        assert!(packed.stored_bytes() < cluster as u64);
                        let decoder = Decompressor::default();
                        decoder
                            .decompress(kind, packed.bytes(), &mut again)
                            .unwrap();
                        assert!(again[..len] == plain[..len] && is_zero(&again[len..]));
                    }
                }
            }
        }
    }

    #[test]
    fn deflate_needs_a_window_of_4_kib_and_no_more() {
        let mut plain = text(65536);
        // A repetition that a larger window would use.
        let head = plain[..4000].to_vec();
        plain[20_000..24_000].copy_from_slice(&head);
        let mut packed = CompressedCluster::default();
        for level in 1..=9 {
            Compressor::with(CompressionType::Deflate, level, 65536).compress(&plain, &mut packed);
            let mut again = vec![0; 65536];
            let mut reader = Decompress::new_with_window_bits(false, DEFLATE_WINDOW_BITS);
            // In small pieces, so that the reader has only its window to look back in.
            let (mut from, mut to) = (0, 0);
            while to < again.len() {
                let end = (to + 512).min(again.len());
                let input = &packed.bytes()[from..];
                let result = reader.decompress(input, &mut again[to..end], FlushDecompress::None);
                result.unwrap();
                (from, to) = (reader.total_in() as usize, reader.total_out() as usize);
            }
            assert!(again == plain, "level {level}");
        }
    }

    #[test]
    fn zeros_and_what_does_not_get_smaller_are_not_compressed() {
        let mut random = Random::new(9);
        let noise: Vec<u8> = (0..4096).map(|_| random.next() as u8).collect();
        for kind in [CompressionType::Deflate, CompressionType::Zstd] {
            let mut compressor = Compressor::with(kind, 3, 4096);
            let mut packed = CompressedCluster::default();
            compressor.compress(&noise, &mut packed);
            assert_eq!(
                (packed.content, packed.stored_bytes()),
                (Content::Plain, 4096)
            );
            compressor.compress(&[0; 4096], &mut packed);
            assert_eq!((packed.content, packed.stored_bytes()), (Content::Zeros, 0));
            compressor.compress(&[0; 17], &mut packed);
            assert_eq!(packed.content, Content::Zeros);
            compressor.compress(&text(4096), &mut packed);
            assert_eq!(packed.content, Content::Compressed);
        }
    }

    /// An encoder was reset before its stream had ended, because the output was full. After some clusters of
    /// noise zlib-rs had no room left and panicked.
    #[test]
    fn any_number_of_clusters_may_not_get_smaller() {
        let mut random = Random::new(2);
        let noise: Vec<u8> = (0..4096).map(|_| random.next() as u8).collect();
        for (kind, levels) in [
            (CompressionType::Deflate, 1..=9),
            (CompressionType::Zstd, 1..=3),
        ] {
            for level in levels {
                let mut compressor = Compressor::with(kind, level, 4096);
                let mut packed = CompressedCluster::default();
                for _ in 0..40 {
                    compressor.compress(&noise, &mut packed);
                    assert_eq!(packed.content, Content::Plain);
                }
                assert!(kind == CompressionType::Zstd || compressor.deflate.is_some());
                compressor.compress(&text(4096), &mut packed);
                assert_eq!(packed.content, Content::Compressed);
            }
        }
    }
}
