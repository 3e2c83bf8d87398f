//! Images of formats that are not read here, made by QEMU: no verb takes one for a raw disk by itself.
//!
//! The story: a user moved from another hypervisor and ran `gaur convert -O qcow2 real.vmdk x.qcow2`.
//! It ended with exit code 0, and x.qcow2 had the VMDK container where the disk should have been.
//! `create -b real.vmdk` even advised `-F raw`.

use std::process::Command;

use gaur_interop::gaur::{binary, gaur};
use gaur_interop::nbd::Server;
use gaur_interop::scratch::Scratch;
use gaur_interop::tool::{Run, qemu_img};

/// How a container is made of a raw disk.
struct Container {
    /// QEMU's name of the format.
    driver: &'static str,
    /// What a message calls it.
    shown: &'static str,
}

const fn container(driver: &'static str, shown: &'static str) -> Container {
    Container { driver, shown }
}

const CONTAINERS: [Container; 3] = [
    container("qed", "QED"),
    container("parallels", "Parallels"),
    container("qcow", "qcow (version 1)"),
];

impl Container {
    /// Makes one of the disk.
    fn make(&self, scratch: &Scratch, disk: &str) -> String {
        let name = scratch.path("container");
        let into = ["-O", self.driver];
        let words = [&["convert", "-f", "raw"], &into[..], &[disk, &name]];
        qemu_img(&words.concat()).ok();
        name
    }
}

fn disk(scratch: &Scratch) -> String {
    let bytes: Vec<u8> = (0..3 << 20).map(|at: u32| (at >> 9) as u8 | 1).collect();
    scratch.file("disk", &bytes)
}

#[track_caller]
fn names(run: Run, container: &Container, hint: &str) {
    let run = run.refused();
    let looks = format!(
        "looks like a {} image, which is not supported",
        container.shown
    );
    assert!(run.stderr.contains(&looks), "{run}");
    assert!(run.stderr.contains(hint), "{run}");
}

#[test]
fn every_verb_refuses_a_foreign_format_by_name() {
    for container in &CONTAINERS {
        let scratch = Scratch::new(container.driver);
        let disk = disk(&scratch);
        let image = container.make(&scratch, &disk);
        let before = std::fs::read(&image).expect("a container");
        let new = scratch.path("new.qcow2");
        let options = format!("file.filename={image}");
        let json = format!(r#"json:{{"file.filename":"{image}"}}"#);
        let insist = "-f raw takes its bytes as they are";
        for line in [
            &["info", &image][..],
            &["check", &image],
            &["map", &image],
            &["convert", "-O", "qcow2", &image, &new],
            &["compare", &image, &disk],
            &["resize", &image, "+1M"],
            &["snapshot", "list", &image],
            &["snapshot", "create", &image, "name"],
            &["snapshot", "extract", &image, "name"],
            &["bench", "-c", "1", &image],
            &["bench", "-w", "-c", "1", &image],
            &["serve", &image],
            &["serve", "-r", &image],
            &["serve", "--temporary", &image],
        ] {
            names(gaur(line), container, insist);
        }
        let other = "driver=raw takes its bytes as they are";
        names(gaur(&["info", "--image-opts", &options]), container, other);
        names(gaur(&["convert", &json, &new]), container, other);
        names(gaur(&["compare", &disk, &image]), container, "-F raw");
        names(gaur(&["convert", "-n", &disk, &image]), container, "-O raw");
        names(gaur(&["create", "-b", &image, &new]), container, "-F raw");
        let after = std::fs::read(&image).expect("a container");
        assert!(before == after, "{}: it was written to", container.driver);
        assert!(!std::path::Path::new(&new).exists());
    }
}

/// A user may mean the bytes of the container, or have a raw disk whose guest wrote one to it.
#[test]
fn explicit_raw_format_reads_the_container_bytes() {
    for container in &CONTAINERS {
        let scratch = Scratch::new(container.driver);
        let image = container.make(&scratch, &disk(&scratch));
        let copy = scratch.path("copy");
        let note = gaur(&["convert", "-f", "raw", "-O", "raw", &image, &copy])
            .ok()
            .stderr;
        assert!(
            note.contains(container.shown) && note.contains("say -f raw"),
            "{note}"
        );
        let mut bytes = std::fs::read(&image).expect("a container");
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        assert!(
            bytes == std::fs::read(&copy).expect("a copy"),
            "{}",
            container.driver
        );
        gaur(&["compare", "-f", "raw", "-F", "raw", &image, &copy]).ok();
        gaur(&[
            "info",
            "--image-opts",
            &format!("driver=raw,file.filename={image}"),
        ])
        .ok();
    }
}

#[test]
fn a_foreign_backing_file_without_a_format_is_refused_by_name() {
    for container in &CONTAINERS {
        let scratch = Scratch::new(container.driver);
        let image = container.make(&scratch, &disk(&scratch));
        let overlay = scratch.path("overlay.qcow2");
        gaur(&["create", "-q", "-b", &image, "-F", "raw", &overlay]).ok();
        gaur(&["map", &overlay]).ok();
        // An overlay of the time when formats of backing files were not recorded.
        let unsaid = std::fs::read(&overlay).expect("an overlay");
        let kind = 0xe279_2aca_u32.to_be_bytes();
        let at = unsaid
            .windows(4)
            .position(|four| four == kind)
            .expect("the extension");
        let mut bytes = unsaid;
        bytes[at..at + 4].copy_from_slice(&0x6761_7572_u32.to_be_bytes());
        std::fs::write(&overlay, bytes).expect("an overlay");
        names(
            gaur(&["map", &overlay]),
            container,
            "qemu-img rebase -u -F raw",
        );
        qemu_img(&["rebase", "-u", "-b", &image, "-F", "raw", &overlay]).ok();
        gaur(&["map", &overlay]).ok();
    }
}

#[test]
fn a_server_does_not_add_a_foreign_format_by_itself() {
    let scratch = Scratch::new("add");
    let image = CONTAINERS[0].make(&scratch, &disk(&scratch));
    let (socket, control) = (scratch.path("s"), scratch.path("c"));
    let mut command = Command::new(binary());
    command.args(["serve", "-e", "0", "-k", &socket, "--control", &control]);
    let server = Server::start(command, &socket);
    let add = ["export", "add", "--control", &control];
    names(
        gaur(&[&add[..], &[&image]].concat()),
        &CONTAINERS[0],
        "-f raw",
    );
    gaur(&[&add[..], &["-f", "raw", &image]].concat()).ok();
    server.stop();
}
