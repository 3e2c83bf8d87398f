//! Published images: the same disk comes back whatever its file was, chunks are shared and put once, and what is wrong in the
//! store is noticed.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use gaur_interop::gaur::binary;
use gaur_interop::nbd::Server;
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::store::{Object, Weed};
use gaur_interop::tool::{Run, qemu_img, run};

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 256 << 10;
const BUCKET: &str = "bases";
/// Noise, then text that packs well, then nothing, in a disk whose last chunk is not whole.
const NOISE_BYTES: u64 = 12 * MIB;
const TEXT_BYTES: u64 = 4 * MIB;
const DISK_BYTES: u64 = 64 * MIB + 68 * 1024;

/// A store, and a disk to publish.
struct Shelf {
    scratch: Scratch,
    weed: Weed,
}

impl Shelf {
    fn new() -> Shelf {
        let weed = Weed::start();
        weed.make_bucket(BUCKET);
        let scratch = Scratch::new("published");
        let mut bytes = Random::new(3).bytes(NOISE_BYTES as usize);
        let mut line = 0;
        while (bytes.len() as u64) < NOISE_BYTES + TEXT_BYTES {
            line += 1;
            bytes.extend(format!("line {line} of a text\n").bytes());
        }
        let raw = scratch.file("raw", &bytes);
        run("truncate", &["--size", &DISK_BYTES.to_string(), &raw]).ok();
        let shelf = Shelf { scratch, weed };
        // The last chunk has data, too.
        shelf.write("raw", &format!("write -P 9 {} 4k", DISK_BYTES - 8192));
        shelf
    }

    fn path(&self, name: &str) -> String {
        self.scratch.path(name)
    }

    /// Writes to a file that is raw or qcow2 by its content.
    fn write(&self, file: &str, command: &str) {
        let format = if file.starts_with("raw") {
            "raw"
        } else {
            "qcow2"
        };
        let path = self.path(file);
        let done = run("qemu-io", &["-f", format, "-c", command, &path]).ok();
        assert!(!done.stdout.contains("failed"), "{done}");
    }

    fn line<'a>(&self, variables: &'a mut Vec<String>, arguments: &[&'a str]) -> Vec<&'a str> {
        let store = self.weed.environment().into_iter();
        variables.extend(store.map(|(name, value)| format!("{name}={value}")));
        variables.push(format!("GAUR_REMOTE_CACHE={}", self.path("cache")));
        variables.push("GAUR_REMOTE_TIMEOUT=20".to_owned());
        let mut line: Vec<&str> = variables.iter().map(String::as_str).collect();
        line.push(binary());
        line.extend(arguments);
        line
    }

    fn gaur(&self, arguments: &[&str]) -> Run {
        run("env", &self.line(&mut Vec::new(), arguments))
    }

    /// Publishes a file; returns what gaur says of it.
    fn publish(&self, more: &[&str], file: &str, name: &str) -> serde_json::Value {
        let (path, name) = (self.path(file), url(name));
        let arguments = [&["publish", "--output", "json"], more, &[&path, &name]].concat();
        self.gaur(&arguments).ok().json()
    }

    /// Pulls an image; the disk must be that of a raw file.
    fn check_pull(&self, name: &str, raw: &str) {
        let (copy, raw) = (self.path("pulled.qcow2"), self.path(raw));
        self.gaur(&["pull", &url(name), &copy]).ok();
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw", &copy, &raw]).ok();
        qemu_img(&["check", "-q", &copy]).ok();
        let copy = self.path("pulled");
        self.gaur(&["pull", "-O", "raw", "-m", "3", &url(name), &copy])
            .ok();
        run("cmp", &[&copy, &raw]).ok();
    }

    fn chunks(&self) -> Vec<Object> {
        let mut objects = self.weed.list(BUCKET);
        // Not what tells that a publish is under way.
        objects.retain(|object| object.key.matches('/').count() == 3);
        objects
    }
}

fn url(name: &str) -> String {
    format!("s3://{BUCKET}/dir/{name}.gaur")
}

fn number(told: &serde_json::Value, key: &str) -> u64 {
    told[key].as_u64().expect("a number")
}

#[test]
fn a_disk_is_published_and_pulled_whatever_its_layout() {
    let shelf = Shelf::new();
    let raw = shelf.path("raw");
    let key = shelf.scratch.file("key", b"secret");
    let secret = format!("secret,id=sec,file={key}");
    let packed = ["-c", "-o", "cluster_size=4k"];
    let extended = ["-o", "extended_l2=on,cluster_size=128k"];
    let luks = "encrypt.format=luks,encrypt.key-secret=sec,encrypt.iter-time=10,cluster_size=2M";
    let luks = ["--object", &secret, "-o", luks];
    let forms: [(&str, &[&str]); 3] = [
        ("packed", &packed),
        ("extended", &extended),
        ("luks", &luks),
    ];
    for (name, options) in forms {
        let convert = ["convert", "-f", "raw", "-O", "qcow2"];
        let path = shelf.path(name);
        qemu_img(&[&convert[..], options, &[&raw, &path]].concat()).ok();
    }
    let first = shelf.publish(&["-f", "raw"], "raw", "raw");
    let there = shelf.chunks();
    // Noise takes its length, text less, and zeros nothing.
    let chunks = (NOISE_BYTES + TEXT_BYTES) / CHUNK + 2;
    assert!(
        (chunks - 1..=chunks).contains(&number(&first, "chunks")),
        "{first}"
    );
    assert_eq!(number(&first, "new-chunks"), there.len() as u64);
    let bytes: u64 = there.iter().map(|object| object.len_bytes).sum();
    assert_eq!(number(&first, "new-bytes"), bytes);
    assert!(bytes < NOISE_BYTES + TEXT_BYTES / 2, "{bytes}");
    shelf.check_pull("raw", "raw");
    for name in ["packed", "extended", "luks"] {
        let key = ["--key-file", &key];
        let key = if name == "luks" { &key[..] } else { &[] };
        let told = shelf.publish(key, name, name);
        // The same disk is the same manifest, with the same chunks.
        assert_eq!(told["digest"], first["digest"]);
        assert_eq!(number(&told, "new-chunks"), 0);
        shelf.check_pull(name, "raw");
    }
    assert_eq!(shelf.chunks(), there);
    let again = shelf.publish(&["-f", "raw"], "raw", "raw");
    assert_eq!(again["unchanged"], true);
}

#[test]
fn a_second_publish_puts_what_has_changed() {
    let shelf = Shelf::new();
    let first = shelf.publish(&["-f", "raw"], "raw", "first");
    run(
        "cp",
        &["--sparse=always", &shelf.path("raw"), &shelf.path("raw2")],
    )
    .ok();
    shelf.write("raw2", &format!("write -P 1 1M {}", DISK_BYTES / 400));
    // Another content needs another name, or a word.
    let path = shelf.path("raw2");
    let refused = shelf
        .gaur(&["publish", "-f", "raw", &path, &url("first")])
        .refused();
    assert!(refused.stderr.contains("--force"), "{refused}");
    shelf.check_pull("first", "raw");
    shelf.publish(&["-f", "raw", "--force"], "raw2", "first");
    shelf.check_pull("first", "raw2");
    shelf.write("raw2", &format!("write -P 2 6M {}", DISK_BYTES / 400));
    let second = shelf.publish(&["-f", "raw"], "raw2", "second");
    let (all, new) = (number(&first, "new-bytes"), number(&second, "new-bytes"));
    assert!(
        number(&second, "new-chunks") > 0 && new * 100 <= all * 3,
        "{new} of {all}"
    );
    shelf.check_pull("second", "raw2");
}

#[test]
fn a_publish_that_was_killed_goes_on_where_it_was() {
    let shelf = Shelf::new();
    let raw = shelf.path("raw");
    let mut put = 0;
    for millis in [150, 300, 450] {
        let name = url("image");
        let slow = ["publish", "-f", "raw", "-r", "8M", &raw, &name];
        let mut variables = Vec::new();
        let line = shelf.line(&mut variables, &slow);
        let mut publish = Command::new("env")
            .args(line)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        sleep(Duration::from_millis(300 + millis));
        publish.kill().unwrap();
        publish.wait().unwrap();
        let there = shelf.chunks().len();
        assert!(there >= put);
        put = there;
        // Without its manifest there is no image.
        let missing = shelf.gaur(&["pull", &name, &shelf.path("none")]).refused();
        assert!(
            missing.stderr.contains("there is no such object"),
            "{missing}"
        );
    }
    assert!(put > 0);
    let told = shelf.publish(&["-f", "raw"], "raw", "image");
    assert_eq!(
        number(&told, "new-chunks") + put as u64,
        number(&told, "chunks")
    );
    shelf.check_pull("image", "raw");
}

#[test]
fn a_top_layer_is_published_alone() {
    let shelf = Shelf::new();
    shelf.publish(&["-f", "raw"], "raw", "base");
    let overlay = shelf.path("overlay");
    let larger = (DISK_BYTES + 3 * MIB).to_string();
    qemu_img(&[
        "create", "-q", "-f", "qcow2", "-b", "raw", "-F", "raw", &overlay, &larger,
    ])
    .ok();
    shelf.write("overlay", "write -P 5 1000k 20k");
    shelf.write("overlay", "write -z 2M 1M");
    shelf.write("overlay", "write -z 5000k 8k");
    shelf.write("overlay", &format!("write -P 6 {} 8k", DISK_BYTES + MIB));
    let told = shelf.publish(&["--top", &url("base")], "overlay", "top");
    assert!(number(&told, "chunks") <= 4, "{told}");
    qemu_img(&["convert", "-O", "raw", &overlay, &shelf.path("raw-overlay")]).ok();
    shelf.check_pull("top", "raw-overlay");
    // Neither does a collection go on without the parent that is named.
    let gc = ["gc", &format!("s3://{BUCKET}/dir")];
    shelf.gaur(&gc).ok();
    let manifest = shelf.path("base.gaur");
    shelf.weed.get(BUCKET, "dir/base.gaur", &manifest);
    shelf.weed.delete(BUCKET, "dir/base.gaur");
    let refused = shelf.gaur(&gc).refused();
    assert!(
        refused.stderr.contains("base.gaur, which is not there"),
        "{refused}"
    );
    shelf.weed.put(&manifest, BUCKET, "dir/base.gaur");
    // Another image in the parent's place is noticed.
    run(
        "cp",
        &["--sparse=always", &shelf.path("raw"), &shelf.path("raw3")],
    )
    .ok();
    shelf.write("raw3", "write -P 1 0 64k");
    shelf.publish(&["-f", "raw", "--force"], "raw3", "base");
    let refused = shelf
        .gaur(&["pull", &url("top"), &shelf.path("none")])
        .refused();
    assert!(
        refused.stderr.contains("base.gaur, is another: blake3:"),
        "{refused}"
    );
    let alone = [
        "publish",
        "-f",
        "raw",
        "--top",
        &url("base"),
        &shelf.path("raw"),
        &url("x"),
    ];
    let refused = shelf.gaur(&alone).refused();
    assert!(refused.stderr.contains("no backing file"), "{refused}");
}

#[test]
fn wrong_bytes_in_the_store_are_noticed() {
    let shelf = Shelf::new();
    shelf.publish(&["-f", "raw"], "raw", "image");
    let pull = || {
        let copy = shelf.path("wrong");
        shelf
            .gaur(&["pull", "-O", "raw", &url("image"), &copy])
            .refused()
    };
    let chunks = shelf.chunks();
    let plain = chunks.iter().find(|object| object.len_bytes == CHUNK);
    let packed = chunks.iter().find(|object| object.key.ends_with(".zst"));
    for object in [plain.unwrap(), packed.unwrap()] {
        let name = format!("s3://{BUCKET}/{}", object.key);
        let (right, wrong) = (shelf.path("right"), shelf.path("changed"));
        shelf.weed.get(BUCKET, &object.key, &right);
        let mut bytes = std::fs::read(&right).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&wrong, &bytes).unwrap();
        let key = object.key.strip_prefix("dir/").unwrap();
        for len in [bytes.len(), 3] {
            std::fs::write(&wrong, &bytes[..len]).unwrap();
            shelf.weed.put(&wrong, BUCKET, &object.key);
            let refused = pull();
            assert!(refused.stderr.contains(key), "{name}: {refused}");
        }
        shelf.weed.delete(BUCKET, &object.key);
        let refused = pull();
        assert!(
            refused.stderr.contains("there is no such object"),
            "{refused}"
        );
        // The next publish mends it.
        let told = shelf.publish(&["-f", "raw"], "raw", "image");
        assert_eq!(number(&told, "new-chunks"), 1);
        shelf.check_pull("image", "raw");
    }
    for bytes in [&b"QFI\xfb"[..], b"", b"{\"gaur-published\":2}\n"] {
        let other = shelf.scratch.file("other", bytes);
        shelf.weed.put(&other, BUCKET, "dir/image.gaur");
        pull();
        let raw = shelf.path("raw");
        shelf
            .gaur(&["publish", "-f", "raw", &raw, &url("image")])
            .refused();
    }
    for name in [
        "s3://bases/dir/image",
        "https://127.0.0.1/x.gaur",
        "s3://bases/.gaur",
        "file.gaur",
    ] {
        shelf
            .gaur(&["publish", "-f", "raw", &shelf.path("raw"), name])
            .refused();
    }
}

#[test]
fn a_published_image_is_a_layer() {
    let shelf = Shelf::new();
    let raw = shelf.path("raw");
    // A disk that begins like an image: what the guest wrote is no image.
    let inner = shelf.path("inner");
    qemu_img(&["create", "-q", "-f", "qcow2", &inner, "1G"]).ok();
    run(
        "dd",
        &[
            &format!("if={inner}"),
            &format!("of={raw}"),
            "bs=64k",
            "count=4",
            "conv=notrunc",
        ],
    )
    .ok();
    shelf.publish(&["-f", "raw"], "raw", "base");
    let (base, plain) = (url("base"), shelf.path("plain"));
    let info = shelf.gaur(&["info", "--output", "json", &base]).ok().json();
    assert_eq!(
        (&info["format"], &info["virtual-size"]),
        (&"raw".into(), &DISK_BYTES.into())
    );
    let compare = ["compare", "-F", "raw", &base, &raw];
    shelf.gaur(&compare).ok();
    shelf.gaur(&["convert", "-O", "raw", &base, &plain]).ok();
    run("cmp", &[&plain, &raw]).ok();
    // The same disk under another name is the same entry of the cache.
    let entries = || {
        let found = std::fs::read_dir(shelf.path("cache/objects"));
        found.unwrap().count()
    };
    assert_eq!(entries(), 1);
    shelf.publish(&["-f", "raw"], "raw", "again");
    shelf
        .gaur(&["compare", "-F", "raw", &url("again"), &raw])
        .ok();
    assert_eq!(entries(), 1);
}

#[test]
fn an_overlay_over_a_published_image_is_served_and_published() {
    let shelf = Shelf::new();
    let raw = shelf.path("raw");
    shelf.publish(&["-f", "raw"], "raw", "base");
    let base = url("base");
    let overlay = shelf.path("overlay");
    shelf
        .gaur(&[
            "create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &overlay,
        ])
        .ok();
    let refused = shelf.gaur(&["compare", &overlay, &raw]).code(2);
    assert!(refused.stderr.contains("not allowed"), "{refused}");
    let twin = shelf.path("twin");
    run("cp", &["--sparse=always", &raw, &twin]).ok();
    run(
        "qemu-io",
        &["-f", "raw", "-c", "write -P 5 1000k 20k", &twin],
    )
    .ok();
    let socket = shelf.path("socket");
    let mut variables = Vec::new();
    let serve = [
        "serve",
        "--persistent",
        "--socket",
        &socket,
        "--allow",
        "s3://bases/dir/",
        &overlay,
    ];
    let line: Vec<String> = shelf
        .line(&mut variables, &serve)
        .into_iter()
        .map(str::to_owned)
        .collect();
    let mut command = Command::new("env");
    command.args(line);
    let server = Server::start(command, &socket);
    let write = "write -P 5 1000k 20k";
    run("qemu-io", &["-f", "raw", "-c", write, &server.uri()]).ok();
    qemu_img(&["compare", "-f", "raw", "-F", "raw", &server.uri(), &twin]).ok();
    server.stop();
    // The top layer of what stands on a published image.
    let (mut publish, top) = (
        vec!["publish", "-q", "--allow", "s3://bases/dir/"],
        url("top"),
    );
    publish.extend(["--top", &base, &overlay, &top]);
    shelf.gaur(&publish).ok();
    shelf.gaur(&["compare", "-F", "raw", &top, &twin]).ok();
}

#[test]
fn a_wrong_chunk_is_never_served() {
    let shelf = Shelf::new();
    shelf.publish(&["-f", "raw"], "raw", "image");
    let object = shelf
        .chunks()
        .into_iter()
        .find(|object| object.len_bytes == CHUNK);
    let key = object.unwrap().key;
    let (right, wrong) = (shelf.path("right"), shelf.path("changed"));
    shelf.weed.get(BUCKET, &key, &right);
    let mut bytes = std::fs::read(&right).unwrap();
    bytes[77] ^= 1;
    std::fs::write(&wrong, &bytes).unwrap();
    shelf.weed.put(&wrong, BUCKET, &key);
    let (image, raw) = (url("image"), shelf.path("raw"));
    let compare = ["compare", "-F", "raw", &image, &raw];
    shelf.gaur(&compare).code(4);
    let copy = shelf.path("copy");
    let failed = shelf
        .gaur(&["convert", "-O", "raw", &image, &copy])
        .refused();
    let what = "holds other bytes than its digest says";
    assert!(
        failed.stderr.contains(what) && failed.stderr.contains("chunks/"),
        "{failed}"
    );
    shelf.weed.put(&right, BUCKET, &key);
    shelf.gaur(&compare).ok();
}

#[test]
fn gc_removes_what_no_image_names() {
    let shelf = Shelf::new();
    let folder = format!("s3://{BUCKET}/dir");
    let gc = |more: &[&str]| {
        let line = [&["gc", "--output", "json"], more, &[&folder]].concat();
        shelf.gaur(&line).ok().json()
    };
    let keys = |told: &serde_json::Value| {
        let objects = told["objects"].as_array().unwrap().iter();
        let mut keys: Vec<String> = objects
            .map(|object| object["key"].as_str().unwrap().to_owned())
            .collect();
        keys.sort();
        keys
    };
    assert_eq!(gc(&["--remove"])["images"], 0);
    shelf.publish(&["-f", "raw"], "raw", "first");
    let first = shelf.chunks();
    let copy = shelf.path("raw2");
    run("cp", &["--sparse=always", &shelf.path("raw"), &copy]).ok();
    shelf.write("raw2", "write -P 1 1M 3M");
    shelf.publish(&["-f", "raw"], "raw2", "second");
    let both = shelf.chunks();
    assert!(both.len() > first.len());
    // What both or one of them name is in use.
    let told = gc(&["--remove", "--grace", "0s"]);
    assert_eq!((&told["images"], keys(&told).len()), (&2.into(), 0));
    assert_eq!(shelf.chunks(), both);
    shelf.weed.delete(BUCKET, "dir/second.gaur");
    let told = gc(&["--remove"]);
    assert_eq!(number(&told, "younger"), (both.len() - first.len()) as u64);
    assert_eq!(shelf.chunks(), both);
    let listed = gc(&["--grace", "0s"]);
    assert_eq!(
        (&listed["removed"], shelf.chunks()),
        (&false.into(), both.clone())
    );
    // Nothing is removed while an image may be on its way, or cannot be read.
    let mark = shelf.scratch.file("mark", b"x");
    shelf.weed.put(&mark, BUCKET, "dir/chunks/publishing-1");
    let line = ["gc", "--remove", "--grace", "1h", &folder];
    let refused = shelf.gaur(&line).refused();
    assert!(
        refused.stderr.contains("is being published there"),
        "{refused}"
    );
    shelf.weed.delete(BUCKET, "dir/chunks/publishing-1");
    shelf.weed.put(&mark, BUCKET, "dir/broken.gaur");
    let refused = shelf
        .gaur(&["gc", "--remove", "--grace", "0s", &folder])
        .refused();
    assert!(refused.stderr.contains("broken.gaur"), "{refused}");
    shelf.weed.delete(BUCKET, "dir/broken.gaur");
    assert_eq!(shelf.chunks(), both);
    // And nothing is published while chunks are removed.
    shelf.weed.put(&mark, BUCKET, "dir/chunks/collecting-1");
    let refused = shelf
        .gaur(&["publish", "-f", "raw", &copy, &url("second")])
        .refused();
    assert!(
        refused.stderr.contains("gaur gc removes chunks"),
        "{refused}"
    );
    shelf.weed.delete(BUCKET, "dir/chunks/collecting-1");
    let removed = gc(&["--remove", "--grace", "0s"]);
    assert_eq!(keys(&removed), keys(&listed));
    assert_eq!(shelf.chunks(), first);
    shelf.check_pull("first", "raw");
}

/// As the page on the format says.
#[test]
fn plain_tools_read_a_chunk() {
    let shelf = Shelf::new();
    shelf.publish(&["-f", "raw"], "raw", "image");
    let manifest = shelf.path("image.gaur");
    shelf.weed.get(BUCKET, "dir/image.gaur", &manifest);
    let head = run("head", &["-n", "1", &manifest]).ok();
    assert_eq!(head.json()["size_bytes"], DISK_BYTES);
    for chunk in [3, NOISE_BYTES / CHUNK + 2] {
        let find = format!(
            "awk '$1 == {chunk} {{ print \"chunks/\" substr($3, 1, 2) \"/\" $3 ($2 == \"zstd\" ? \".zst\" : \"\") }}' {manifest}"
        );
        let object = run("sh", &["-c", &find]).ok().stdout;
        let key = format!("dir/{}", object.trim());
        let file = shelf.path("object");
        shelf.weed.get(BUCKET, &key, &file);
        let plain = match key.ends_with(".zst") {
            true => format!("zstd -d -q -c {file}"),
            false => format!("cat {file}"),
        };
        let compare = format!(
            "{plain} | cmp --bytes {CHUNK} --ignore-initial 0:{} - {}",
            chunk * CHUNK,
            shelf.path("raw")
        );
        run("sh", &["-c", &compare]).ok();
    }
}
