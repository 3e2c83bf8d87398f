//! A running `gaur serve`, and its clients.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::workdir::{GAUR, WorkDir};

/// A running server.
pub struct Server {
    pub child: Child,
    /// Of its first export.
    pub uri: String,
    /// What it prints after that.
    pub rest: BufReader<std::process::ChildStdout>,
}

impl Server {
    /// Starts it and waits until clients can come.
    pub fn start(dir: &WorkDir, args: &[&str]) -> Server {
        Server::start_with(dir, args, |_| {})
    }

    /// The same after a change of the command.
    pub fn start_with(dir: &WorkDir, args: &[&str], change: impl FnOnce(&mut Command)) -> Server {
        let runtime = dir.path("runtime");
        if !runtime.exists() {
            std::fs::create_dir(&runtime).expect("a runtime directory");
        }
        let mut command = dir.command(GAUR, &[&["serve"], args].concat());
        command
            .env("XDG_RUNTIME_DIR", runtime)
            .stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().expect("the server starts");
        let mut rest = BufReader::new(child.stdout.take().expect("its output"));
        let mut uri = String::new();
        rest.read_line(&mut uri).expect("a line");
        let uri = uri.trim_end().to_owned();
        assert!(
            uri.starts_with("nbd"),
            "{args:?} prints its URI first, not '{uri}'"
        );
        Server { child, uri, rest }
    }

    /// Waits for the end; returns its exit code.
    pub fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends a signal, `-TERM`.
    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let status = Command::new("kill").args([name, &pid]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Asks it to end, and waits for that.
    pub fn stop(mut self) {
        self.signal("-TERM");
        assert_eq!(
            self.wait(),
            Some(0),
            "a server that is asked to end ends well"
        );
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended already unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a client, which must do well; returns what it prints.
#[track_caller]
pub fn client(dir: &WorkDir, program: &str, args: &[&str]) -> String {
    let output = dir.command(program, args).output();
    let output = output.unwrap_or_else(|error| panic!("cannot run {program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{program} {args:?}: {text} {errors}"
    );
    text
}
