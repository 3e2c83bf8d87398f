//! Images with the encryption of old times, which QEMU's tools still make: every verb that reads reads them, and none writes.

use gaur_interop::compare::assert_same_bytes;
use gaur_interop::gaur::gaur;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{qemu_io_with_key, run};

/// An encrypted image that QEMU has made, and its key.
struct Old {
    scratch: Scratch,
    image: String,
    key: String,
    object: String,
}

impl Old {
    fn new(key: &str, options: &str) -> Old {
        let scratch = Scratch::new("aes");
        let key_file = scratch.path("key");
        std::fs::write(&key_file, key).expect("scratch is writable");
        let old = Old {
            image: scratch.path("old.qcow2"),
            object: format!("secret,id=sec,file={key_file}"),
            key: key_file,
            scratch,
        };
        let options = format!("encrypt.format=aes,encrypt.key-secret=sec,{options}");
        let what = ["create", "-q", "--object", &old.object, "-f", "qcow2"];
        let how = ["-u", "-o", &options, &old.image, "8M"];
        run("qemu-img", &[&what[..], &how[..]].concat()).ok();
        old
    }

    fn options(&self) -> String {
        format!(
            "driver=qcow2,file.filename={},encrypt.format=aes,encrypt.key-secret=sec",
            self.image
        )
    }

    #[track_caller]
    fn qemu_io(&self, commands: &[&str]) {
        qemu_io_with_key(&self.object, &self.options(), commands);
    }

    /// QEMU and Gaur copy the same disk out of it, or with `more` that of an internal snapshot.
    #[track_caller]
    fn assert_both_read_the_same(&self, more: &[&str]) -> String {
        let options = self.options();
        let (ours, theirs) = (
            self.scratch.path("ours.raw"),
            self.scratch.path("theirs.raw"),
        );
        let verb = ["convert", "--object", &self.object, "-O", "raw"];
        let ends = ["--image-opts", &options, &theirs];
        run("qemu-img", &[&verb[..], more, &ends[..]].concat()).ok();
        let ends = ["--key-file", &self.key, &self.image, &ours];
        gaur(&[&["convert", "-O", "raw"], more, &ends[..]].concat()).ok();
        assert_same_bytes(&theirs, &ours);
        ours
    }
}

/// Data of every kind, in clusters that do not lie in the order of the disk.
const WRITES: [&str; 6] = [
    "write -P 1 5M 1M",
    "write -P 2 0 200k",
    "write -P 3 5242880 512",
    "write -P 4 1049088 1536",
    "write -z 64k 64k",
    "write -P 5 8387584 1k",
];

#[test]
fn disks_snapshots_and_compressed_clusters_are_read() {
    // Keys that are short, as long as the cipher's, and longer.
    for (key, options, cluster) in [
        ("k", "compat=1.1", 64),
        ("short", "compat=0.10,cluster_size=1k", 1),
        ("0123456789abcdef", "extended_l2=on", 64),
        ("0123456789abcdefghi", "cluster_size=2M", 2048),
        (
            "schl\u{fc}ssel\n",
            "backing_fmt=raw,backing_file=base.raw",
            64,
        ),
    ] {
        let old = Old::new(key, options);
        let base = old.scratch.path("base.raw");
        std::fs::write(&base, vec![0xb5; 3 << 20]).expect("scratch is writable");
        old.qemu_io(&WRITES);
        old.assert_both_read_the_same(&[]);
        let image = old.options();
        let snapshot = ["snapshot", "--object", &old.object, "--image-opts", "-c"];
        run("qemu-img", &[&snapshot[..], &["one", &image]].concat()).ok();
        let packed = format!("write -c -P 9 2M {cluster}k");
        old.qemu_io(&["write -P 8 0 1M", &packed]);
        old.assert_both_read_the_same(&[]);
        old.assert_both_read_the_same(&["-l", "one"]);
        gaur(&["check", &old.image]).ok();
        let info = gaur(&["info", "--output=json", &old.image]).ok().json();
        let encrypt = &info["format-specific"]["data"]["encrypt"]["format"];
        assert_eq!(encrypt, "aes");
    }
}

#[test]
fn data_files_and_backing_files_are_read() {
    let scratch = Scratch::new("aes-data");
    let data = scratch.path("data");
    let old = Old::new("key", &format!("data_file={data}"));
    old.qemu_io(&WRITES);
    let options = format!("{},data-file.filename={data}", old.options());
    let theirs = old.scratch.path("theirs.raw");
    let to = ["-O", "raw", "--image-opts", &options, &theirs];
    run(
        "qemu-img",
        &[&["convert", "--object", &old.object], &to[..]].concat(),
    )
    .ok();
    let raw = format!("driver=raw,file.filename={theirs}");
    let both = ["compare", "--object", &old.object, "--image-opts"];
    gaur(&[&both[..], &[&options, &raw]].concat()).ok();

    let base = Old::new("below", "cluster_size=64k");
    base.qemu_io(&WRITES);
    let disk = base.assert_both_read_the_same(&[]);
    let overlay = base.scratch.path("overlay.qcow2");
    let create = ["create", "-q", "--key-file", &base.key, "-b", &base.image];
    gaur(&[&create[..], &["-F", "qcow2", &overlay]].concat()).ok();
    let name = format!("driver=qcow2,file.filename={overlay},backing.encrypt.key-secret=sec");
    let bench = ["bench", "-q", "-w", "-c", "3", "--object", &base.object];
    gaur(&[&bench[..], &["--image-opts", &name]].concat()).ok();
    let wanted = std::fs::read(&disk).expect("it was written");
    let copy = base.scratch.path("copy.raw");
    let to = ["-O", "raw", "--image-opts", &name, &copy];
    gaur(&[&["convert", "--object", &base.object], &to[..]].concat()).ok();
    let seen = std::fs::read(&copy).expect("it was written");
    // The three requests of 4 KiB that were written over it, and the rest as it was.
    assert_eq!(seen[..12 << 10], vec![0; 12 << 10]);
    assert_eq!(seen[12 << 10..], wanted[12 << 10..]);
}

#[test]
fn what_writes_is_refused_and_a_luks_image_is_made_of_it() {
    let old = Old::new("key", "cluster_size=64k");
    old.qemu_io(&WRITES);
    let before = std::fs::read(&old.image).expect("it is there");
    let options = old.options();
    for verb in [
        &["resize", "--image-opts", &options, "+1M"][..],
        &["bench", "-w", "--image-opts", &options],
        &["snapshot", "create", "--image-opts", &options, "one"],
        &["amend", "-o", "compat=v3", "--image-opts", &options],
        &[
            "create",
            "-o",
            "encrypt.format=aes,encrypt.key-secret=sec",
            "new.qcow2",
            "1M",
        ],
    ] {
        let refused = gaur(&[verb, &["--object", &old.object]].concat())
            .refused()
            .stderr;
        assert!(refused.contains("aes"), "{verb:?}: {refused}");
    }
    assert!(before == std::fs::read(&old.image).expect("it is there"));
    let wrong = options.replace("=aes", "=luks");
    let told = gaur(&["map", "--object", &old.object, "--image-opts", &wrong])
        .refused()
        .stderr;
    assert!(told.contains("has aes"), "{told}");
    let told = gaur(&["map", &old.image]).refused().stderr;
    assert!(told.contains("(aes), and no key"), "{told}");

    let new = old.scratch.path("new.qcow2");
    let luks = "encrypt.format=luks,encrypt.key-secret=sec,encrypt.iter-time=10";
    let to = ["-O", "qcow2", "-o", luks, "--image-opts", &options, &new];
    gaur(&[&["convert", "--object", &old.object], &to[..]].concat()).ok();
    let luks =
        format!("driver=qcow2,file.filename={new},encrypt.format=luks,encrypt.key-secret=sec");
    let both = [
        "compare",
        "--object",
        &old.object,
        "--image-opts",
        &options,
        &luks,
    ];
    gaur(&both).ok();
    run("qemu-img", &both).ok();
}
