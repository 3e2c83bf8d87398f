//! A running NBD server: ours or QEMU's.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::tool::{Run, run};

/// Longest time from a server's start to its first answer, and from the request to stop to its
/// end.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server on a Unix socket; killed on drop unless it was stopped.
#[derive(Debug)]
pub struct Server {
    child: Option<Child>,
    command: String,
    socket: String,
}

impl Server {
    /// Starts a server that listens on `socket`, and waits until it does.
    #[track_caller]
    pub fn start(command: Command, socket: &str) -> Server {
        match Server::try_start(command, socket) {
            Ok(server) => server,
            Err(run) => panic!("the server did not start: {run}"),
        }
    }

    /// Starts a server that may refuse; then what it said is returned.
    pub fn try_start(mut command: Command, socket: &str) -> Result<Server, Run> {
        let text = format!("{command:?}");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{text}: {error}"));
        let start = Instant::now();
        loop {
            if let Ok(Some(_)) = child.try_wait() {
                return Err(end_of(child, &text));
            }
            if greets(socket) {
                break;
            }
            if start.elapsed() > PATIENCE {
                child.kill().expect("a child can be killed");
                return Err(end_of(child, &text));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Server {
            child: Some(child),
            command: text,
            socket: socket.to_owned(),
        })
    }

    /// QEMU's server over an image, read-only or not.
    #[track_caller]
    pub fn qemu(image: &str, format: &str, socket: &str, read_only: bool) -> Server {
        let mut command = Command::new("qemu-nbd");
        command.args([
            "--persistent",
            "--shared=8",
            "--discard=unmap",
            "--socket",
            socket,
        ]);
        command.args(["--format", format]);
        if read_only {
            command.arg("--read-only");
        }
        command.arg(image);
        Server::start(command, socket)
    }

    /// The URI of its default export.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket)
    }

    /// Process number.
    pub fn id(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Sends a signal by its name, `TERM` for example.
    pub fn signal(&self, name: &str) {
        run("kill", &["-s", name, &self.id().to_string()]).ok();
    }

    /// Asks the server to stop and asserts that it did so in good order.
    #[track_caller]
    pub fn stop(mut self) {
        self.signal("TERM");
        let run = self.wait();
        assert_eq!(run.code, 0, "the server did not stop in good order: {run}");
        assert!(!run.stderr.contains("panicked"), "{run}");
    }

    /// Kills the server, as a crash would.
    pub fn kill(mut self) {
        self.signal("KILL");
        self.wait();
    }

    /// Waits for its end, at most as long as patience lasts.
    #[track_caller]
    pub fn wait(&mut self) -> Run {
        let mut child = self.child.take().expect("a server ends once");
        let start = Instant::now();
        while child
            .try_wait()
            .expect("a child can be waited for")
            .is_none()
        {
            if start.elapsed() > PATIENCE {
                child.kill().expect("a child can be killed");
                panic!("does not stop: {}", end_of(child, &self.command));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        end_of(child, &self.command)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended by itself; then there is nothing to kill.
            let _ = child.kill();
            let run = end_of(child, &self.command);
            if std::thread::panicking() {
                eprintln!("the server said: {run}");
            }
        }
    }
}

/// Whether a server on the socket starts to speak: one that listens may still find out that it
/// cannot open its image.
fn greets(socket: &str) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else {
        return false;
    };
    let mut greeting = [0; 8];
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .is_ok()
        && stream.read_exact(&mut greeting).is_ok()
        && greeting == *b"NBDMAGIC"
}

/// What a child that has ended left behind.
fn end_of(child: Child, command: &str) -> Run {
    use std::os::unix::process::ExitStatusExt;
    let output = child.wait_with_output().expect("a child can be waited for");
    let signal = output.status.signal().unwrap_or_default();
    Run {
        command: command.to_owned(),
        code: output.status.code().unwrap_or(128 + signal),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}
