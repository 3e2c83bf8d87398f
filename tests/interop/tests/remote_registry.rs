//! Disks in images of containers: read from a registry by ranges, also from one that asks who reads.

use gaur_interop::gaur::binary;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::store::{Access, FaultyStore, Layer, PASSWORD, Registry, USER};
use gaur_interop::tool::{Run, qemu_img, run};

/// An image of some chunks of the cache.
fn disk(scratch: &Scratch) -> (String, String) {
    let raw = scratch.file("raw", &Random::new(2).bytes(3 << 20));
    let disk = scratch.path("disk.qcow2");
    qemu_img(&["convert", "-q", "-O", "qcow2", &raw, &disk]).ok();
    (raw, disk)
}

fn gaur(scratch: &Scratch, more: &[String], arguments: &[&str]) -> Run {
    let cache = format!("GAUR_REMOTE_CACHE={}", scratch.path("cache"));
    let mut line = vec!["-u", "DOCKER_CONFIG", "-u", "REGISTRY_AUTH_FILE", &cache];
    line.extend(["GAUR_REMOTE_TIMEOUT=5"]);
    line.extend(more.iter().map(String::as_str));
    line.push(binary());
    line.extend(arguments);
    run("env", &line)
}

#[test]
fn a_disk_in_an_image_of_a_container_is_read_by_ranges() {
    let scratch = Scratch::new("registry-reads");
    let (raw, disk) = disk(&scratch);
    let registry = Registry::start(Access::Open);
    registry.push_disk("kubevirt/plain", "v1", &disk, Layer::Tar);
    let amd64 = registry.push_disk("kubevirt/arch", "a", &disk, Layer::Tar);
    let other = scratch.file("other.qcow2", b"for another machine");
    let s390x = registry.push_disk("kubevirt/arch", "s", &other, Layer::Tar);
    let here = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "amd64",
    };
    let index = [("s390x", &s390x), (here, &amd64)];
    let digest = registry.push_index("kubevirt/arch", "v1", &index);
    let by_digest = format!("oci://{}/kubevirt/arch@{digest}", registry.host());
    for name in [
        registry.reference("kubevirt/plain", "v1"),
        registry.reference("kubevirt/arch", "v1"),
        by_digest,
    ] {
        let info = gaur(&scratch, &[], &["info", "--output", "json", &name]).ok();
        assert_eq!(info.json()["format"], "qcow2", "{name}");
        gaur(&scratch, &[], &["compare", "-F", "raw", &name, &raw]).ok();
        // As a base of an overlay.
        let top = scratch.path("top");
        let create = [
            "create", "-q", "-f", "qcow2", "-b", &name, "-F", "qcow2", &top,
        ];
        gaur(&scratch, &[], &create).ok();
        let allow = format!("oci://{}", registry.host());
        let compare = ["compare", "--allow", &allow, "-F", "raw", &top, &raw];
        gaur(&scratch, &[], &compare).ok();
    }
    // One layer under several names is kept once.
    let objects = std::fs::read_dir(scratch.path("cache/objects")).unwrap();
    assert_eq!(objects.count(), 1);

    registry.push_disk("kubevirt/packed", "v1", &disk, Layer::TarGzip);
    for (name, tag, line) in [
        ("kubevirt/packed", "v1", "its layers are compressed"),
        (
            "kubevirt/plain",
            "none",
            "there is no such object (HTTP 404)",
        ),
        ("kubevirt/none", "v1", "there is no such object (HTTP 404)"),
    ] {
        let name = registry.reference(name, tag);
        let refused = gaur(&scratch, &[], &["info", &name]).refused();
        assert!(refused.stderr.contains(line), "{refused}");
    }
}

#[test]
fn a_registry_that_wants_to_know_who_asks_is_told() {
    let scratch = Scratch::new("registry-auth");
    let (raw, disk) = disk(&scratch);
    let registry = Registry::start(Access::Token);
    registry.push_disk("a/disk", "v1", &disk, Layer::Tar);
    let name = registry.reference("a/disk", "v1");
    gaur(&scratch, &[], &["compare", "-F", "raw", &name, &raw]).ok();
    let asked = registry.tokens().expect("it has tokens").take_requests();
    assert!(
        asked[0]
            .query
            .contains("scope=repository%3Aa%2Fdisk%3Apull"),
        "{asked:?}"
    );

    let registry = Registry::start(Access::Password);
    registry.push_disk("a/disk", "v1", &disk, Layer::Tar);
    let name = registry.reference("a/disk", "v1");
    let refused = gaur(&scratch, &[], &["info", &name]).refused();
    assert!(
        refused.stderr.contains("docker or podman login"),
        "{refused}"
    );
    // What those programs write.
    let encoded = run(
        "bash",
        &["-c", &format!("printf %s {USER}:{PASSWORD} | base64 -w0")],
    );
    let auth = format!(
        r#"{{"auths":{{"{}":{{"auth":"{}"}}}}}}"#,
        registry.host(),
        encoded.stdout
    );
    let file = scratch.file("auth.json", auth.as_bytes());
    let known = [format!("REGISTRY_AUTH_FILE={file}")];
    gaur(&scratch, &known, &["compare", "-F", "raw", &name, &raw]).ok();
    // An image that may refer to anything gets no password.
    let top = scratch.path("top");
    gaur(
        &scratch,
        &known,
        &[
            "create", "-q", "-f", "qcow2", "-b", &name, "-F", "qcow2", &top,
        ],
    )
    .ok();
    let compare = ["compare", "--allow-any", "-F", "raw", &top, &raw];
    let refused = gaur(&scratch, &known, &compare).refused();
    assert!(refused.stderr.contains("access was refused"), "{refused}");
}

#[test]
fn a_hostile_registry_is_refused_in_a_line() {
    let scratch = Scratch::new("registry-hostile");
    let store = FaultyStore::start();
    let name = format!("oci://127.0.0.1:{}/a/disk:v1", store.port());
    let manifest = |layer: &str| format!(r#"{{"layers":[{layer}]}}"#).into_bytes();
    let layer = |digest: &str, size: &str| {
        let kind = "application/vnd.oci.image.layer.v1.tar";
        format!(r#"{{"mediaType":"{kind}","digest":"{digest}","size":{size}}}"#)
    };
    let good = format!("sha256:{}", "0".repeat(64));
    store.put(&format!("/v2/a/disk/blobs/{good}"), vec![0x55; 8192]);
    for (text, line) in [
        (b"no JSON".to_vec(), "no manifest that is understood"),
        (b"{}".to_vec(), "no layers"),
        (
            manifest(&layer("sha256:../../secret", "5")),
            "a digest that is none",
        ),
        (manifest(&layer(&good, "1024")), "another length"),
        (manifest(&layer(&good, "8192")), "no tar file"),
        (
            manifest(&layer(&good, "-1")),
            "no manifest that is understood",
        ),
        (vec![b'['; 8 << 20], "the answer is too long"),
    ] {
        store.put("/v2/a/disk/manifests/v1", text);
        let refused = gaur(&scratch, &[], &["info", &name]).refused();
        assert!(refused.stderr.contains(line), "{line}: {refused}");
        assert_eq!(refused.stderr.lines().count(), 1);
    }
}
