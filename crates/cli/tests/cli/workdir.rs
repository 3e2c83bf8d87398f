//! A directory with images, and commands run in it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// The command under test.
pub const GAUR: &str = env!("CARGO_BIN_EXE_gaur");

/// What a command answered.
#[derive(Debug)]
pub struct Answer {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Answer {
    fn new(output: &Output) -> Answer {
        Answer {
            code: output.status.code().expect("the command exits"),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Standard output as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Fails unless the command went well; returns its output.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.out
    }

    /// Fails unless the command failed with `code` and one line that has all of `words`.
    #[track_caller]
    pub fn fails(self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        assert_eq!(self.err.lines().count(), 1, "one line: {self:?}");
        assert!(self.err.starts_with("gaur: "), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "'{word}' in {self:?}");
        }
    }
}

/// A directory that commands run in.
pub struct WorkDir(TempDir);

impl WorkDir {
    /// An empty one.
    pub fn new() -> WorkDir {
        WorkDir(tempfile::tempdir().expect("a temporary directory"))
    }

    /// The path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A command to be run in it.
    pub fn command(&self, program: impl AsRef<Path>, args: &[&str]) -> Command {
        let mut command = Command::new(program.as_ref());
        command
            .current_dir(self.0.path())
            .args(args)
            .stdin(Stdio::null());
        command
    }

    fn run(&self, program: &str, args: &[&str]) -> Answer {
        let output = self.command(program, args).output();
        let output = output.unwrap_or_else(|error| panic!("cannot run {program}: {error}"));
        Answer::new(&output)
    }

    /// Runs the command under test. It is allowed what the one image of the gallery needs whose base
    /// lies above its directory.
    pub fn gaur(&self, args: &[&str]) -> Answer {
        match args {
            [verb, rest @ ..] if rest.contains(&"sub/over.qcow2") => {
                self.run(GAUR, &[&[*verb, "--allow", "."], rest].concat())
            }
            _ => self.run(GAUR, args),
        }
    }

    /// Runs `qemu-img`.
    pub fn qemu_img(&self, args: &[&str]) -> Answer {
        self.run("qemu-img", args)
    }

    /// Runs commands of `qemu-io` on an image.
    pub fn qemu_io(&self, image: &str, commands: &[&str]) {
        let mut args = vec!["-f", "qcow2"];
        for command in commands {
            args.extend(["-c", command]);
        }
        args.push(image);
        let answer = self.run("qemu-io", &args);
        assert!(
            answer.code == 0 && !answer.out.contains("failed"),
            "{commands:?}: {answer:?}"
        );
    }

    /// Runs commands of `qemu-io`, the last of which ends it without closing the image.
    pub fn qemu_io_killed(&self, image: &str, commands: &[&str]) {
        let args = commands.iter().flat_map(|command| ["-c", command]);
        let args: Vec<&str> = args.chain([image]).collect();
        let status = self.command("qemu-io", &args).status().expect("qemu-io");
        assert_eq!(status.code(), None, "it was ended by a signal");
    }

    /// Runs both tools with the same arguments; fails unless code and output are the same.
    #[track_caller]
    pub fn same(&self, args: &[&str]) -> Answer {
        let (ours, theirs) = (self.gaur(args), self.qemu_img(args));
        assert_eq!(ours.code, theirs.code, "{args:?}: {ours:?} {theirs:?}");
        assert_eq!(ours.out, theirs.out, "{args:?}");
        ours
    }

    /// Fails unless QEMU finds nothing wrong with a qcow2 image.
    #[track_caller]
    pub fn check_clean(&self, image: &str) {
        self.qemu_img(&["check", "-f", "qcow2", image]).ok();
    }

    /// Fails unless QEMU sees the same bytes in both.
    #[track_caller]
    pub fn identical(&self, left: &str, right: &str) {
        self.qemu_img(&["compare", left, right]).ok();
    }

    /// Bytes of a file.
    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).expect("a file to read")
    }

    /// Changes bytes of a file.
    pub fn patch(&self, name: &str, offset: usize, bytes: &[u8]) {
        let mut all = self.read(name);
        all[offset..offset + bytes.len()].copy_from_slice(bytes);
        std::fs::write(self.path(name), all).expect("a file to write");
    }

    /// Makes an image with QEMU.
    pub fn qemu_create(&self, args: &[&str]) {
        let words = ["create", "-q", "-f", "qcow2"];
        self.qemu_img(&[&words, args].concat()).ok();
    }

    /// Makes images of every kind, and returns their names: plain, version 2, extended L2 on a
    /// shorter base, compressed, with snapshots and bitmaps, empty, and one in another directory.
    pub fn gallery(&self) -> Vec<&'static str> {
        self.hang_layers();
        self.hang_singles();
        vec![
            "base.qcow2",
            "top.qcow2",
            "packed.qcow2",
            "old.qcow2",
            "rich.qcow2",
            "empty.qcow2",
            "sub/over.qcow2",
        ]
    }

    fn hang_layers(&self) {
        self.qemu_create(&["base.qcow2", "64M"]);
        let data = ["write -P 1 0 1M", "write -P 2 5M 3M", "write -P 9 63M 1M"];
        self.qemu_io("base.qcow2", &[&data[..], &["write -z 20M 1M"]].concat());
        let on_base = ["-b", "base.qcow2", "-F", "qcow2", "top.qcow2", "100M"];
        self.qemu_create(&[&["-o", "extended_l2=on"], &on_base[..]].concat());
        let data = [
            "write -P 3 6M 10k",
            "write -P 4 90M 1M",
            "write -P 5 65534k 4k",
        ];
        self.qemu_io("top.qcow2", &[&data[..], &["write -z 512k 100k"]].concat());
        self.qemu_img(&["convert", "-c", "-O", "qcow2", "top.qcow2", "packed.qcow2"])
            .ok();
        std::fs::create_dir(self.path("sub")).expect("a directory");
        let on_top = [
            "-b",
            "../top.qcow2",
            "-F",
            "qcow2",
            "sub/over.qcow2",
            "120M",
        ];
        self.qemu_create(&[&["-u"], &on_top[..]].concat());
        self.qemu_io("sub/over.qcow2", &["write -P 6 33M 70k"]);
    }

    fn hang_singles(&self) {
        self.qemu_create(&["empty.qcow2", "0"]);
        self.qemu_create(&["-o", "compat=0.10,cluster_size=4k", "old.qcow2", "3M"]);
        self.qemu_io("old.qcow2", &["write -P 7 1000k 100k"]);
        self.qemu_create(&[
            "-o",
            "lazy_refcounts=on,refcount_bits=64",
            "rich.qcow2",
            "1G",
        ]);
        self.qemu_io("rich.qcow2", &["write -P 8 0 256k"]);
        self.qemu_img(&["snapshot", "-c", "before the storm", "rich.qcow2"])
            .ok();
        self.qemu_io("rich.qcow2", &["write -P 9 64k 64k", "write -P 9 600M 64k"]);
        self.qemu_img(&["snapshot", "-c", "two", "rich.qcow2"]).ok();
        self.qemu_img(&["bitmap", "--add", "rich.qcow2", "days"])
            .ok();
        let weeks = [
            "bitmap",
            "--add",
            "-g",
            "1M",
            "--disable",
            "rich.qcow2",
            "weeks",
        ];
        self.qemu_img(&weeks).ok();
    }
}
