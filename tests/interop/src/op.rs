//! Operations of a guest, and `qemu-io` as the guest that does them.

use crate::layout::Layout;
use crate::random::Random;
use crate::tool::{Run, run};

/// One operation of a guest; offsets and lengths in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are what they are called, in bytes")]
pub enum Op {
    /// Store a pattern.
    Write { offset: u64, len: u64, pattern: u8 },
    /// Store the bytes of a file, again and again.
    WriteFile { offset: u64, len: u64, file: String },
    /// Store a pattern in compressed clusters (whole clusters only).
    Compressed { offset: u64, len: u64, pattern: u8 },
    /// Store the bytes of a file in compressed clusters (whole clusters only).
    CompressedFile { offset: u64, len: u64, file: String },
    /// Make a range zeros, keeping its space or giving it back.
    Zero { offset: u64, len: u64, unmap: bool },
    /// Forget a range.
    Discard { offset: u64, len: u64 },
    /// Make what was written durable.
    Flush,
    /// Read and compare with a pattern.
    Expect { offset: u64, len: u64, pattern: u8 },
}

impl Op {
    /// The operation as `qemu-io` spells it.
    pub fn command(&self) -> String {
        match self {
            Op::Write {
                offset,
                len,
                pattern,
            } => format!("write -P {pattern} {offset} {len}"),
            Op::WriteFile { offset, len, file } => format!("write -s {file} {offset} {len}"),
            Op::Compressed {
                offset,
                len,
                pattern,
            } => {
                format!("write -c -P {pattern} {offset} {len}")
            }
            Op::CompressedFile { offset, len, file } => {
                format!("write -c -s {file} {offset} {len}")
            }
            Op::Zero {
                offset,
                len,
                unmap: true,
            } => format!("write -z -u {offset} {len}"),
            Op::Zero {
                offset,
                len,
                unmap: false,
            } => format!("write -z {offset} {len}"),
            Op::Discard { offset, len } => format!("discard {offset} {len}"),
            Op::Flush => "flush".to_owned(),
            Op::Expect {
                offset,
                len,
                pattern,
            } => format!("read -P {pattern} {offset} {len}"),
        }
    }
}

/// Lets `qemu-io` do the operations on an image file or an NBD URI, one after the other.
#[track_caller]
pub fn apply(format: &str, target: &str, ops: &[Op]) {
    let run = try_apply(format, target, ops).ok();
    let failed =
        run.stdout.lines().chain(run.stderr.lines()).find(|line| {
            line.contains("failed") || line.contains("rror") || line.contains("Invalid")
        });
    assert!(failed.is_none(), "{failed:?}: {run}");
}

/// Like [`apply`], for operations that may fail. The target is opened for writing only if some
/// operation writes.
pub fn try_apply(format: &str, target: &str, ops: &[Op]) -> Run {
    let commands: Vec<String> = ops.iter().map(Op::command).collect();
    let mut arguments = vec!["-d", "unmap", "-f", format];
    if ops.iter().all(|op| matches!(op, Op::Expect { .. })) {
        arguments.push("--read-only");
    }
    for command in &commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(target);
    run("qemu-io", &arguments)
}

/// A fixed mix of operations that leaves every kind of cluster behind: data in whole, partly and
/// across clusters, zeros with and without space, holes, a last cluster that is not whole. `file`
/// holds bytes that do not compress.
pub fn mixed(layout: &Layout, file: &str) -> Vec<Op> {
    let cluster = layout.cluster_bytes;
    let unit = layout.unit_bytes();
    let size = layout.size_bytes();
    let last = (size - 1) / cluster * cluster;
    let write = |offset, len, pattern| Op::Write {
        offset,
        len,
        pattern,
    };
    vec![
        write(0, cluster, 0x11),
        write(cluster + unit / 2, unit.max(512), 0x22),
        Op::WriteFile {
            offset: 2 * cluster,
            len: cluster + cluster / 2,
            file: file.into(),
        },
        write(2 * cluster + 512.min(cluster / 2), 256, 0x33),
        Op::Zero {
            offset: 3 * cluster,
            len: cluster,
            unmap: false,
        },
        write(4 * cluster, cluster, 0x44),
        Op::Zero {
            offset: 4 * cluster,
            len: unit,
            unmap: true,
        },
        write(size / 2 / 512 * 512, 4 * cluster.min(65536), 0x55),
        write(last - cluster / 2, cluster / 2 + 512, 0x66),
        Op::Zero {
            offset: size - 512,
            len: 512,
            unmap: false,
        },
        Op::WriteFile {
            offset: size / 3,
            len: 3000,
            file: file.into(),
        },
    ]
}

/// Random operations that any image takes. Discards keep to whole clusters, because what becomes
/// of the rest is free; with `discards` off (a version 2 image with a backing file, where a discarded
/// cluster may show the backing file again) there are none.
pub fn random(layout: &Layout, seed: u64, count: usize, discards: bool, file: &str) -> Vec<Op> {
    let mut random = Random::new(seed);
    let size = layout.size_bytes();
    let one = |random: &mut Random| {
        let (offset, len) = random_range(layout, size, random);
        let pattern = random.below(255) as u8 + 1;
        match random.below(10) {
            0..=4 => Op::Write {
                offset,
                len,
                pattern,
            },
            5 => Op::WriteFile {
                offset,
                len,
                file: file.to_owned(),
            },
            6..=7 => Op::Zero {
                offset,
                len,
                unmap: random.one_in(2),
            },
            8 if discards => {
                let cluster = layout.cluster_bytes;
                let start = offset / cluster * cluster;
                let end = (offset + len).next_multiple_of(cluster).min(size);
                Op::Discard {
                    offset: start,
                    len: end - start,
                }
            }
            _ => Op::Flush,
        }
    };
    (0..count).map(|_| one(&mut random)).collect()
}

/// A range inside the image: of bytes, sectors, subclusters or clusters.
fn random_range(layout: &Layout, size: u64, random: &mut Random) -> (u64, u64) {
    let grain = match random.below(6) {
        0 => 1,
        1 | 2 => 512,
        3 => layout.unit_bytes(),
        _ => layout.cluster_bytes,
    };
    let offset = random.below(size / grain) * grain;
    let most = (4 * layout.cluster_bytes).clamp(4096, 3 << 20);
    let len = (random.below(most / grain + 1) + 1) * grain;
    (offset, len.min(size - offset))
}
