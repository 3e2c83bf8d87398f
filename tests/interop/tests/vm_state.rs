//! The state of virtual machines: what QEMU saved Gaur reads byte for byte, and QEMU loads what Gaur
//! saved.

use gaur_interop::builder::{create, noise};
use gaur_interop::compare::assert_same_bytes;
use gaur_interop::gaur::gaur;
use gaur_interop::layout::Layout;
use gaur_interop::machine::{LOADED_AT, Machine};
use gaur_interop::random::Random;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{assert_clean, qemu_img, run};

const MIB: u64 = 1 << 20;

/// An image with the state of a machine whose memory holds `memory`, saved by QEMU as `qemu`.
fn saved_by_qemu(scratch: &Scratch, layout: &Layout, memory: &str) -> String {
    let image = scratch.path("theirs.qcow2");
    create(&image, layout);
    let mut machine = Machine::start(&image, Some(memory), None);
    machine.monitor("savevm qemu");
    machine.quit();
    image
}

fn state_bytes(image: &str, name: &str) -> u64 {
    let info = qemu_img(&["info", "--output=json", image]).ok().json();
    let snapshots = info["snapshots"].as_array().expect("there are snapshots");
    let one = snapshots.iter().find(|one| one["name"] == name);
    one.expect("the snapshot is listed")["vm-state-size"]
        .as_u64()
        .expect("a state has a size")
}

/// The state of an applied snapshot as QEMU reads it.
fn read_by_qemu(image: &str, len: u64) -> Vec<u8> {
    let command = format!("read -b -v 0 {}", len.next_multiple_of(512));
    let dump = run("qemu-io", &["-r", "-f", "qcow2", "-c", &command, image]).ok();
    let mut bytes = Vec::new();
    for line in dump.stdout.lines() {
        // 00000010:  51 45 56 4d ...  QEVM
        let Some((offset, rest)) = line.split_once(":  ") else {
            continue;
        };
        if u64::from_str_radix(offset, 16) != Ok(bytes.len() as u64) {
            continue;
        }
        let words = rest.get(..47).unwrap_or(rest).split(' ');
        bytes.extend(words.filter_map(|word| u8::from_str_radix(word, 16).ok()));
    }
    bytes.truncate(len as usize);
    bytes
}

fn extract(image: &str, name: &str, to: &str) {
    gaur(&["snapshot", "extract", image, name, "--to", to]).ok();
}

/// The machine's memory as it is after QEMU has loaded snapshot `name`.
fn loaded_by_qemu(scratch: &Scratch, image: &str, name: &str, len: u64) -> String {
    let path = scratch.path("memory");
    let mut machine = Machine::start(image, None, Some(name));
    machine.memory_to(LOADED_AT, len, &path);
    machine.quit();
    path
}

/// QEMU saves into one image, Gaur carries the state over to one of another shape, QEMU goes on there.
fn there_and_back(layout: Layout) {
    let scratch = Scratch::new("state");
    let memory = noise(&scratch);
    let theirs = saved_by_qemu(&scratch, &Layout::v3(65536), &memory);
    let state = scratch.path("state");
    extract(&theirs, "qemu", &state);

    let ours = scratch.path("ours.qcow2");
    create(&ours, &layout);
    gaur(&["snapshot", "create", &ours, "before"]).ok();
    gaur(&["snapshot", "save", &ours, "gaur", "--state", &state]).ok();
    gaur(&["snapshot", "create", &ours, "after"]).ok();
    assert_clean(&ours);
    gaur(&["check", &ours]).ok();
    let len = std::fs::metadata(&state).expect("it was written").len();
    assert_eq!(state_bytes(&ours, "gaur"), len);
    let back = scratch.path("back");
    extract(&ours, "gaur", &back);
    assert_same_bytes(&state, &back);

    let found = loaded_by_qemu(&scratch, &ours, "gaur", MIB);
    assert_same_bytes(&memory, &found);
    assert_clean(&ours);
    // QEMU saves once more, beside Gaur's.
    let mut machine = Machine::start(&ours, None, Some("gaur"));
    machine.monitor("savevm again");
    machine.quit();
    assert_clean(&ours);
    gaur(&["check", &ours]).ok();
    gaur(&["snapshot", "delete", &ours, "gaur"]).ok();
    gaur(&["snapshot", "delete", &ours, "before"]).ok();
    assert_clean(&ours);
    let found = loaded_by_qemu(&scratch, &ours, "again", MIB);
    assert_same_bytes(&memory, &found);
    for name in ["again", "after"] {
        gaur(&["snapshot", "delete", &ours, name]).ok();
        assert_clean(&ours);
    }
}

mod loaded_by_qemu {
    gaur_interop::layout_tests! { crate::there_and_back, |layout| layout;
        v2_64k: v2(65536); v2_4k: v2(4096); v3_64k: v3(65536); v3_4k: v3(4096); v3_2m: v3(2 << 20);
        extended_16k: extended(16384); extended_64k: extended(65536); extended_2m: extended(2 << 20);
    }
}

/// What QEMU reads of the state it saved is what Gaur extracts.
fn extracted(layout: Layout) {
    let scratch = Scratch::new("extract");
    let image = saved_by_qemu(&scratch, &layout, &noise(&scratch));
    let len = state_bytes(&image, "qemu");
    assert!(len > MIB, "the noise is in it");
    let state = scratch.path("state");
    extract(&image, "qemu", &state);
    qemu_img(&["snapshot", "-a", "qemu", &image]).ok();
    let expected = scratch.file("expected", &read_by_qemu(&image, len));
    assert_same_bytes(&state, &expected);
}

mod saved_by_qemu {
    gaur_interop::layout_tests! { crate::extracted, |layout| layout;
        v2_64k: v2(65536); v3_4k: v3(4096); v3_64k: v3(65536); v3_2m: v3(2 << 20);
        extended_16k: extended(16384); extended_64k: extended(65536);
    }
}

#[test]
fn vm_states_of_any_length_round_trip() {
    let scratch = Scratch::new("lengths");
    let image = scratch.path("a.qcow2");
    create(&image, &Layout::extended(65536));
    let bytes = Random::new(3).bytes(5 << 20);
    for (number, len) in [1, 511, 512, 65535, 65537, 5 << 20].into_iter().enumerate() {
        let name = format!("s{number}");
        let state = scratch.file("state", &bytes[..len]);
        gaur(&["snapshot", "save", &image, &name, "--state", &state]).ok();
        assert_eq!(state_bytes(&image, &name), len as u64);
    }
    assert_clean(&image);
    for (number, len) in [1, 511, 512, 65535, 65537, 5 << 20].into_iter().enumerate() {
        let (back, name) = (scratch.path("back"), format!("s{number}"));
        extract(&image, &name, &back);
        let state = scratch.file("state", &bytes[..len]);
        assert_same_bytes(&state, &back);
    }
}

/// The disk grows between two snapshots: each has its state behind the end the disk had.
#[test]
fn vm_state_is_stored_behind_the_snapshot_disk_size() {
    let scratch = Scratch::new("sizes");
    let memory = noise(&scratch);
    let image = saved_by_qemu(&scratch, &Layout::v3(65536), &memory);
    let state = scratch.path("state");
    extract(&image, "qemu", &state);
    gaur(&["resize", &image, "2G"]).ok();
    gaur(&["snapshot", "save", &image, "larger", "--state", &state]).ok();
    assert_clean(&image);
    for name in ["qemu", "larger"] {
        let back = scratch.path("back");
        extract(&image, name, &back);
        assert_same_bytes(&state, &back);
        let found = loaded_by_qemu(&scratch, &image, name, MIB);
        assert_same_bytes(&memory, &found);
        assert_clean(&image);
    }
    let info = qemu_img(&["info", "--output=json", &image]).ok().json();
    assert_eq!(info["virtual-size"].as_u64(), Some(2 << 30));
    gaur(&["snapshot", "apply", &image, "qemu"]).ok();
    let info = qemu_img(&["info", "--output=json", &image]).ok().json();
    assert_eq!(
        info["virtual-size"].as_u64(),
        Some(Layout::v3(65536).size_bytes())
    );
    assert_clean(&image);
}
