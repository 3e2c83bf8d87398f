//! `gaur qemu-io`: the lines, the exit code and the disk are those of QEMU's program. And what differs under the names of
//! QEMU's programs.

use gaur_interop::builder::create;
use gaur_interop::compare::assert_same_view;
use gaur_interop::gaur::gaur;
use gaur_interop::layout::Layout;
use gaur_interop::op::{Op, mixed, random};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, assert_clean, qemu_img, run};

/// What both print, but for times and rates, and the words of errors.
fn lines(text: &str) -> Vec<String> {
    let told = |line: &str| {
        if let Some((amount, _)) = line.split_once(", 1 ops; ") {
            return format!("{amount}, 1 ops");
        }
        match line.split_once(",1,0:00:00.") {
            Some((bytes, _)) => bytes.to_owned(),
            None => line.to_owned(),
        }
    };
    text.lines().map(told).collect()
}

/// Runs the commands with both, each on an image of its own, and expects the same.
#[track_caller]
fn same(scratch: &Scratch, layout: &Layout, flags: &[&str], commands: &[&str]) -> Run {
    let both = ["theirs.qcow2", "ours.qcow2"].map(|name| {
        let image = scratch.path(name);
        create(&image, layout);
        let mut line = vec!["qemu-io", "-f", "qcow2"];
        line.extend(flags);
        for command in commands {
            line.extend(["-c", command]);
        }
        line.push(&image);
        let ran = match name {
            "ours.qcow2" => gaur(&line),
            _ => run(line[0], &line[1..]),
        };
        (image, ran)
    });
    let [(their_image, theirs), (our_image, ours)] = both;
    assert_eq!(lines(&ours.stdout), lines(&theirs.stdout), "{ours}");
    assert_eq!(ours.code, theirs.code, "{ours}");
    let (said, expected) = (ours.stderr.lines().count(), theirs.stderr.lines().count());
    assert_eq!(said, expected, "{ours}{theirs}");
    assert_clean(&our_image);
    assert_same_view(("qcow2", &our_image), ("qcow2", &their_image));
    ours
}

#[test]
fn commands_print_what_those_of_qemu_print() {
    let scratch = Scratch::new("exerciser");
    let layout = Layout::extended(65536);
    same(
        &scratch,
        &layout,
        &[],
        &[
            "write -P 0xab 0 64k",
            "read -v 100 40",
            "read -C 0 256k",
            "read -P 0xab -s 10 -l 20 0 1k",
            "write 128k 1536",
            "w -q 192k 1",
            "readv -P 0xab 0 512 1k",
            "writev -P 3 0 512 1536",
            "map",
            "alloc 0 256k",
            "alloc 0",
            "length",
            "discard 0 64k",
            "write -z 64k 64k",
            "write -z -u 128k 64k",
            "aio_write -P 7 0 4k",
            "aio_flush",
            "aio_read -P 7 0 4k",
            "aio_flush",
            "sleep 1",
            "truncate 512k",
            "flush",
            "close",
        ],
    )
    .ok();
}

#[test]
fn what_goes_wrong_is_told_where_qemu_tells_it() {
    let scratch = Scratch::new("exerciser-wrong");
    let layout = Layout::extended(65536);
    same(
        &scratch,
        &layout,
        &[],
        &[
            "read -P 1 0 1k",
            "read 0 3G",
            "read x 1",
            "read 0",
            "read 0 12x",
            "frob",
            "write -z -P 1 0 1",
            "read -P 300 0 512",
            "read -P 1 -s 600 0 512",
            "write -u 0 512",
            "write -n 0 512",
            "write -c 100 128",
            "write -s /nonexistent 0 1",
            "write 1P 4k",
            "read 1P 4k",
            "discard 1P 4k",
            "alloc 0 512 3",
            "sleep x",
            "sleep 1 2",
            "truncate x",
            "close",
            "close",
            "open",
            "length",
            "quit",
            "frob",
        ],
    )
    .code(1);
    same(&scratch, &layout, &["-r"], &["write 0 1", "read 0 1"]).code(1);
    same(
        &scratch,
        &layout,
        &["-s"],
        &["write 0 1k", "read -P 0xcd 0 1k"],
    )
    .ok();
}

#[test]
fn operations_leave_the_disk_that_they_leave_by_qemu() {
    let scratch = Scratch::new("exerciser-disk");
    let noise = scratch.file("noise", &Random::new(5).bytes(300_000));
    for (seed, layout) in [Layout::extended(65536), Layout::extended(16384)]
        .iter()
        .enumerate()
    {
        let several = [
            mixed(layout, &noise),
            random(layout, seed as u64, 60, true, &noise),
        ];
        for ops in several {
            let commands: Vec<String> = ops.iter().map(Op::command).collect();
            let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
            for cache in ["writeback", "none"] {
                same(&scratch, layout, &["-t", cache, "-d", "unmap"], &commands).ok();
            }
        }
    }
}

#[test]
fn images_are_reopened_and_named_by_options() {
    let scratch = Scratch::new("exerciser-open");
    let image = scratch.path("disk.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &image, "1M"]).ok();
    let open = format!("open -o driver=qcow2,l2-cache-size=64k {image}");
    let ran = gaur(&[
        "qemu-io",
        "-c",
        &open,
        "-c",
        "write -P 5 0 64k",
        "-c",
        "reopen -r -o l2-cache-size=128k",
        "-c",
        "write 0 512",
        "-c",
        "reopen -w",
        "-c",
        "write -P 6 0 4k",
        "-c",
        "read -P 6 0 4k",
    ])
    .code(1);
    assert!(
        ran.stderr.contains("read-only") && ran.stderr.lines().count() == 1,
        "{ran}"
    );
    assert!(!ran.stdout.contains("failed"), "{ran}");
    let options = format!("driver=qcow2,file.filename={image}");
    gaur(&[
        "qemu-io",
        "--image-opts",
        "-c",
        "read -P 5 4k 60k",
        &options,
    ])
    .ok();
}

#[test]
fn images_refer_to_any_file_under_the_names_of_qemu() {
    let scratch = Scratch::new("exerciser-references");
    for folder in ["bases", "disks"] {
        std::fs::create_dir(scratch.path(folder)).expect("a folder");
    }
    let (base, disk) = (
        scratch.path("bases/base.qcow2"),
        scratch.path("disks/disk.qcow2"),
    );
    qemu_img(&["create", "-q", "-f", "qcow2", &base, "1M"]).ok();
    qemu_img(&[
        "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &base, &disk,
    ])
    .ok();
    gaur(&["map", &disk]).refused();
    gaur(&["qemu-img", "map", &disk]).ok();
    gaur(&["qemu-io", "-c", "read 0 1k", &disk]).ok();
    let said = gaur(&["qemu-img", "map", "--untrusted", &disk]).refused();
    assert!(said.stderr.starts_with("qemu-img: "), "{said}");
    // The last of several counts, as with getopt.
    gaur(&["qemu-img", "map", "-f", "raw", "-f", "qcow2", &disk]).ok();
    gaur(&["map", "-f", "raw", "-f", "qcow2", &disk]).refused();
}

/// The kernel takes the ring of a killed process apart in its own time, with the locks of the image: the next one waits
/// for that. What was said before the signal is not lost.
#[test]
fn after_a_kill_the_image_opens_at_once_and_the_output_is_there() {
    let scratch = Scratch::new("exerciser-kill");
    let image = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &image, "8M"]).ok();
    for _ in 0..10 {
        let commands = [
            "-c",
            "write 0 64k",
            "-c",
            "flush",
            "-c",
            "sigraise 9",
            &image,
        ];
        let killed = gaur(&[&["qemu-io"], &commands[..]].concat());
        assert!(
            killed.code != 0 && killed.stdout.starts_with("wrote 65536/65536"),
            "{killed}"
        );
    }
    gaur(&["qemu-io", "-c", "read -P 0xcd 0 64k", &image]).ok();
}
