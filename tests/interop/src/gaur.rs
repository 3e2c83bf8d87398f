//! The program under test: finding it, running it, serving an image with it.

use std::process::Command;
use std::sync::OnceLock;

use crate::build_paths::{profile_dir, target_dir, workspace_dir};
use crate::nbd::Server;
use crate::tool::{Run, run, run_for};

/// The path of the `gaur` program of this build. Builds it first, with the profile and into the
/// folder of the running tests; `GAUR_BIN` names another one.
pub fn binary() -> &'static str {
    static BINARY: OnceLock<String> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Ok(path) = std::env::var("GAUR_BIN") {
            return path;
        }
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(["build", "--quiet", "--package", "gaur-cli", "--target-dir"]);
        command.arg(target_dir()).current_dir(workspace_dir());
        if profile_dir().ends_with("release") {
            command.arg("--release");
        }
        let status = command.status().expect("cargo starts");
        assert!(status.success(), "gaur cannot be built");
        profile_dir()
            .join("gaur")
            .to_str()
            .expect("the build folder has a UTF-8 name")
            .to_owned()
    })
}

/// Runs `gaur` with these arguments.
pub fn gaur(arguments: &[&str]) -> Run {
    run(binary(), arguments)
}

/// The name of the first export of the server behind a control socket.
#[track_caller]
pub fn first_export(control: &str) -> String {
    let list = gaur(&["export", "list", "--control", control, "--output", "json"]).ok();
    list.json()[0]["name"].as_str().expect("a name").to_owned()
}

/// Most memory, in KiB, and time, in seconds, that a verb may take on a hostile image.
const BOUND_KIB: u32 = 1 << 20;
const BOUND_SECONDS: u32 = 30;

/// Runs `gaur` with bounded address space and time, for hostile images.
pub fn gaur_bounded(arguments: &[&str]) -> Run {
    let limited = format!("ulimit -v {BOUND_KIB}; exec \"$0\" \"$@\"");
    let mut line = vec!["-c", &limited, binary()];
    line.extend(arguments);
    run_for("bash", &line, BOUND_SECONDS)
}

/// Serves an image for writing to up to eight clients at once until it is stopped.
#[track_caller]
pub fn serve(image: &str, socket: &str) -> Server {
    serve_with(image, socket, &[])
}

/// Serves an image with more arguments.
#[track_caller]
pub fn serve_with(image: &str, socket: &str, more: &[&str]) -> Server {
    let mut command = Command::new(binary());
    command.args(["serve", "--persistent", "--shared", "8", "--socket", socket]);
    command.args(more).arg(image);
    Server::start(command, socket)
}
