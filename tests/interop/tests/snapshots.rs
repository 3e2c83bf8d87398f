//! Internal snapshots by both tools in turn: after every step they agree on what there is, and neither
//! finds a fault.

use std::process::{Command, Stdio};
use std::time::Duration;

use gaur_interop::builder::{Kind, build, create, noise};
use gaur_interop::compare::{assert_same_bytes, assert_same_view, qemu_view};
use gaur_interop::gaur::{binary, gaur, serve};
use gaur_interop::layout::Layout;
use gaur_interop::op::{self, Op};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run_for};

/// Steps of a random sequence.
const STEPS: usize = 30;
/// Most snapshots at once.
const SNAPSHOTS_MAX: u64 = 4;

/// An image that both tools change in turn, and what is known of it.
struct Pair {
    scratch: Scratch,
    image: String,
    layout: Layout,
    random: Random,
    /// Names, each with the disk as QEMU saw it when the snapshot was made.
    known: Vec<(String, String)>,
    steps: usize,
}

impl Pair {
    fn new(layout: Layout) -> Pair {
        let scratch = Scratch::new("pair");
        let image = build(Kind::Plain, &layout, &scratch);
        Pair {
            scratch,
            image,
            random: Random::new(layout.cluster_bytes + u64::from(layout.refcount_bits)),
            layout,
            known: Vec::new(),
            steps: 0,
        }
    }

    fn step(&mut self) {
        self.steps += 1;
        let ours = self.random.one_in(2);
        let some = self.random.below(SNAPSHOTS_MAX) as usize;
        let some = self.known.get(some).map(|one| one.0.clone());
        match (self.random.below(6), some) {
            (0, Some(name)) => self.run(ours, "apply", "-a", &name),
            (1, Some(name)) => {
                self.run(ours, "delete", "-d", &name);
                self.known.retain(|one| one.0 != name);
            }
            (2, Some(name)) => {
                let new = format!("new {}", self.steps);
                gaur(&["snapshot", "rename", &self.image, &name, &new]).ok();
                let found = self.known.iter_mut().find(|one| one.0 == name);
                found.expect("it is known").0 = new;
            }
            (3, _) if (self.known.len() as u64) < SNAPSHOTS_MAX => {
                let name = format!("s{}", self.steps);
                self.run(ours, "create", "-c", &name);
                let raw = self.scratch.path(&format!("{name}.raw"));
                qemu_view(&self.image, &raw);
                self.known.push((name, raw));
            }
            _ => self.write(ours),
        }
        self.agree();
    }

    fn run(&self, ours: bool, verb: &str, flag: &str, name: &str) {
        let run = match (ours, self.steps % 2) {
            (true, 0) => gaur(&["snapshot", verb, &self.image, name]),
            (true, _) => gaur(&["snapshot", flag, name, &self.image]),
            (false, _) => qemu_img(&["snapshot", flag, name, &self.image]),
        };
        run.ok();
    }

    fn write(&mut self, ours: bool) {
        let file = noise(&self.scratch);
        let seed = self.random.number();
        let ops = op::random(&self.layout, seed, 8, true, &file);
        if ours {
            let server = serve(&self.image, &self.scratch.path("s"));
            op::apply("raw", &server.uri(), &ops);
            server.stop();
        } else {
            op::apply("qcow2", &self.image, &ops);
        }
    }

    /// Both tools say the same of the image.
    fn agree(&self) {
        let image = &self.image;
        assert_clean(image);
        gaur(&["check", image]).ok();
        let theirs = qemu_img(&["snapshot", "-l", image]).ok().stdout;
        let ours = gaur(&["snapshot", "-l", image]).ok().stdout;
        assert_eq!(ours, theirs);
        let theirs = qemu_img(&["info", "--output=json", image]).ok().json();
        let ours = gaur(&["info", "--output=json", image]).ok().json();
        assert_eq!(ours["snapshots"], theirs["snapshots"]);
        let names = theirs["snapshots"].as_array().cloned().unwrap_or_default();
        let names: Vec<&str> = names
            .iter()
            .filter_map(|one| one["name"].as_str())
            .collect();
        let known: Vec<&str> = self.known.iter().map(|one| one.0.as_str()).collect();
        assert_eq!(names, known);
    }

    /// Every snapshot is what it was, as both tools read it.
    fn compare(&self) {
        for (name, expected) in &self.known {
            let (theirs, ours) = (self.scratch.path("theirs"), self.scratch.path("ours"));
            let convert = ["convert", "-O", "raw", "-l", name, &self.image];
            qemu_img(&[&convert[..], &[&theirs]].concat()).ok();
            gaur(&[&convert[..], &[&ours]].concat()).ok();
            assert_same_bytes(&theirs, expected);
            assert_same_bytes(&ours, expected);
        }
        gaur(&["compare", &self.image, &self.image]).ok();
    }
}

fn in_turn(layout: Layout) {
    let mut pair = Pair::new(layout);
    for _ in 0..STEPS {
        pair.step();
    }
    pair.compare();
    for (name, _) in std::mem::take(&mut pair.known) {
        pair.run(true, "delete", "-d", &name);
    }
    pair.agree();
}

mod both_tools_in_turn {
    gaur_interop::every_layout!(crate::in_turn);
    mod width {
        gaur_interop::layout_tests! { crate::in_turn,
            |layout: gaur_interop::layout::Layout| layout.refcount_bits(4);
            bits_4_4k: v3(4096); bits_4_64k: v3(65536);
        }
    }
}

#[test]
fn a_snapshot_is_served_read_only_or_below_a_temporary_overlay() {
    let scratch = Scratch::new("served");
    let layout = Layout::v3(65536);
    let image = build(Kind::Plain, &layout, &scratch);
    let before = scratch.path("before.raw");
    qemu_view(&image, &before);
    gaur(&["snapshot", "create", &image, "before"]).ok();
    let write = |pattern| Op::Write {
        offset: 4096,
        len: 100_000,
        pattern,
    };
    op::apply("qcow2", &image, &[write(7)]);
    let after = scratch.path("after.raw");
    qemu_view(&image, &after);

    let socket = scratch.path("s");
    let show = |more: &[&str]| {
        let arguments = [&["--snapshot", "before"], more].concat();
        gaur_interop::gaur::serve_with(&image, &socket, &arguments)
    };
    let server = show(&[]);
    assert_same_view(("raw", &server.uri()), ("raw", &before));
    let refused = op::try_apply("raw", &server.uri(), &[write(8)]);
    assert!(
        refused.code != 0 || refused.stdout.contains("ead-only"),
        "{refused}"
    );
    server.stop();
    let server = show(&["--temporary"]);
    op::apply("raw", &server.uri(), &[write(9)]);
    let twin = scratch.path("twin.raw");
    std::fs::copy(&before, &twin).expect("scratch is writable");
    op::apply("raw", &twin, &[write(9)]);
    assert_same_view(("raw", &server.uri()), ("raw", &twin));
    server.stop();
    assert_same_view(("qcow2", &image), ("raw", &after));
    assert_clean(&image);
}

#[test]
fn invalid_snapshot_requests_leave_the_image() {
    let scratch = Scratch::new("refused");
    let image = build(Kind::Plain, &Layout::v3(4096), &scratch);
    gaur(&["snapshot", "create", &image, "one"]).ok();
    let before = std::fs::read(&image).expect("the image is there");
    for line in [
        &["create", &image, "one"][..],
        &["create", &image, "1"],
        &["create", &image, ""],
        &["apply", &image, "two"],
        &["delete", &image, "two"],
        &["rename", &image, "two", "three"],
        &["info", &image, "two"],
        &["extract", &image, "two", "--to", "/dev/null"],
        &["extract", &image, "one", "--to", "/dev/null"],
    ] {
        let run = gaur(&[&["snapshot"], line].concat()).refused();
        assert!(run.stderr.contains(&image), "it says where: {run}");
    }
    let after = std::fs::read(&image).expect("the image is there");
    assert!(before == after, "nothing has changed");
}

#[test]
fn narrow_refcounts_are_a_clear_error() {
    for (bits, most) in [(1, 0), (2, 2)] {
        let scratch = Scratch::new("narrow");
        let image = build(
            Kind::Plain,
            &Layout::v3(65536).refcount_bits(bits),
            &scratch,
        );
        for number in 0..most {
            gaur(&["snapshot", "create", &image, &format!("s{number}")]).ok();
        }
        let run = gaur(&["snapshot", "create", &image, "more"]).refused();
        assert!(run.stderr.contains("refcount_bits"), "{run}");
        assert_clean(&image);
        let list = gaur(&["snapshot", "list", "--output", "json", &image])
            .ok()
            .json();
        assert_eq!(list.as_array().map_or(0, Vec::len), most, "{list}");
    }
}

/// A table of as many snapshots as the format allows, made by hand.
#[test]
fn more_snapshots_than_the_format_allows_are_refused() {
    const MOST: u32 = 65_536;
    let scratch = Scratch::new("many");
    let image = scratch.path("a.qcow2");
    create(&image, &Layout::v3(65536));
    let mut bytes = std::fs::read(&image).expect("the image is there");
    bytes.resize(bytes.len().next_multiple_of(65536), 0);
    let table = bytes.len() as u64;
    for number in 0..MOST {
        let (id, name) = (format!("{:05}", number + 1), format!("n{number:06}"));
        let mut entry = vec![0; 40];
        entry[12..14].copy_from_slice(&(id.len() as u16).to_be_bytes());
        entry[14..16].copy_from_slice(&(name.len() as u16).to_be_bytes());
        entry[36..40].copy_from_slice(&16_u32.to_be_bytes());
        entry.extend([0; 16]);
        entry.extend(id.bytes().chain(name.bytes()));
        entry.resize(entry.len().next_multiple_of(8), 0);
        bytes.extend(entry);
    }
    bytes.resize(bytes.len().next_multiple_of(65536), 0);
    bytes[60..64].copy_from_slice(&MOST.to_be_bytes());
    bytes[64..72].copy_from_slice(&table.to_be_bytes());
    std::fs::write(&image, bytes).expect("scratch is writable");
    let run = gaur(&["snapshot", "create", &image, "one more"]).refused();
    assert!(run.stderr.contains("65536"), "{run}");
}

/// Creates, deletes and applies in a small file system: what does not fit changes nothing.
#[test]
fn a_full_disk_changes_nothing() {
    const SCRIPT: &str = r#"
set -e
disk=$1 image=$2 result=$3 program=$4
mount -t tmpfs -o size=13m none "$disk"
cp --sparse=always "$image" "$disk/a.qcow2"
dd if=/dev/zero of="$disk/filler" bs=64k 2>/dev/null || true
code=0; "$program" snapshot create "$disk/a.qcow2" more || code=$?
cp --sparse=always "$disk/a.qcow2" "$result"
exit $code
"#;
    let scratch = Scratch::new("full");
    let image = scratch.path("a.qcow2");
    let layout = Layout::v3(4096);
    create(&image, &layout);
    qemu_img(&["resize", "-q", &image, "64M"]).ok();
    // Many L2 tables, which have to be copied.
    let writes: Vec<Op> = (0..32)
        .map(|number| Op::Write {
            offset: number * (2 << 20),
            len: 65536,
            pattern: number as u8 + 1,
        })
        .collect();
    op::apply("qcow2", &image, &writes);
    gaur(&["snapshot", "create", &image, "before"]).ok();
    op::apply("qcow2", &image, &writes);
    let (disk, result) = (scratch.path("disk"), scratch.path("result.qcow2"));
    std::fs::create_dir(&disk).expect("scratch is writable");
    let arguments = [
        "--mount", "bash", "-c", SCRIPT, "full", &disk, &image, &result,
    ];
    let run = run_for("unshare", &[&arguments[..], &[binary()]].concat(), 60).refused();
    assert!(run.stderr.contains("space"), "{run}");
    assert_same_view(("qcow2", &image), ("qcow2", &result));
    qemu_img(&["check", "-q", "-r", "leaks", &result]).survived();
    assert_clean(&result);
    let list = qemu_img(&["snapshot", "-l", &result]).ok().stdout;
    assert!(list.contains("before") && !list.contains("more"), "{list}");
    gaur(&["snapshot", "create", &result, "more"]).ok();
    assert_clean(&result);
}

fn names(image: &str) -> Vec<String> {
    let info = qemu_img(&["info", "--output=json", image]).ok().json();
    let list = info["snapshots"].as_array().cloned().unwrap_or_default();
    let name = |one: &serde_json::Value| one["name"].as_str().map(str::to_owned);
    list.iter().filter_map(name).collect()
}

/// Killed at any moment, an operation was or was not, and the image has leaks at worst.
#[test]
fn snapshot_change_is_atomic_under_kill() {
    let scratch = Scratch::new("killed");
    let image = scratch.path("a.qcow2");
    let (options, size) = ("preallocation=metadata,cluster_size=4096", "2G");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &image, size]).ok();
    op::apply(
        "qcow2",
        &image,
        &[Op::Write {
            offset: 1 << 20,
            len: 1 << 20,
            pattern: 3,
        }],
    );
    let state = scratch.file("state", &Random::new(5).bytes(3 << 20));
    gaur(&["snapshot", "save", &image, "kept", "--state", &state]).ok();
    let view = scratch.path("view.raw");
    qemu_view(&image, &view);
    let mut random = Random::new(11);
    let mut changed = 0;
    // Half of the kills shall come too late, on a fast machine and on a slow one.
    let mut span = 80_000;
    for round in 0..40 {
        let before = names(&image);
        let name = format!("s{round}");
        let line = match (round % 4, before.get(1)) {
            (1, Some(one)) => vec!["snapshot", "delete", &image, one],
            (2, _) => vec!["snapshot", "apply", &image, "kept"],
            (3, _) => vec!["snapshot", "save", &image, &name, "--state", &state],
            _ => vec!["snapshot", "create", &image, &name],
        };
        let mut child = Command::new(binary())
            .args(&line)
            .stderr(Stdio::null())
            .spawn()
            .expect("gaur starts");
        std::thread::sleep(Duration::from_micros(random.below(span)));
        child.kill().expect("it can be killed");
        child.wait().expect("it can be waited for");
        // The kernel holds the lock of a killed process with a ring for a moment.
        let mut check = qemu_img(&["check", &image]);
        while check.stderr.contains("lock") {
            std::thread::sleep(Duration::from_millis(20));
            check = qemu_img(&["check", &image]);
        }
        assert!(check.code == 0 || check.code == 3, "{line:?}: {check}");
        let after = names(&image);
        changed += usize::from(before != after);
        if round % 4 != 2 {
            let late = before != after;
            span = if late { span * 2 / 3 } else { span * 3 / 2 };
        }
        let diff = before.len().abs_diff(after.len());
        assert!(diff <= 1, "{line:?}: {before:?}, then {after:?}");
        assert!(after.iter().any(|name| name == "kept"), "{after:?}");
        qemu_img(&["check", "-q", "-r", "leaks", &image]).ok();
    }
    assert!(changed > 0, "some went through");
    assert_same_view(("qcow2", &image), ("raw", &view));
    let back = scratch.path("back");
    gaur(&["snapshot", "extract", &image, "kept", "--to", &back]).ok();
    assert_same_bytes(&state, &back);
}
