//! `gaur amend`: QEMU reads, checks and writes on what it leaves.

use gaur_interop::compare::assert_same_bytes;
use gaur_interop::gaur::gaur;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, run};

fn qemu_io(image: &str, commands: &[&str]) {
    let mut all = vec!["-f", "qcow2", image];
    all.extend(commands.iter().flat_map(|command| ["-c", command]));
    let done = run("qemu-io", &all).ok();
    assert!(!done.stdout.contains("failed"), "{done}");
}

/// What QEMU reads of an image, which it finds clean.
#[track_caller]
fn read(scratch: &Scratch, image: &str, name: &str) -> String {
    run("qemu-img", &["check", "-q", "-f", "qcow2", image]).ok();
    gaur(&["check", image]).ok();
    let raw = scratch.path(name);
    run(
        "qemu-img",
        &["convert", "-f", "qcow2", "-O", "raw", image, &raw],
    )
    .ok();
    raw
}

#[track_caller]
fn info(image: &str) -> String {
    run("qemu-img", &["info", image]).ok().stdout
}

#[test]
fn versions_and_widths_change_and_qemu_goes_on() {
    let scratch = Scratch::new("amend");
    for (made, more) in [
        ("compat=0.10", ""),
        ("compat=1.1,cluster_size=4k", ""),
        ("compat=1.1,refcount_bits=1", ""),
        ("compat=0.10,cluster_size=512", ",allocation=compact"),
    ] {
        for bits in ["1", "8", "64"] {
            let image = scratch.path("image.qcow2");
            run(
                "qemu-img",
                &["create", "-q", "-f", "qcow2", "-o", made, &image, "20M"],
            )
            .ok();
            qemu_io(&image, &["write -P 5 1M 3M", "write -P 6 19M 1M"]);
            let before = read(&scratch, &image, "before.raw");
            let options = format!("compat=1.1,refcount_bits={bits},lazy_refcounts=on{more}");
            gaur(&["amend", "-q", "-o", &options, &image]).ok();
            let told = info(&image);
            assert!(told.contains("compat: 1.1"), "{told}");
            assert!(told.contains(&format!("refcount bits: {bits}")), "{told}");
            assert!(told.contains("lazy refcounts: true"), "{told}");
            assert_same_bytes(&before, &read(&scratch, &image, "after.raw"));
            qemu_io(
                &image,
                &["write -P 7 8M 1M", "write -z 2M 64k", "write -z 12M 64k"],
            );
            let before = read(&scratch, &image, "before.raw");
            gaur(&["amend", "-q", "-o", "compat=v2,refcount_bits=16", &image]).ok();
            assert!(info(&image).contains("compat: 0.10"));
            assert_same_bytes(&before, &read(&scratch, &image, "after.raw"));
            qemu_io(
                &image,
                &["write -P 9 4M 1M", "read -P 9 4M 1M", "read -P 0 2M 64k"],
            );
            read(&scratch, &image, "after.raw");
        }
    }
}

#[test]
fn zeros_of_an_overlay_are_written_before_it_becomes_one_of_version_2() {
    let scratch = Scratch::new("amend");
    let (base, top) = (scratch.path("base.qcow2"), scratch.path("top.qcow2"));
    gaur(&["create", "-q", &base, "8M"]).ok();
    qemu_io(&base, &["write -P 1 0 8M"]);
    let onto = ["-b", &base, "-F", "qcow2", "-o", "extended_l2=off"];
    gaur(&[&["create", "-q"], &onto[..], &[&top]].concat()).ok();
    qemu_io(
        &top,
        &["write -z 1M 1M", "write -z 3M 64k", "write -P 2 5M 1M"],
    );
    let before = read(&scratch, &top, "before.raw");
    gaur(&["amend", "-o", "compat=0.10", &top]).ok();
    assert_same_bytes(&before, &read(&scratch, &top, "after.raw"));
    assert!(info(&top).contains("compat: 0.10"));
}

#[test]
fn snapshots_stay_whole_when_refcounts_change() {
    let scratch = Scratch::new("amend");
    let image = scratch.path("image.qcow2");
    gaur(&["create", "-q", "-o", "extended_l2=off", &image, "8M"]).ok();
    qemu_io(&image, &["write -P 1 0 4M"]);
    gaur(&["snapshot", "create", &image, "one"]).ok();
    qemu_io(&image, &["write -P 2 1M 1M"]);
    let before = read(&scratch, &image, "before.raw");
    gaur(&["amend", "-o", "refcount_bits=64", &image]).ok();
    gaur(&["amend", "-o", "refcount_bits=2,size=16M", &image]).ok();
    let narrow = gaur(&["amend", "-o", "refcount_bits=1", &image]).refused();
    assert!(narrow.stderr.contains("too narrow"), "{narrow}");
    // QEMU refuses this, too.
    let down = gaur(&["amend", "-o", "compat=0.10,refcount_bits=16", &image]).refused();
    assert!(down.stderr.contains("a disk of another size"), "{down}");
    assert!(run("qemu-img", &["amend", "-o", "compat=0.10", &image]).code != 0);
    gaur(&["resize", "--shrink", "-q", &image, "8M"]).ok();
    assert_same_bytes(&before, &read(&scratch, &image, "after.raw"));
    gaur(&["snapshot", "apply", &image, "one"]).ok();
    qemu_io(&image, &["read -P 1 0 4M"]);
}

/// What QEMU reads of a snapshot.
#[track_caller]
fn read_snapshot(scratch: &Scratch, image: &str, snapshot: &str, name: &str) -> String {
    let raw = scratch.path(name);
    let to = ["-O", "raw", image, &raw];
    run(
        "qemu-img",
        &[&["convert", "-l", snapshot], &to[..]].concat(),
    )
    .ok();
    raw
}

/// Snapshots and the disk have clusters that are marked as zeros, with space and without.
#[test]
fn snapshots_with_zeros_and_bitmaps_become_those_of_version_2() {
    let scratch = Scratch::new("amend");
    let base = scratch.path("base.qcow2");
    gaur(&["create", "-q", &base, "8M"]).ok();
    qemu_io(&base, &["write -P 9 0 8M"]);
    for over in [false, true] {
        let image = scratch.path("image.qcow2");
        let under: &[&str] = if over {
            &["-b", &base, "-F", "qcow2"]
        } else {
            &[]
        };
        let create = ["create", "-q", "-f", "qcow2", "-o", "refcount_bits=64"];
        run("qemu-img", &[&create[..], under, &[&image, "8M"]].concat()).ok();
        qemu_io(
            &image,
            &["write -P 1 0 4M", "write -z 1M 256k", "write -z 5M 1M"],
        );
        run("qemu-img", &["snapshot", "-c", "one", &image]).ok();
        qemu_io(
            &image,
            &["write -z 0 512k", "write -P 2 1M 64k", "write -P 3 6M 64k"],
        );
        run("qemu-img", &["snapshot", "-c", "two", &image]).ok();
        qemu_io(&image, &["write -z 2M 64k", "write -P 4 5M 64k"]);
        run("qemu-img", &["bitmap", "--add", &image, "b0"]).ok();
        let names = ["one", "two"];
        let before =
            names.map(|name| read_snapshot(&scratch, &image, name, &format!("{name}.raw")));
        let disk = read(&scratch, &image, "before.raw");
        let done = gaur(&["amend", "-o", "compat=0.10,refcount_bits=16", &image]).ok();
        assert!(done.stderr.contains("\"b0\" is removed"), "{done}");
        assert!(info(&image).contains("compat: 0.10"));
        assert_same_bytes(&disk, &read(&scratch, &image, "after.raw"));
        for (name, before) in names.iter().zip(&before) {
            assert_same_bytes(before, &read_snapshot(&scratch, &image, name, "after.raw"));
        }
        // QEMU goes on with all of them.
        qemu_io(&image, &["write -P 7 0 1M", "write -P 8 5M 128k"]);
        run("qemu-img", &["snapshot", "-a", "one", &image]).ok();
        assert_same_bytes(&before[0], &read(&scratch, &image, "after.raw"));
        run("qemu-img", &["snapshot", "-d", "one", &image]).ok();
        assert_same_bytes(
            &before[1],
            &read_snapshot(&scratch, &image, "two", "after.raw"),
        );
        read(&scratch, &image, "after.raw");
    }
}

#[test]
fn what_cannot_be_amended_is_refused_by_name() {
    let scratch = Scratch::new("amend");
    let image = scratch.path("image.qcow2");
    gaur(&["create", "-q", "-o", "extended_l2=on", &image, "8M"]).ok();
    let before = std::fs::read(&image).expect("it is there");
    for (options, word) in [
        ("cluster_size=4k", "'cluster_size' cannot be amended"),
        ("size=4M", "gaur resize --shrink"),
        ("backing_file=other", "gaur rebase"),
        ("data_file=other", "no external data file"),
        ("data_file_raw=on", "gaur convert"),
        ("compat=0.10", "extended l2"),
        ("refcount_bits=5", "1, 2, 4"),
        ("encrypt.state=active", "encrypt.new-secret"),
        ("encrypt.state=inactive,encrypt.keyslot=0", "not encrypted"),
        ("encrypt.keyslot=0", "without 'encrypt.state'"),
    ] {
        let run = gaur(&["amend", "-o", options, &image]).refused();
        assert!(run.stderr.contains(word), "{run}");
        assert!(
            std::fs::read(&image).expect("it is there") == before,
            "{options}"
        );
    }
    // What is as it is may be said.
    gaur(&[
        "amend",
        "-o",
        "backing_file=,data_file_raw=off,size=8M,compat=1.1",
        &image,
    ])
    .ok();
}

/// Snapshots with the state of a machine stay whole; disks of another size cannot be told in version 2, and QEMU refuses
/// as well.
#[test]
fn snapshots_become_those_of_version_2_or_are_named() {
    let scratch = Scratch::new("amend");
    let [image, state, left] = ["image.qcow2", "state", "left"].map(|name| scratch.path(name));
    let amend = ["amend", "-o", "compat=0.10", &image];
    gaur(&["create", "-q", "-o", "extended_l2=off", &image, "8M"]).ok();
    // Its zeros are marks before, and clusters afterwards.
    let bytes = [&[7; 100_000][..], &[0; 300_000], &[8; 50_000]].concat();
    std::fs::write(&state, bytes).expect("scratch is writable");
    qemu_io(&image, &["write -P 1 0 1M", "write -z 512k 256k"]);
    gaur(&["snapshot", "save", &image, "one", "--state", &state]).ok();
    gaur(&amend).ok();
    assert!(info(&image).contains("compat: 0.10"), "{}", info(&image));
    run("qemu-img", &["check", "-q", &image]).ok();
    gaur(&["snapshot", "extract", &image, "one", "--to", &left]).ok();
    assert_same_bytes(&state, &left);
    gaur(&["amend", "-o", "compat=1.1", &image]).ok();
    gaur(&["resize", &image, "16M"]).ok();
    let before = std::fs::read(&image).expect("it is there");
    let told = gaur(&amend).refused();
    assert!(told.stderr.contains("a disk of another size"), "{told}");
    assert!(std::fs::read(&image).expect("it is there") == before);
    assert_eq!(run("qemu-img", &amend).code, 1);
}

/// Opens with a key.
fn opens(image: &str, key: &str) -> bool {
    let object = format!("secret,id=s,file={key}");
    let options = format!("driver=qcow2,file.filename={image},encrypt.key-secret=s");
    let all = [
        "--object",
        &object,
        "--image-opts",
        &options,
        "-c",
        "read -P 3 0 1M",
    ];
    let Run { code, stdout, .. } = run("qemu-io", &all);
    code == 0 && !stdout.contains("failed")
}

/// An encrypted image, its disk, and two keys of which the first opens it.
struct Locked {
    scratch: Scratch,
    image: String,
    raw: String,
    keys: [String; 2],
}

impl Locked {
    fn new() -> Locked {
        let scratch = Scratch::new("amend");
        let (image, raw) = (scratch.path("image.qcow2"), scratch.path("disk.raw"));
        let keys = ["first", "second"].map(|name| {
            let path = scratch.path(name);
            std::fs::write(&path, name).expect("scratch is writable");
            path
        });
        std::fs::write(&raw, vec![3; 1 << 20]).expect("scratch is writable");
        let luks = "encrypt.format=luks,encrypt.iter-time=10";
        let to = ["-f", "raw", "-O", "qcow2", "-o", luks, &raw, &image];
        gaur(&[&["convert", "--key-file", &keys[0]], &to[..]].concat()).ok();
        Locked {
            scratch,
            image,
            raw,
            keys,
        }
    }

    /// Adds the second key.
    fn add(&self, slot: &str) -> Run {
        let object = format!("secret,id=new,file={}", self.keys[1]);
        let add = "encrypt.state=active,encrypt.new-secret=new,encrypt.iter-time=10";
        let options = format!("{add}{slot}");
        let open = ["--key-file", &self.keys[0], "--object", &object];
        gaur(&[&["amend"], &open[..], &["-o", &options, &self.image]].concat())
    }

    fn erase(&self, what: &str, more: &[&str]) -> Run {
        let object = format!("secret,id=old,file={}", self.keys[0]);
        let options = format!("encrypt.state=inactive,{what}");
        let all = ["amend", "--object", &object, "-o", &options, &self.image];
        gaur(&[&all[..], more].concat())
    }

    /// Which of the keys open it in QEMU.
    fn opened(&self) -> [bool; 2] {
        [0, 1].map(|key| opens(&self.image, &self.keys[key]))
    }
}

#[test]
fn keys_are_added_and_erased_and_qemu_opens_with_those_that_are_left() {
    let locked = Locked::new();
    locked.add("").ok();
    locked.add(",encrypt.keyslot=6").ok();
    let taken = locked.add(",encrypt.keyslot=6").refused();
    assert!(taken.stderr.contains("key slot 6 is in use"), "{taken}");
    assert_eq!(locked.opened(), [true, true]);
    locked.erase("encrypt.old-secret=old", &[]).ok();
    assert_eq!(locked.opened(), [false, true]);
    let gone = locked.erase("encrypt.old-secret=old", &[]).refused();
    assert!(gone.stderr.contains("no key slot opens"), "{gone}");
    locked.erase("encrypt.keyslot=6", &[]).ok();
    let last = locked.erase("encrypt.keyslot=1", &[]).refused();
    assert!(last.stderr.contains("--force"), "{last}");
    assert_eq!(locked.opened(), [false, true]);
    locked.erase("encrypt.keyslot=1", &["--force"]).ok();
    assert_eq!(locked.opened(), [false, false]);
}

#[test]
fn a_key_that_qemu_adds_opens_the_image() {
    let locked = Locked::new();
    let path = locked.scratch.path("third");
    std::fs::write(&path, "third").expect("scratch is writable");
    let old = format!("secret,id=s,file={}", locked.keys[0]);
    let new = format!("secret,id=n,file={path}");
    let image = format!(
        "driver=qcow2,file.filename={},encrypt.key-secret=s",
        locked.image
    );
    let add = "encrypt.state=active,encrypt.new-secret=n,encrypt.iter-time=10";
    let all = [
        "amend",
        "--object",
        &old,
        "--object",
        &new,
        "--image-opts",
        "-o",
        add,
        &image,
    ];
    run("qemu-img", &all).ok();
    gaur(&["compare", "--key-file", &path, &locked.image, &locked.raw]).ok();
    locked.erase("encrypt.old-secret=old", &[]).ok();
    assert!(opens(&locked.image, &path));
    assert_eq!(locked.opened(), [false, false]);
}
