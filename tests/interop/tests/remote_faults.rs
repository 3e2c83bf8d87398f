//! Stores and web servers that answer wrongly: what passes is tried again, what does not ends in a line that says why, and
//! nothing is left behind that the next attempt would stumble over.

use std::time::{Duration, Instant};

use gaur_interop::gaur::binary;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::store::{Fault, FaultyStore, When};
use gaur_interop::tool::{Run, run};

const CHUNK: usize = 256 << 10;
const PATH: &str = "/bases/disk";
/// Several requests of several chunks, and a part of one.
const LEN: usize = 20 * CHUNK + 700;

struct Shelf {
    store: FaultyStore,
    scratch: Scratch,
    raw: String,
    /// How long a read is tried.
    seconds: u32,
}

impl Shelf {
    fn new(seconds: u32) -> Shelf {
        let (store, scratch) = (FaultyStore::start(), Scratch::new("faults"));
        let bytes = Random::new(5).bytes(LEN);
        let raw = scratch.file("raw", &bytes);
        store.put(PATH, bytes);
        Shelf {
            store,
            scratch,
            raw,
            seconds,
        }
    }

    /// The names by which the object is asked for: as in an S3 store, and as on a web server.
    fn names(&self) -> [String; 2] {
        [format!("s3:/{PATH}"), self.store.url(PATH)]
    }

    fn gaur(&self, arguments: &[&str]) -> Run {
        let variables = [
            format!("AWS_ENDPOINT_URL={}", self.store.endpoint()),
            format!("GAUR_REMOTE_CACHE={}", self.scratch.path("cache")),
            format!("GAUR_REMOTE_TIMEOUT={}", self.seconds),
        ];
        let known = [
            "AWS_ACCESS_KEY_ID=key",
            "AWS_SECRET_ACCESS_KEY=a-secret",
            "AWS_REGION=us-east-1",
            "AWS_ALLOW_HTTP=true",
        ];
        let mut line: Vec<&str> = variables.iter().map(String::as_str).collect();
        line.extend(known);
        line.push(binary());
        line.extend(arguments);
        run("env", &line)
    }

    fn compare(&self, name: &str) -> Run {
        self.gaur(&["compare", "-f", "raw", "-F", "raw", name, &self.raw])
    }

    fn forget_cache(&self) {
        let _ = std::fs::remove_dir_all(self.scratch.path("cache"));
    }
}

#[test]
fn what_passes_is_tried_again() {
    let shelf = Shelf::new(30);
    let faults = [
        Fault::slow_down(None),
        Fault::slow_down(Some(1)),
        Fault::internal_error(),
        Fault::Reset,
        Fault::CutShort(1000),
        Fault::SlowFirstByte(Duration::from_secs(1)),
        Fault::Trickle(CHUNK / 4, Duration::from_millis(10)),
    ];
    for name in shelf.names() {
        for fault in &faults {
            // While it is opened, and while it is read.
            for when in [When::first(1), When::nth(2), When::one_in(5, 3)] {
                shelf.forget_cache();
                shelf.store.fail(when.clone(), fault.clone());
                let compared = shelf.compare(&name);
                assert_eq!(compared.code, 0, "{name} {fault:?} {when:?}\n{compared}");
                shelf.store.recover();
            }
        }
    }
}

#[test]
fn what_does_not_pass_ends_soon_in_one_line_and_poisons_nothing() {
    let shelf = Shelf::new(2);
    let elsewhere = Fault::Redirect("http://169.254.169.254/latest/meta-data".to_owned());
    let other = Fault::Redirect("http://127.0.0.2:1/bases/disk".to_owned());
    // A fault, and what is said: by the S3 client, and by the web client.
    let faults = [
        (
            Fault::expired_token(),
            [
                "access was refused (HTTP 403",
                "access was refused (HTTP 403",
            ],
        ),
        (
            Fault::error(404, "NoSuchKey"),
            ["there is no such object", "there is no such object"],
        ),
        (
            Fault::slow_down(None),
            ["the store is busy (HTTP 503", "the store is busy (HTTP 503"],
        ),
        (
            Fault::Hang,
            ["the store does not answer", "the store does not answer"],
        ),
        (Fault::CutShort(1000), ["", ""]),
        (Fault::IgnoreRange, ["", "sends no ranges"]),
        (Fault::WrongContentRange(512), ["", "another range"]),
        (
            Fault::OtherSize(LEN as u64 + 512),
            ["", "changed since it was opened"],
        ),
        (
            Fault::OtherEtag,
            ["changed since it was opened", "changed since it was opened"],
        ),
        (Fault::ContentEncoding, ["", "encoded"]),
        (Fault::RedirectEndlessly, ["", "too many redirects"]),
        (elsewhere, ["", "redirect to another host"]),
        (other, ["", "redirect to another host"]),
        (Fault::EndlessBody, ["", ""]),
        (Fault::EndlessHeaders, ["", ""]),
    ];
    for (kind, name) in shelf.names().iter().enumerate() {
        for (fault, lines) in &faults {
            shelf.forget_cache();
            // What opens it goes well, and what probes its first bytes.
            shelf.store.fail(When::after(2), fault.clone());
            let start = Instant::now();
            let failed = shelf.compare(name);
            let took = start.elapsed();
            assert!([2, 4].contains(&failed.code), "{name} {fault:?}\n{failed}");
            let line = failed.stderr.trim_end();
            let is_line = line.starts_with("gaur: ") && !line.contains('\n') && line.len() < 500;
            assert!(is_line && line.contains(lines[kind]), "{fault:?}: {line}");
            assert!(took < Duration::from_secs(20), "{fault:?} took {took:?}");
            shelf.store.recover();
            shelf.compare(name).ok();
        }
    }
    let asked = shelf.store.take_requests();
    let signed = |request: &&gaur_interop::store::Request| {
        let mut headers = request.headers.iter();
        headers.any(|(name, _)| name == "authorization")
    };
    assert!(asked.iter().any(|request| signed(&request)));
    shelf.forget_cache();
    shelf.compare(&shelf.names()[1]).ok();
    let asked = shelf.store.take_requests();
    assert!(
        asked.iter().all(|request| !signed(&request)),
        "a web server hears no key"
    );
}

#[test]
fn each_chunk_is_asked_for_once_by_all_processes_together() {
    let shelf = Shelf::new(30);
    let name = &shelf.names()[0];
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| shelf.compare(name)))
            .collect();
        for reader in readers {
            reader.join().unwrap().ok();
        }
    });
    let mut bytes = 0;
    for request in shelf.store.take_requests() {
        let range = request.headers.iter().find(|(name, _)| name == "range");
        let range = range.and_then(|(_, value)| value.strip_prefix("bytes=")?.split_once('-'));
        if let Some((from, to)) = range {
            bytes += to.parse::<usize>().unwrap() + 1 - from.parse::<usize>().unwrap();
        }
    }
    // A reader that has waited long may have asked a second time.
    assert!(
        (LEN..LEN + 4 * CHUNK).contains(&bytes),
        "{bytes} of {LEN} bytes"
    );
}

#[test]
fn a_hostile_overlay_reaches_neither_secrets_nor_other_hosts() {
    let shelf = Shelf::new(5);
    let top = shelf.scratch.path("top");
    let host = shelf.store.endpoint();
    for base in [
        "http://169.254.169.254/latest/meta-data",
        "http://[fd00:ec2::254]/latest",
        "http://0xa9fea9fe/latest",
        "https://user:password@host.example/disk",
        "s3://bases/disk",
        &format!("{host}/bases/disk"),
    ] {
        let create = ["create", "-q", "-u", "-b", base, "-F", "raw", &top, "1M"];
        run(
            "qemu-img",
            &[&create[..1], &["-f", "qcow2"], &create[1..]].concat(),
        )
        .ok();
        // Without a word of the user's nothing is asked for at all.
        for more in [
            &[][..],
            &["--untrusted"],
            &["--allow", "/srv"],
            &["--allow", "s3://base"],
        ] {
            let arguments = [&["convert", "-O", "raw"], more, &[&*top, "/dev/null"]].concat();
            shelf.gaur(&arguments).refused();
        }
        assert!(shelf.store.take_requests().is_empty(), "{base}");
    }
    // With any word it gets what anybody gets.
    for base in ["s3://bases/disk", &format!("{host}/bases/disk")] {
        let create = [
            "create", "-q", "-f", "qcow2", "-u", "-b", base, "-F", "raw", &top, "1M",
        ];
        run("qemu-img", &create).ok();
        shelf.gaur(&["check", &top]).ok();
        let out = shelf.scratch.path("out");
        shelf
            .gaur(&["convert", "-O", "raw", "--allow-any", &top, &out])
            .ok();
        let asked = shelf.store.take_requests();
        let headers = asked.iter().flat_map(|request| &request.headers);
        let names: Vec<&str> = headers.map(|(name, _)| name.as_str()).collect();
        assert!(
            !asked.is_empty() && !names.contains(&"authorization"),
            "{names:?}"
        );
    }
}
