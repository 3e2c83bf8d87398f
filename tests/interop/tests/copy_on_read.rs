//! Copy-on-read and streams, beside QEMU's: what reads leave in an overlay, and that no client of a served image sees a
//! stream.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use gaur_interop::builder::{create, noise};
use gaur_interop::compare::{assert_same_view, qemu_view};
use gaur_interop::gaur::{binary, gaur, serve_with};
use gaur_interop::layout::Layout;
use gaur_interop::nbd::Server;
use gaur_interop::op;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

/// An image, and an overlay that differs from it here and there.
fn overlay(scratch: &Scratch, base: &Layout, top: &Layout) -> (String, String) {
    let noise = noise(scratch);
    let (below, image) = (scratch.path("base.qcow2"), scratch.path("top.qcow2"));
    create(&below, base);
    op::apply("qcow2", &below, &op::random(base, 1, 60, true, &noise));
    over(&below, &image, &top.options());
    let size = top.size_bytes().to_string();
    qemu_img(&["resize", "-q", "--shrink", &image, &size]).ok();
    op::apply("qcow2", &image, &op::random(top, 2, 12, true, &noise));
    (below, image)
}

fn over(below: &str, image: &str, options: &str) {
    let line = ["create", "-q", "-f", "qcow2", "-o", options];
    qemu_img(&[&line[..], &["-b", below, "-F", "qcow2", image]].concat()).ok();
}

fn copy(from: &str, to: &str) -> String {
    std::fs::copy(from, to).expect("a copy");
    to.to_owned()
}

/// What an image has of its own, sector by sector: `None` for nothing, else whether it is marked as zeros.
fn own(image: &str) -> Vec<Option<bool>> {
    let map = qemu_img(&["map", "--output=json", image]).ok().json();
    let mut sectors = Vec::new();
    for extent in map.as_array().expect("a list") {
        let own = extent["depth"] == 0 && extent["present"] == true;
        let state = own.then(|| extent["zero"] == true);
        let len = extent["length"].as_u64().expect("a length") / 512;
        sectors.extend((0..len).map(|_| state));
    }
    sectors
}

/// Asserts that our reads have left in an overlay what QEMU's have left in a copy of it. QEMU looks for zeros in all that a
/// read copies, and this engine in each cluster or subcluster of it: ours may be marked where theirs are written.
fn assert_left_alike(ours: &str, theirs: &str, what: &str) {
    for (sector, found) in own(ours).into_iter().zip(own(theirs)).enumerate() {
        let alike = found.0 == found.1 || found == (Some(true), Some(false));
        assert!(alike, "sector {sector}: {found:?}: {what}");
    }
}

/// The same reads leave the same in the overlay. But version 2 marks no zeros: QEMU writes them, also where nothing is below.
#[test]
fn reads_leave_what_they_leave_with_qemu() {
    let layouts = [
        (Layout::v3(65536), Layout::v3(65536)),
        (Layout::v3(4096), Layout::v3(65536)),
        (Layout::v3(65536), Layout::v3(4096)),
        (Layout::extended(16384), Layout::extended(65536)),
        (Layout::v2(4096), Layout::extended(16384)),
        (Layout::v3(4096), Layout::v2(65536)),
    ];
    for (number, (base, top)) in layouts.iter().enumerate() {
        let scratch = Scratch::new("copy-on-read");
        let (_, image) = overlay(&scratch, base, top);
        let before = scratch.path("before.raw");
        qemu_view(&image, &before);
        let theirs = copy(&image, &scratch.path("theirs.qcow2"));
        let ours = copy(&image, &scratch.path("ours.qcow2"));
        let mut random = Random::new(number as u64);
        let reads: Vec<String> = (0..40)
            .map(|_| {
                let sectors = top.size_bytes() / 512;
                let start = random.below(sectors);
                let longest = if random.one_in(4) { 600 } else { 20 };
                let len = (1 + random.below(longest)).min(sectors - start);
                format!("read {} {}", start * 512, len * 512)
            })
            .collect();
        let words: Vec<&str> = reads.iter().flat_map(|read| ["-c", read]).collect();
        run(
            "qemu-io",
            &[&["-C", "-f", "qcow2"], &words[..], &[&theirs]].concat(),
        )
        .ok();
        gaur(&[&["qemu-io", "-C", "-f", "qcow2"], &words[..], &[&ours]].concat()).ok();
        for image in [&theirs, &ours] {
            assert_clean(image);
            assert_same_view(("qcow2", image), ("raw", &before));
        }
        if !top.v2 {
            let what = format!("{base:?} below {top:?}: {reads:?}");
            assert_left_alike(&ours, &theirs, &what);
        }
    }
}

#[test]
fn what_is_only_read_keeps_nothing() {
    let scratch = Scratch::new("copy-on-read");
    let layout = Layout::v3(65536);
    let (_, image) = overlay(&scratch, &layout, &layout);
    let filter = format!("driver=copy-on-read,file.driver=qcow2,file.file.filename={image}");
    let plain = format!("driver=qcow2,copy-on-read=on,file.filename={image}");
    for words in [
        vec!["qemu-io", "-r", "-C", "-c", "read 0 1", &image],
        vec!["qemu-io", "-r", "--image-opts", "-c", "read 0 1", &filter],
        vec!["serve", "-r", "--image-opts", &plain],
    ] {
        let refused = gaur(&words).refused();
        assert!(refused.stderr.contains("opened read-only"), "{refused}");
    }
    let before = std::fs::read(&image).expect("the image");
    gaur(&["map", "--image-opts", &filter]).ok();
    gaur(&["compare", "--image-opts", &filter, &plain]).ok();
    assert!(std::fs::read(&image).expect("the image") == before);
    run("qemu-io", &["--image-opts", "-c", "read 0 1M", &filter]).ok();
    let theirs = copy(&image, &scratch.path("theirs.qcow2"));
    std::fs::write(&image, &before).expect("the image");
    gaur(&["qemu-io", "--image-opts", "-c", "read 0 1M", &filter]).ok();
    assert_left_alike(&image, &theirs, "a MiB");
}

/// The whole disk read by a client is the whole disk copied.
#[test]
fn a_served_image_keeps_what_clients_read() {
    let scratch = Scratch::new("copy-on-read");
    for options in ["", ",extended_l2=on"] {
        let layout = Layout::v3(65536);
        let (below, image) = overlay(&scratch, &layout, &layout);
        let fresh = scratch.path("fresh.qcow2");
        over(&image, &fresh, &format!("cluster_size=65536{options}"));
        let socket = scratch.path("s");
        let server = serve_with(&fresh, &socket, &["--copy-on-read"]);
        let raw = scratch.path("read.raw");
        qemu_img(&["convert", "-O", "raw", &server.uri(), &raw]).ok();
        server.stop();
        assert_clean(&fresh);
        assert_same_view(("qcow2", &image), ("raw", &raw));
        qemu_img(&["rebase", "-u", "-b", "", &fresh]).ok();
        assert_same_view(("qcow2", &fresh), ("raw", &raw));
        std::fs::remove_file(below).expect("the base");
    }
}

/// An image that may not grow any more is read all the same, and its server says once why nothing stays in it.
#[test]
fn a_full_disk_fails_no_read() {
    let scratch = Scratch::new("copy-on-read");
    let below = large(&scratch);
    let (image, socket) = (scratch.path("top.qcow2"), scratch.path("s"));
    over(&below, &image, "cluster_size=65536");
    let script = r#"
trap '' XFSZ
ulimit -f 8192
exec "$0" serve --persistent --shared 8 --copy-on-read --control "$3" --socket "$1" "$2"
"#;
    let mut command = Command::new("bash");
    let control = scratch.path("control");
    command.args(["-c", script, binary(), &socket, &image, &control]);
    let mut server = Server::start(command, &socket);
    assert_same_view(("raw", &server.uri()), ("qcow2", &below));
    gaur(&["export", "remove", "--control", &control, ""]).ok();
    server.signal("TERM");
    let ended = server.wait().ok();
    let told = ended.stderr.matches("could not be kept in the image: ");
    assert_eq!(told.count(), 1, "{ended}");
    assert!(ended.stderr.contains(" times in all"), "{ended}");
    assert_clean(&image);
    assert_same_view(("qcow2", &image), ("qcow2", &below));
    let kept = own(&image).iter().flatten().count();
    assert!(kept > 4096, "{kept} sectors");
}

/// A load of writes that leaves the same disk each time, and of reads beside them.
fn load(uri: &str) -> Command {
    let mut load = Command::new("fio");
    load.args([
        "--ioengine=nbd",
        "--iodepth=16",
        "--bs=8k",
        "--randrepeat=1",
    ]);
    load.arg(format!("--uri={uri}"));
    load.args([
        "--name=writes",
        "--rw=randwrite",
        "--size=32m",
        "--io_size=12m",
    ]);
    load.args([
        "--verify=pattern",
        "--verify_pattern=%o",
        "--do_verify=0",
        "--verify_state_save=0",
    ]);
    load.args(["--offset=8m", "--fsync=16", "--rate=4m"]);
    load.args([
        "--name=reads",
        "--rw=randread",
        "--size=64m",
        "--io_size=16m",
    ]);
    load.arg("--rate=5m");
    load.stdout(Stdio::null()).stderr(Stdio::null());
    load
}

/// A base of 64 MiB with data, zeros and holes.
fn large(scratch: &Scratch) -> String {
    let below = scratch.path("base.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &below, "64M"]).ok();
    let mut words = vec!["-f".to_owned(), "qcow2".to_owned()];
    for number in 0..39_u64 {
        let at = number * 1664;
        words.extend([
            "-c".to_owned(),
            format!("write -P {} {at}k 1300k", number + 1),
        ]);
    }
    words.extend(["-c".to_owned(), "write -z 20M 3M".to_owned(), below.clone()]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    run("qemu-io", &words).ok();
    below
}

#[test]
fn clients_see_no_stream() {
    for (options, more) in [
        ("cluster_size=65536", &["--copy-on-read"][..]),
        ("extended_l2=on", &[]),
    ] {
        let scratch = Scratch::new("stream");
        let below = large(&scratch);
        let (image, twin) = (scratch.path("top.qcow2"), scratch.path("twin.qcow2"));
        over(&below, &image, options);
        over(&below, &twin, options);
        let control = scratch.path("control");
        let words = [&["--control", &control][..], more].concat();
        let server = serve_with(&image, &scratch.path("s"), &words);
        let mut clients = load(&server.uri()).spawn().expect("fio starts");
        let limited = gaur(&["stream", "--control", &control, "-r", "16M", "-p"]).ok();
        assert!(limited.stdout.contains("copied."), "{limited}");
        assert!(clients.wait().expect("fio").success());
        let again = gaur(&["stream", "--control", &control]).ok();
        assert_eq!(again.stdout, "0 B copied.\n");
        server.stop();
        let other = Server::qemu(&twin, "qcow2", &scratch.path("t"), false);
        assert!(load(&other.uri()).status().expect("fio").success());
        other.stop();
        assert_clean(&image);
        assert_same_view(("qcow2", &image), ("qcow2", &twin));
        // Nothing of it is below any more.
        qemu_img(&["rebase", "-u", "-b", "", &image]).ok();
        assert_same_view(("qcow2", &image), ("qcow2", &twin));
    }
}

/// The same views; the kernel may hold the locks of a process that was killed for a moment.
fn assert_same_beside_locks(left: &str, right: &str) {
    qemu_img(&["compare", "-U", "-f", "qcow2", "-F", "qcow2", left, right]).ok();
}

#[test]
fn a_stream_that_was_killed_goes_on_where_it_was() {
    let scratch = Scratch::new("stream");
    let below = large(&scratch);
    let image = scratch.path("top.qcow2");
    over(&below, &image, "cluster_size=65536");
    let mut killed = Command::new(binary());
    killed.args(["stream", "-r", "40M", &image]);
    let mut killed = killed.spawn().expect("gaur starts");
    sleep(Duration::from_millis(700));
    killed.kill().expect("killed");
    killed.wait().expect("a child");
    assert_same_beside_locks(&image, &below);
    // Served: killed with a client's stream under way.
    let control = scratch.path("control");
    let server = serve_with(&image, &scratch.path("s"), &["--control", &control]);
    let mut streaming = Command::new(binary());
    streaming.args(["stream", "--control", &control, "-r", "20M"]);
    streaming.stdout(Stdio::null()).stderr(Stdio::null());
    let mut streaming = streaming.spawn().expect("gaur starts");
    sleep(Duration::from_millis(700));
    server.kill();
    assert!(!streaming.wait().expect("a child").success());
    assert_same_beside_locks(&image, &below);
    // Leaks at worst.
    let repaired = || qemu_img(&["check", "-q", "-r", "leaks", &image]);
    let unlocked = (0..100).any(|_| {
        sleep(Duration::from_millis(50));
        repaired().code == 0
    });
    assert!(unlocked, "{}", repaired());
    let data = |image: &str| own(image).iter().filter(|own| **own == Some(false)).count();
    let (copied, all) = (data(&image), data(&below));
    assert!(
        0 < copied && copied < all,
        "killed in the middle: {copied} of {all}"
    );
    gaur(&["stream", "--unlink", &image]).ok();
    assert_clean(&image);
    let info = qemu_img(&["info", "--output=json", &image]).ok().json();
    assert!(info.get("backing-filename").is_none(), "{info}");
    assert_same_view(("qcow2", &image), ("qcow2", &below));
}

#[test]
fn a_snapshot_keeps_its_backing_file() {
    let scratch = Scratch::new("stream");
    let layout = Layout::v3(65536);
    let (_, image) = overlay(&scratch, &layout, &layout);
    qemu_img(&["snapshot", "-c", "one", &image]).ok();
    let refused = gaur(&["stream", "--unlink", &image]).refused();
    assert!(refused.stderr.contains("snapshots"), "{refused}");
    gaur(&["stream", "-q", &image]).ok();
    assert_clean(&image);
    let before = scratch.path("one.raw");
    qemu_img(&["convert", "-l", "one", "-O", "raw", &image, &before]).ok();
    assert_same_view(("qcow2", &image), ("raw", &before));
}

/// What the options leave out is not copied, so its name stays.
#[test]
fn unlink_needs_the_whole_chain() {
    let scratch = Scratch::new("stream");
    let layout = Layout::v3(65536);
    let (_, image) = overlay(&scratch, &layout, &layout);
    let alone = format!("driver=qcow2,file.filename={image},backing=null");
    let refused = gaur(&["stream", "--unlink", "--image-opts", &alone]).refused();
    assert!(refused.stderr.contains("backing file"), "{refused}");
    let info = qemu_img(&["info", "--output=json", &image]).ok().json();
    assert!(info.get("backing-filename").is_some(), "{info}");
}
