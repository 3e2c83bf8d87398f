//! Mistakes of a new user: wrong, missing and contradictory words, and files that
//! are none. Every answer is one line that is true and says what and where.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use crate::workdir::{GAUR, WorkDir};

fn dir() -> WorkDir {
    let dir = WorkDir::new();
    dir.gaur(&["create", "-q", "d.qcow2", "10M"]).ok();
    dir
}

#[test]
fn every_verb_reports_a_truncated_image_alike() {
    let dir = dir();
    // The start of an image: `info` said "bad header length", the other verbs something else.
    let start = dir.read("d.qcow2")[..50].to_vec();
    std::fs::write(dir.path("fifty.qcow2"), start).expect("a file");
    for verb in ["info", "check", "map", "resize"] {
        let words = [
            &[verb, "fifty.qcow2"][..],
            if verb == "resize" { &["1G"] } else { &[] },
        ];
        dir.gaur(&words.concat())
            .fails(1, &["fifty.qcow2: header", "truncated", "found 50 bytes"]);
    }
}

#[test]
fn invalid_numbers_are_explained() {
    let dir = dir();
    for (line, words) in [
        (
            &["bench", "-c", "-1", "d.qcow2"][..],
            "no number is negative here",
        ),
        (&["create", "x.qcow2", "-1"], "no number is negative here"),
        (&["bench", "--threads", "0", "d.qcow2"], "must be 1 or more"),
        (&["bench", "--threads", "99999", "d.qcow2"], "too large"),
        (&["serve", "-p", "x", "d.qcow2"], "not a whole number"),
        (&["resize", "d.qcow2", "++1M"], "'++1M' is not a size"),
        (&["resize", "d.qcow2", "+"], "'+' is not a size"),
    ] {
        dir.gaur(line).fails(1, &[words]);
    }
}

#[test]
fn empty_path_is_quoted_in_the_message() {
    let dir = dir();
    dir.gaur(&["info", ""])
        .fails(1, &["gaur: '': no such file"]);
    dir.gaur(&["info", "--image-opts", ""])
        .fails(1, &["'': --image-opts wants"]);
    dir.gaur(&["info", "--image-opts", "="])
        .fails(1, &["a comma in a value is written twice"]);
}

#[test]
fn missing_backing_file_is_reported_before_missing_format() {
    let dir = dir();
    // "a backing file needs its format too (say -F raw or -F qcow2)", and then it was not there.
    dir.gaur(&["create", "-b", "gone", "x.qcow2"])
        .fails(1, &["gone: no such file", "-F"]);
    std::fs::create_dir(dir.path("sub")).expect("a folder");
    dir.gaur(&["create", "-b", "d.qcow2", "-F", "qcow2", "sub/x.qcow2"])
        .fails(
            1,
            &["sub/d.qcow2", "counts from the folder of the new image"],
        );
}

/// `create -b overlay base`, the words in the wrong order: base was emptied, and with it what the overlay
/// stands on. By a second name an image became its own backing file.
#[test]
fn create_refuses_to_overwrite_its_backing_chain() {
    let dir = dir();
    dir.gaur(&["create", "-q", "-b", "d.qcow2", "-F", "qcow2", "over.qcow2"])
        .ok();
    std::fs::hard_link(dir.path("d.qcow2"), dir.path("hard.qcow2")).expect("a link");
    let before = dir.read("d.qcow2");
    for (below, words) in [
        ("over.qcow2", "below its own backing file"),
        ("hard.qcow2", "its own backing file"),
    ] {
        dir.gaur(&["create", "-b", below, "-F", "qcow2", "d.qcow2"])
            .fails(1, &[words]);
        assert!(dir.read("d.qcow2") == before);
    }
    dir.gaur(&["create", "-u", "-b", "nbd://host/x", "n.qcow2", "1M"])
        .fails(1, &["-F"]);
}

/// `bind` failed, and only EADDRINUSE was looked at: "invalid argument", from `listen`.
#[test]
fn missing_socket_directory_is_reported() {
    let dir = dir();
    for switch in ["-k", "--control", "--vhost-user"] {
        dir.gaur(&["serve", switch, "nodir/s", "d.qcow2"])
            .fails(1, &["nodir/s", "no such file or directory"]);
    }
}

#[test]
fn unknown_snapshot_verb_is_reported() {
    let dir = dir();
    // "the subcommand 'd.qcow2' cannot be used with '[IMAGE]'"
    dir.gaur(&["snapshot", "frob", "d.qcow2"])
        .fails(1, &["'frob' is no verb of 'gaur snapshot'"]);
    dir.gaur(&["snapshot", "d.qcow2", "list"])
        .fails(1, &["the verb comes first, then the image"]);
}

/// Exit code 1 says that two images differ, also when nothing could be said.
#[test]
fn compare_output_error_does_not_exit_with_1() {
    let dir = dir();
    let run = |line: &str| {
        let line = format!("\"$0\" {line} >/dev/full");
        let output = dir.command("bash", &["-c", &line, GAUR]).output();
        let output = output.expect("bash runs");
        assert!(
            output
                .stderr
                .starts_with(b"gaur: standard output: no space"),
            "{output:?}"
        );
        output.status.code()
    };
    assert_eq!(run("compare d.qcow2 d.qcow2"), Some(2));
    assert_eq!(run("info d.qcow2"), Some(1));
    assert_eq!(run("--help"), Some(1));
}

/// `serve --pid-file /dev/null`, run by root, removed /dev/null.
#[test]
fn pid_file_path_of_another_kind_is_not_removed() {
    let dir = dir();
    std::os::unix::fs::symlink("/dev/null", dir.path("pid")).expect("a link");
    let args = ["--pid-file", "pid", "-k", "s", "-t", "d.qcow2"];
    crate::server::Server::start(&dir, &args).stop();
    assert!(dir.path("pid").symlink_metadata().is_ok());
}

#[test]
fn unwritable_directory_is_named_as_the_cause() {
    let dir = dir();
    let folder = dir.path("ro");
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o555)).expect("changed");
    // root may write anywhere, unless it has no capabilities.
    let line = ["--bounding-set=-all", GAUR, "create", "ro/x.qcow2", "1M"];
    let output = match std::fs::metadata("/proc/self").expect("this process").uid() {
        0 => dir.command("setpriv", &line).output(),
        _ => dir.command(GAUR, &line[2..]).output(),
    };
    let output = output.expect("gaur runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let wanted =
        "gaur: ro/x.qcow2: cannot create: permission denied to make a file in its folder\n";
    assert_eq!(said, wanted);
}

/// A limit of file sizes ended the command by a signal, without a word; a server would have crashed.
#[test]
fn file_size_limit_is_an_error_not_a_crash() {
    let dir = dir();
    let line = "ulimit -f 1; \"$0\" create -q big.qcow2 1G";
    let output = dir
        .command("bash", &["-c", line, GAUR])
        .output()
        .expect("bash runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.starts_with("gaur: big.qcow2: ") && said.ends_with("file too large\n"),
        "{said}"
    );
}

#[test]
fn system_errors_are_lower_case_without_code() {
    let dir = dir();
    let mut command = dir.command(GAUR, &["serve", "--temporary", "d.qcow2"]);
    let output = command
        .env("TMPDIR", "/nonexistent")
        .output()
        .expect("gaur runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let wanted =
        "gaur: /nonexistent: no such file or directory (TMPDIR says where temporary files go)\n";
    assert_eq!(said, wanted);
}

/// `gaur info ssh://host/x` said "no such file or directory" to who knows that QEMU opens such names.
#[test]
fn protocol_prefix_is_named_in_the_hint() {
    let dir = dir();
    dir.gaur(&["info", "ssh://host/x"])
        .fails(1, &["no such file", "'ssh' is not supported"]);
    dir.gaur(&["map", "nbd+unix:///?socket=x"])
        .fails(1, &["cannot connect to x"]);
    dir.gaur(&["map", "nbds://host/x"]).fails(1, &["TLS"]);
    let map = dir.gaur(&["map", "d.qcow2"]);
    assert_eq!(dir.gaur(&["map", "file:d.qcow2"]).out, map.out);
    dir.gaur(&["map", "file:missing"])
        .fails(1, &["missing: no such file"]);
}
