//! Our program under the names of QEMU's, first in PATH, for programs that call them.

use crate::gaur::binary;
use crate::scratch::Scratch;
use crate::tool::{Run, run_for};

/// The names.
const NAMES: [&str; 3] = ["qemu-img", "qemu-io", "qemu-nbd"];
/// Longest time a script may take, in seconds.
const SCRIPT_SECONDS: u32 = 240;

/// A folder for a script to work in. Beside it stand the programs first in PATH: they write their command line to a
/// file and then become the link to ours.
#[derive(Debug)]
pub struct InPath {
    scratch: Scratch,
}

impl InPath {
    /// Makes the folders; `name` as in [`Scratch::new`].
    pub fn new(name: &str) -> InPath {
        let scratch = Scratch::new(name);
        for folder in ["links", "bin", "work"] {
            std::fs::create_dir(scratch.path(folder)).expect("scratch holds folders");
        }
        let calls = scratch.file("calls", b"");
        for name in NAMES {
            let link = scratch.path(&format!("links/{name}"));
            std::os::unix::fs::symlink(binary(), &link).expect("scratch holds links");
            let wrapper =
                format!("#!/bin/sh\necho \"{name} $*\" >>'{calls}'\nexec '{link}' \"$@\"\n");
            let path = scratch.file(&format!("bin/{name}"), wrapper.as_bytes());
            make_executable(&path);
        }
        InPath { scratch }
    }

    /// The path of a file in the folder that scripts work in.
    pub fn path(&self, name: &str) -> String {
        self.scratch.path(&format!("work/{name}"))
    }

    /// Puts a program of the test's own into PATH.
    pub fn add(&self, name: &str, script: &str) {
        let path = self.scratch.file(&format!("bin/{name}"), script.as_bytes());
        make_executable(&path);
    }

    /// Runs a script of bash that must succeed; `$1` and on are the arguments.
    #[track_caller]
    pub fn script(&self, script: &str, arguments: &[&str]) -> Run {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", self.scratch.path("bin"));
        run_script(&path, &self.scratch.path("work"), script, arguments)
    }

    /// Runs such a script with the programs also in the places of QEMU's, for a program that clears its environment.
    #[track_caller]
    pub fn script_in_place(&self, script: &str, arguments: &[&str]) -> Run {
        let bin = self.scratch.path("bin");
        let names = NAMES.join(" ");
        let mount =
            format!("for name in {names}; do mount --bind {bin}/$name /usr/bin/$name; done");
        let inside = self
            .scratch
            .file("inside", format!("{mount}\n{script}").as_bytes());
        let mut line = vec![&*inside];
        line.extend(arguments);
        self.script("exec unshare --mount bash -euo pipefail \"$@\"", &line)
    }

    /// Runs the script with our programs and with QEMU's, each in its own folder, and asserts that it prints the same.
    /// Returns the path of a file in QEMU's folder.
    #[track_caller]
    pub fn script_beside_qemu(&self, script: &str) -> impl Fn(&str) -> String {
        let theirs = self.scratch.path("theirs");
        std::fs::create_dir(&theirs).expect("scratch holds folders");
        let path = std::env::var("PATH").unwrap_or_default();
        let expected = run_script(&path, &theirs, script, &[]);
        let seen = self.script(script, &[]);
        let expected = expected.stdout.replace(&theirs, ".");
        assert_eq!(
            seen.stdout.replace(&self.scratch.path("work"), "."),
            expected
        );
        move |name| format!("{theirs}/{name}")
    }

    /// The command lines with which our programs were called so far, with `.` for the folder that scripts work in.
    pub fn calls(&self) -> Vec<String> {
        let calls = std::fs::read_to_string(self.scratch.path("calls")).expect("the file is there");
        let work = self.scratch.path("work");
        let calls = calls.lines().map(|line| line.replace(&work, "."));
        calls.collect()
    }

    /// Asserts that a call contained these words.
    #[track_caller]
    pub fn assert_called(&self, words: &str) {
        let calls = self.calls();
        assert!(
            calls.iter().any(|call| call.contains(words)),
            "{words}: {calls:#?}"
        );
    }
}

#[track_caller]
fn run_script(path: &str, folder: &str, script: &str, arguments: &[&str]) -> Run {
    let path = format!("PATH={path}");
    let script = format!("cd \"$0\"\n{script}");
    let mut line = vec![&*path, "LC_ALL=C", "bash", "-euo", "pipefail", "-c"];
    line.extend([&*script, folder]);
    line.extend(arguments);
    run_for("env", &line, SCRIPT_SECONDS).ok()
}

fn make_executable(path: &str) {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(path, mode).expect("scratch has modes");
}
