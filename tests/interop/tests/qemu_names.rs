//! What `gaur` does under the name of `qemu-img` beside QEMU's program: the words of `check`, the lists of `-o help`,
//! progress that a signal asks for.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use gaur_interop::field::header;
use gaur_interop::gaur::{binary, gaur};
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, qemu_img, run};

/// Runs `qemu-img` of both.
fn both(arguments: &[&str]) -> (Run, Run) {
    let ours = [&["qemu-img"], arguments].concat();
    (gaur(&ours), run("qemu-img", arguments))
}

/// An image with data in four clusters, and the position of its refcount block.
fn image(scratch: &Scratch) -> (String, u64) {
    let path = scratch.path("disk.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &path, "4M"]).ok();
    run("qemu-io", &["-f", "qcow2", "-c", "write 0 256k", &path]).ok();
    let table = header("refcount_table_offset").get(&path) as usize;
    let bytes = std::fs::read(&path).expect("the image");
    let block = bytes[table..table + 8].try_into().expect("an entry");
    (path, u64::from_be_bytes(block))
}

fn set_refcount(image: &str, block: u64, cluster: u64, count: u16) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).open(image);
    let file = file.expect("the image");
    file.write_all_at(&count.to_be_bytes(), block + cluster * 2)
        .expect("written");
}

#[test]
fn check_tells_counts_in_the_words_of_qemu() {
    let scratch = Scratch::new("names-check");
    let (path, block) = image(&scratch);
    set_refcount(&path, block, 6, 3);
    set_refcount(&path, block, 7, 0);
    set_refcount(&path, block, 900, 1);
    let (ours, theirs) = both(&["check", "-f", "qcow2", &path]);
    assert_eq!(ours.code, theirs.code);
    // What is wrong with an entry is said after the counts, in each one's own words.
    let said: Vec<&str> = ours.stderr.lines().collect();
    let expected: Vec<&str> = theirs.stderr.lines().collect();
    assert_eq!(said.len(), expected.len(), "{ours}{theirs}");
    assert_eq!(said[..2], expected[..2]);
    assert!(
        said[2..].iter().all(|line| line.starts_with("ERROR: ")),
        "{ours}"
    );
    assert_eq!(ours.stdout, theirs.stdout);
    assert!(
        ours.stderr
            .contains("Leaked cluster 6 refcount=3 reference=1\n")
    );
    // Said before it is repaired, and what was done. (QEMU builds all counts anew when one is too low.)
    set_refcount(&path, block, 7, 1);
    let copy = scratch.path("copy.qcow2");
    std::fs::copy(&path, &copy).expect("a copy");
    let ours = gaur(&["qemu-img", "check", "-r", "all", &path]).ok();
    let theirs = qemu_img(&["check", "-r", "all", &copy]).ok();
    let told = |run: &Run, begin: &str| {
        let lines = run.stderr.lines().filter(|line| line.starts_with(begin));
        let mut lines: Vec<String> = lines.map(str::to_owned).collect();
        lines.sort();
        lines.dedup();
        lines
    };
    for begin in ["Leaked cluster ", "Repairing cluster "] {
        assert_eq!(told(&ours, begin), told(&theirs, begin), "{ours}{theirs}");
        assert!(!told(&ours, begin).is_empty(), "{ours}");
    }
    assert_eq!(ours.stdout, theirs.stdout);
}

#[test]
fn many_leaks_are_counted_and_each_line_is_a_leak() {
    let scratch = Scratch::new("names-leaks");
    let (path, block) = image(&scratch);
    for cluster in 2000..4000 {
        set_refcount(&path, block, cluster, 1);
    }
    let file = std::fs::File::options().write(true).open(&path);
    file.and_then(|file| file.set_len(4000 << 16))
        .expect("longer");
    let (ours, theirs) = both(&["check", "-f", "qcow2", &path]);
    assert_eq!(ours.stdout, theirs.stdout);
    assert_eq!((ours.code, theirs.code), (3, 3));
    let lines: Vec<&str> = ours.stderr.lines().collect();
    assert!(lines.len() >= 1000, "{}", lines.len());
    for line in lines {
        assert!(theirs.stderr.contains(line), "{line}");
    }
}

#[test]
fn lists_of_options_are_those_of_qemu() {
    let scratch = Scratch::new("names-help");
    let new = scratch.path("new.qcow2");
    let (old, _) = image(&scratch);
    for line in [
        &["create", "-f", "qcow2", "-o", "help"][..],
        &["create", "-f", "qcow2", "-o", "help", &new],
        &["create", "-o", "help"],
        &["create", "-f", "raw", "-o", "help", &new],
        &["convert", "-O", "qcow2", "-o", "help", &old, &new],
        &["amend", "-f", "qcow2", "-o", "help", &old],
    ] {
        let (ours, theirs) = both(line);
        let heads = |run: &Run| {
            let lines = run.stdout.lines();
            let heads = lines.map(|line| line.split(" - ").next().unwrap_or(line).trim_end());
            heads.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(heads(&ours), heads(&theirs), "{line:?}");
        assert_eq!(ours.code, 0, "{ours}");
    }
    for list in ["cluster_size=4k,", ",cluster_size=4k", "cluster_size=4k,,,"] {
        let (ours, theirs) = both(&["create", "-f", "qcow2", "-o", list, &new, "1M"]);
        assert_eq!((ours.code, theirs.code), (1, 1), "{list}");
    }
}

#[test]
fn a_signal_asks_how_far_it_is() {
    let scratch = Scratch::new("names-signal");
    let (source, target) = (scratch.path("source.raw"), scratch.path("target.raw"));
    // A limit on the rate keeps it at work until the signal has come.
    std::fs::write(&source, vec![7; 8 << 20]).expect("a source");
    let line = ["qemu-img", "convert", "-r", "4M", "-f", "raw", "-O", "raw"];
    let mut convert = Command::new(binary())
        .args(line)
        .args([&source, &target])
        .stderr(Stdio::piped())
        .spawn()
        .expect("gaur");
    let id = convert.id().to_string();
    let mut status = None;
    while status.is_none() {
        std::thread::sleep(Duration::from_millis(200));
        status = convert.try_wait().expect("a state");
        if status.is_none() {
            run("kill", &["-USR1", &id]);
        }
    }
    let status = convert.wait().expect("its end");
    assert!(status.success(), "{status}");
    let mut told = String::new();
    let stderr = convert.stderr.as_mut().expect("a pipe");
    stderr.read_to_string(&mut told).expect("text");
    assert!(told.lines().count() > 0, "nothing was told");
    for line in told.lines() {
        assert!(
            line.starts_with("    (") && line.ends_with("/100%)"),
            "{line}"
        );
    }
}

/// Counts are C's numbers: scripts pass `-m " 4"`, `0x10` and `010`.
#[test]
fn numbers_are_taken_and_refused_as_qemu_takes_them() {
    let scratch = Scratch::new("numbers");
    let (source, target) = (scratch.zeros("source", 1 << 20), scratch.path("target"));
    for number in [
        "4", " 4", "4 ", "0x4", "0X4", "04", "010", "+4", "-4", "4.0", "1e1", "4x", "", "0", "08",
        "17",
    ] {
        let (count, bits) = (format!("count={number}"), format!("refcount_bits={number}"));
        let (from, to) = (format!("if={source}"), format!("of={target}"));
        for line in [
            &["convert", "-m", number, "-O", "raw", &source, &target][..],
            &["convert", "-r", number, "-O", "raw", &source, &target],
            &["create", "-q", "-f", "raw", &target, number],
            &["create", "-q", "-f", "qcow2", "-o", &bits, &target, "1M"],
            &["bench", "-f", "raw", "-c", number, &source],
            &["dd", "-f", "raw", "-O", "raw", &count, &from, &to],
        ] {
            // A rate takes its time, and blocks of half a size are ours.
            if (line[1] == "-r" && number != "0")
                || (line[0] == "dd" && ["4.0", "08"].contains(&number))
            {
                continue;
            }
            let outcome = |run: Run| {
                let made = std::fs::metadata(&target).map(|made| made.len()).ok();
                let _ = std::fs::remove_file(&target);
                (
                    run.code,
                    made.filter(|_| run.code == 0 && line[3] != "qcow2"),
                )
            };
            let theirs = outcome(run("qemu-img", line));
            let ours = outcome(gaur(&[&["qemu-img"], line].concat()));
            assert_eq!(ours, theirs, "{line:?}");
        }
    }
}

#[test]
fn info_tells_protocols_and_exports_as_qemu_does() {
    let scratch = Scratch::new("names-info");
    let (raw, socket) = (scratch.zeros("disk.raw", 1 << 20), scratch.path("s"));
    let mut command = Command::new("qemu-nbd");
    command.args(["-t", "-r", "-e", "4", "-f", "raw", "-k", &socket, &raw]);
    let server = Server::start(command, &socket);
    let (file, uri) = (
        format!("driver=file,filename={raw}"),
        format!("nbd+unix:///?socket={socket}"),
    );
    let export = format!("driver=nbd,path={socket}");
    let below = format!("driver=raw,file.driver=nbd,file.path={socket}");
    for image in [
        &["--image-opts", &file][..],
        &["--image-opts", &export],
        &["--image-opts", &below],
        &[&uri],
        &[&raw],
    ] {
        for output in ["--output=human", "--output=json"] {
            let (ours, theirs) = both(&[&["info", output], image].concat());
            assert_eq!(ours.ok().stdout, theirs.ok().stdout, "{image:?}");
        }
    }
    server.stop();
}

#[test]
fn corruption_is_told_when_a_request_meets_it() {
    let scratch = Scratch::new("names-corrupt");
    let (path, block) = image(&scratch);
    // The L2 table is counted as free, so that the next cluster would be it.
    set_refcount(&path, block, 4, 0);
    let commands = ["-c", "write 1M 64k", "-c", "write 2M 64k"];
    let line = [&["qemu-io", "-f", "qcow2"], &commands[..], &[&path]].concat();
    let ours = gaur(&line);
    let said: Vec<&str> = ours.stderr.lines().collect();
    assert_eq!(ours.code, 1);
    assert!(
        ours.stdout.contains("write failed: Input/output error"),
        "{ours}"
    );
    assert_eq!(said.len(), 1, "{ours}");
    assert!(
        said[0].starts_with("qcow2: Marking image as corrupt: "),
        "{ours}"
    );
    let theirs = qemu_img(&["info", "-U", "--output=json", &path]).json();
    assert_eq!(theirs["format-specific"]["data"]["corrupt"], true);
}

/// An image that cannot be closed because of corruption that was told is closed all the same.
#[test]
fn commands_go_on_behind_the_close_of_a_corrupt_image() {
    let scratch = Scratch::new("names-close");
    let (path, block) = image(&scratch);
    set_refcount(&path, block, 4, 0);
    let commands = ["-c", "write 1M 64k", "-c", "close", "-c", "length"];
    let other = format!("open -r {}", scratch.zeros("other.raw", 1 << 20));
    let more = ["-c", &other, "-c", "length"];
    let line = [&["qemu-io", "-f", "qcow2"], &commands[..], &more, &[&path]].concat();
    let ours = gaur(&line).code(1);
    let said: Vec<&str> = ours.stderr.lines().collect();
    assert!(said[0].contains("as corrupt: "), "{ours}");
    assert!(said[1].contains("no file open"), "{ours}");
    assert_eq!(said.len(), 2, "{ours}");
    assert!(ours.stdout.ends_with("1 MiB\n"), "{ours}");
}
