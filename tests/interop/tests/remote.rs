//! Layers in an object store: every verb reads them, a server serves overlays over them, and the cache stays right when
//! readers are killed and servers are lost.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use gaur_interop::gaur::binary;
use gaur_interop::layout::Layout;
use gaur_interop::nbd::Server;
use gaur_interop::op;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::store::Weed;
use gaur_interop::tool::{Run, assert_clean, qemu_img, run};

const MIB: u64 = 1 << 20;
const BUCKET: &str = "bases";
/// Some chunks of the cache, and a part of one.
const DATA_BYTES: u64 = 24 * MIB + 4096;
const DISK_BYTES: u64 = 64 * MIB;

/// A store with images, and the cache of this machine.
struct Shelf {
    scratch: Scratch,
    weed: Weed,
    seconds: u32,
}

impl Shelf {
    /// A store with one disk in three images: `raw`, `qcow2` and `packed`, with compressed clusters.
    fn new() -> Shelf {
        let weed = Weed::start();
        let scratch = Scratch::new("remote");
        let raw = scratch.file("raw", &Random::new(7).bytes(DATA_BYTES as usize));
        run("truncate", &["--size", &DISK_BYTES.to_string(), &raw]).ok();
        let (plain, packed) = (scratch.path("qcow2"), scratch.path("packed"));
        qemu_img(&["convert", "-q", "-O", "qcow2", &raw, &plain]).ok();
        qemu_img(&["convert", "-q", "-c", "-O", "qcow2", &raw, &packed]).ok();
        weed.make_bucket(BUCKET);
        for name in ["raw", "qcow2", "packed"] {
            weed.put(&scratch.path(name), BUCKET, &format!("dir/{name}"));
        }
        Shelf {
            scratch,
            weed,
            seconds: 20,
        }
    }

    fn variables(&self) -> Vec<String> {
        let store = self.weed.environment().into_iter();
        let store = store.map(|(name, value)| format!("{name}={value}"));
        let cache = format!("GAUR_REMOTE_CACHE={}", self.scratch.path("cache"));
        let patience = format!("GAUR_REMOTE_TIMEOUT={}", self.seconds);
        store.chain([cache, patience]).collect()
    }

    /// Runs gaur in the store's environment, and in that of more variables.
    fn gaur_with(&self, more: &[&str], arguments: &[&str]) -> Run {
        let variables = self.variables();
        let mut line: Vec<&str> = variables.iter().map(String::as_str).collect();
        line.extend(more);
        line.push(binary());
        line.extend(arguments);
        run("env", &line)
    }

    fn gaur(&self, arguments: &[&str]) -> Run {
        self.gaur_with(&[], arguments)
    }

    fn raw(&self) -> String {
        self.scratch.path("raw")
    }

    /// A new overlay over an object.
    fn overlay(&self, name: &str, base: &str, format: &str) -> String {
        let path = self.scratch.path(name);
        let create = [
            "create", "-q", "-f", "qcow2", "-b", base, "-F", format, &path,
        ];
        self.gaur(&create).ok();
        path
    }

    /// A server of an image, with more arguments.
    fn serve(&self, image: &str, more: &[&str]) -> Server {
        let socket = self.scratch.path("socket");
        let mut command = Command::new("env");
        command.args(self.variables()).arg(binary());
        command.args([
            "serve",
            "--persistent",
            "--shared",
            "8",
            "--socket",
            &socket,
        ]);
        command.args(more).arg(image);
        Server::start(command, &socket)
    }
}

fn url(name: &str) -> String {
    format!("s3://{BUCKET}/dir/{name}")
}

#[test]
fn every_verb_reads_what_is_in_a_store() {
    let shelf = Shelf::new();
    let raw = shelf.raw();
    for (name, format) in [("raw", "raw"), ("qcow2", "qcow2"), ("packed", "qcow2")] {
        let (url, copy) = (url(name), shelf.scratch.path("copy"));
        let info = shelf
            .gaur(&["info", "-f", format, "--output", "json", &url])
            .ok();
        assert_eq!(info.json()["virtual-size"], DISK_BYTES);
        shelf
            .gaur(&["compare", "-f", format, "-F", "raw", &url, &raw])
            .ok();
        shelf
            .gaur(&["convert", "-f", format, "-O", "qcow2", &url, &copy])
            .ok();
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw", &copy, &raw]).ok();
        if format == "qcow2" {
            shelf.gaur(&["check", &url]).ok();
            // What a map says of the object is what it says of the file.
            let map = |image: &str| shelf.gaur(&["map", "--output", "json", image]).ok().stdout;
            assert_eq!(map(&url), map(&shelf.scratch.path(name)));
        }
        let refused = shelf.gaur(&["convert", "-O", "raw", &raw, &url]).refused();
        assert!(refused.stderr.contains("is only read"), "{refused}");
    }
    // The key as Amazon's tools keep it.
    let key = shelf.weed.credentials();
    let profile = format!(
        "[default]\naws_access_key_id = no\naws_secret_access_key = no\n[tests]\n\
         aws_access_key_id = {}\naws_secret_access_key = {}\n",
        key.access_key, key.secret_key
    );
    let file = shelf.scratch.file("credentials", profile.as_bytes());
    let file = format!("AWS_SHARED_CREDENTIALS_FILE={file}");
    let mut known = vec!["AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY=", &file];
    let refused = shelf.gaur_with(&known, &["info", &url("raw")]).refused();
    assert!(refused.stderr.contains("HTTP 403"), "{refused}");
    known.push("AWS_PROFILE=tests");
    shelf.gaur_with(&known, &["info", &url("raw")]).ok();
    let missing = shelf.gaur(&["info", &url("none")]).refused();
    let line = format!(
        "gaur: {}: there is no such object (HTTP 404)\n",
        url("none")
    );
    assert_eq!(missing.stderr, line);
}

#[test]
fn an_overlay_over_an_object_is_served_like_one_over_a_file() {
    let shelf = Shelf::new();
    let noise = gaur_interop::builder::noise(&shelf.scratch);
    let layout = Layout::v3(65536);
    let ops = op::random(&layout, 3, 60, true, &noise);
    let overlay = shelf.overlay("overlay", &url("packed"), "qcow2");
    let twin = shelf.scratch.path("twin");
    qemu_img(&[
        "create", "-q", "-f", "qcow2", "-b", "packed", "-F", "qcow2", &twin,
    ])
    .ok();
    op::apply("qcow2", &twin, &ops);
    // Nothing is opened that was not allowed, and a place is whole components.
    let socket = shelf.scratch.path("no-socket");
    for place in [None, Some("s3://bases/di"), Some("s3://other/dir")] {
        let mut arguments = vec!["serve", "--socket", &socket];
        arguments.extend(place.iter().flat_map(|place| ["--allow", *place]));
        arguments.push(&overlay);
        let refused = shelf.gaur(&arguments).refused();
        assert!(refused.stderr.contains("not allowed"), "{refused}");
    }
    // What refers to anything gets no credentials of ours.
    let refused = shelf
        .gaur(&["compare", "--allow-any", &overlay, &shelf.raw()])
        .code(2);
    assert!(refused.stderr.contains("HTTP 403"), "{refused}");

    let server = shelf.serve(&overlay, &["--allow", "s3://bases/dir/"]);
    op::apply("raw", &server.uri(), &ops);
    let same = ["compare", "-f", "raw", "-F", "qcow2", &server.uri(), &twin];
    qemu_img(&same).ok();
    server.stop();
    // QEMU knows no stores, but the overlay itself: over the same base as a file.
    let local = ["rebase", "-u", "-F", "qcow2", "-b", "packed", &overlay];
    qemu_img(&local).ok();
    assert_clean(&overlay);
    qemu_img(&["compare", &overlay, &twin]).ok();
}

#[test]
fn the_cache_outlives_kills_and_heals_what_was_damaged() {
    let shelf = Shelf::new();
    let (url, raw) = (url("qcow2"), shelf.raw());
    let compare = ["compare", "-f", "qcow2", "-F", "raw", &url, &raw];
    // Killed at any moment, by the dozen, two at a time.
    let mut random = Random::new(11);
    for _ in 0..12 {
        let start = || {
            let mut command = Command::new("env");
            command.args(shelf.variables()).arg(binary()).args(compare);
            command.stdout(Stdio::null()).spawn().expect("env starts")
        };
        let mut readers = [start(), start()];
        sleep(Duration::from_millis(random.below(120)));
        for reader in &mut readers {
            // It may have come to its end.
            let _ = reader.kill();
            reader.wait().unwrap();
        }
    }
    shelf.gaur(&compare).ok();
    let object = std::fs::read_dir(shelf.scratch.path("cache/objects")).unwrap();
    let objects: Vec<_> = object.map(|found| found.unwrap().path()).collect();
    let [object] = objects.as_slice() else {
        panic!("one object, and not {objects:?}");
    };
    // Bytes that a power cut took are fetched again.
    let damage = "dd if=/dev/zero of=\"$0\"/data bs=1M seek=3 count=5 conv=notrunc status=none";
    run("bash", &["-c", damage, object.to_str().unwrap()]).ok();
    shelf.gaur(&compare).ok();
    // A small cache is no obstacle, and stays small.
    let small = format!("GAUR_REMOTE_CACHE_BYTES={}", 4 * MIB);
    shelf.gaur_with(&[&small], &compare).ok();
    let used = run("du", &["-s", "-B1", &shelf.scratch.path("cache")])
        .ok()
        .stdout;
    let used: u64 = used.split('\t').next().unwrap().parse().unwrap();
    assert!(used < 16 * MIB, "{used} bytes in a cache of 4 MiB");
    shelf.gaur(&compare).ok();
}

#[test]
fn a_store_that_is_gone_is_waited_for_and_what_is_here_is_served() {
    let mut shelf = Shelf::new();
    shelf.seconds = 8;
    let overlay = shelf.overlay("overlay", &url("raw"), "raw");
    let server = shelf.serve(&overlay, &["--allow", "s3://bases"]);
    let uri = server.uri();
    let read = |offset: u64| {
        let command = format!("read {offset} 65536");
        run("qemu-io", &["-r", "-f", "raw", "-c", &command, &uri])
    };
    let ends_well = |run: &Run| !run.stdout.contains("failed") && run.code == 0;
    assert!(ends_well(&read(0)));
    shelf.weed.kill_volume_server(0);
    assert!(ends_well(&read(2 * MIB)));
    shelf.weed.kill_filer();
    let start = Instant::now();
    assert!(ends_well(&read(4096)) && ends_well(&read(2 * MIB)));
    assert!(start.elapsed() < Duration::from_secs(5));
    // What is not here is waited for, and then fails.
    let start = Instant::now();
    let failed = read(12 * MIB);
    assert!(
        failed.stdout.contains("Input/output error") || failed.code != 0,
        "{failed}"
    );
    let waited = start.elapsed();
    assert!(
        waited > Duration::from_secs(5) && waited < Duration::from_secs(20),
        "{waited:?}"
    );
    assert!(ends_well(&read(4096)));
    // A read that waits when the store comes back is answered, and nothing is left of the failure.
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| read(14 * MIB));
        sleep(Duration::from_secs(1));
        shelf.weed.start_filer();
        waiting.join().unwrap()
    });
    assert!(ends_well(&waiting), "{waiting}");
    assert!(ends_well(&read(12 * MIB)));
    let same = ["compare", "-f", "raw", "-F", "raw", &uri, &shelf.raw()];
    qemu_img(&same).ok();
    // Another key: what is open fails in words, what is here is served.
    let old = shelf.gaur(&["info", &url("qcow2")]).ok();
    assert!(old.stdout.contains("qcow2"));
    let key = shelf.weed.environment();
    shelf
        .weed
        .change_credentials("ANOTHERKEY", "another-secret");
    let key: Vec<String> = key
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let key: Vec<&str> = key.iter().map(String::as_str).collect();
    let refused = shelf.gaur_with(&key, &["info", &url("qcow2")]).refused();
    assert!(
        refused.stderr.contains("access was refused (HTTP 403"),
        "{refused}"
    );
    assert!(ends_well(&read(4096)));
    shelf.gaur(&["info", &url("qcow2")]).ok();
    server.stop();
}

#[test]
fn an_object_that_was_changed_is_never_mixed_with_what_it_was() {
    let shelf = Shelf::new();
    let overlay = shelf.overlay("overlay", &url("raw"), "raw");
    let server = shelf.serve(&overlay, &["--allow", "s3://bases"]);
    let read = |pattern: &str, offset: u64| {
        let command = format!("read {pattern} {offset} 4096");
        run(
            "qemu-io",
            &["-r", "-f", "raw", "-c", &command, &server.uri()],
        )
    };
    read("", 0).ok();
    let other = shelf
        .scratch
        .file("other", &vec![0x5a; DISK_BYTES as usize]);
    shelf.weed.put(&other, BUCKET, "dir/raw");
    // What was read before is as it was; what was not, is not there any more.
    let first = read("-P 0x5a", 0);
    assert!(first.stdout.contains("verification failed"), "{first}");
    let changed = read("", 16 * MIB);
    assert!(
        changed.code != 0 || changed.stdout.contains("failed"),
        "{changed}"
    );
    server.stop();
    let server = shelf.serve(&overlay, &["--allow", "s3://bases"]);
    qemu_img(&["compare", "-f", "raw", "-F", "raw", &server.uri(), &other]).ok();
    server.stop();
}
