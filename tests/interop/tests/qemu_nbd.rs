//! `qemu-nbd` by another name: the same command lines for QEMU's program and for ours, and the same to see.

use std::process::Command;
use std::time::{Duration, Instant};

use gaur_interop::gaur::binary;
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, qemu_img, run};

/// QEMU's program, and a link to ours.
fn programs(scratch: &Scratch) -> [String; 2] {
    let link = scratch.path("qemu-nbd");
    std::os::unix::fs::symlink(binary(), &link).expect("scratch holds links");
    ["qemu-nbd".to_owned(), link]
}

fn qemu_io(arguments: &[&str]) -> Run {
    run("qemu-io", arguments)
}

/// A server on the socket `s` of the scratch folder.
fn start(program: &str, scratch: &Scratch, words: &[&str]) -> Server {
    let socket = scratch.path("s");
    let mut command = Command::new(program);
    command.args(["-k", &socket]).args(words);
    Server::start(command, &socket)
}

/// What `nbdinfo` says of the default export, as far as it is about the export.
fn info(server: &Server) -> String {
    let json = run("nbdinfo", &["--json", &server.uri()]).ok().json();
    let export = &json["exports"][0];
    let keys = [
        "export-name",
        "description",
        "export-size",
        "contexts",
        "is_read_only",
        "can_flush",
        "can_fua",
        "can_trim",
        "can_zero",
        "can_df",
        "can_cache",
        "can_multi_conn",
        "is_rotational",
    ];
    let facts = keys.map(|key| format!("{key}={}", export[key]));
    facts.join("\n")
}

/// An image of 64 MiB with 1 MiB of data at 1 MiB, and one of the same as an overlay over it with 64 KiB at 4 MiB.
fn chain(scratch: &Scratch) -> (String, String) {
    let (base, top) = (scratch.path("base.qcow2"), scratch.path("top.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", &base, "64M"]).ok();
    qemu_io(&["-f", "qcow2", "-c", "write -q -P 1 1M 1M", &base]).ok();
    qemu_img(&[
        "create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &top,
    ])
    .ok();
    qemu_io(&["-f", "qcow2", "-c", "write -q -P 2 4M 64k", &top]).ok();
    (base, top)
}

fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_there() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn clients_see_the_same_export_behind_the_same_flags() {
    let scratch = Scratch::new("nbd-flags");
    let (_, top) = chain(&scratch);
    let raw = scratch.zeros("raw", 1 << 20);
    let lines: [&[&str]; 9] = [
        &["-t", "-f", "qcow2", &top],
        &["-t", "-r", "-f", "qcow2", &top],
        &["-t", "-e", "2", "-f", "qcow2", &top],
        &["-t", "-e0", "--read-only", "--format=qcow2", &top],
        &["-t", "-D", "for people", "-f", "raw", &raw],
        &["-t", "-f", "raw", "-o", "4096", &raw],
        &["-t", "--discard=unmap", "--detect-zeroes=unmap", "-n", &top],
        &[
            "-t",
            "--cache=writethrough",
            "--aio=threads",
            "-T",
            "x",
            &top,
        ],
        &[
            "-ts",
            "--image-opts",
            &format!("driver=raw,file.filename={raw}"),
        ],
    ];
    let programs = programs(&scratch);
    for words in lines {
        let [theirs, ours] = [0, 1].map(|which| {
            let server = start(&programs[which], &scratch, words);
            let seen = info(&server);
            server.stop();
            seen
        });
        assert_eq!(theirs, ours, "{words:?}");
    }
}

#[test]
fn server_ends_with_its_last_client_unless_it_is_persistent() {
    let scratch = Scratch::new("nbd-last");
    let (_, top) = chain(&scratch);
    for program in programs(&scratch) {
        let mut server = start(&program, &scratch, &["-f", "qcow2", &top]);
        run("nbdinfo", &["--size", &server.uri()]).ok();
        server.wait().ok();
        let server = start(&program, &scratch, &["-t", "-f", "qcow2", &top]);
        for _ in 0..2 {
            run("nbdinfo", &["--size", &server.uri()]).ok();
        }
        server.stop();
        assert!(!std::path::Path::new(&scratch.path("s")).exists());
    }
}

#[test]
fn fork_returns_when_the_server_is_ready_and_leaves_its_process_id() {
    let scratch = Scratch::new("nbd-fork");
    let (_, top) = chain(&scratch);
    let (socket, pid) = (scratch.path("s"), scratch.path("pid"));
    for program in programs(&scratch) {
        let started = run(
            &program,
            &[
                "--fork",
                "--pid-file",
                &pid,
                "-t",
                "-k",
                &socket,
                "-f",
                "qcow2",
                &top,
            ],
        );
        started.ok();
        let uri = format!("nbd+unix:///?socket={socket}");
        run("nbdinfo", &["--size", &uri]).ok();
        let number = std::fs::read_to_string(&pid).expect("the file is there");
        run("kill", &[number.trim()]).ok();
        wait_for("the server ends", || {
            !std::path::Path::new(&socket).exists()
        });
        assert!(std::path::Path::new(&pid).exists(), "scripts remove it");
        std::fs::remove_file(&pid).expect("it is a file");
        let refused = run(
            &program,
            &["--fork", "-k", &socket, "-f", "qcow2", "/nowhere"],
        );
        let said = refused.code(1).stderr;
        assert!(said.contains("/nowhere"), "{said}");
    }
}

#[test]
fn snapshots_are_served_read_only_by_id_and_by_name() {
    let scratch = Scratch::new("nbd-snapshots");
    let (base, _) = chain(&scratch);
    // The name of one is the id of the other.
    qemu_img(&["snapshot", "-c", "2", &base]).ok();
    qemu_io(&["-f", "qcow2", "-c", "write -q -P 7 1M 64k", &base]).ok();
    qemu_img(&["snapshot", "-c", "second", &base]).ok();
    qemu_io(&["-f", "qcow2", "-c", "write -q -P 9 1M 64k", &base]).ok();
    let pattern = |server: &Server, byte: &str| {
        let read = format!("read -P {byte} 1M 64k");
        qemu_io(&["-f", "raw", "-r", "-c", &read, &server.uri()]).code
    };
    for program in programs(&scratch) {
        for (which, byte) in [
            ("1", "1"),
            ("2", "7"),
            ("second", "7"),
            ("snapshot.id=1", "1"),
            ("snapshot.name=2", "1"),
            ("snapshot.id=2,snapshot.name=second", "7"),
        ] {
            let server = start(
                &program,
                &scratch,
                &["-t", "-l", which, "-f", "qcow2", &base],
            );
            assert_eq!(pattern(&server, byte), 0, "{program} {which}");
            assert!(info(&server).contains("is_read_only=true"));
            server.stop();
        }
        let missing = run(&program, &["-k", &scratch.path("s"), "-l", "none", &base]);
        missing.code(1);
    }
}

#[test]
fn writes_to_a_temporary_overlay_leave_the_image_alone() {
    let scratch = Scratch::new("nbd-temporary");
    let (base, _) = chain(&scratch);
    for program in programs(&scratch) {
        let server = start(&program, &scratch, &["-t", "-s", "-f", "qcow2", &base]);
        let uri = server.uri();
        qemu_io(&["-f", "raw", "-c", "write -q -P 5 1M 1M", &uri]).ok();
        qemu_io(&["-f", "raw", "-c", "read -q -P 5 1M 1M", &uri]).ok();
        server.stop();
        qemu_io(&["-f", "qcow2", "-r", "-c", "read -q -P 1 1M 1M", &base]).ok();
    }
}

#[test]
fn raw_image_that_was_probed_keeps_its_first_sector_from_looking_like_an_image() {
    let scratch = Scratch::new("nbd-probed");
    let raw = scratch.zeros("disk", 1 << 20);
    let header = scratch.path("header");
    qemu_img(&["create", "-q", "-f", "qcow2", &header, "1M"]).ok();
    for program in programs(&scratch) {
        let server = start(&program, &scratch, &["-t", &raw]);
        let uri = server.uri();
        let write = format!("write -q -s {header} 0 4k");
        let refused = qemu_io(&["-f", "raw", "-c", &write, &uri]);
        assert!(refused.code != 0, "{program}: {refused}");
        qemu_io(&["-f", "raw", "-c", "write -q -P 3 0 4k", &uri]).ok();
        qemu_io(&["-f", "raw", "-c", "read -q -P 3 0 4k", &uri]).ok();
        run("kill", &[&server.id().to_string()]).ok();
        let mut server = server;
        let said = server.wait().ok().stderr;
        assert!(
            said.starts_with("WARNING: Image format was not specified"),
            "{said}"
        );
        assert_eq!(said.lines().count(), 3, "{said}");
        let server = start(&program, &scratch, &["-t", "-f", "raw", &raw]);
        qemu_io(&["-f", "raw", "-c", &write, &server.uri()]).ok();
        qemu_io(&["-f", "raw", "-c", "write -q -z 0 4k", &server.uri()]).ok();
        server.stop();
    }
}

#[test]
fn two_clients_are_served_at_once_when_asked_for() {
    let scratch = Scratch::new("nbd-shared");
    let (_, top) = chain(&scratch);
    for program in programs(&scratch) {
        let server = start(&program, &scratch, &["-e", "2", "-t", "-f", "qcow2", &top]);
        let uri = server.uri();
        let script = format!(
            "import nbd\na = nbd.NBD(); a.connect_uri('{uri}')\nb = nbd.NBD(); b.connect_uri('{uri}')\n\
             a.pwrite(b'x' * 512, 0); a.flush()\nassert b.pread(512, 0) == b'x' * 512"
        );
        run("/usr/bin/python3", &["-c", &script]).ok();
        server.stop();
    }
}

#[test]
fn wrong_command_lines_are_refused_in_one_line() {
    let scratch = Scratch::new("nbd-wrong");
    let (base, _) = chain(&scratch);
    let lines: [&[&str]; 9] = [
        &[],
        &["-k", "/s", "--selinux-label=no-label", &base],
        &["-k", "relative", &base],
        &["-k", "/s", "--cache=warm", &base],
        &["-k", "/s", "-n", "--cache=none", &base],
        &["-k", "/s", "--detect-zeroes=unmap", &base],
        &["-k", "/s", "--image-opts", "-f", "raw", "driver=raw"],
        &["-k", "/s", "-e", "x", &base],
        &["-k", "/s", "-f", "raw", "-o", "1G", &base],
    ];
    let [theirs, ours] = programs(&scratch);
    for words in lines {
        let refused: Run = run(&theirs, words);
        assert_eq!(refused.code, 1, "{refused}");
        let refused = run(&ours, words).code(1).refused();
        assert!(refused.stderr.starts_with("qemu-nbd: "), "{refused}");
    }
}

#[test]
fn list_of_exports_is_qemus_line_by_line() {
    let scratch = Scratch::new("nbd-list");
    let (base, top) = chain(&scratch);
    qemu_img(&["bitmap", "--add", &top, "daily"]).ok();
    qemu_img(&["bitmap", "--add", &top, "weekly"]).ok();
    let [theirs, ours] = programs(&scratch);
    let socket = scratch.path("s");
    let lines: [&[&str]; 4] = [
        &["-t", "-r", "-f", "qcow2", "-A", &top],
        &["-t", "-f", "qcow2", "-B", "daily", "-B", "weekly", &top],
        &["-t", "-e", "3", "-x", "name", "-D", "what it is", &base],
        &["-t", "-f", "qcow2", &base],
    ];
    for words in lines {
        let [of_theirs, of_ours] = [&theirs, &ours].map(|program| {
            let server = start(program, &scratch, words);
            let lists = [&theirs, &ours].map(|one| run(one, &["-L", "-k", &socket]).ok().stdout);
            server.stop();
            assert_eq!(lists[0], lists[1], "{words:?}");
            lists[0].clone()
        });
        // QEMU's names the bitmaps last to first.
        let sorted = |list: &str| {
            let mut lines: Vec<String> = list.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(&of_theirs), sorted(&of_ours), "{words:?}");
    }
    let refused = run(&ours, &["-L", "-k", "/nowhere/s"]).code(1).refused();
    assert!(refused.stderr.contains("/nowhere/s"), "{refused}");
    for words in [&["-L", &top][..], &["-L", "-f", "raw"], &["-L", "--fork"]] {
        assert_eq!(run(&theirs, words).code, 1);
        run(&ours, words).code(1).refused();
    }
}

#[test]
fn depths_and_bitmaps_are_shown_as_qemu_shows_them() {
    let scratch = Scratch::new("nbd-contexts");
    let (base, top) = chain(&scratch);
    qemu_img(&["bitmap", "--add", "-g", "64k", &top, "daily"]).ok();
    qemu_io(&["-f", "qcow2", "-c", "write -q 8M 1M", &top]).ok();
    // A bitmap of the backing file.
    qemu_img(&["bitmap", "--add", "-g", "64k", &base, "below"]).ok();
    qemu_io(&["-f", "qcow2", "-c", "write -q -P 1 1M 1M", &base]).ok();
    let lines: [(&[&str], &str); 4] = [
        (
            &["-t", "-r", "-B", "below", &top],
            "qemu:dirty-bitmap:below",
        ),
        (
            &["-t", "-r", "-A", "-B", "daily", &top],
            "qemu:allocation-depth",
        ),
        (
            &["-t", "-r", "-A", "-B", "daily", &top],
            "qemu:dirty-bitmap:daily",
        ),
        (&["-t", "-r", "-A", "-B", "daily", &top], "base:allocation"),
    ];
    let programs = programs(&scratch);
    for (words, context) in lines {
        let [theirs, ours] = [0, 1].map(|which| {
            let server = start(&programs[which], &scratch, words);
            let map = run("nbdinfo", &[&format!("--map={context}"), &server.uri()]).ok();
            server.stop();
            map.stdout
        });
        assert_eq!(theirs, ours, "{words:?} {context}");
        assert!(
            ours.lines().count() > 2 || context == "base:allocation",
            "{ours}"
        );
    }
}

/// What needs no device; the rest is in `guest_qemu_nbd.rs`.
#[test]
fn devices_are_refused_where_they_cannot_be() {
    let scratch = Scratch::new("nbd-no-device");
    let (_, top) = chain(&scratch);
    let ours = &programs(&scratch)[1];
    for (line, words) in [
        (
            &["-c", "/dev/nbd0", "-p", "10809", &top][..],
            "-c does not go with -p",
        ),
        (&["-L", "-c", "/dev/nbd0"], "-L does not go with -c"),
        (&["-c", "/dev/nbd0", "-d"], "cannot be used with"),
        (&["-c", "/dev/nbd0"], "the image is missing"),
        (
            &["-d", "/dev/null"],
            "/dev/null: is no device of the kernel's NBD client",
        ),
        (&["-d", "/nowhere"], "/nowhere: cannot open"),
    ] {
        let run = run(ours, line).refused();
        assert!(run.stderr.contains(words), "{words}: {run}");
    }
}
