//! The stores of the tests do what they say: shown by `curl`, `s3cmd` and `skopeo`.

use std::ops::Range;
use std::time::{Duration, Instant};

use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::store::{
    Access, Bytes, Fault, FaultyStore, Layer, Link, Object, PASSWORD, PUBLIC_BUCKET, Proxy,
    Registry, Request, USER, Weed, When, most_fetched,
};
use gaur_interop::tool::{Run, run};

/// Runs `curl`, with errors printed; a status of an error is none of its.
#[track_caller]
fn curl(arguments: &[&str]) -> Run {
    let mut line = vec!["--silent", "--show-error", "--max-time", "30"];
    line.extend(arguments);
    run("curl", &line)
}

/// The status with which a URL is answered.
#[track_caller]
fn status(url: &str) -> String {
    let format = ["--output", "/dev/null", "--write-out", "%{http_code}"];
    curl(&[format.as_slice(), &[url]].concat()).ok().stdout
}

#[track_caller]
fn assert_object(weed: &Weed, bucket: &str, key: &str, expected: &[u8]) {
    let scratch = Scratch::new("store");
    let file = scratch.path("seen");
    weed.get(bucket, key, &file);
    let seen = std::fs::read(file).unwrap();
    assert!(seen == expected, "{bucket}/{key} is another");
}

/// All of the real store in one test: it takes seconds to start.
#[test]
fn seaweedfs_keeps_objects_through_the_loss_of_a_server() {
    let start = Instant::now();
    let mut weed = Weed::start();
    println!("started in {:?}", start.elapsed());
    let scratch = Scratch::new("store");
    // Put in two parts.
    let bytes = Random::new(1).bytes(20 << 20);
    let file = scratch.file("object", &bytes);
    weed.make_bucket("bases");
    weed.put(&file, "bases", "a/disk.qcow2");
    let object = Object {
        key: "a/disk.qcow2".to_owned(),
        len_bytes: 20 << 20,
    };
    assert_eq!(weed.list("bases"), [object]);
    let private = format!("{}/bases/a/disk.qcow2", weed.endpoint());
    assert_eq!(status(&private), "403");

    weed.make_bucket(PUBLIC_BUCKET);
    weed.put(&file, PUBLIC_BUCKET, "disk");
    let public = format!("{}/{PUBLIC_BUCKET}/disk", weed.endpoint());
    let part = scratch.path("part");
    curl(&[
        "--fail",
        "--range",
        "5000000-9999999",
        "--output",
        &part,
        &public,
    ])
    .ok();
    assert!(std::fs::read(&part).unwrap() == bytes[5_000_000..10_000_000]);

    let secret = format!("{}/{PUBLIC_BUCKET}/disk", weed.tls_endpoint());
    assert_eq!(curl(&[&secret]).code, 60, "an authority that is not known");
    let known = [
        "--fail",
        "--cacert",
        &weed.authority(),
        "--output",
        &part,
        &secret,
    ];
    curl(&known).ok();
    assert!(std::fs::read(&part).unwrap() == bytes);

    let old = weed.credentials().clone();
    weed.change_credentials("ANOTHERKEY", "another-secret");
    let refused = weed.s3cmd_with(&old, &["ls", "s3://bases"]);
    assert!(refused.stderr.contains("InvalidAccessKeyId"), "{refused}");

    for number in [0, 1] {
        weed.kill_volume_server(number);
        assert_object(&weed, "bases", "a/disk.qcow2", &bytes);
        weed.start_volume_server(number);
    }
    weed.kill_filer();
    assert_eq!(curl(&[&public]).code, 7, "a connection is refused");
    weed.start_filer();
    assert_object(&weed, "bases", "a/disk.qcow2", &bytes);
    weed.delete("bases", "a/disk.qcow2");
    assert_eq!(weed.list("bases"), []);

    let processes = weed.processes();
    assert_eq!(processes.len(), 4);
    drop(weed);
    for id in processes {
        assert!(!std::fs::exists(format!("/proc/{id}")).unwrap());
    }
    println!("over after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(120));
}

const MIB: usize = 1 << 20;
/// Where the objects of small stores are.
const PATH: &str = "/bases/disk";

/// A store that answers rightly, with an object, and the object's bytes.
fn small_store(len_bytes: usize) -> (FaultyStore, Vec<u8>) {
    let store = FaultyStore::start();
    let bytes = Random::new(2).bytes(len_bytes);
    store.put(PATH, bytes.clone());
    (store, bytes)
}

/// The body that `curl` writes to a file.
#[track_caller]
fn body(arguments: &[&str]) -> Vec<u8> {
    let scratch = Scratch::new("store");
    let file = scratch.path("body");
    let line = [&["--fail", "--output", &*file], arguments].concat();
    curl(&line).ok();
    std::fs::read(file).unwrap()
}

/// Seconds that `curl` took for each URL.
#[track_caller]
fn seconds(urls: &[&str]) -> Vec<f64> {
    let mut line = vec!["--fail", "--write-out", "%{time_total}\n"];
    for url in urls {
        line.extend(["--output", "/dev/null", url]);
    }
    let printed = curl(&line).ok().stdout;
    let seconds = printed.lines().map(|line| line.parse().unwrap());
    seconds.collect()
}

#[test]
fn proxy_delays_both_ways_and_keeps_pieces_under_way() {
    let (store, bytes) = small_store(32 * MIB);
    let proxy = Proxy::start(store.port(), Link::FAR);
    store.put("/bases/small", vec![7; 10]);
    let [small, large] = ["/bases/small", PATH].map(|path| proxy.endpoint() + path);
    // The handshake and the request, four times 20 ms; then a request on the same connection.
    let taken = seconds(&[&small, &small]);
    assert!((0.080..0.5).contains(&taken[0]), "{taken:?}");
    assert!((0.040..0.5).contains(&taken[1]), "{taken:?}");
    assert_eq!(proxy.connections(), 1);
    // 512 pieces, each 20 ms under way: one after the other they take ten seconds.
    let start = Instant::now();
    assert!(body(&[&large]) == bytes);
    assert!(start.elapsed() < Duration::from_secs(5));
    let Bytes { sent, received } = proxy.bytes();
    assert!((100..5000).contains(&sent), "{sent}");
    let expected = 32 * MIB as u64;
    assert!((expected..expected + 5000).contains(&received));
}

#[test]
fn proxy_limits_the_rate_of_all_connections_together() {
    let (store, _) = small_store(MIB);
    let link = Link {
        bytes_per_second: 2 * MIB as u64,
        ..Link::default()
    };
    let proxy = Proxy::start(store.port(), link);
    let url = proxy.endpoint() + PATH;
    let start = Instant::now();
    let parallel = ["--parallel", "--parallel-immediate"];
    let one = ["--output", "/dev/null", &*url];
    curl(&[&parallel[..], &one, &one, &one].concat()).ok();
    let taken = start.elapsed();
    let expected = Duration::from_millis(1500)..Duration::from_secs(10);
    assert!(expected.contains(&taken), "{taken:?}");
    proxy.set(Link::default());
    let taken = seconds(&[&url]);
    assert!(taken[0] < 0.4, "{taken:?}");
}

#[test]
fn proxy_resets_and_delays_by_its_seed() {
    let (store, bytes) = small_store(MIB);
    let resets = |seed| {
        let link = Link {
            reset_one_in: 40,
            seed,
            ..Link::default()
        };
        let proxy = Proxy::start(store.port(), link);
        let url = proxy.endpoint() + PATH;
        let codes: Vec<i32> = (0..20)
            .map(|_| curl(&["--output", "/dev/null", &url]).code)
            .collect();
        let failed = codes.iter().filter(|code| **code != 0).count();
        assert_eq!(proxy.resets(), failed as u64, "{codes:?}");
        assert!((2..18).contains(&failed), "{codes:?}");
        let retries = [
            "--retry",
            "50",
            "--retry-delay",
            "0",
            "--retry-max-time",
            "20",
        ];
        let all = [&retries[..], &["--retry-all-errors", &url]].concat();
        assert!(body(&all) == bytes);
        codes
    };
    assert_eq!(resets(1), resets(1));
    assert_ne!(resets(1), resets(2));
    let link = Link {
        late_one_in: 1,
        ..Link::default()
    };
    let proxy = Proxy::start(store.port(), link);
    let taken = seconds(&[&(proxy.endpoint() + PATH)]);
    assert!((0.4..3.0).contains(&taken[0]), "{taken:?}");
}

#[test]
fn proxy_is_cut_and_restored() {
    let (store, bytes) = small_store(MIB);
    let proxy = Proxy::start(store.port(), Link::default());
    let url = proxy.endpoint() + PATH;
    for _ in 0..3 {
        proxy.refuse();
        assert_eq!(curl(&[&url]).code, 7, "connection refused");
        proxy.restore();
        assert!(body(&[&url]) == bytes);
    }
    proxy.hang();
    assert_eq!(curl(&["--max-time", "0.3", &url]).code, 28, "time-out");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| body(&[&url]));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!waiting.is_finished());
        proxy.restore();
        assert!(waiting.join().unwrap() == bytes);
    });
    // A transfer that has begun.
    let before = proxy.bytes();
    proxy.set(Link {
        bytes_per_second: MIB as u64 / 4,
        ..Link::default()
    });
    std::thread::scope(|scope| {
        let line = ["--output", "/dev/null", &*url];
        let waiting = scope.spawn(move || curl(&line));
        while proxy.bytes() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
        proxy.reset_connections();
        assert_eq!(waiting.join().unwrap().code, 56, "connection reset");
    });
}

#[test]
fn faulty_store_answers_rightly_and_remembers_requests() {
    let (store, bytes) = small_store(3 * MIB);
    let url = store.url(PATH);
    assert!(body(&[&url]) == bytes);
    assert!(body(&["--range", "100-299", &url]) == bytes[100..300]);
    assert!(body(&["--range", "250-", &url]) == bytes[250..]);
    assert!(body(&["--range", "-10", &url]) == bytes[3 * MIB - 10..]);
    let range = format!("{}-", 3 * MIB);
    let refused = curl(&["--include", "--range", &range, &url]).ok().stdout;
    assert!(refused.starts_with("HTTP/1.1 416 "), "{refused}");
    assert!(
        refused.contains("Content-Range: bytes */3145728"),
        "{refused}"
    );
    assert_eq!(status(&store.url("/bases/other")), "404");

    let head = || curl(&["--head", &url]).ok().stdout;
    let etag = |head: &str| {
        head.split("ETag: ")
            .nth(1)
            .unwrap()
            .lines()
            .next()
            .unwrap()
            .to_owned()
    };
    let old = etag(&head());
    let condition = format!("If-Match: {old}");
    assert!(body(&["--header", &condition, &url]) == bytes);
    store.put(PATH, vec![1; 10]);
    let changed = head();
    assert!(changed.contains("Content-Length: 10\r\n"), "{changed}");
    assert_ne!(etag(&changed), old);
    let refused = curl(&["--include", "--header", &condition, &url])
        .ok()
        .stdout;
    assert!(refused.starts_with("HTTP/1.1 412 "), "{refused}");

    let requests = store.take_requests();
    let ranges: Vec<_> = requests.iter().filter_map(Request::range).collect();
    assert_eq!(
        ranges,
        vec![Range {
            start: 100,
            end: 300
        }]
    );
    assert_eq!(
        requests.iter().filter(|one| one.method == "HEAD").count(),
        2
    );
    assert!(!requests.iter().any(Request::has_credentials));
    // Four parts, one of them again, on one connection.
    store.put(PATH, bytes);
    let mut line = Vec::new();
    for range in ["0-99", "100-199", "200-299", "150-159"] {
        line.extend(["--output", "/dev/null", "--range", range, &url, "--next"]);
    }
    line.pop();
    curl(&line).ok();
    let requests = store.take_requests();
    assert_eq!(most_fetched(&requests), 2);
    assert_eq!(most_fetched(&requests[..3]), 1);
}

/// Runs `s3cmd` on a store, with a key.
fn s3cmd(store: &FaultyStore, arguments: &[&str]) -> Run {
    let host = format!("127.0.0.1:{}", store.port());
    let (host, bucket) = (format!("--host={host}"), format!("--host-bucket={host}"));
    let key = ["--access_key=A", "--secret_key=B", "--config=/dev/null"];
    let line = [&["--no-ssl", &host, &bucket], &key[..], arguments].concat();
    run("s3cmd", &line)
}

#[test]
fn faulty_store_is_an_s3_store_for_s3cmd() {
    let (store, bytes) = small_store(MIB);
    let scratch = Scratch::new("store");
    let file = scratch.path("seen");
    s3cmd(&store, &["get", "s3://bases/disk", &file]).ok();
    assert!(std::fs::read(&file).unwrap() == bytes);
    assert!(store.requests().iter().all(Request::has_credentials));
    store.fail(When::always(), Fault::expired_token());
    let refused = s3cmd(&store, &["ls", "s3://bases"]);
    assert!(refused.stderr.contains("403 (ExpiredToken)"), "{refused}");
    store.recover();
    store.fail(When::first(1), Fault::slow_down(Some(1)));
    let delayed = s3cmd(&store, &["get", "--force", "s3://bases/disk", &file]).ok();
    assert!(delayed.stderr.contains("503 ("), "{delayed}");
}

/// What `curl` says to a fault: its exit code, and head and body of the answer as text.
#[track_caller]
fn with_fault(store: &FaultyStore, fault: Fault, arguments: &[&str]) -> (i32, String) {
    store.recover();
    store.fail(When::always(), fault);
    let url = store.url(PATH);
    let line = [&["--include", "--max-time", "2"], arguments, &[&url]].concat();
    let run = curl(&line);
    (run.code, run.stdout)
}

#[test]
fn faulty_store_answers_wrongly_as_it_is_told() {
    let store = FaultyStore::start();
    let bytes: Vec<u8> = (0..1000).map(|number| b'a' + (number % 26) as u8).collect();
    let text = std::str::from_utf8(&bytes).unwrap().to_owned();
    store.put(PATH, bytes);
    let part = ["--range", "0-9"];
    let fail = |fault| with_fault(&store, fault, &part);

    let (code, answer) = fail(Fault::slow_down(Some(3)));
    assert!(code == 0 && answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.contains("Retry-After: 3\r\n"), "{answer}");
    let (_, answer) = fail(Fault::internal_error());
    assert!(answer.starts_with("HTTP/1.1 500 "), "{answer}");
    assert!(answer.contains("<Code>InternalError</Code>"), "{answer}");

    let (code, answer) = fail(Fault::CutShort(4));
    assert!(
        code == 18 && answer.ends_with("\r\n\r\nabcd"),
        "{code} {answer}"
    );
    let (code, answer) = fail(Fault::OtherBytes);
    assert!(
        code == 0 && answer.ends_with("\r\n\r\nabcdegghij"),
        "{answer}"
    );
    let (_, answer) = fail(Fault::WrongContentRange(100));
    assert!(
        answer.contains("Content-Range: bytes 100-109/1000"),
        "{answer}"
    );
    assert!(answer.ends_with("\r\n\r\nabcdefghij"), "{answer}");
    let (_, answer) = fail(Fault::IgnoreRange);
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with(&text));
    let (_, answer) = fail(Fault::OtherSize(5000));
    assert!(answer.contains("Content-Range: bytes 0-9/5000"), "{answer}");
    let (_, answer) = with_fault(&store, Fault::OtherSize(5000), &["--head"]);
    assert!(answer.contains("Content-Length: 5000"), "{answer}");

    let (code, _) = with_fault(&store, Fault::RedirectEndlessly, &["--location"]);
    assert_eq!(code, 47, "too many redirects");
    let elsewhere = FaultyStore::start();
    elsewhere.put("/other", b"another".to_vec());
    let (code, answer) = with_fault(
        &store,
        Fault::Redirect(elsewhere.url("/other")),
        &["--location"],
    );
    assert!(code == 0 && answer.ends_with("another"), "{answer}");

    let [first, second] = [(); 2].map(|()| with_fault(&store, Fault::OtherEtag, &["--head"]).1);
    assert!(first.contains("ETag: ") && first != second);
    let (code, answer) = with_fault(&store, Fault::ContentEncoding, &["--compressed"]);
    assert!(code == 0 && answer.contains("Content-Encoding: gzip"));
    assert!(answer.ends_with(&text));
    assert_eq!(fail(Fault::Hang).0, 28, "time-out");
    assert_eq!(fail(Fault::Reset).0, 56, "connection reset");
}

#[test]
fn faulty_store_is_slow_and_endless_as_it_is_told() {
    let (store, _) = small_store(1000);
    let url = store.url(PATH);
    store.fail(
        When::nth(1).method("GET"),
        Fault::SlowFirstByte(Duration::from_millis(300)),
    );
    let pause = Duration::from_millis(40);
    store.fail(When::nth(1).method("GET"), Fault::Trickle(100, pause));
    // The second, and of those that the first rule has left the second.
    let taken = seconds(&[&url, &url, &url, &url]);
    let slow = taken.iter().map(|seconds| *seconds > 0.3);
    assert_eq!(
        slow.collect::<Vec<_>>(),
        [false, true, true, false],
        "{taken:?}"
    );
    for fault in [Fault::EndlessBody, Fault::EndlessHeaders] {
        store.recover();
        store.fail(When::always(), fault);
        let code = curl(&["--max-time", "1", "--output", "/dev/null", &url]).code;
        // Time-out, or too many headers.
        assert!([28, 27, 56, 100].contains(&code), "{code}");
    }
    store.recover();
    store.fail(When::one_in(3, 1), Fault::internal_error());
    store.take_requests();
    for _ in 0..30 {
        status(&url);
    }
    let requests = store.requests();
    let failed = requests.iter().filter(|one| one.fault.is_some());
    assert!((3..20).contains(&failed.count()));
}

/// Copies an image from a registry to a folder.
fn skopeo(registry: &Registry, image: &str, folder: &str, more: &[&str]) -> Run {
    let from = format!("docker://{}/{image}", registry.host());
    let line = ["copy", "--insecure-policy", "--src-tls-verify=false"];
    let to = format!("dir:{folder}");
    let line = [&line[..], more, &[&from, &to]].concat();
    run("skopeo", &line)
}

/// Asserts that the layer in a folder of skopeo's has the disk.
#[track_caller]
fn assert_disk(folder: &str, layer_digest: &str, disk: &str) {
    let layer = format!("{folder}/{}", layer_digest.strip_prefix("sha256:").unwrap());
    run("tar", &["-C", folder, "-xf", &layer]).ok();
    run("cmp", &[&format!("{folder}/disk/small.qcow2"), disk]).ok();
}

#[test]
fn registry_has_disks_in_images() {
    let registry = Registry::start(Access::Open);
    let scratch = Scratch::new("store");
    let bytes = Random::new(3).bytes(3 * MIB + 5);
    let disk = scratch.file("small.qcow2", &bytes);
    let plain = registry.push_disk("disks/plain", "1.0", &disk, Layer::Tar);
    let zipped = registry.push_disk("disks/zipped", "latest", &disk, Layer::TarGzip);
    let index = registry.push_index("disks/plain", "all", &[("amd64", &plain)]);
    let images = [
        ("disks/plain:1.0", &plain),
        ("disks/zipped:latest", &zipped),
        ("disks/plain:all", &plain),
    ];
    for (number, (image, pushed)) in images.into_iter().enumerate() {
        let folder = scratch.path(&number.to_string());
        let amd64 = ["--override-arch=amd64"];
        skopeo(&registry, image, &folder, &amd64).ok();
        assert_disk(&folder, &pushed.layer_digest, &disk);
    }
    let by_digest = format!(
        "http://{}/v2/disks/plain/manifests/{index}",
        registry.host()
    );
    let accept = "Accept: application/vnd.oci.image.index.v1+json";
    let text = body(&["--header", accept, &by_digest]);
    assert!(String::from_utf8(text).unwrap().contains(&plain.digest));
    // A part of the disk, out of the layer.
    let first = plain.disk_offset + 1_000_000;
    let range = format!("{first}-{}", first + 999_999);
    let url = registry.blob_url("disks/plain", &plain.layer_digest);
    assert!(body(&["--range", &range, &url]) == bytes[1_000_000..2_000_000]);
    let id = registry.process();
    drop(registry);
    assert!(!std::fs::exists(format!("/proc/{id}")).unwrap());
}

#[test]
fn registry_asks_for_a_password_or_a_token() {
    let scratch = Scratch::new("store");
    let disk = scratch.file("small.qcow2", b"a disk");
    let push = |registry: &Registry| registry.push_disk("disks/small", "1", &disk, Layer::Tar);

    let registry = Registry::start(Access::Password);
    let pushed = push(&registry);
    let folder = scratch.path("password");
    let refused = skopeo(&registry, "disks/small:1", &folder, &[]);
    assert!(
        refused.stderr.contains("authentication required"),
        "{refused}"
    );
    let user = format!("--src-creds={USER}:{PASSWORD}");
    skopeo(&registry, "disks/small:1", &folder, &[&user]).ok();
    assert_disk(&folder, &pushed.layer_digest, &disk);

    let registry = Registry::start(Access::Token);
    let pushed = push(&registry);
    let url = registry.blob_url("disks/small", &pushed.layer_digest);
    assert_eq!(status(&url), "401");
    let tokens = registry.tokens().unwrap();
    tokens.take_requests();
    let folder = scratch.path("token");
    skopeo(&registry, "disks/small:1", &folder, &[]).ok();
    assert_disk(&folder, &pushed.layer_digest, &disk);
    let asked = tokens.requests();
    let scope = asked.first().map(|request| request.query.as_str()).unwrap();
    assert!(scope.contains("disks%2Fsmall%3Apull"), "{scope}");
}
