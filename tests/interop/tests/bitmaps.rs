//! Persistent bitmaps, which are not kept: nothing is lost without being asked for, and nothing stays
//! behind that other programs stumble over.

use gaur_interop::gaur::{gaur, serve_with};
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, assert_clean, qemu_img};

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

/// The image is sound, has its two snapshots, and keeps them when QEMU repairs leaks.
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

/// Every verb that writes, in a form that changes the image.
fn writers(image: &str, scratch: &Scratch) -> Vec<Vec<String>> {
    let source = scratch.zeros("source.raw", 1 << 20);
    let words = |line: &[&str]| line.iter().map(|word| (*word).to_owned()).collect();
    vec![
        words(&["resize", image, "128M"]),
        words(&["snapshot", "-c", "new", image]),
        words(&["snapshot", "create", image, "new"]),
        words(&["snapshot", "-a", "before", image]),
        words(&["snapshot", "delete", image, "before"]),
        words(&["convert", "-n", "-f", "raw", &source, image]),
        words(&["bench", "-w", "-c", "10", image]),
        words(&["serve", image]),
    ]
}

/// A server that wrote to an image with bitmaps dropped them without a word, and `resize` left their
/// clusters behind.
#[test]
fn bitmaps_are_not_lost_unless_that_is_asked_for() {
    let scratch = Scratch::new("refused");
    let image = image_with_bitmaps(&scratch, false);
    let before = std::fs::read(&image).expect("the image is there");
    for line in writers(&image, &scratch) {
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        let said: Run = gaur(&line).refused();
        for word in [r#""daily", "hourly""#, "--drop-bitmaps"] {
            assert!(said.stderr.contains(word), "{line:?}: {}", said.stderr);
        }
        let after = std::fs::read(&image).expect("the image is there");
        assert!(before == after, "{line:?} changed the image");
    }
    for line in [&["check"][..], &["info"], &["map"], &["snapshot", "-l"]] {
        gaur(&[line, &[image.as_str()]].concat()).ok();
    }
    assert_eq!(bitmaps(&image), 2);
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
