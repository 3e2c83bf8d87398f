//! A registry of container images: Debian's `docker-registry`, with disks in images as KubeVirt has them.
//!
//! Such an image (a *containerDisk*) is one layer, a tar file with `disk/NAME.qcow2`, compressed or not. What is pushed
//! goes over plain HTTP, by curl, in the steps of the OCI distribution specification ("Pushing a blob monolithically").

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::daemon::{Daemon, wait_for};
use super::faulty::FaultyStore;
use super::ports::{ask, free};
use crate::packages::unpacked;
use crate::scratch::Scratch;
use crate::tool::{Run, run, run_for};

/// Longest time until it answers.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a port is looked for that stays free until the registry has it.
const STARTS: u32 = 3;
/// Longest time for packing or a transfer, in seconds.
const TRANSFER_SECONDS: u32 = 600;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";

/// Who may read and write a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// All.
    Open,
    /// [`USER`] with [`PASSWORD`].
    Password,
    /// Who has fetched a token from where the registry says, as in public registries. The user of a push is asked for
    /// nothing.
    Token,
}

/// The user of [`Access::Password`].
pub const USER: &str = "tests";
/// Its password.
pub const PASSWORD: &str = "a-password-of-the-tests";
/// The password's bcrypt.
const PASSWORD_HASH: &str = "$2y$05$abcdefghijklmnopqrstuu6O/jaYCx8zhCexxqCBsInzagwRDBqGq";
const TOKEN: &str = "a-token-of-the-tests";

/// The form of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// A plain tar file: a disk in it can be read by ranges.
    Tar,
    /// A tar file in gzip.
    TarGzip,
}

/// An image in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushedImage {
    /// `sha256:...` of the manifest.
    pub digest: String,
    /// Length of the manifest.
    pub len_bytes: u64,
    /// `sha256:...` of the layer, as it is stored.
    pub layer_digest: String,
    /// Length of the layer, as it is stored.
    pub layer_len_bytes: u64,
    /// Where the disk begins in the tar file, once that is not compressed.
    pub disk_offset: u64,
}

/// A running registry.
#[derive(Debug)]
pub struct Registry {
    // The process ends before its folder is removed.
    daemon: Daemon,
    tokens: Option<FaultyStore>,
    access: Access,
    port: u16,
    scratch: Scratch,
}

impl Registry {
    /// Starts an empty one.
    #[track_caller]
    pub fn start(access: Access) -> Registry {
        let tokens = (access == Access::Token).then(|| {
            let tokens = FaultyStore::start();
            let token = json!({"token": TOKEN, "access_token": TOKEN, "expires_in": 300});
            tokens.put("/token", token.to_string().into_bytes());
            tokens
        });
        let scratch = Scratch::new("registry");
        for _ in 0..STARTS {
            let [port] = free(&[0]);
            let config = config(&scratch, port, tokens.as_ref(), access);
            let program = unpacked("docker-registry").join("usr/bin/docker-registry");
            let mut command = Command::new(program);
            command.args(["serve", &config]);
            let daemon = Daemon::start(&command, &scratch.path("log"));
            let answers = || ask(port, "/v2/").is_some_and(|said| said.starts_with("HTTP/1."));
            let over = wait_for(PATIENCE, || answers() || !daemon.is_running());
            assert!(over, "not ready: {}", daemon.last_words());
            if daemon.is_running() {
                return Registry {
                    daemon,
                    tokens,
                    access,
                    port,
                    scratch,
                };
            }
        }
        panic!("docker-registry does not start: {}", scratch.path("log"));
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its name in references to images: `127.0.0.1:PORT`.
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The reference to an image: `oci://127.0.0.1:PORT/name:tag`.
    pub fn reference(&self, name: &str, tag: &str) -> String {
        format!("oci://{}/{name}:{tag}", self.host())
    }

    /// The URL of a blob of an image.
    pub fn blob_url(&self, name: &str, digest: &str) -> String {
        format!("http://{}/v2/{name}/blobs/{digest}", self.host())
    }

    /// Process number.
    pub fn process(&self) -> u32 {
        self.daemon.id()
    }

    /// The server of tokens, of [`Access::Token`]: it tells who has asked for one, and can fail.
    pub fn tokens(&self) -> Option<&FaultyStore> {
        self.tokens.as_ref()
    }

    /// Pushes an image with a file as its disk, `disk/` and the file's name, and gives it a tag.
    #[track_caller]
    pub fn push_disk(&self, name: &str, tag: &str, disk: &str, layer: Layer) -> PushedImage {
        // Gone at the end: it is as large as the disk.
        let work = Scratch::new("push");
        let (tar, disk_offset) = pack(&work, disk);
        let diff_id = digest(&tar);
        let (file, media_type) = match layer {
            Layer::Tar => (tar, TAR.to_owned()),
            Layer::TarGzip => {
                run_for("gzip", &["-1", "--no-name", &tar], TRANSFER_SECONDS).ok();
                (format!("{tar}.gz"), format!("{TAR}+gzip"))
            }
        };
        let config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        });
        let config = work.file("config", config.to_string().as_bytes());
        let layer = self.push_blob(name, &file, &media_type);
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.push_blob(name, &config, CONFIG),
            "layers": [layer],
        });
        let pushed = self.push_manifest(&work, name, tag, &manifest);
        PushedImage {
            digest: text_of(&pushed, "digest"),
            len_bytes: pushed["size"].as_u64().expect("it is a number"),
            layer_digest: text_of(&layer, "digest"),
            layer_len_bytes: layer["size"].as_u64().expect("it is a number"),
            disk_offset,
        }
    }

    /// Pushes an index of images for architectures (`amd64`, `arm64`), and gives it a tag; its digest.
    #[track_caller]
    pub fn push_index(&self, name: &str, tag: &str, images: &[(&str, &PushedImage)]) -> String {
        let manifest = |(architecture, image): &(&str, &PushedImage)| {
            json!({
                "mediaType": MANIFEST,
                "digest": image.digest,
                "size": image.len_bytes,
                "platform": {"architecture": architecture, "os": "linux"},
            })
        };
        let manifests: Vec<Value> = images.iter().map(manifest).collect();
        let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
        let work = Scratch::new("push");
        text_of(&self.push_manifest(&work, name, tag, &index), "digest")
    }

    /// Pushes a file; its descriptor.
    #[track_caller]
    fn push_blob(&self, name: &str, file: &str, media_type: &str) -> Value {
        let descriptor = descriptor(file, media_type);
        let url = format!("http://{}/v2/{name}/blobs/uploads/", self.host());
        let begun = self.curl(&[
            "--request",
            "POST",
            "--data",
            "",
            "--dump-header",
            "-",
            &url,
        ]);
        let location = begun.stdout.lines().find_map(|line| {
            let (header, value) = line.split_once(": ")?;
            header
                .eq_ignore_ascii_case("location")
                .then(|| value.trim())
        });
        let location = location.unwrap_or_else(|| panic!("where to upload to: {begun}"));
        let join = if location.contains('?') { '&' } else { '?' };
        let url = format!("{location}{join}digest={}", text_of(&descriptor, "digest"));
        let binary = "Content-Type: application/octet-stream";
        self.curl(&["--header", binary, "--upload-file", file, &url]);
        descriptor
    }

    /// Pushes a manifest or an index; its descriptor.
    #[track_caller]
    fn push_manifest(&self, work: &Scratch, name: &str, tag: &str, manifest: &Value) -> Value {
        let media_type = text_of(manifest, "mediaType");
        let file = work.file("manifest", manifest.to_string().as_bytes());
        let url = format!("http://{}/v2/{name}/manifests/{tag}", self.host());
        let header = format!("Content-Type: {media_type}");
        self.curl(&["--header", &header, "--upload-file", &file, &url]);
        descriptor(&file, &media_type)
    }

    /// Runs `curl` with what the registry wants to know of its user.
    #[track_caller]
    fn curl(&self, arguments: &[&str]) -> Run {
        let user = format!("{USER}:{PASSWORD}");
        let token = format!("Authorization: Bearer {TOKEN}");
        let mut line = vec!["--silent", "--show-error", "--fail"];
        match self.access {
            Access::Open => {}
            Access::Password => line.extend(["--user", &user]),
            Access::Token => line.extend(["--header", &token]),
        }
        line.extend(arguments);
        run_for("curl", &line, TRANSFER_SECONDS).ok()
    }

    /// The folder with what was pushed.
    pub fn folder(&self) -> String {
        self.scratch.path("storage")
    }
}

/// The registry's configuration, as YAML; JSON is that.
fn config(scratch: &Scratch, port: u16, tokens: Option<&FaultyStore>, access: Access) -> String {
    let mut config = json!({
        "version": "0.1",
        "log": {"level": "warn", "accesslog": {"disabled": true}},
        "storage": {
            "filesystem": {"rootdirectory": scratch.path("storage")},
            "delete": {"enabled": true},
        },
        "http": {"addr": format!("127.0.0.1:{port}")},
    });
    if access == Access::Password {
        let users = format!("{USER}:{PASSWORD_HASH}\n");
        let users = scratch.file("users", users.as_bytes());
        config["auth"] = json!({"htpasswd": {"realm": "tests", "path": users}});
    }
    if let Some(tokens) = tokens {
        // It takes any token, and says where to get one.
        config["auth"] = json!({"silly": {"realm": tokens.url("/token"), "service": "tests"}});
    }
    scratch.file("config.yml", config.to_string().as_bytes())
}

/// Packs a file as a disk into a tar file; its path, and where the disk begins in it.
#[track_caller]
fn pack(work: &Scratch, disk: &str) -> (String, u64) {
    let disk = std::fs::canonicalize(disk).expect("the disk is there");
    let name = disk.file_name().expect("it is a file");
    let folder = work.folder().join("disk");
    std::fs::create_dir(&folder).expect("scratch holds folders");
    std::os::unix::fs::symlink(&disk, folder.join(name)).expect("scratch holds links");
    let tar = work.path("layer.tar");
    let root = work.path("");
    let owner = [
        "--owner=107",
        "--group=107",
        "--numeric-owner",
        "--mtime=@0",
    ];
    let all = ["--dereference", "-C", &root, "-cf", &tar, "disk"];
    run_for("tar", &[&owner[..], &all].concat(), TRANSFER_SECONDS).ok();
    // "block 1: disk/NAME", in blocks of 512 bytes, of the header, which one block of data follows.
    let listing = run("tar", &["--list", "--block-number", "--file", &tar]).ok();
    let suffix = format!(": disk/{}", Path::new(name).display());
    let line = listing.stdout.lines().find(|line| line.ends_with(&suffix));
    let block = line.and_then(|line| line.strip_prefix("block ")?.split(':').next());
    let block: Option<u64> = block.and_then(|block| block.parse().ok());
    let block = block.unwrap_or_else(|| panic!("no disk: {listing}"));
    (tar, (block + 1) * 512)
}

/// What a manifest says of a blob.
#[track_caller]
fn descriptor(file: &str, media_type: &str) -> Value {
    let len_bytes = std::fs::metadata(file).expect("it is there").len();
    json!({"mediaType": media_type, "digest": digest(file), "size": len_bytes})
}

#[track_caller]
fn digest(file: &str) -> String {
    let sum = run_for("sha256sum", &[file], TRANSFER_SECONDS).ok();
    let hex = sum.stdout.split(' ').next().unwrap_or_default();
    format!("sha256:{hex}")
}

#[track_caller]
fn text_of(value: &Value, name: &str) -> String {
    value[name].as_str().expect("it is text").to_owned()
}
