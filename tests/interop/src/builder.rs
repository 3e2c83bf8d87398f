//! Images built by QEMU's tools alone: every kind of content in every layout.

use crate::layout::Layout;
use crate::op::{self, Op};
use crate::random::Random;
use crate::scratch::Scratch;
use crate::tool::qemu_img;

/// What an image holds beside plain data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Data, zeros and holes.
    Plain,
    /// Two backing files: a raw one that is shorter below a qcow2 one that is longer.
    Chain,
    /// Compressed clusters among others.
    Compressed,
    /// Two internal snapshots, named `one` and `two`, that share clusters with the active image.
    Snapshots,
}

impl Kind {
    /// Whether a discarded cluster of an image of this kind must read as zeros: not in version 2
    /// with a backing file, which has no way to say so.
    pub fn discards(self, layout: &Layout) -> bool {
        !(layout.v2 && self == Kind::Chain)
    }
}

/// A file of bytes that do not compress, for [`op::mixed`] and others.
pub fn noise(scratch: &Scratch) -> String {
    let path = scratch.path("noise");
    if !std::path::Path::new(&path).exists() {
        scratch.file("noise", &Random::new(7).bytes(1 << 20));
    }
    path
}

/// Builds an image and whatever it needs in the folder; returns its path.
pub fn build(kind: Kind, layout: &Layout, scratch: &Scratch) -> String {
    match kind {
        Kind::Plain => plain(layout, scratch),
        Kind::Chain => chain(layout, scratch),
        Kind::Compressed => compressed(layout, scratch),
        Kind::Snapshots => snapshots(layout, scratch),
    }
}

/// Creates an empty image of the layout.
pub fn create(path: &str, layout: &Layout) {
    let size = layout.size_bytes().to_string();
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        &layout.options(),
        path,
        &size,
    ])
    .ok();
}

fn plain(layout: &Layout, scratch: &Scratch) -> String {
    let path = scratch.path("plain.qcow2");
    create(&path, layout);
    op::apply("qcow2", &path, &op::mixed(layout, &noise(scratch)));
    path
}

/// The names of backing files are relative, so that the chain is found from any working folder.
fn chain(layout: &Layout, scratch: &Scratch) -> String {
    let noise = noise(scratch);
    let size = layout.size_bytes();
    let base = scratch.zeros("base.raw", size / 2 / 512 * 512);
    op::apply(
        "raw",
        &base,
        &[
            Op::WriteFile {
                offset: 0,
                len: size / 2 / 512 * 512,
                file: noise.clone(),
            },
            Op::Write {
                offset: 512,
                len: 4096,
                pattern: 0xa1,
            },
        ],
    );
    let middle = scratch.path("middle.qcow2");
    let options = layout.options();
    let longer = (size + 3 * layout.cluster_bytes).to_string();
    let create = ["create", "-q", "-f", "qcow2", "-o", &options];
    qemu_img(
        &[
            &create[..],
            &["-b", "base.raw", "-F", "raw", &middle, &longer],
        ]
        .concat(),
    )
    .ok();
    let cluster = layout.cluster_bytes;
    op::apply(
        "qcow2",
        &middle,
        &[
            Op::Write {
                offset: cluster,
                len: 2 * cluster,
                pattern: 0xb1,
            },
            Op::Zero {
                offset: 4 * cluster,
                len: cluster,
                unmap: false,
            },
            Op::WriteFile {
                offset: size * 3 / 4 / 512 * 512,
                len: 2 * cluster,
                file: noise.clone(),
            },
            Op::Write {
                offset: size - 512,
                len: 1024,
                pattern: 0xb2,
            },
        ],
    );
    let top = scratch.path("top.qcow2");
    let shorter = size.to_string();
    qemu_img(
        &[
            &create[..],
            &["-b", "middle.qcow2", "-F", "qcow2", &top, &shorter],
        ]
        .concat(),
    )
    .ok();
    let mut ops = op::mixed(layout, &noise);
    // Leave room for the backing files to be seen.
    ops.truncate(6);
    op::apply("qcow2", &top, &ops);
    top
}

/// Half of it by `convert`, which packs compressed clusters one behind the other, half by writes.
fn compressed(layout: &Layout, scratch: &Scratch) -> String {
    let noise = noise(scratch);
    let cluster = layout.cluster_bytes;
    let size = layout.size_bytes();
    let raw = scratch.zeros("source.raw", size);
    let text = scratch.file("text", prose(1 << 20).as_bytes());
    op::apply(
        "raw",
        &raw,
        &[
            Op::WriteFile {
                offset: 0,
                len: size / 2 / 512 * 512,
                file: text.clone(),
            },
            Op::WriteFile {
                offset: cluster * 2 / 3,
                len: 512,
                file: noise.clone(),
            },
            Op::Write {
                offset: size - 512,
                len: 512,
                pattern: 0xc1,
            },
        ],
    );
    let path = scratch.path("compressed.qcow2");
    let options = layout.options();
    qemu_img(&[
        "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, &raw, &path,
    ])
    .ok();
    let middle = size / 2 / cluster * cluster + cluster;
    op::apply(
        "qcow2",
        &path,
        &[
            Op::Compressed {
                offset: middle,
                len: cluster,
                pattern: 0xc2,
            },
            Op::CompressedFile {
                offset: middle + cluster,
                len: cluster,
                file: noise,
            },
            Op::Write {
                offset: cluster + 512.min(cluster / 2),
                len: 256,
                pattern: 0xc3,
            },
            Op::Zero {
                offset: 2 * cluster,
                len: cluster,
                unmap: false,
            },
        ],
    );
    path
}

/// Text that compresses about as text does, different in every cluster.
fn prose(len_bytes: usize) -> String {
    const WORDS: [&str; 8] = [
        "cluster ",
        "sector ",
        "table ",
        "mapping ",
        "flush ",
        "snapshot ",
        "zero ",
        "image ",
    ];
    let mut random = Random::new(11);
    let mut text = String::with_capacity(len_bytes + 16);
    while text.len() < len_bytes {
        text.push_str(WORDS[random.below(8) as usize]);
        if random.one_in(8) {
            text.push_str(&random.below(100_000).to_string());
        }
    }
    text.truncate(len_bytes);
    text
}

fn snapshots(layout: &Layout, scratch: &Scratch) -> String {
    let path = scratch.path("snapshots.qcow2");
    create(&path, layout);
    let noise = noise(scratch);
    op::apply("qcow2", &path, &op::mixed(layout, &noise));
    qemu_img(&["snapshot", "-c", "one", &path]).ok();
    let cluster = layout.cluster_bytes;
    op::apply(
        "qcow2",
        &path,
        &[
            Op::Write {
                offset: 0,
                len: cluster / 2,
                pattern: 0xd1,
            },
            Op::Write {
                offset: 5 * cluster,
                len: cluster,
                pattern: 0xd2,
            },
            Op::Discard {
                offset: 2 * cluster,
                len: cluster,
            },
        ],
    );
    qemu_img(&["snapshot", "-c", "two", &path]).ok();
    op::apply(
        "qcow2",
        &path,
        &[Op::Write {
            offset: cluster,
            len: cluster,
            pattern: 0xd3,
        }],
    );
    path
}

/// Writes the view of the snapshot with that name to a raw file, as QEMU sees it.
#[track_caller]
pub fn snapshot_view(image: &str, snapshot: &str, raw: &str) {
    qemu_img(&[
        "convert",
        "-l",
        &format!("snapshot.name={snapshot}"),
        "-O",
        "raw",
        image,
        raw,
    ])
    .ok();
}
