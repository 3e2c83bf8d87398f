//! A disk that is full in the middle of a write: the write fails with a clear error, the server
//! lives on, nothing that was there is lost.

use std::process::Command;

use gaur_interop::builder::create;
use gaur_interop::gaur::{binary, gaur};
use gaur_interop::layout::Layout;
use gaur_interop::nbd::Server;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::qemu_img;

const MIB: u64 = 1 << 20;

/// Serves an image on a small file system of its own (in memory, in a private mount namespace) and
/// copies the image out of it afterwards.
const ON_A_SMALL_DISK: &str = r#"
set -e
disk=$1 image=$2 result=$3 socket=$4 program=$5
mount -t tmpfs -o size=12m none "$disk"
cp --sparse=always "$image" "$disk/image.qcow2"
"$program" serve --persistent --shared 8 --socket "$socket" "$disk/image.qcow2" &
trap 'kill -TERM $!' TERM
code=0; wait $! || code=$?
# The first wait ends with the signal, the second with the server.
if [ $code -ge 128 ]; then code=0; wait $! || code=$?; fi
cp --sparse=always "$disk/image.qcow2" "$result"
exit $code
"#;

/// Serves an image as long as it stays below a length: writes beyond fail with `EFBIG`.
const BELOW_A_LIMIT: &str = r#"
trap '' XFSZ
ulimit -f 12288
exec "$5" serve --persistent --shared 8 --socket "$4" "$2"
"#;

fn image(layout: &Layout, scratch: &Scratch) -> String {
    let path = scratch.path("image.qcow2");
    create(&path, layout);
    qemu_img(&["resize", "-q", &path, "256M"]).ok();
    op::apply(
        "qcow2",
        &path,
        &[Op::Write {
            offset: 0,
            len: 3 * MIB,
            pattern: 0x11,
        }],
    );
    path
}

/// Fills the disk through the server until a write fails; whatever was written before the last
/// successful flush is there, on the server that lives on and in the image afterwards.
fn fill(layout: Layout, script: &str, in_place: bool) {
    let scratch = Scratch::new("full");
    let image = image(&layout, &scratch);
    let disk = scratch.path("disk");
    std::fs::create_dir(&disk).expect("scratch is writable");
    let copy = scratch.path("copy.qcow2");
    let result = if in_place { &image } else { &copy };
    let socket = scratch.path("s");
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-c", script, "small"]);
    command.args([&disk, &image, result, &socket, binary()]);
    let mut server = Server::start(command, &socket);

    let write = |offset, len, pattern| Op::Write {
        offset,
        len,
        pattern,
    };
    op::apply(
        "raw",
        &server.uri(),
        &[write(3 * MIB, MIB, 0x22), Op::Flush],
    );
    let mut failures = 0;
    for number in 0..24 {
        let ops = [write((8 + number) * MIB, MIB, 0x33), Op::Flush];
        let run = op::try_apply("raw", &server.uri(), &ops);
        assert!(run.code < 124, "a full disk is no reason to hang: {run}");
        failures += i32::from(run.code != 0);
    }
    assert!(failures > 0, "24 MiB fit on a disk of 12");
    // An overwrite of what has its place already needs no space, unless the image is closed to
    // writes because a metadata write failed half way; reads go on either way.
    let run = op::try_apply("raw", &server.uri(), &[write(MIB, 4096, 0x11)]);
    assert!(run.code < 124, "{run}");
    let there = [
        Op::Expect {
            offset: 0,
            len: 3 * MIB,
            pattern: 0x11,
        },
        Op::Expect {
            offset: 3 * MIB,
            len: MIB,
            pattern: 0x22,
        },
    ];
    op::apply("raw", &server.uri(), &there);
    server.signal("TERM");
    let end = server.wait();
    assert!(
        end.code != 101 && end.code < 124 && !end.stderr.contains("panicked"),
        "{end}"
    );

    let check = qemu_img(&["check", result]);
    assert!(
        check.code == 0 || check.code == 3,
        "more than leaks: {check}"
    );
    op::apply("qcow2", result, &there);
    let ours = gaur(&["check", result]);
    assert_eq!(ours.code, check.code, "{ours}");
}

#[test]
fn enospc_keeps_existing_data() {
    fill(Layout::v3(65536), ON_A_SMALL_DISK, false);
}

#[test]
fn a_full_file_system_and_subclusters() {
    fill(Layout::extended(65536), ON_A_SMALL_DISK, false);
}

#[test]
fn a_full_file_system_and_small_clusters() {
    fill(Layout::v3(4096), ON_A_SMALL_DISK, false);
}

#[test]
fn file_size_limit_keeps_existing_data() {
    fill(Layout::v3(65536), BELOW_A_LIMIT, true);
}

#[test]
fn a_conversion_that_does_not_fit_says_so() {
    let scratch = Scratch::new("toobig");
    let source = scratch.path("source.raw");
    let fifth = 5 * MIB;
    scratch.zeros("source.raw", 4 * fifth);
    op::apply(
        "raw",
        &source,
        &[Op::Write {
            offset: 0,
            len: 4 * fifth,
            pattern: 1,
        }],
    );
    let target = scratch.path("target.qcow2");
    let limited = "trap '' XFSZ; ulimit -f 8192; exec \"$0\" convert -f raw -O qcow2 \"$1\" \"$2\"";
    let words = ["-c", limited, binary(), &source, &target];
    gaur_interop::tool::run("bash", &words).refused();
}
