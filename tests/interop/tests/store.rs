//! The stores of the tests do what they say: shown by `curl` and `s3cmd`.

use std::time::{Duration, Instant};

use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::store::{Object, PUBLIC_BUCKET, Weed};
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
