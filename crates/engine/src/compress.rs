//! Decompression of one cluster.
//!
//! The image says where a compressed cluster starts and in which 512-byte sector it ends, not how
//! long it is; so the input runs to the end of that sector and what follows the compressed data
//! there is of no interest. The output is exactly one cluster. Anything shorter is damage.
//!
//! * deflate: a raw stream, any window up to 32 KiB (other implementations write 4 KiB ones).
//! * zstd: frames one after the other until the cluster is full. Each is decompressed in one go from
//!   its own bytes, straight into the cluster, so that no frame can ask for window memory.
//!
//! Memory: the decoders are made when they are first needed, kept, and of fixed size. One per queue.

use std::cell::RefCell;

use flate2::{Decompress, FlushDecompress};
use gaur_block::Errno;
use gaur_format::header::CompressionType;
use zstd_safe::DCtx;

/// The decoders of one queue.
#[derive(Default)]
pub(crate) struct Decompressor {
    deflate: RefCell<Option<Decompress>>,
    zstd: RefCell<Option<DCtx<'static>>>,
}

impl Decompressor {
    /// Fills `output`, one cluster, from `input`: the bytes from the start of the compressed data to
    /// the end of its last sector, less if the file ends before. [`Errno::EIO`] means damaged data;
    /// `output` is undefined then.
    pub(crate) fn decompress(
        &self,
        kind: CompressionType,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), Errno> {
        let filled = match kind {
            CompressionType::Deflate => self.inflate(input, output),
            CompressionType::Zstd => self.unpack_frames(input, output),
        };
        filled.ok_or(Errno::EIO)
    }

    /// The stream may go on after the cluster is full; what matters is that it fills it.
    fn inflate(&self, input: &[u8], output: &mut [u8]) -> Option<()> {
        let mut state = self.deflate.borrow_mut();
        let decoder = state.get_or_insert_with(|| Decompress::new(false));
        decoder.reset(false);
        let wanted = output.len() as u64;
        decoder
            .decompress(input, output, FlushDecompress::Finish)
            .ok()?;
        (decoder.total_out() == wanted).then_some(())
    }

    /// Fills `output` as far as a zlib stream (RFC 1950) goes; how many bytes that is.
    pub(crate) fn inflate_zlib(&self, input: &[u8], output: &mut [u8]) -> Option<usize> {
        let mut state = self.deflate.borrow_mut();
        let decoder = state.get_or_insert_with(|| Decompress::new(true));
        decoder.reset(true);
        decoder
            .decompress(input, output, FlushDecompress::Finish)
            .ok()?;
        usize::try_from(decoder.total_out()).ok()
    }

    fn unpack_frames(&self, mut input: &[u8], mut output: &mut [u8]) -> Option<()> {
        let mut state = self.zstd.borrow_mut();
        if state.is_none() {
            *state = DCtx::try_create();
        }
        let decoder = state.as_mut()?;
        while !output.is_empty() {
            let frame_len = zstd_safe::find_frame_compressed_size(input).ok()?;
            let (frame, rest) = input
                .split_at_checked(frame_len)
                .filter(|_| frame_len > 0)?;
            let count = decoder.decompress(output, frame).ok()?;
            output = output.get_mut(count..)?;
            input = rest;
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_file::Random;
    use flate2::{Compress, Compression, FlushCompress};
    use zstd_safe::CCtx;

    /// A cluster that compresses, but not to nothing.
    fn cluster(len: usize) -> Vec<u8> {
        let mut random = Random::new(3);
        (0..len)
            .map(|at| {
                if at % 3 == 0 {
                    random.below(16) as u8
                } else {
                    at as u8 / 5
                }
            })
            .collect()
    }

    fn deflate(bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len() * 2 + 100);
        let mut encoder = Compress::new(Compression::best(), false);
        encoder
            .compress_vec(bytes, &mut out, FlushCompress::Finish)
            .unwrap();
        assert_eq!(encoder.total_in(), bytes.len() as u64);
        out
    }

    fn frame(bytes: &[u8], level: i32) -> Vec<u8> {
        let mut out = Vec::with_capacity(zstd_safe::compress_bound(bytes.len()));
        CCtx::create().compress(&mut out, bytes, level).unwrap();
        out
    }

    fn pack(kind: CompressionType, bytes: &[u8]) -> Vec<u8> {
        match kind {
            CompressionType::Deflate => deflate(bytes),
            CompressionType::Zstd => frame(bytes, 3),
        }
    }

    const KINDS: [CompressionType; 2] = [CompressionType::Deflate, CompressionType::Zstd];

    #[test]
    fn decompression_ignores_what_follows_in_the_last_sector() {
        let decoder = Decompressor::default();
        for kind in KINDS {
            for len in [512, 65536, 2 << 20] {
                let plain = cluster(len);
                let exact = pack(kind, &plain);
                for garbage in [0_u8, 0xff, 0x28] {
                    let mut packed = exact.clone();
                    packed.resize(exact.len() + 511, garbage);
                    let mut output = vec![0xaa; len];
                    decoder.decompress(kind, &packed, &mut output).unwrap();
                    assert!(output == plain, "{kind:?} {len}");
                }
            }
        }
    }

    #[test]
    fn truncated_compressed_data_is_an_error() {
        let decoder = Decompressor::default();
        let plain = cluster(65536);
        let mut output = vec![0; 65536];
        for kind in KINDS {
            let short = pack(kind, &plain[..65535]);
            assert_eq!(
                decoder.decompress(kind, &short, &mut output),
                Err(Errno::EIO)
            );
            let packed = pack(kind, &plain);
            for cut in [0, 1, 5, packed.len() / 2, packed.len() - 16] {
                let result = decoder.decompress(kind, &packed[..cut], &mut output);
                assert_eq!(result, Err(Errno::EIO), "{kind:?} cut to {cut}");
            }
            assert_eq!(
                decoder.decompress(kind, &packed, &mut output),
                Ok(()),
                "and recovers"
            );
        }
    }

    #[test]
    fn a_zstd_cluster_may_be_made_of_several_frames_also_empty_and_skippable_ones() {
        let plain = cluster(65536);
        let mut packed = frame(&plain[..10_000], 1);
        packed.extend(frame(&[], 3));
        packed.extend([0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]);
        packed.extend(frame(&plain[10_000..], 19));
        let mut output = vec![0; 65536];
        Decompressor::default()
            .decompress(CompressionType::Zstd, &packed, &mut output)
            .unwrap();
        assert!(output == plain);
    }

    #[test]
    fn a_zstd_frame_longer_than_the_cluster_is_an_error() {
        let packed = frame(&cluster(65537), 3);
        let mut output = vec![0; 65536];
        let decoder = Decompressor::default();
        let result = decoder.decompress(CompressionType::Zstd, &packed, &mut output);
        assert_eq!(result, Err(Errno::EIO));
    }

    #[test]
    fn deflate_may_use_the_whole_32_kib_window() {
        let mut plain = cluster(65536);
        let head = plain[..1000].to_vec();
        plain[32_700..33_700].copy_from_slice(&head);
        let packed = deflate(&plain);
        let mut output = vec![0; 65536];
        let decoder = Decompressor::default();
        decoder
            .decompress(CompressionType::Deflate, &packed, &mut output)
            .unwrap();
        assert!(output == plain);
    }

    #[test]
    fn arbitrary_and_damaged_bytes_never_panic() {
        let decoder = Decompressor::default();
        let mut random = Random::new(11);
        let mut output = vec![0; 4096];
        let packed = KINDS.map(|kind| pack(kind, &cluster(4096)));
        for round in 0..4000 {
            let kind = KINDS[round % 2];
            let mut input = packed[round % 2].clone();
            for _ in 0..=random.below(4) {
                let at = random.below(input.len() as u64) as usize;
                input[at] = random.next() as u8;
            }
            input.truncate(random.below(input.len() as u64 * 2) as usize);
            let _ = decoder.decompress(kind, &input, &mut output);
        }
    }
}
