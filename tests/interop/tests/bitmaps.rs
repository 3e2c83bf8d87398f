//! Persistent bitmaps: made, changed and kept as QEMU does, and read by it; and removed without anything left
//! behind that other programs stumble over.

use std::process::Command;

use gaur_interop::gaur::{gaur, serve_with};
use gaur_interop::nbd::Server;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img};

const WRITE: Op = Op::Write {
    offset: 3 << 20,
    len: 65536,
    pattern: 7,
};

/// An image with two bitmaps, two snapshots and data. With a backing file its header is longer, and the
/// extension that leads to the bitmaps lies behind the first sector.
fn image_with_bitmaps(scratch: &Scratch, backed: bool) -> String {
    let image = scratch.path("d.qcow2");
    let mut create = vec!["create", "-q", "-f", "qcow2"];
    let base = scratch.path("base.qcow2");
    if backed {
        qemu_img(&["create", "-q", "-f", "qcow2", &base, "64M"]).ok();
        create.extend(["-b", &base, "-F", "qcow2"]);
    }
    create.extend([image.as_str(), "64M"]);
    qemu_img(&create).ok();
    let write = |pattern| Op::Write {
        offset: 0,
        len: 4 << 20,
        pattern,
    };
    op::apply("qcow2", &image, &[write(1)]);
    qemu_img(&["snapshot", "-c", "before", &image]).ok();
    qemu_img(&["bitmap", "--add", &image, "daily"]).ok();
    qemu_img(&["bitmap", "--add", "-g", "4k", &image, "hourly"]).ok();
    op::apply("qcow2", &image, &[write(2)]);
    qemu_img(&["snapshot", "-c", "after", &image]).ok();
    image
}

fn bitmaps(image: &str) -> usize {
    let info = qemu_img(&["info", "--output=json", image]).ok().json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array();
    bitmaps.map_or(0, Vec::len)
}

/// The image is sound, has its two snapshots, and keeps them when QEMU repairs leaks. (With bitmaps QEMU 10 deletes
/// them there, also those of its own images.)
fn assert_safe_from_repair(image: &str, scratch: &Scratch) {
    assert_clean(image);
    let copy = scratch.path("copy.qcow2");
    std::fs::copy(image, &copy).expect("the image is there");
    qemu_img(&["check", "-q", "-r", "leaks", &copy]).ok();
    let list = qemu_img(&["snapshot", "-l", &copy]).ok().stdout;
    assert!(list.contains("before") && list.contains("after"), "{list}");
    assert_clean(&copy);
}

fn write_by_server(image: &str, scratch: &Scratch, name: &str, options: &[&str]) {
    let server = serve_with(image, &scratch.path(name), options);
    op::apply("raw", &server.uri(), &[WRITE]);
    server.stop();
}

/// What is marked: start and length of each range.
type Ranges = Vec<(u64, u64)>;

/// The ranges that QEMU finds marked in a bitmap. It shows only those that are enabled or read-only.
fn marked(image: &str, name: &str, scratch: &Scratch) -> Ranges {
    let socket = scratch.path("marked");
    let mut command = Command::new("qemu-nbd");
    command.args(["-r", "-t", "-f", "qcow2", "-B", name, "-k", &socket, image]);
    let server = Server::start(command, &socket);
    let options = format!(
        "driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap=qemu:dirty-bitmap:{name}"
    );
    let arguments = ["map", "--output=json", "--image-opts", &options];
    let map = qemu_img(&arguments).ok().json();
    assert_eq!(gaur(&arguments).ok().json(), map, "a bitmap of qemu-nbd");
    server.stop();
    let ranges = map.as_array().expect("a list").iter();
    let number = |range: &serde_json::Value, key: &str| range[key].as_u64().expect("a number");
    let dirty = ranges.filter(|range| range["data"] == false);
    dirty
        .map(|range| (number(range, "start"), number(range, "length")))
        .collect()
}

/// The list that `info` shows, which both tools agree on.
fn listed(image: &str) -> serde_json::Value {
    let theirs = qemu_img(&["info", "--output=json", image]).ok().json();
    let ours = gaur(&["info", "--output=json", image]).ok().json();
    let list = |info: &serde_json::Value| info["format-specific"]["data"]["bitmaps"].clone();
    assert_eq!(list(&theirs), list(&ours));
    list(&ours)
}

const MIB: u64 = 1 << 20;

fn write(offset: u64, len: u64) -> Op {
    Op::Write {
        offset,
        len,
        pattern: 9,
    }
}

/// The same verbs by either tool make the same bitmaps, whoever wrote to the disk.
#[test]
fn verbs_make_what_qemu_makes() {
    let scratch = Scratch::new("verbs");
    let mut results = Vec::new();
    for ours in [false, true] {
        let image = scratch.path(if ours { "ours" } else { "theirs" });
        let other = scratch.path(if ours { "our_source" } else { "their_source" });
        let bitmap = |line: &[&str]| {
            let line = [&["bitmap"], line].concat();
            match ours {
                true => gaur(&line).ok(),
                false => qemu_img(&line).ok(),
            };
        };
        for file in [&image, &other] {
            qemu_img(&["create", "-q", "-f", "qcow2", file, "64M"]).ok();
        }
        bitmap(&["--add", "-f", "qcow2", &image, "a"]);
        bitmap(&["--add", "-g", "4k", &image, "b"]);
        bitmap(&["--add", "--disable", &image, "c"]);
        bitmap(&["--add", &other, "far"]);
        op::apply("qcow2", &image, &[write(MIB, 4096), write(10 * MIB, MIB)]);
        op::apply("qcow2", &other, &[write(60 * MIB, 65536)]);
        bitmap(&["--merge", "b", "--merge", "a", &image, "c"]);
        bitmap(&["--clear", "--disable", &image, "a"]);
        bitmap(&["--merge", "far", "-b", &other, "-F", "qcow2", &image, "b"]);
        bitmap(&["--add", &image, "gone"]);
        bitmap(&["--remove", &image, "gone"]);
        op::apply("qcow2", &image, &[write(20 * MIB, 4096)]);
        assert_clean(&image);
        let bits = ["a", "b", "c"].map(|name| marked(&image, name, &scratch));
        results.push((listed(&image), bits));
    }
    assert_eq!(results[0], results[1]);
    let [a, b, c] = &results[1].1;
    let base = vec![
        (MIB, 4096),
        (10 * MIB, MIB),
        (20 * MIB, 4096),
        (60 * MIB, 65536),
    ];
    assert_eq!((a, b), (&vec![], &base));
    assert_eq!(c, &vec![(MIB, 65536), (10 * MIB, MIB)]);
}

/// A server marks what its clients change in bitmaps that QEMU made, and QEMU goes on with them.
#[test]
fn bitmaps_are_kept_while_the_image_is_served() {
    for backed in [false, true] {
        let scratch = Scratch::new("kept");
        let image = image_with_bitmaps(&scratch, backed);
        qemu_img(&["bitmap", "--clear", &image, "daily"]).ok();
        qemu_img(&["bitmap", "--clear", "--disable", &image, "hourly"]).ok();
        let server = serve_with(&image, &scratch.path("socket"), &[]);
        op::apply("raw", &server.uri(), &[WRITE, write(40 * MIB, 512)]);
        let discard = [
            "-f",
            "raw",
            "-c",
            "discard 0 64k",
            "-c",
            "write -z 8M 1M",
            &server.uri(),
        ];
        gaur_interop::tool::run("qemu-io", &discard).ok();
        server.stop();
        let flags = |name: &str| listed(&image)[usize::from(name == "hourly")]["flags"].clone();
        assert_eq!(flags("daily"), serde_json::json!(["auto"]));
        assert_eq!(flags("hourly"), serde_json::json!([]));
        let expected = [
            (0, 65536),
            (3 * MIB, 65536),
            (8 * MIB, MIB),
            (40 * MIB, 65536),
        ];
        assert_eq!(marked(&image, "daily", &scratch), expected);
        assert_eq!(marked(&image, "hourly", &scratch), []);
        assert_clean(&image);
        op::apply("qcow2", &image, &[write(50 * MIB, 512)]);
        let more = [&expected[..], &[(50 * MIB, 65536)]].concat();
        assert_eq!(marked(&image, "daily", &scratch), more);
    }
}

/// Sizes change and snapshots are applied with bitmaps there; QEMU opens and writes to what comes out.
#[test]
fn bitmaps_follow_the_disk() {
    let scratch = Scratch::new("follow");
    let image = image_with_bitmaps(&scratch, false);
    qemu_img(&["bitmap", "--clear", &image, "daily"]).ok();
    gaur(&["resize", "-q", &image, "600M"]).ok();
    assert_eq!(marked(&image, "daily", &scratch), [(64 * MIB, 536 * MIB)]);
    qemu_img(&["bitmap", "--clear", &image, "daily"]).ok();
    gaur(&["resize", "-q", "--shrink", &image, "32M"]).ok();
    assert_eq!(marked(&image, "daily", &scratch), []);
    op::apply("qcow2", &image, &[write(0, 512)]);
    assert_eq!(marked(&image, "daily", &scratch), [(0, 65536)]);
    gaur(&["snapshot", "-a", "before", &image]).ok();
    for name in ["daily", "hourly"] {
        assert_eq!(marked(&image, name, &scratch), [(0, 64 * MIB)]);
    }
    op::apply("qcow2", &image, &[write(0, 512)]);
    assert_clean(&image);
}

/// The kernel may give back the locks of a killed server a little later.
fn wait_for_locks(image: &str) {
    while qemu_img(&["info", image]).code != 0 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// A server that was killed leaves bitmaps that QEMU cannot use and we can: they have the regions that were written to,
/// a sixteenth of the disk each, also by QEMU since.
#[test]
fn bitmaps_of_a_killed_server_survive() {
    for snapshots in [true, false] {
        let scratch = Scratch::new("killed");
        let image = image_with_bitmaps(&scratch, false);
        if !snapshots {
            for name in ["before", "after"] {
                gaur(&["snapshot", "-d", name, &image]).ok();
            }
        }
        qemu_img(&["bitmap", "--clear", &image, "daily"]).ok();
        qemu_img(&["bitmap", "--disable", &image, "hourly"]).ok();
        let server = serve_with(&image, &scratch.path("socket"), &[]);
        op::apply("raw", &server.uri(), &[WRITE, write(32 * MIB, 4096)]);
        server.kill();
        wait_for_locks(&image);
        let flags = |at: usize| listed(&image)[at]["flags"].clone();
        assert_eq!(listed(&image)[0]["name"], "gaur-write-intent-map");
        assert_eq!(flags(0), serde_json::json!(["auto"]));
        assert_eq!(flags(1), serde_json::json!(["in-use", "auto"]));
        assert_eq!(flags(2), serde_json::json!([]));
        let report = qemu_img(&["check", "--output=json", &image]);
        let report: serde_json::Value =
            serde_json::from_str(&report.stdout).expect("a report of leaks at most");
        assert!(report["corruptions"].is_null(), "{report}");
        // QEMU keeps the map, and nothing else of what is in use.
        qemu_img(&["bitmap", "--clear", &image, "daily"]).code(1);
        op::apply("qcow2", &image, &[write(50 * MIB, 512)]);
        gaur(&["bitmap", "--add", "--disable", &image, "other"]).ok();
        let expected = [0, 32, 48].map(|at| (at * MIB, 4 * MIB));
        assert_eq!(marked(&image, "daily", &scratch), expected);
        assert!(!marked(&image, "hourly", &scratch).is_empty());
        let names = listed(&image);
        assert_eq!(names.as_array().map(Vec::len), Some(3), "{names}");
        gaur(&["check", "-q", "-r", "leaks", &image]).ok();
        op::apply("qcow2", &image, &[write(60 * MIB, 65536)]);
        let more = [&expected[..], &[(60 * MIB, 65536)]].concat();
        assert_eq!(marked(&image, "daily", &scratch), more);
        assert_clean(&image);
    }
}

/// QEMU marks the map in use while it writes. If it is killed, it has written more than the map says.
#[test]
fn bitmaps_that_a_killed_qemu_leaves_are_inconsistent() {
    let scratch = Scratch::new("killed_qemu");
    let image = image_with_bitmaps(&scratch, false);
    qemu_img(&["bitmap", "--disable", &image, "hourly"]).ok();
    let server = serve_with(&image, &scratch.path("socket"), &[]);
    op::apply("raw", &server.uri(), &[WRITE]);
    server.kill();
    wait_for_locks(&image);
    let socket = scratch.path("qemu");
    let mut command = Command::new("qemu-nbd");
    command.args(["-t", "-f", "qcow2", "-k", &socket, &image]);
    let server = Server::start(command, &socket);
    op::apply("raw", &server.uri(), &[write(50 * MIB, 512)]);
    server.kill();
    wait_for_locks(&image);
    // QEMU marks those in use that do not record, too.
    for name in ["daily", "hourly"] {
        let said = gaur(&["bitmap", "--clear", &image, name]).code(1);
        assert!(said.stderr.contains("inconsistent"), "{}", said.stderr);
        gaur(&["bitmap", "--remove", &image, name]).ok();
    }
    gaur(&["check", "-q", "-r", "leaks", &image]).ok();
    assert_eq!(bitmaps(&image), 0);
    assert_clean(&image);
}

/// What is asked for is done wholly: no extension, no bit, no cluster is left. An image with the extension
/// and without the bit loses all its snapshots when `qemu-img check -r leaks` (QEMU 10) repairs it.
#[test]
fn bitmaps_that_are_dropped_leave_nothing_behind() {
    for backed in [false, true] {
        let scratch = Scratch::new("dropped");
        let image = image_with_bitmaps(&scratch, backed);
        let size = std::fs::metadata(&image).expect("it is there").len();
        let idle = serve_with(&image, &scratch.path("idle"), &["--drop-bitmaps"]);
        idle.stop();
        assert_eq!(bitmaps(&image), 2, "nothing was written");
        write_by_server(&image, &scratch, "socket", &["--drop-bitmaps"]);
        assert_eq!(bitmaps(&image), 0);
        assert_safe_from_repair(&image, &scratch);
        op::apply(
            "qcow2",
            &image,
            &[Op::Expect {
                offset: 3 << 20,
                len: 65536,
                pattern: 7,
            }],
        );
        // QEMU can have new ones, and we drop those as well.
        qemu_img(&["bitmap", "--add", &image, "again"]).ok();
        gaur(&["resize", "-q", "--drop-bitmaps", &image, "65M"]).ok();
        assert_eq!(bitmaps(&image), 0);
        assert_safe_from_repair(&image, &scratch);
        let grown = std::fs::metadata(&image).expect("it is there").len() - size;
        assert!(grown < 2 << 20, "{grown} bytes");
    }
}

/// Bitmaps that a program without bitmaps has made useless (their autoclear bit is off) are what QEMU
/// stumbles over. The first change hides them; their clusters may have other owners by now, and stay.
#[test]
fn stale_bitmaps_are_hidden_by_the_first_change() {
    for backed in [false, true] {
        let scratch = Scratch::new("stale");
        let image = image_with_bitmaps(&scratch, backed);
        let mut bytes = std::fs::read(&image).expect("the image is there");
        bytes[88..96].fill(0);
        std::fs::write(&image, bytes).expect("scratch is writable");
        let said = gaur(&["resize", "-q", &image, "65M"]).ok();
        assert!(said.stderr.contains("useless"), "{}", said.stderr);
        let copy = scratch.path("copy.qcow2");
        std::fs::copy(&image, &copy).expect("the image is there");
        qemu_img(&["check", "-q", "-r", "leaks", &copy]).ok();
        let list = qemu_img(&["snapshot", "-l", &copy]).ok().stdout;
        assert!(list.contains("before") && list.contains("after"), "{list}");
        assert_clean(&copy);
    }
}

/// Clusters that a damaged bitmap claims may hold the guest's data: they are not given away.
#[test]
fn damaged_bitmaps_are_not_dropped() {
    let scratch = Scratch::new("damaged");
    let image = image_with_bitmaps(&scratch, false);
    let mut bytes = std::fs::read(&image).expect("the image is there");
    let at = bytes
        .windows(4)
        .position(|word| word == 0x2385_2875_u32.to_be_bytes())
        .expect("the extension is there");
    let word = |bytes: &[u8], at: usize| {
        u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    };
    let directory = word(&bytes, at + 24) as usize;
    let table = word(&bytes, directory) as usize;
    // The first cluster of guest data.
    let l1 = word(&bytes, 40) as usize;
    let l2 = (word(&bytes, l1) & 0xff_ffff_ffff_fe00) as usize;
    let data = word(&bytes, l2) & 0xff_ffff_ffff_fe00;
    bytes[table..table + 8].copy_from_slice(&data.to_be_bytes());
    std::fs::write(&image, &bytes).expect("scratch is writable");
    let said = gaur(&["resize", "-q", "--drop-bitmaps", &image, "65M"]).refused();
    assert!(said.stderr.contains("check the image"), "{}", said.stderr);
    assert!(bytes == std::fs::read(&image).expect("the image is there"));
}

/// Either tool copies the same bitmaps, but for those of a killed server, which QEMU cannot use.
#[test]
fn convert_copies_bitmaps_as_qemu_does() {
    let scratch = Scratch::new("copied");
    let image = image_with_bitmaps(&scratch, true);
    qemu_img(&["bitmap", "--disable", &image, "daily"]).ok();
    let convert = ["convert", "-O", "qcow2", "--bitmaps"];
    let mut results = Vec::new();
    for ours in [false, true] {
        let target = scratch.path(if ours { "ours" } else { "theirs" });
        let line = [&convert[..], &[&image, &target]].concat();
        match ours {
            true => gaur(&line).ok(),
            false => qemu_img(&line).ok(),
        };
        assert_clean(&target);
        let bits = ["daily", "hourly"].map(|name| marked(&target, name, &scratch));
        results.push((listed(&target), bits));
    }
    assert_eq!(results[0], results[1]);
    assert!(results[0].1.iter().all(|bits| !bits.is_empty()));
    let refused = scratch.path("refused");
    for line in [
        &["convert", "-O", "raw", "--bitmaps", &image, &refused][..],
        &[
            "convert",
            "-O",
            "qcow2",
            "--bitmaps",
            &image,
            &image,
            &refused,
        ],
        &[
            "convert",
            "-O",
            "qcow2",
            "--bitmaps",
            "-o",
            "size=65M",
            &image,
            &refused,
        ],
    ] {
        gaur(line).code(1);
    }
    let server = serve_with(&image, &scratch.path("socket"), &[]);
    op::apply("raw", &server.uri(), &[write(40 * MIB, 4096)]);
    server.kill();
    wait_for_locks(&image);
    let target = scratch.path("after");
    qemu_img(&[&convert[..], &[&image, &target]].concat()).code(1);
    gaur(&[&convert[..], &[&image, &target]].concat()).ok();
    let hourly = marked(&target, "hourly", &scratch);
    assert_eq!(hourly, [(0, 4 * MIB), (40 * MIB, 4 * MIB)]);
    // Inconsistent ones are refused, or left out.
    let mut bytes = std::fs::read(&image).expect("it is there");
    let map = bytes
        .windows(21)
        .position(|name| name == b"gaur-write-intent-map");
    bytes[map.expect("it is in the directory") - 9] |= 1;
    std::fs::write(&image, bytes).expect("scratch is writable");
    let said = gaur(&[&convert[..], &[&image, &target]].concat()).code(1);
    assert!(said.stderr.contains("inconsistent"), "{}", said.stderr);
    let skip = ["--skip-broken-bitmaps", &image, &target];
    gaur(&[&convert[..], &skip].concat()).ok();
    assert_eq!(bitmaps(&target), 1);
}

/// NBD clients see a bitmap as QEMU's server shows it.
#[test]
fn bitmaps_are_shown_to_nbd_clients() {
    let scratch = Scratch::new("shown");
    let image = image_with_bitmaps(&scratch, false);
    op::apply(
        "qcow2",
        &image,
        &[write(9 * MIB, 4096), write(40 * MIB, MIB)],
    );
    for (options, name) in [
        (&["-r", "-B", "hourly"][..], "hourly"),
        (&["-B", "daily"], "daily"),
    ] {
        let server = serve_with(&image, &scratch.path("socket"), options);
        let context = format!("qemu:dirty-bitmap:{name}");
        let map = format!("--map={context}");
        let map = gaur_interop::tool::run("nbdinfo", &["--json", &map, &server.uri()]).ok();
        let both = ["--json", "--list", &server.uri()];
        let listed = gaur_interop::tool::run("nbdinfo", &both).ok().stdout;
        assert!(
            listed.contains(&context) && listed.contains("base:allocation"),
            "{listed}"
        );
        // Both contexts at once: data where it is, by the bitmap's side.
        let options = format!(
            "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap={context}",
            scratch.path("socket")
        );
        let arguments = ["map", "--output=json", "--image-opts", &options];
        let theirs = qemu_img(&arguments).ok().json();
        assert_eq!(gaur(&arguments).ok().json(), theirs);
        // The disk behind it is what it is, whatever the bitmap says.
        let plain = options.replace(&format!(",x-dirty-bitmap={context}"), "");
        let same = ["compare", "--image-opts", &options, &plain];
        gaur(&same).ok();
        let missing = gaur(&["map", "--image-opts", &format!("{options}-not")]).code(1);
        let said = missing.stderr.trim_end();
        assert!(said.ends_with("of this export"), "{said}");
        server.stop();
        let ranges = map.json();
        let ranges = ranges.as_array().expect("a list").iter();
        let ranges = ranges.filter(|range| range["type"] == 1);
        let number = |range: &serde_json::Value, key: &str| range[key].as_u64().expect("a number");
        let ours: Ranges = ranges
            .map(|range| (number(range, "offset"), number(range, "length")))
            .collect();
        let theirs = theirs.as_array().expect("a list").iter();
        let dirty: Ranges = theirs
            .filter(|range| range["data"] == false)
            .map(|range| (number(range, "start"), number(range, "length")))
            .collect();
        assert_eq!(ours, dirty);
        assert_eq!(ours, marked(&image, name, &scratch));
        assert_eq!(ours.len(), 3, "{ours:?}");
    }
    let said = gaur(&["serve", "-k", &scratch.path("no"), "-B", "none", &image]).code(1);
    assert!(said.stderr.contains("no bitmap named"), "{}", said.stderr);
}

/// A bitmap that records is shown as it is, also after clients have written.
#[test]
fn bitmap_that_records_is_shown_with_what_was_just_written() {
    let scratch = Scratch::new("shown-live");
    let image = image_with_bitmaps(&scratch, false);
    let server = serve_with(
        &image,
        &scratch.path("socket"),
        &["-B", "daily", "-B", "hourly"],
    );
    let dirty = |name: &str| {
        let map = format!("--map=qemu:dirty-bitmap:{name}");
        let map = gaur_interop::tool::run("nbdinfo", &["--json", &map, &server.uri()]).ok();
        let ranges = map.json();
        let ranges = ranges.as_array().expect("a list").iter();
        let ranges = ranges.filter(|range| range["type"] == 1);
        let lengths = ranges.map(|range| range["length"].as_u64().expect("a number"));
        lengths.sum::<u64>()
    };
    let before = [dirty("daily"), dirty("hourly")];
    op::apply("raw", &server.uri(), &[write(50 * MIB, MIB)]);
    let after = [dirty("daily"), dirty("hourly")];
    for (before, after) in before.iter().zip(after) {
        assert!(after >= before + MIB, "{before} {after}");
    }
    server.stop();
}

/// An overlay goes on with the bitmaps of its base, whose own stay as they are.
#[test]
fn bitmaps_go_on_in_an_overlay() {
    let scratch = Scratch::new("overlay");
    let base = image_with_bitmaps(&scratch, false);
    qemu_img(&["bitmap", "--disable", &base, "hourly"]).ok();
    let before = std::fs::read(&base).expect("it is there");
    let overlay = scratch.path("overlay.qcow2");
    let create = ["create", "-q", "-b", &base, "-F", "qcow2", "--bitmaps"];
    gaur(&[&create[..], &[&overlay]].concat()).ok();
    assert_eq!(listed(&overlay), listed(&base));
    let server = serve_with(&overlay, &scratch.path("socket"), &[]);
    op::apply("raw", &server.uri(), &[write(40 * MIB, 65536)]);
    server.stop();
    assert_eq!(
        marked(&overlay, "daily", &scratch),
        [(0, 4 * MIB), (40 * MIB, 65536)]
    );
    assert_eq!(marked(&overlay, "hourly", &scratch), [(0, 4 * MIB)]);
    assert!(before == std::fs::read(&base).expect("it is there"));
    assert_clean(&overlay);
    let other = scratch.path("other.qcow2");
    let said = gaur(&[&create[..], &[&other, "65M"]].concat()).code(1);
    assert!(said.stderr.contains("same size"), "{}", said.stderr);
    gaur(&["create", "-q", "--bitmaps", &other, "1M"]).code(1);
}

/// Kills a server under load again and again: blocks that have changed since the bitmap was made are in it, always.
/// `GAUR_KILLS` has more rounds than ten.
#[test]
fn bitmaps_cover_all_changes_over_many_kills() {
    const BLOCK: usize = 65536;
    let rounds = std::env::var("GAUR_KILLS").ok();
    let rounds = rounds.and_then(|rounds| rounds.parse().ok()).unwrap_or(10);
    let scratch = Scratch::new("kills");
    let image = scratch.path("d.qcow2");
    let raw = |name: &str| {
        let raw = scratch.path(name);
        gaur(&["convert", "-O", "raw", &image, &raw]).ok();
        std::fs::read(&raw).expect("it was made")
    };
    gaur(&["create", "-q", "-f", "qcow2", &image, "256M"]).ok();
    gaur(&["bitmap", "--add", &image, "daily"]).ok();
    let (mut before, mut changed) = (raw("before"), 0);
    let mut random = 7_u64;
    let mut draw = |bound: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (random >> 33) % bound
    };
    for round in 0..rounds {
        let server = serve_with(&image, &scratch.path("socket"), &[]);
        let mut load = Command::new("qemu-io");
        load.args(["-f", "raw"]);
        for _ in 0..200 {
            let (at, pattern) = (draw(256 * 16) * 65536, 1 + draw(255));
            load.args(["-c", &format!("aio_write -P {pattern} {at} 4096")]);
        }
        let load = load.arg(server.uri());
        let quiet = || std::process::Stdio::null();
        let mut load = load
            .stdout(quiet())
            .stderr(quiet())
            .spawn()
            .expect("qemu-io is there");
        std::thread::sleep(std::time::Duration::from_millis(20 + draw(150)));
        server.kill();
        load.wait().expect("it ends with its server");
        wait_for_locks(&image);
        let now = raw("now");
        let target = scratch.path("target");
        gaur(&["convert", "-O", "qcow2", "--bitmaps", &image, &target]).ok();
        let marks = marked(&target, "daily", &scratch);
        let blocks = now.chunks(BLOCK).zip(before.chunks(BLOCK));
        for (number, (now, before)) in (0..).zip(blocks) {
            let at = number * BLOCK as u64;
            let is_marked = marks
                .iter()
                .any(|(start, len)| (*start..start + len).contains(&at));
            assert!(now == before || is_marked, "round {round}: block at {at}");
            changed += usize::from(now != before);
        }
        if round % 4 == 3 {
            // A backup is made: the next begins here.
            gaur(&["bitmap", "--clear", &image, "daily"]).ok();
            assert_eq!(marked(&image, "daily", &scratch), []);
            before = now;
        }
    }
    assert!(
        changed > rounds,
        "blocks changed by killed servers: {changed}"
    );
    let report = gaur(&["check", "--output=json", &image]);
    assert!([0, 3].contains(&report.code), "{}", report.stdout);
}
