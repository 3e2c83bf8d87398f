//! NBD exports as images: of qemu-nbd, of nbdkit and our own, as sources, as targets and below qcow2.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::process::Command;

use gaur_interop::compare::assert_same_bytes;
use gaur_interop::gaur::{gaur, gaur_bounded, serve_with};
use gaur_interop::nbd::Server;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

const SIZE: u64 = 64 << 20;

/// A sparse disk with random bytes in some places.
fn disk(scratch: &Scratch, name: &str, seed: u64) -> String {
    let path = scratch.zeros(name, SIZE);
    let file = std::fs::OpenOptions::new().write(true).open(&path);
    let file = file.expect("scratch is writable");
    let mut random = Random::new(seed);
    for _ in 0..20 {
        let len = 512 * (1 + random.below(1500)) as usize;
        let at = 512 * random.below((SIZE - len as u64) / 512);
        let bytes = random.bytes(len);
        file.write_all_at(&bytes, at).expect("scratch is writable");
    }
    path
}

/// nbdkit on a socket, with more arguments.
fn nbdkit(socket: &str, more: &[&str]) -> Server {
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--exit-with-parent", "--unix", socket]);
    command.args(more);
    Server::start(command, socket)
}

const SERVERS: [&str; 3] = ["qemu-nbd", "nbdkit", "gaur"];

/// A server that exports a raw disk.
fn export(name: &str, scratch: &Scratch, disk: &str) -> Server {
    let socket = scratch.path(&format!("{name}.s"));
    match name {
        "qemu-nbd" => Server::qemu(disk, "raw", &socket, false),
        "nbdkit" => nbdkit(&socket, &["file", disk]),
        _ => serve_with(disk, &socket, &["-f", "raw"]),
    }
}

#[test]
fn every_verb_that_reads_sees_the_exported_disk() {
    let scratch = Scratch::new("nbd-reads");
    // The server has its own locked.
    let (served, disk) = (disk(&scratch, "served", 1), disk(&scratch, "disk", 1));
    for name in SERVERS {
        let server = export(name, &scratch, &served);
        let uri = server.uri();
        let info = gaur(&["info", "--output", "json", &uri]).ok().json();
        assert_eq!(info["virtual-size"], SIZE, "{name}");
        assert_eq!(info["format"], "raw");
        assert!(info["actual-size"].is_null(), "{info}");
        assert!(gaur(&["info", &uri]).ok().stdout.contains("unavailable"));
        gaur(&["compare", "-f", "raw", &uri, &disk]).ok();
        let copy = scratch.path("copy.qcow2");
        gaur(&["convert", "-f", "raw", &uri, &copy]).ok();
        qemu_img(&["compare", &copy, &disk]).ok();
        let map = |image: &str| {
            let map = gaur(&["map", "-f", "raw", "--output", "json", image]).ok();
            let map = map.json();
            let extents = map.as_array().expect("a list").iter();
            let data = extents.filter(|one| one["data"] == true && one["zero"] == false);
            data.map(|one| one["length"].as_u64().expect("a length"))
                .sum::<u64>()
        };
        assert_eq!(map(&uri), map(&disk), "{name} tells the holes");
        let dd = scratch.path("dd");
        let (from, to) = (format!("if={uri}"), format!("of={dd}"));
        gaur(&[
            "dd", "-f", "raw", "-O", "raw", "bs=1M", "skip=3", &from, &to,
        ])
        .ok();
        let tail = run("tail", &["-c", "+3145729", &disk]);
        let there = run("cat", &[&dd]);
        assert!(tail.stdout == there.stdout, "{name}");
    }
}

/// Converts a raw file into an export, which is there.
fn convert_into(format: &str, source: &str, server: &Server) {
    let uri = server.uri();
    gaur(&["convert", "-n", "-f", "raw", "-O", format, source, &uri]).ok();
}

#[test]
fn an_export_is_written_to_as_a_target() {
    let scratch = Scratch::new("nbd-target");
    let source = disk(&scratch, "source", 2);
    for name in SERVERS {
        // What was there before has to go.
        let target = disk(&scratch, "target", 3);
        let server = export(name, &scratch, &target);
        convert_into("raw", &source, &server);
        server.stop();
        assert_same_bytes(&source, &target);
    }
}

#[test]
fn qcow2_lives_on_an_export() {
    let scratch = Scratch::new("nbd-qcow2");
    let source = disk(&scratch, "source", 4);
    let image = scratch.path("image.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", &image, "64M"]).ok();
    // Space for the clusters: an export does not grow.
    run("truncate", &["-s", "80M", &image]).ok();
    let server = Server::qemu(&image, "raw", &scratch.path("s"), false);
    convert_into("qcow2", &source, &server);
    gaur(&["compare", "-F", "raw", &server.uri(), &source]).ok();
    let options = format!(
        "driver=qcow2,file.driver=nbd,file.server.type=unix,file.server.path={}",
        scratch.path("s")
    );
    gaur(&["check", "--image-opts", &options]).ok();
    // What a context says of the export is not said of the guest.
    let chosen = format!("{options},file.x-dirty-bitmap=base:allocation");
    let map = ["map", "--output=json", "--image-opts", &chosen];
    assert_eq!(gaur(&map).ok().json(), qemu_img(&map).ok().json());
    let json = format!(
        r#"json:{{"driver":"qcow2","file":{{"driver":"nbd","path":"{}"}}}}"#,
        scratch.path("s")
    );
    gaur(&["compare", "-F", "raw", &json, &source]).ok();
    let grown = gaur(&["resize", "-f", "raw", &server.uri(), "1G"]).refused();
    assert_eq!(grown.stderr.lines().count(), 1, "{grown}");
    server.stop();
    assert_clean(&image);
    qemu_img(&["compare", &image, &source]).ok();
}

#[test]
fn an_image_has_exports_opened_only_where_that_is_allowed() {
    let scratch = Scratch::new("nbd-references");
    let disk = disk(&scratch, "disk", 5);
    let server = Server::qemu(&disk, "raw", &scratch.path("s"), true);
    let uri = server.uri();
    let top = scratch.path("top.qcow2");
    qemu_img(&[
        "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", &uri, &top, "64M",
    ])
    .ok();
    let out = scratch.path("out");
    let convert = |more: &[&str]| {
        let line = [&["convert", "-O", "raw", &top, &out], more].concat();
        gaur_bounded(&line)
    };
    for more in [
        &[][..],
        &["--untrusted"],
        &["--allow", "nbd://localhost"],
        &["--allow", "/"],
    ] {
        let refusal = convert(more).refused();
        assert!(refusal.stderr.contains("NBD"), "{refusal}");
        assert_eq!(refusal.stderr.lines().count(), 1, "{refusal}");
    }
    for more in [&["--allow-any"][..], &["--allow", &uri]] {
        convert(more).ok();
        assert_same_bytes(&out, &disk);
    }
}

/// A server that is killed under a copy: the error says so, and with a delay the copy waits for the next server.
#[test]
fn lost_server_is_an_error_and_with_reconnect_delay_a_pause() {
    let scratch = Scratch::new("nbd-lost");
    let disk = disk(&scratch, "disk", 6);
    let socket = scratch.path("s");
    // It goes away after a second.
    let slow = || nbdkit(&socket, &["--filter=delay", "file", &disk, "rdelay=50ms"]);
    let copy = |options: &str| {
        let source = format!("nbd+unix:///?socket={socket}{options}");
        let out = scratch.path("out");
        let _ = std::fs::remove_file(&out);
        let made = out.clone();
        let copying = std::thread::spawn(move || {
            gaur(&[
                "convert", "-f", "raw", "-O", "raw", "-m", "1", "-S", "0", &source, &out,
            ])
        });
        // The target is made when the source is open.
        while !copying.is_finished() && !std::path::Path::new(&made).exists() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert!(!copying.is_finished(), "the copy takes longer than that");
        copying
    };
    let server = slow();
    let copying = copy("");
    server.kill();
    let failed = copying.join().expect("it ends").refused();
    assert!(
        failed.stderr.contains("the server closed the connection"),
        "{failed}"
    );
    assert_eq!(failed.stderr.lines().count(), 1, "{failed}");

    std::fs::remove_file(&socket).expect("the socket of the dead server");
    let server = slow();
    let copying = copy("&reconnect-delay=20");
    server.kill();
    std::fs::remove_file(&socket).expect("the socket of the dead server");
    std::thread::sleep(std::time::Duration::from_millis(700));
    assert!(!copying.is_finished(), "it waits");
    let _server = Server::qemu(&disk, "raw", &socket, false);
    copying.join().expect("it ends").ok();
    assert_same_bytes(&scratch.path("out"), &disk);
}

/// Errors of the server reach the user in the server's words, and end nothing but the request.
#[test]
fn errors_of_the_server_are_told() {
    let scratch = Scratch::new("nbd-errors");
    let disk = disk(&scratch, "disk", 7);
    let server = nbdkit(
        &scratch.path("s"),
        &[
            "--filter=error",
            "file",
            &disk,
            "error-pread=ENOSPC",
            "error-pread-rate=100%",
        ],
    );
    let out = scratch.path("out");
    let refusal = gaur(&["convert", "-f", "raw", "-O", "raw", &server.uri(), &out]).refused();
    assert!(refusal.stderr.contains("no space left"), "{refusal}");
    // Every fifth read fails; salvaged, the rest is there.
    let server = nbdkit(
        &scratch.path("t"),
        &[
            // A line for each error would fill the pipe that nobody reads meanwhile.
            "--log=null",
            "--filter=error",
            "file",
            &disk,
            "error-pread=EIO",
            "error-pread-rate=20%",
        ],
    );
    gaur(&[
        "convert",
        "--salvage",
        "-f",
        "raw",
        "-O",
        "raw",
        &server.uri(),
        &out,
    ])
    .ok();
}

/// What a server does that has said what it has to say.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Close,
    Stay,
    /// Byte after byte of a reply that never ends, so that it is never silent.
    Trickle,
}

/// What a server of the test's own says, which lies.
fn liar(socket: &str, greeting: Vec<u8>, then: Then) {
    let listener = std::os::unix::net::UnixListener::bind(socket).expect("a socket");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let said = greeting.clone();
            std::thread::spawn(move || {
                // What it says may be more than a client takes.
                let _ = stream.write_all(&said);
                // A chunk of data of an endless length.
                let chunk = [
                    &[0x66, 0x8e, 0x33, 0xef, 0, 0, 0, 1][..],
                    &[0; 8],
                    &[0, 8, 0, 8],
                ];
                for byte in chunk.concat().into_iter().chain(std::iter::repeat(0)) {
                    if then != Then::Trickle || stream.write_all(&[byte]).is_err() {
                        break;
                    }
                    std::thread::sleep(std::time::Duration::from_millis(200));
                }
                if then == Then::Stay {
                    let _ = stream.read_to_end(&mut Vec::new());
                }
            });
        }
    });
}

/// The greeting of a server, and replies: each an option's number, a type, a length that is told, and data.
fn handshake(replies: &[(u32, u32, u32, &[u8])]) -> Vec<u8> {
    let mut said = b"NBDMAGICIHAVEOPT\0\x03".to_vec();
    // Extended headers are asked for first, and it has none.
    if !replies.is_empty() {
        said.extend(reply((11, 0x8000_0001, 0, &[])));
    }
    replies.iter().for_each(|one| said.extend(reply(*one)));
    said
}

fn reply((option, kind, len, data): (u32, u32, u32, &[u8])) -> Vec<u8> {
    let mut said = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
    for field in [option, kind, len] {
        said.extend(field.to_be_bytes());
    }
    said.extend(data);
    said
}

/// A handshake that agrees on structured replies and block status, up to the first request.
fn export_of_a_liar(size: u64) -> Vec<u8> {
    let context = [&7_u32.to_be_bytes()[..], b"base:allocation"].concat();
    let info = [&[0, 0][..], &size.to_be_bytes(), &[0, 1]].concat();
    handshake(&[
        (8, 1, 0, &[]),
        (10, 4, context.len() as u32, &context),
        (10, 1, 0, &[]),
        (7, 3, info.len() as u32, &info),
        (7, 1, 0, &[]),
    ])
}

/// A reply to a request that was not sent.
fn unasked() -> Vec<u8> {
    let mut said = 0x668e_33ef_u32.to_be_bytes().to_vec();
    said.extend([0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 77, 0, 0, 0, 0]);
    said
}

#[test]
fn hostile_servers_end_in_one_line_of_error_soon() {
    let scratch = Scratch::new("nbd-hostile");
    let long = [b'x'; 4000];
    let export = |more: &[u8]| [&export_of_a_liar(1 << 20), more].concat();
    let contexts = reply((10, 4, 19, b"\0\0\0\x07base:allocation")).repeat(5000);
    let infos = reply((7, 3, 2, &[0, 9])).repeat(5000);
    let lies: Vec<(&str, Vec<u8>, &str)> = vec![
        (
            "ssh",
            b"SSH-2.0-OpenSSH_9.2 and more".to_vec(),
            "no NBD server",
        ),
        (
            "oldstyle",
            [
                &b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53"[..],
                &[0xff; 8],
                &[0; 128],
            ]
            .concat(),
            "18446744073709551615",
        ),
        (
            "magic",
            [&handshake(&[])[..], &[7; 20]].concat(),
            "bad magic",
        ),
        (
            "length",
            handshake(&[(8, 1, u32::MAX, &[])]),
            "4294967295 bytes",
        ),
        ("option", handshake(&[(3, 1, 0, &[])]), "not sent"),
        (
            "contexts",
            [handshake(&[(8, 1, 0, &[])]), contexts].concat(),
            "without end",
        ),
        (
            "infos",
            [handshake(&[(8, 1, 0, &[]), (10, 1, 0, &[])]), infos].concat(),
            "without end",
        ),
        (
            "refusal",
            handshake(&[
                (8, 1, 0, &[]),
                (10, 1, 0, &[]),
                (7, 0x8000_0006, 4000, &long),
            ]),
            "no export",
        ),
        ("size", export_of_a_liar(u64::MAX), "18446744073709551615"),
        ("reply", export(&[9; 64]), "bad magic"),
        ("cookie", export(&unasked()), "not sent"),
        ("nothing", vec![], "closed"),
    ];
    for (name, says, words) in lies {
        let socket = scratch.path(name);
        let then = if name == "nothing" {
            Then::Close
        } else {
            Then::Stay
        };
        liar(&socket, says, then);
        let uri = format!("nbd+unix:///?socket={socket}&request-timeout=9");
        let out = scratch.path("out");
        let refusal = gaur_bounded(&["convert", "-f", "raw", "-O", "raw", &uri, &out]).refused();
        assert_eq!(refusal.stderr.lines().count(), 1, "{name}: {refusal}");
        assert!(refusal.stderr.contains(words), "{name}: {refusal}");
    }
}

/// Servers of the time before options have one export, and say what it is.
#[test]
fn servers_of_the_oldstyle_protocol_have_one_export() {
    let scratch = Scratch::new("nbd-oldstyle");
    let (disk, socket) = (disk(&scratch, "disk", 8), scratch.path("s"));
    let server = nbdkit(&socket, &["--oldstyle", "file", &disk]);
    let (uri, copy) = (
        format!("nbd+unix:///?socket={socket}"),
        scratch.path("copy"),
    );
    gaur(&["convert", "-f", "raw", "-O", "raw", &uri, &copy]).ok();
    assert_same_bytes(&disk, &copy);
    let named = format!("nbd+unix:///name?socket={socket}");
    let refusal = gaur(&["map", "-f", "raw", &named]).refused();
    assert!(refusal.stderr.contains("oldstyle"), "{refusal}");
    server.stop();
}

/// Extended headers: one request tells of a hole of terabytes.
#[test]
fn a_sparse_disk_of_terabytes_is_mapped_in_few_requests() {
    let scratch = Scratch::new("nbd-extended");
    let (image, socket, trace) = (
        scratch.path("disk.qcow2"),
        scratch.path("s"),
        scratch.path("trace"),
    );
    qemu_img(&["create", "-q", "-f", "qcow2", &image, "4T"]).ok();
    let write = [
        "-f",
        "qcow2",
        "-c",
        "write -P 3 3T 64k",
        "-c",
        "write -P 4 5G 1M",
        &image,
    ];
    run("qemu-io", &write).ok();
    let mut command = Command::new("qemu-nbd");
    command.args(["-t", "-r", "-e", "9", "-f", "qcow2", "-k", &socket, &image]);
    command.args([
        "--trace",
        &format!("enable=nbd_receive_request,file={trace}"),
    ]);
    command.stderr(std::fs::File::create(&trace).expect("scratch is writable"));
    let server = Server::start(command, &socket);
    let uri = format!("nbd+unix:///?socket={socket}");
    let map = ["map", "-f", "raw", "--output=json"];
    let ours = gaur(&[&map[..], &[&uri]].concat()).json();
    let theirs = qemu_img(&[&map[..], &[&uri]].concat()).json();
    assert_eq!(ours, theirs);
    let read = gaur(&["qemu-io", "-r", "-f", "raw", "-c", "read -P 3 3T 64k", &uri]).ok();
    assert!(read.stdout.contains("read 65536/65536"), "{read}");
    server.stop();
    let traced = std::fs::read_to_string(&trace).expect("the trace");
    let asked = traced.matches(".type = 0x7").count();
    assert!(!traced.is_empty() && asked < 40, "{asked} requests");

    // Our own server has them as well.
    let server = serve_with(&image, &socket, &["-r"]);
    let again = gaur(&[&map[..], &[&uri]].concat()).json();
    assert_eq!(again, theirs);
    server.stop();
}

/// Neither silence nor a byte now and then is an answer.
#[test]
fn servers_that_do_not_answer_in_time_are_given_up() {
    let scratch = Scratch::new("nbd-slow");
    for (name, says, then) in [
        ("silent", vec![], Then::Stay),
        ("later", export_of_a_liar(1 << 20), Then::Stay),
        ("slow", export_of_a_liar(1 << 20), Then::Trickle),
    ] {
        let socket = scratch.path(name);
        liar(&socket, says, then);
        let uri = format!("nbd+unix:///?socket={socket}&request-timeout=2");
        let out = scratch.path("out");
        let refusal = gaur_bounded(&["convert", "-f", "raw", "-O", "raw", &uri, &out]).refused();
        let words = "did not answer for 2 seconds";
        assert!(refusal.stderr.contains(words), "{name}: {refusal}");
    }
}

/// A served export: clients of ours read and write through, on connections of the serving threads' own.
#[test]
fn served_export_is_reached_by_each_thread_on_its_own() {
    let scratch = Scratch::new("nbd-served");
    let (disk, source) = (disk(&scratch, "disk", 8), disk(&scratch, "source", 9));
    let log = format!("logfile={}", scratch.path("log"));
    let below = nbdkit(&scratch.path("s"), &["--filter=log", "file", &disk, &log]);
    let options = ["-f", "raw", "--threads", "2"];
    let served = serve_with(&below.uri(), &scratch.path("t"), &options);
    let copy = |from: &str, to: &str| {
        run("nbdcopy", &["--connections=4", "--flush", from, to]).ok();
    };
    copy(&source, &served.uri());
    copy(&served.uri(), &scratch.path("out"));
    served.stop();
    below.stop();
    assert_same_bytes(&scratch.path("out"), &source);
    assert_same_bytes(&disk, &source);
    let log = std::fs::read_to_string(scratch.path("log")).expect("a log");
    let reads = log
        .lines()
        .filter(|line| line.contains(" Read ") || line.contains(" Write "));
    let connections = reads.filter_map(|line| line.split("connection=").nth(1)?.split(' ').next());
    let connections: std::collections::BTreeSet<&str> = connections.collect();
    assert!(connections.len() >= 2, "{connections:?}");
}
