//! LUKS containers as images, both ways with QEMU and with cryptsetup.

use gaur_interop::compare::assert_same_bytes;
use gaur_interop::gaur::{first_export, gaur, serve_with};
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, qemu_img, qemu_io_with_key, run};

const SIZE: u64 = 5 << 20;

/// A folder with a key and a raw disk with data in it.
struct Folder {
    scratch: Scratch,
    object: String,
    key: String,
    raw: String,
}

impl Folder {
    fn new() -> Folder {
        let scratch = Scratch::new("luks-format");
        let key = scratch.file("key", b"correct horse");
        let mut disk = vec![0_u8; SIZE as usize];
        for (start, len) in [(100, 700), (70_000, 200_000), (3 << 20, 1 << 20)] {
            for (at, byte) in disk[start..start + len].iter_mut().enumerate() {
                *byte = ((at * 7) >> 3) as u8 | 1;
            }
        }
        Folder {
            object: format!("secret,id=sec,file={key}"),
            raw: scratch.file("disk.raw", &disk),
            key,
            scratch,
        }
    }

    fn path(&self, name: &str) -> String {
        self.scratch.path(name)
    }

    /// The options by which an image in this folder is opened.
    fn image(&self, name: &str) -> String {
        format!(
            "driver=luks,key-secret=sec,file.filename={}",
            self.path(name)
        )
    }

    /// `qemu-img` with the key.
    #[track_caller]
    fn qemu(&self, arguments: &[&str]) -> Run {
        let mut all = vec![arguments[0], "--object", &self.object];
        all.extend(&arguments[1..]);
        run("qemu-img", &all)
    }

    /// `gaur` with the key.
    #[track_caller]
    fn gaur(&self, arguments: &[&str]) -> Run {
        let mut all = vec![arguments[0], "--object", &self.object];
        all.extend(&arguments[1..]);
        gaur(&all)
    }

    /// QEMU finds in an image what the raw disk holds, and so does Gaur.
    #[track_caller]
    fn assert_holds_the_disk(&self, name: &str) {
        let (image, raw) = (
            self.image(name),
            format!("driver=raw,file.filename={}", self.raw),
        );
        self.qemu(&["compare", "-q", "--image-opts", &image, &raw])
            .ok();
        self.gaur(&["compare", "-q", "--image-opts", &image, &raw])
            .ok();
    }

    /// Whether cryptsetup opens it with a key.
    fn cryptsetup_opens(&self, name: &str, key: &str) -> bool {
        let path = self.path(name);
        let tried = run(
            "cryptsetup",
            &["open", "--test-passphrase", "--key-file", key, &path],
        );
        tried.code == 0
    }
}

const NEW: &str = "key-secret=sec,iter-time=10";

#[test]
fn containers_are_converted_both_ways() {
    let folder = Folder::new();
    for (name, more) in [
        ("xts", ""),
        (
            "cbc",
            ",cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256",
        ),
        ("full", ",preallocation=full,hash-alg=sha512"),
    ] {
        let options = format!("{NEW}{more}");
        let (ours, theirs) = (format!("{name}.ours"), format!("{name}.theirs"));
        let convert = [
            "convert",
            "-f",
            "raw",
            "-O",
            "luks",
            "-o",
            &options,
            &folder.raw,
        ];
        folder
            .gaur(&[&convert[..], &[&folder.path(&ours)]].concat())
            .ok();
        folder
            .qemu(&[&convert[..], &[&folder.path(&theirs)]].concat())
            .ok();
        folder.assert_holds_the_disk(&ours);
        folder.assert_holds_the_disk(&theirs);
        let len = |name: &str| std::fs::metadata(folder.path(name)).expect("made").len();
        assert_eq!(len(&ours), len(&theirs), "{name}");
        assert!(folder.cryptsetup_opens(&ours, &folder.key));
    }
}

#[test]
fn containers_of_cryptsetup_are_read_and_written() {
    let folder = Folder::new();
    let path = folder.scratch.zeros("c.luks", 7 << 20);
    let make = [
        "luksFormat",
        "-q",
        "--type",
        "luks1",
        "--pbkdf-force-iterations",
        "1000",
        "--key-file",
        &folder.key,
        &path,
    ];
    run("cryptsetup", &make).ok();
    let image = folder.image("c.luks");
    qemu_io_with_key(
        &folder.object,
        &image,
        &["write -P 7 1000 5000", "write -P 6 1M 1M"],
    );
    let ours = [
        "-c",
        "read -P 7 1000 5000",
        "-c",
        "write -P 8 3000 100000",
        "-c",
        "write -z 1100000 300001",
        "-c",
        "discard 0 1M",
    ];
    let mut all = vec![
        "qemu-io",
        "--object",
        &folder.object,
        "--image-opts",
        &image,
    ];
    all.extend(ours);
    gaur(&all).ok();
    let read = [
        "read -P 7 1000 2000",
        "read -P 8 3000 100000",
        "read -P 0 1100000 300001",
        "read -P 6 1400001 600000",
    ];
    qemu_io_with_key(&folder.object, &image, &read);
    assert!(folder.cryptsetup_opens("c.luks", &folder.key));
}

#[test]
fn info_measure_and_map_are_those_of_qemu() {
    let folder = Folder::new();
    let (path, image) = (folder.path("a.luks"), folder.image("a.luks"));
    folder
        .gaur(&["create", "-q", "-f", "luks", "-o", NEW, &path, "3M"])
        .ok();
    let info = ["info", "--output=json", &path];
    assert_eq!(gaur(&info).json(), qemu_img(&info).json());
    assert_eq!(gaur(&info).json()["virtual-size"], 3 << 20);
    let text = ["qemu-img", "info", &path];
    assert_eq!(gaur(&text).stdout, qemu_img(&text[1..]).stdout);
    let map = ["map", "--output=json", "--image-opts", &image];
    assert_eq!(folder.gaur(&map).json(), folder.qemu(&map).json());
    for size in ["0", "1G"] {
        let measure = [
            "measure",
            "--output=json",
            "-O",
            "luks",
            "-o",
            NEW,
            "--size",
            size,
        ];
        assert_eq!(folder.gaur(&measure).json(), folder.qemu(&measure).json());
    }
    gaur(&["qemu-img", "check", &path]).code(63);
}

#[test]
fn a_container_grows_shrinks_and_keeps_its_data() {
    let folder = Folder::new();
    let (path, image) = (folder.path("a.luks"), folder.image("a.luks"));
    folder
        .gaur(&[
            "convert",
            "-f",
            "raw",
            "-O",
            "luks",
            "-o",
            NEW,
            &folder.raw,
            &path,
        ])
        .ok();
    for (size, flag) in [("9M", "-q"), ("5M", "--shrink")] {
        folder
            .gaur(&["resize", flag, "--image-opts", &image, size])
            .ok();
        let theirs = qemu_img(&["info", "--output=json", &path]).json();
        assert_eq!(
            theirs["virtual-size"],
            size.trim_end_matches('M').parse::<u64>().expect("a number") << 20
        );
    }
    folder.assert_holds_the_disk("a.luks");
    let odd = folder.gaur(&["resize", "--image-opts", &image, "6000001"]);
    assert!(odd.refused().stderr.contains("512"));
}

#[test]
fn keys_are_added_and_erased() {
    let folder = Folder::new();
    let (path, image) = (folder.path("a.luks"), folder.image("a.luks"));
    folder
        .gaur(&[
            "convert",
            "-f",
            "raw",
            "-O",
            "luks",
            "-o",
            NEW,
            &folder.raw,
            &path,
        ])
        .ok();
    let other = folder.scratch.file("other", b"battery staple");
    let more = format!("secret,id=new,file={other}");
    let add = "state=active,new-secret=new,iter-time=10";
    folder
        .gaur(&[
            "amend",
            "--object",
            &more,
            "-o",
            add,
            "--image-opts",
            &image,
        ])
        .ok();
    let new = folder.image("a.luks").replace("secret=sec", "secret=new");
    qemu_io_with_key(&more, &new, &["read 0 5M"]);
    assert!(folder.cryptsetup_opens("a.luks", &other));
    let erase = "state=inactive,old-secret=sec";
    folder
        .gaur(&["amend", "-f", "luks", "-o", erase, &path])
        .ok();
    let refused = folder.gaur(&["qemu-io", "--image-opts", &image, "-c", "read 0 1"]);
    assert!(refused.stderr.contains("no key slot"), "{refused}");
    folder.qemu(&["info", &path]).ok();
    let last = [
        "amend",
        "--object",
        &more,
        "-o",
        "state=inactive,keyslot=1",
        "--image-opts",
        &new,
    ];
    assert!(folder.gaur(&last).refused().stderr.contains("last key"));
}

#[test]
fn a_container_is_served_and_written_by_nbd() {
    let folder = Folder::new();
    let path = folder.path("a.luks");
    folder
        .gaur(&["create", "-q", "-f", "luks", "-o", NEW, &path, "5M"])
        .ok();
    let socket = folder.path("socket");
    let server = serve_with(&path, &socket, &["-f", "luks", "--key-file", &folder.key]);
    let uri = format!("nbd+unix:///?socket={socket}");
    qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", &folder.raw, &uri]).ok();
    server.stop();
    folder.assert_holds_the_disk("a.luks");
}

#[test]
fn an_overlay_over_a_container_reads_it_with_its_key() {
    let folder = Folder::new();
    let (base, overlay) = (folder.path("a.luks"), folder.path("o.qcow2"));
    folder
        .gaur(&[
            "convert",
            "-f",
            "raw",
            "-O",
            "luks",
            "-o",
            NEW,
            &folder.raw,
            &base,
        ])
        .ok();
    // No key is needed to make one.
    gaur(&[
        "qemu-img", "create", "-q", "-f", "qcow2", "-b", &base, "-F", "luks", &overlay,
    ])
    .ok();
    let chain = format!(
        "driver=qcow2,file.filename={overlay},backing.driver=luks,backing.key-secret=sec,backing.file.filename={base}"
    );
    let (ours, theirs) = (folder.path("ours"), folder.path("theirs"));
    folder
        .gaur(&["convert", "--image-opts", &chain, "-O", "raw", &ours])
        .ok();
    folder
        .qemu(&["convert", "--image-opts", &chain, "-O", "raw", &theirs])
        .ok();
    assert_same_bytes(&ours, &theirs);
    assert_same_bytes(&ours, &folder.raw);
    qemu_io_with_key(&folder.object, &chain, &["write -P 9 1M 64k"]);
    folder.gaur(&["commit", "-q", "--image-opts", &chain]).ok();
    qemu_io_with_key(
        &folder.object,
        &folder.image("a.luks"),
        &["read -P 9 1M 64k"],
    );
    // A backing file that the options name is that one, whatever the overlay says.
    let other = folder.path("other.raw");
    gaur(&["create", "-q", "-f", "raw", &other, "5M"]).ok();
    let chain = format!(
        "driver=qcow2,file.filename={overlay},backing.driver=raw,backing.file.filename={other}"
    );
    let read = gaur(&["qemu-io", "--image-opts", &chain, "-c", "read -P 0 3M 1M"]).ok();
    assert!(read.stdout.contains("read 1048576"), "{read}");
}

/// What nobody writes to a container decrypts to noise.
#[test]
fn dd_writes_the_zeros_of_a_container() {
    let folder = Folder::new();
    let (path, cut) = (folder.path("a.luks"), folder.path("cut.raw"));
    let dd = |options: &[&str], input: &str| {
        let (input, output) = (format!("if={input}"), format!("of={path}"));
        let line = [&["dd", "-f", "raw", "-O", "luks", "-o", NEW], options];
        folder
            .gaur(&[&line.concat()[..], &[&input, &output]].concat())
            .ok();
    };
    dd(&["bs=64k"], &folder.raw);
    folder.assert_holds_the_disk("a.luks");
    std::fs::write(&cut, [7; 700]).expect("scratch is writable");
    dd(&["bs=1", "count=700"], &cut);
    let read = ["read -P 7 0 700", "read -P 0 700 324"];
    qemu_io_with_key(&folder.object, &folder.image("a.luks"), &read);
}

/// A container that a commit makes longer shows zeros where the overlay did.
#[test]
fn commit_into_a_shorter_container_writes_the_zeros_behind_it() {
    let folder = Folder::new();
    let (base, overlay) = (folder.path("a.luks"), folder.path("o.qcow2"));
    folder
        .gaur(&["create", "-q", "-f", "luks", "-o", NEW, &base, "1M"])
        .ok();
    let image = folder.image("a.luks");
    qemu_io_with_key(&folder.object, &image, &["write -P 5 0 1M"]);
    let create = ["create", "-q", "-f", "qcow2", "-b", &base, "-F", "luks"];
    folder.qemu(&[&create[..], &[&overlay, "5M"]].concat()).ok();
    let chain = format!(
        "driver=qcow2,file.filename={overlay},backing.driver=luks,backing.key-secret=sec,backing.file.filename={base}"
    );
    let write = ["write -P 9 2M 64k", "write -z 3M 64k"];
    qemu_io_with_key(&folder.object, &chain, &write);
    folder.gaur(&["commit", "-q", "--image-opts", &chain]).ok();
    let read = [
        "read -P 5 0 1M",
        "read -P 0 1M 1M",
        "read -P 9 2M 64k",
        "read -P 0 2112k 3008k",
    ];
    qemu_io_with_key(&folder.object, &image, &read);
}

/// Without its key a chain is not opened, and what lies below is not overwritten unseen.
#[test]
fn an_image_below_a_locked_one_is_not_overwritten() {
    let folder = Folder::new();
    let (base, middle) = (folder.path("base.qcow2"), folder.path("middle.qcow2"));
    gaur(&["create", "-q", &base, "5M"]).ok();
    let encrypted = "encrypt.format=luks,encrypt.key-secret=sec,encrypt.iter-time=10";
    let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2"];
    let create_over = [&create[..], &["-b", &middle]].concat();
    let below = ["-b", &base, "-o", encrypted, &middle];
    folder.gaur(&[&create[..], &below].concat()).ok();
    let before = std::fs::read(&base).expect("made");
    let refused = gaur(&[&create_over[..], &[&base]].concat()).refused();
    assert!(refused.stderr.contains("no key"), "{refused}");
    assert_eq!(std::fs::read(&base).expect("made"), before);
    let with_key = [&create_over[..], &["--key-file", &folder.key, &base]].concat();
    let refused = gaur(&with_key).refused();
    assert!(refused.stderr.contains("below its own"), "{refused}");
    gaur(&[&create_over[..], &[&folder.path("top.qcow2")]].concat()).ok();
}

#[test]
fn a_served_container_grows_and_does_not_shrink() {
    let folder = Folder::new();
    let (path, control) = (folder.path("a.luks"), folder.path("control"));
    folder
        .gaur(&["create", "-q", "-f", "luks", "-o", NEW, &path, "5M"])
        .ok();
    let key = ["-f", "luks", "--key-file", &folder.key];
    let options = [&key[..], &["--control", &control]].concat();
    let server = serve_with(&path, &folder.path("socket"), &options);
    let name = first_export(&control);
    let resize = |size: &str| {
        let line = ["export", "resize", "--control", &control, "--shrink"];
        gaur(&[&line[..], &[&name, size]].concat())
    };
    resize("6M").ok();
    let refused = resize("4M").refused();
    assert!(refused.stderr.contains("does not shrink"), "{refused}");
    server.stop();
    let theirs = qemu_img(&["info", "--output=json", &path]).json();
    assert_eq!(theirs["virtual-size"], 6 << 20);
}

/// A temporary overlay is one more layer: keys and backing files of the options are those of the layers below it.
#[test]
fn options_of_the_chain_hold_below_a_temporary_overlay() {
    let folder = Folder::new();
    let (top, other) = (folder.path("top.qcow2"), folder.path("other.luks"));
    folder
        .gaur(&["create", "-q", "-f", "luks", "-o", NEW, &other, "5M"])
        .ok();
    let image = folder.image("other.luks");
    qemu_io_with_key(&folder.object, &image, &["write -P 5 0 1M"]);
    let encrypted = "encrypt.format=luks,encrypt.key-secret=sec,encrypt.iter-time=10";
    let create = ["create", "-q", "-f", "qcow2", "-o", encrypted];
    let below = ["-b", &folder.raw, "-F", "raw", &top];
    folder.gaur(&[&create[..], &below].concat()).ok();
    let chain = format!(
        "driver=qcow2,file.filename={top},encrypt.key-secret=sec,\
         backing.driver=luks,backing.key-secret=sec,backing.file.filename={other}"
    );
    qemu_io_with_key(&folder.object, &chain, &["write -P 6 64k 64k"]);
    let io = ["qemu-io", "-s", "--image-opts", &chain];
    let commands = ["read -P 5 0 64k", "read -P 6 64k 64k", "write -P 8 0 1k"];
    let commands: Vec<_> = commands.iter().flat_map(|one| ["-c", one]).collect();
    let commands = [&io[..], &commands].concat();
    let ours = folder.gaur(&commands).ok();
    assert!(!ours.stdout.contains("failed"), "{ours}");
    let mut theirs = vec!["--object", &folder.object];
    theirs.extend(&commands[1..]);
    let theirs = run("qemu-io", &theirs).ok();
    assert!(!theirs.stdout.contains("failed"), "{theirs}");
}

#[test]
fn what_is_no_container_is_refused_in_a_line() {
    let folder = Folder::new();
    let path = folder.path("a.luks");
    let create = |options: &str| {
        folder
            .gaur(&["create", "-f", "luks", "-o", options, &path, "1M"])
            .refused()
            .stderr
    };
    assert!(create("iter-time=10").contains("no key"));
    assert!(create("key-secret=sec,detached-header=on").contains("detached-header"));
    assert!(create("key-secret=sec,compat=v3").contains("no option 'compat'"));
    assert!(create("key-secret=sec,backing_file=x").contains("backing file"));
    let raw = gaur(&["info", "-f", "luks", &folder.raw]).refused();
    assert!(raw.stderr.contains("luks header"), "{raw}");
    folder
        .gaur(&["create", "-q", "-f", "luks", "-o", NEW, &path, "1M"])
        .ok();
    let cut = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("made");
    cut.set_len(1 << 20).expect("cut");
    let image = folder.image("a.luks");
    let cut = folder.gaur(&["qemu-io", "--image-opts", &image, "-c", "read 0 1"]);
    assert!(cut.refused().stderr.contains("the file ends at"));
}
