//! What a hostile image may have opened by naming it: every name that has led to a host's files in other
//! programs, with every verb that opens a chain. Modelled on CVE-2024-32498 and CVE-2024-4467 (names of data files, `json:`) and
//! on the backing files that were the same hole before.

use std::os::unix::fs::{FileExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

use gaur_interop::builder::create;
use gaur_interop::field::header;
use gaur_interop::gaur::{binary, gaur, gaur_bounded, serve_with};
use gaur_interop::layout::Layout;
use gaur_interop::nbd::Server;
use gaur_interop::op::{self, Op};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, qemu_img, run};

const SMALL: Layout = Layout::v3(4096);
const SECRET: u8 = 0x5e;

/// A folder with a secret, and beside it a folder with the images of somebody who wants it.
struct Host {
    scratch: Scratch,
}

impl Host {
    fn new() -> Host {
        let scratch = Scratch::new("references");
        std::fs::create_dir_all(scratch.path("images/deep")).expect("scratch is writable");
        scratch.file("secret", &[SECRET; 4 << 20]);
        Host { scratch }
    }

    fn path(&self, name: &str) -> String {
        self.scratch.path(name)
    }

    /// An image whose backing file has this name, put there by hand: QEMU would look at it.
    fn image(&self, name: &str, backing: &str, format: &str) -> String {
        let path = self.path(&format!("images/{name}"));
        create(&path, &SMALL);
        let link = [
            "rebase", "-u", "-f", "qcow2", "-b", "x", "-F", format, &path,
        ];
        qemu_img(&link).ok();
        let file = std::fs::OpenOptions::new().write(true).open(&path);
        let offset = header("backing_file_offset").get(&path);
        file.expect("it opens")
            .write_all_at(backing.as_bytes(), offset)
            .expect("the image is writable");
        header("backing_file_size").set(&path, backing.len() as u64);
        path
    }

    /// A file that holds nothing but the secret, as an image.
    fn assert_no_secret(&self, path: &str, what: &str) {
        let Ok(bytes) = std::fs::read(path) else {
            return;
        };
        assert!(!bytes.contains(&SECRET), "{what}: the secret is in {path}");
    }
}

/// The command lines that open the chain of an image.
fn verbs(host: &Host, image: &str) -> Vec<Vec<String>> {
    let healthy = host.path("images/healthy.qcow2");
    create(&healthy, &SMALL);
    let line = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let socket = host.path("socket");
    let (raw, new) = (host.path("out.raw"), host.path("images/new.qcow2"));
    vec![
        line(&["info", "--backing-chain", image]),
        line(&["info", "--backing-chain", "--output", "json", image]),
        line(&["map", "--output", "json", image]),
        line(&["convert", "-O", "raw", image, &raw]),
        line(&["convert", "-n", "-O", "qcow2", &healthy, image]),
        line(&[
            "convert", "-O", "qcow2", "-B", image, "-F", "qcow2", &healthy, &new,
        ]),
        line(&["compare", image, &healthy]),
        line(&["compare", &healthy, image]),
        line(&["measure", "-O", "qcow2", image]),
        line(&["resize", image, "+1M"]),
        line(&["bench", "-c", "1", image]),
        line(&["snapshot", "create", image, "name"]),
        line(&["snapshot", "extract", image, "name", "--to", &raw]),
        line(&["create", "-b", image, "-F", "qcow2", &new]),
        line(&["serve", "--socket", &socket, image]),
        line(&["serve", "--read-only", "--socket", &socket, image]),
        line(&["serve", "--temporary", "--socket", &socket, image]),
    ]
}

fn bounded(line: &[String], more: &[&str]) -> Run {
    let mut words: Vec<&str> = line.iter().map(String::as_str).collect();
    // Behind the verb, and behind its own verb if it has one.
    let at = if words[0] == "snapshot" { 2 } else { 1 };
    words.splice(at..at, more.iter().copied());
    gaur_bounded(&words)
}

/// Every verb refuses the image, and says why in one line with `word`.
#[track_caller]
fn all_refuse(host: &Host, image: &str, more: &[&str], word: &str) {
    for line in verbs(host, image) {
        let refusal = bounded(&line, more).refused();
        assert!(refusal.stderr.contains(word), "{word}: {refusal}");
        host.assert_no_secret(&host.path("out.raw"), &refusal.command);
    }
}

#[test]
fn every_verb_refuses_a_file_outside_of_the_directory_and_says_how_to_allow_it() {
    let host = Host::new();
    let image = host.image("evil.qcow2", "../secret", "raw");
    all_refuse(&host, &image, &[], "--allow PATH");
    all_refuse(&host, &image, &["--untrusted"], "without --untrusted");
    // What looks at the image alone is not concerned.
    gaur(&["check", &image]).ok();
    gaur(&["check", "--untrusted", &image]).ok();
    let info = gaur(&["info", "--untrusted", &image]).ok();
    assert!(info.stdout.contains("../secret"), "{info}");
}

#[test]
fn names_that_lead_to_the_hosts_files_are_refused() {
    let host = Host::new();
    let secret = host.path("secret");
    symlink("/etc", host.path("images/etc")).expect("scratch is writable");
    symlink("../secret", host.path("images/link")).expect("scratch is writable");
    symlink("/proc/self/fd", host.path("images/fd")).expect("scratch is writable");
    for name in [
        "/etc/passwd",
        "../../../../../../../../etc/passwd",
        "deep/../../secret",
        &secret,
        "link",
        "etc/passwd",
        "/dev/fd/0",
        "fd/0",
        "/proc/self/maps",
        "/proc/self/environ",
        "/proc/self/root/etc/passwd",
        "/dev/zero",
        "/dev/mem",
        "/sys/kernel/notes",
        "file:/etc/passwd",
        &format!("file:{secret}"),
    ] {
        let image = host.image("evil.qcow2", name, "raw");
        let convert = ["convert", "-O", "raw", &image, &host.path("out.raw")];
        let refusal = gaur_bounded(&convert).refused();
        assert!(refusal.stderr.contains("--allow PATH"), "{name}: {refusal}");
        host.assert_no_secret(&host.path("out.raw"), name);
        let chain = gaur_bounded(&["info", "--backing-chain", &image]).refused();
        assert!(chain.stderr.contains("--allow PATH"), "{name}: {chain}");
    }
}

/// `ssh://` would have the host connect to whom the image likes (CVE-2024-4467 was `json:`).
#[test]
fn protocols_and_json_are_refused_by_every_verb_whatever_is_allowed() {
    let host = Host::new();
    for name in [
        r#"json:{"driver":"raw","file":{"driver":"file","filename":"/etc/passwd"}}"#,
        "fat:/etc",
        "ssh://root@localhost/etc/passwd",
    ] {
        let image = host.image("evil.qcow2", name, "raw");
        for more in [&[][..], &["--allow-any"], &["--allow", "/"]] {
            for line in verbs(&host, &image) {
                let refusal = bounded(&line, more).refused();
                assert!(refusal.stderr.contains("protocol"), "{name}: {refusal}");
            }
        }
    }
}

#[test]
fn fifos_sockets_and_folders_are_refused_and_do_not_hang() {
    let host = Host::new();
    run("mkfifo", &[&host.path("images/fifo")]).ok();
    let _socket = std::os::unix::net::UnixListener::bind(host.path("images/s")).expect("a socket");
    for name in ["fifo", "s", "deep", "."] {
        let image = host.image("evil.qcow2", name, "raw");
        for line in verbs(&host, &image) {
            bounded(&line, &[]).refused();
            bounded(&line, &["--allow-any"]).refused();
        }
    }
}

/// CVE-2024-32498: the data file of an image, another name that leads anywhere.
#[test]
fn an_external_data_file_outside_of_the_directory_is_never_shown() {
    let host = Host::new();
    let image = host.path("images/data.qcow2");
    let data = host.path("data.raw");
    let option = format!("data_file={data},data_file_raw=on");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &option, &image, "4M"]).ok();
    std::fs::copy(host.path("secret"), &data).expect("scratch is writable");
    for line in verbs(&host, &image) {
        let end = bounded(&line, &[]);
        // It reads the image alone.
        if line[0] != "info" {
            end.refused();
        }
        host.assert_no_secret(&host.path("out.raw"), &line.join(" "));
    }
}

/// The base's content shows through, as it does through QEMU.
fn assert_opens(image: &str, host: &Host, more: &[&str]) {
    let out = host.path("out.raw");
    let line = [&["convert", "-O", "raw"], more, &[image, &out]].concat();
    gaur(&line).ok();
    let bytes = std::fs::read(&out).expect("it was made");
    assert!(bytes.contains(&SECRET), "{image}: nothing shows through");
    std::fs::remove_file(&out).expect("it was made");
}

#[test]
fn what_lies_beside_the_image_opens_by_any_name() {
    let host = Host::new();
    let base = host.path("images/base.raw");
    std::fs::copy(host.path("secret"), &base).expect("scratch is writable");
    std::fs::copy(&base, host.path("images/deep/base.raw")).expect("scratch is writable");
    symlink("deep/base.raw", host.path("images/link")).expect("scratch is writable");
    for name in [
        "base.raw",
        "./base.raw",
        "deep/base.raw",
        "deep/../base.raw",
        "link",
        &base,
        &format!("file:{base}"),
    ] {
        let image = host.image("top.qcow2", name, "raw");
        assert_opens(&image, &host, &[]);
        gaur(&["info", "--backing-chain", &image]).ok();
    }
    // Seen from the folder itself, and from another one, by a link.
    let image = host.image("top.qcow2", "base.raw", "raw");
    symlink(host.path("images"), host.path("way")).expect("scratch is writable");
    assert_opens(&host.path("way/top.qcow2"), &host, &[]);
    let line = format!(
        "cd {} && exec {} map top.qcow2",
        host.path("images"),
        binary()
    );
    run("sh", &["-c", &line]).ok();
    gaur(&["map", &image]).ok();
}

#[test]
fn allowed_files_and_directories_open_and_no_others() {
    let host = Host::new();
    let image = host.image("top.qcow2", "../secret", "raw");
    let (secret, folder) = (host.path("secret"), host.path(""));
    for allow in [&secret, &folder] {
        assert_opens(&image, &host, &["--allow", allow]);
        gaur(&["info", "--backing-chain", "--allow", allow, &image]).ok();
    }
    assert_opens(&image, &host, &["--allow-any"]);
    assert_opens(
        &image,
        &host,
        &["--allow", "/nonexistent", "--allow", &secret],
    );
    for allow in [&host.path("images/deep"), "/etc", "/nonexistent"] {
        let line = ["map", "--allow", allow, &image];
        let refusal = gaur_bounded(&line).refused();
        assert!(refusal.stderr.contains("--allow PATH"), "{refusal}");
    }
    // A made-up file is none, wherever it lies.
    let image = host.image("top.qcow2", "/proc/self/maps", "raw");
    gaur_bounded(&["map", "--allow", "/", &image]).refused();
    for both in ["--allow-any", "--allow=/"] {
        gaur_bounded(&["map", "--untrusted", both, &image]).refused();
    }
}

/// An attacker's image points to a trusted neighbour, or to an allowed image, which points elsewhere.
#[test]
fn places_of_a_chain_are_those_of_its_top() {
    let host = Host::new();
    let other = host.path("other");
    std::fs::create_dir(&other).expect("scratch is writable");
    let middle = host.path("other/middle.qcow2");
    create(&middle, &SMALL);
    std::fs::copy(host.path("secret"), host.path("other/base.raw")).expect("scratch");
    let link = [
        "rebase", "-u", "-f", "qcow2", "-b", "base.raw", "-F", "raw", &middle,
    ];
    qemu_img(&link).ok();
    let evil = host.image("evil.qcow2", "../other/middle.qcow2", "qcow2");
    // The file alone is allowed, and what lies beside that is not.
    let refusal = gaur_bounded(&["map", "--allow", &middle, &evil]).refused();
    assert!(refusal.stderr.contains("base.raw"), "{refusal}");
    assert_opens(&evil, &host, &["--allow", &other]);
    let neighbour = host.image("neighbour.qcow2", "../secret", "raw");
    let evil = host.image("evil.qcow2", "neighbour.qcow2", "qcow2");
    gaur_bounded(&["map", &evil]).refused();
    gaur_bounded(&["map", "--allow", &neighbour, &evil]).refused();
    // Further down a name may come back up, into the directory of the top.
    let up = host.image("deep/up.qcow2", "../base.raw", "raw");
    std::fs::copy(host.path("secret"), host.path("images/base.raw")).expect("scratch");
    let top = host.image("top.qcow2", "deep/up.qcow2", "qcow2");
    assert_opens(&top, &host, &[]);
    gaur_bounded(&["map", &up]).refused();
}

/// What the command line names is its user's word.
#[test]
fn files_that_the_user_names_are_opened_wherever_they_are() {
    let host = Host::new();
    let secret = host.path("secret");
    let new = host.path("images/new.qcow2");
    let made = gaur(&["create", "-q", "-b", &secret, "-F", "raw", &new]).ok();
    assert!(made.stderr.is_empty(), "{made}");
    let told = gaur(&["create", "-b", &secret, "-F", "raw", &new]).ok();
    assert!(told.stderr.contains(&format!("--allow {secret}")), "{told}");
    gaur_bounded(&["map", &new]).refused();
    assert_opens(&new, &host, &["--allow", &secret]);
    let healthy = host.path("images/healthy.qcow2");
    create(&healthy, &SMALL);
    let line = [
        "convert", "-q", "-O", "qcow2", "-B", &secret, "-F", "raw", &healthy, &new,
    ];
    gaur(&line).ok();
    let socket = host.path("s");
    let options = format!("backing_file={secret},backing_fmt=raw");
    std::fs::remove_file(&new).expect("it was made");
    let server = serve_with(&new, &socket, &["--create", "4M", "-o", &options]);
    let seen = Op::Expect {
        offset: 0,
        len: 4096,
        pattern: SECRET,
    };
    op::apply("raw", &server.uri(), &[seen]);
    server.stop();
    // A temporary overlay lies elsewhere than its image.
    let server = serve_with(&secret, &socket, &["--temporary", "-f", "raw"]);
    server.stop();
}

#[test]
fn untrusted_images_are_not_guessed_to_be_raw_in_order_to_write() {
    let host = Host::new();
    let disk = host.path("secret");
    for line in [
        &["resize", "--untrusted", &disk, "+1M"][..],
        &["snapshot", "create", "--untrusted", &disk, "name"],
    ] {
        let refusal = gaur_bounded(line).refused();
        assert!(refusal.stderr.contains("-f raw"), "{refusal}");
    }
    gaur(&["resize", "--untrusted", "-f", "raw", &disk, "+1M"]).ok();
}

#[test]
fn exports_of_a_running_server_have_policies_of_their_own() {
    let host = Host::new();
    let image = host.image("top.qcow2", "../secret", "raw");
    let healthy = host.path("images/healthy.qcow2");
    create(&healthy, &SMALL);
    let control = host.path("c");
    let server = serve_with(&healthy, &host.path("s"), &["--control", &control]);
    let add = |name: &str, more: &[&str]| {
        let line = ["export", "add", "--control", &control, "-r", "-x", name];
        gaur_bounded(&[&line[..], more, &[&image]].concat())
    };
    let refusal = add("plain", &[]).refused();
    assert!(refusal.stderr.contains("--allow PATH"), "{refusal}");
    add("untrusted", &["--untrusted"]).refused();
    add("allowed", &["--allow", &host.path("secret")]).ok();
    add("any", &["--allow-any"]).ok();
    // What another export may do is not this one's.
    add("again", &[]).refused();
    server.stop();
}

/// A link is turned to and fro between a file of the directory and the secret while commands open it.
#[test]
fn a_link_that_is_swapped_meanwhile_never_leads_to_the_secret() {
    let host = Host::new();
    host.scratch.zeros("images/base.raw", 4 << 20);
    let image = host.image("top.qcow2", "link", "raw");
    let link = host.path("images/link");
    symlink("base.raw", &link).expect("scratch is writable");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let new = host.path("images/new");
            for target in ["../secret", "base.raw"].iter().cycle() {
                symlink(target, &new).expect("scratch is writable");
                std::fs::rename(&new, &link).expect("scratch is writable");
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let out = host.path("out.raw");
        for _ in 0..40 {
            gaur_bounded(&["convert", "-O", "raw", &image, &out]).survived();
            host.assert_no_secret(&out, "while the link was swapped");
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// A server that is asked for a hostile image says no and ends.
#[test]
fn server_does_not_start_with_a_hostile_image() {
    let host = Host::new();
    let image = host.image("evil.qcow2", "/proc/self/environ", "raw");
    let socket = host.path("refused");
    let mut command = std::process::Command::new(binary());
    command.args(["serve", "--persistent", "--socket", &socket, &image]);
    match Server::try_start(command, &socket) {
        Ok(_) => panic!("{image} is served"),
        Err(run) => run.refused(),
    };
}
