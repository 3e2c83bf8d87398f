//! QEMU's tools, and bytes of the files they work on.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::process::{Command, Output};

use gaur_format::plan::{CreateOptions, Plan};

use super::Json;

fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).output();
    output.unwrap_or_else(|error| panic!("{program} is needed for this test: {error}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs `qemu-img`, which must succeed; gives what it prints.
pub fn img(arguments: &[&str]) -> String {
    let output = run("qemu-img", arguments);
    assert!(
        output.status.success(),
        "qemu-img {arguments:?}: {}",
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Runs `qemu-io` with one `-c` for each command.
pub fn io(path: &str, commands: &[&str]) -> String {
    // These images need not survive a power cut: no time is spent on flushes.
    let mut arguments = vec!["-t", "unsafe", path];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    let output = run("qemu-io", &arguments);
    assert!(
        output.status.success(),
        "qemu-io {arguments:?}: {}",
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// What `qemu-img check` says, whatever its exit code.
pub fn check(path: &str) -> Json {
    check_with(&["-f", "qcow2", path])
}

/// What `qemu-img check` says of an image encrypted with LUKS.
pub fn check_luks(path: &str, secret: &str) -> Json {
    let object = format!("secret,id=s,data={secret}");
    let image = format!("driver=qcow2,file.filename={path},encrypt.key-secret=s");
    check_with(&["--object", &object, "--image-opts", &image])
}

fn check_with(arguments: &[&str]) -> Json {
    let output = run(
        "qemu-img",
        &[&["check", "--output=json"], arguments].concat(),
    );
    let stdout = text(&output.stdout);
    assert!(
        stdout.contains('{'),
        "qemu-img check {arguments:?}: {}",
        text(&output.stderr)
    );
    Json(stdout)
}

/// The text `qemu-img check` prints about faults.
pub fn check_text(path: &str) -> String {
    let output = run("qemu-img", &["check", "-f", "qcow2", path]);
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

/// Has `qemu-img check` repair an image; whether it is sound then.
pub fn repair(path: &str) -> bool {
    run(
        "qemu-img",
        &["check", "-q", "-f", "qcow2", "-r", "all", path],
    )
    .status
    .success()
}

/// What `qemu-img measure` says of an image without data.
pub fn measure(options: &CreateOptions) -> Json {
    let list = format!(
        "cluster_size={},refcount_bits={},extended_l2={}",
        1u64 << options.cluster_bits,
        1 << options.refcount_order,
        if options.extended_l2 { "on" } else { "off" }
    );
    let size = options.size_bytes.to_string();
    Json(img(&[
        "measure",
        "--output=json",
        "-O",
        "qcow2",
        "-o",
        &list,
        "--size",
        &size,
    ]))
}

/// Executes a plan on a new file.
pub fn write_plan(path: &str, plan: &Plan) {
    let file = File::create(path).unwrap();
    file.set_len(plan.len_bytes).unwrap();
    for (offset, bytes) in &plan.writes {
        assert!(
            offset.0 + bytes.len() as u64 <= plan.len_bytes,
            "a write lies inside the file"
        );
        file.write_all_at(bytes, offset.0).unwrap();
    }
}

/// Overwrites bytes of a file.
pub fn poke(path: &str, offset: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

/// Bytes of a file; zeros after its end.
pub fn peek(path: &str, offset: u64, len: usize) -> Vec<u8> {
    super::driver::read(&File::open(path).unwrap(), offset, len as u64)
}

/// A big-endian number of a file.
pub fn peek_u64(path: &str, offset: u64) -> u64 {
    u64::from_be_bytes(peek(path, offset, 8).try_into().unwrap())
}
