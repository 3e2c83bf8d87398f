//! What must hold when an image is broken on purpose, and the places to break it.

use std::process::Command;

use crate::builder::noise;
use crate::compare::assert_same_bytes;
use crate::field::{Field, header};
use crate::gaur::{binary, gaur_bounded};
use crate::layout::Layout;
use crate::nbd::Server;
use crate::op::{self, Op};
use crate::scratch::Scratch;
use crate::tool::{qemu_img, run_for};

/// Where QEMU refuses an image because of something that the data of the active disk does not
/// depend on, Gaur reads on: snapshots are looked at by the verbs that need them, and an autoclear
/// bit that makes no sense is one that is not maintained.
const READS_ON: &[&str] = &["in snapshot table", "data-file-raw requires a data file"];

/// Every verb that reads an image ends in order within its bounds, and what Gaur takes for the
/// guest's data is what QEMU takes for it. `what` is for messages.
#[track_caller]
pub fn assert_reads_survive(image: &str, scratch: &Scratch, what: &str) {
    eprintln!("reading with {what}");
    let before = std::fs::read(image).expect("the image is there");
    for arguments in [
        &["info", "--output=json", image][..],
        &["check", "--output=json", image],
        &["map", "--output=json", image],
    ] {
        gaur_bounded(arguments).survived();
    }
    let ours = scratch.path("ours.raw");
    let run = gaur_bounded(&["convert", "-f", "qcow2", "-O", "raw", image, &ours]).survived();
    if run.code == 0 {
        cut_to_sectors(&ours);
        let theirs = scratch.path("theirs.raw");
        let arguments = ["convert", "-f", "qcow2", "-O", "raw", image, &theirs];
        let run = run_for("qemu-img", &arguments, 30);
        let reads_on = READS_ON.iter().any(|reason| run.stderr.contains(reason));
        if !reads_on {
            assert!(
                run.code == 0,
                "Gaur reads what QEMU refuses ({what}): {run}"
            );
            assert_same_bytes(&theirs, &ours);
            std::fs::remove_file(&theirs).expect("scratch is writable");
        }
        std::fs::remove_file(&ours).expect("scratch is writable");
    }
    assert!(
        before == std::fs::read(image).expect("it is there"),
        "reading changed the image"
    );
}

/// Cuts a view to whole sectors: QEMU has no bytes of a disk beyond the last whole one, Gaur does.
fn cut_to_sectors(raw: &str) {
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(raw)
        .expect("the view opens");
    let len = file.metadata().expect("it has a length").len();
    file.set_len(len / 512 * 512).expect("it can be cut");
}

/// Serves the image and writes to it; it may be refused or fail, but in order.
#[track_caller]
pub fn assert_writes_survive(image: &str, scratch: &Scratch, ops: &[Op], what: &str) {
    eprintln!("writing with {what}");
    let socket = scratch.path("hostile");
    let mut command = Command::new(binary());
    command.args(["serve", "--persistent", "--socket", &socket, image]);
    let mut server = match Server::try_start(command, &socket) {
        Ok(server) => server,
        Err(run) => {
            run.refused();
            return;
        }
    };
    // One by one: after the first failure the others have a right to be tried.
    for op in ops {
        let run = op::try_apply("raw", &server.uri(), std::slice::from_ref(op));
        assert!(run.code < 124, "{what}: {run}");
    }
    server.signal("TERM");
    let end = server.wait();
    assert!(end.code != 101 && end.code < 124, "{what}: {end}");
    assert!(!end.stderr.contains("panicked"), "{what}: {end}");
}

/// Where the metadata of an image lies.
#[derive(Clone, Copy, Debug)]
pub struct MetadataOffsets {
    /// The active L1 table.
    pub l1: u64,
    /// The first L2 table.
    pub l2: u64,
    /// The refcount table.
    pub refcount_table: u64,
    /// The first refcount block.
    pub refcount_block: u64,
    /// The snapshot table.
    pub snapshots: u64,
}

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// A word of eight bytes somewhere in the file.
pub fn word(name: &'static str, offset: u64) -> Field {
    Field {
        name,
        offset,
        len: 8,
    }
}

/// Finds the metadata of an image that is still whole.
pub fn places(image: &str) -> MetadataOffsets {
    let l1 = header("l1_table_offset").get(image);
    let refcount_table = header("refcount_table_offset").get(image);
    MetadataOffsets {
        l1,
        l2: word("l1", l1).get(image) & OFFSET_MASK,
        refcount_table,
        refcount_block: word("refcount table", refcount_table).get(image) & OFFSET_MASK,
        snapshots: header("snapshots_offset").get(image),
    }
}

/// A small image with data, zeros, compressed clusters and a snapshot, in one file.
pub fn victim(layout: &Layout, scratch: &Scratch) -> String {
    let path = scratch.path("victim.qcow2");
    let size = victim_size(layout).to_string();
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        &layout.options(),
        &path,
        &size,
    ])
    .ok();
    let cluster = layout.cluster_bytes;
    op::apply(
        "qcow2",
        &path,
        &[
            Op::Write {
                offset: 0,
                len: cluster,
                pattern: 0x11,
            },
            Op::WriteFile {
                offset: cluster,
                len: cluster,
                file: noise(scratch),
            },
            Op::Compressed {
                offset: 2 * cluster,
                len: cluster,
                pattern: 0x22,
            },
        ],
    );
    qemu_img(&["snapshot", "-c", "kept", &path]).ok();
    op::apply(
        "qcow2",
        &path,
        &[
            Op::Write {
                offset: cluster,
                len: cluster / 2,
                pattern: 0x33,
            },
            Op::Zero {
                offset: 3 * cluster,
                len: cluster,
                unmap: false,
            },
            Op::Write {
                offset: 4 * cluster,
                len: cluster,
                pattern: 0x44,
            },
            Op::Compressed {
                offset: 5 * cluster,
                len: cluster,
                pattern: 0x55,
            },
        ],
    );
    path
}

/// The size of a [`victim`] in bytes.
pub fn victim_size(layout: &Layout) -> u64 {
    16 * layout.cluster_bytes
}
