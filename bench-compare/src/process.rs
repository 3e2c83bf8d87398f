//! Commands that run to their end, and the servers that are compared, as child processes.

use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long a server may take to listen or to end, and a device to come.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(1);

/// Runs a command to its end, and returns what it printed; it must succeed.
pub fn succeed(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    text_of(
        command,
        output.with_context(|| format!("cannot start {command:?}"))?,
    )
}

/// What a command that has ended printed; an exit status other than 0 is an error.
pub fn text_of(command: &Command, output: Output) -> Result<String> {
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{command:?}: {}, {}", output.status, complaint.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Seconds that a command takes from start to end; it must succeed.
pub fn timed(command: &mut Command) -> Result<f64> {
    let start = Instant::now();
    succeed(command)?;
    Ok(start.elapsed().as_secs_f64())
}

/// A call of `qemu-img`.
pub fn qemu_img(arguments: &[&str]) -> Command {
    let mut command = Command::new("qemu-img");
    command.args(arguments);
    command
}

/// Calls `look` until it finds something.
fn until<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("waited in vain for {what}");
        }
        std::thread::sleep(PAUSE);
    }
}

/// A server process in the foreground, which is killed when this value goes.
#[derive(Debug)]
pub struct Server(Child);

impl Server {
    /// Starts it. What it prints goes to `log`, if there is one.
    pub fn spawn(command: &mut Command, log: Option<&Path>) -> Result<Server> {
        let (stdout, stderr) = match log.map(File::create).transpose()? {
            Some(file) => (file.try_clone()?.into(), file.into()),
            None => (Stdio::null(), Stdio::null()),
        };
        let command = command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        let child = command.spawn();
        Ok(Server(child.with_context(|| {
            format!("cannot start {:?}", command.get_program())
        })?))
    }

    /// An NBD server that stays when clients leave. Tries several times if it must: the kernel takes a
    /// moment to give up the image lock of a process that was killed with a ring.
    pub fn nbd(mut command: Command, image: &Path, socket: &Path) -> Result<Server> {
        command.arg("--persistent").arg("--socket");
        command.arg(socket).arg(image);
        let mut tries = 0;
        loop {
            let _ = std::fs::remove_file(socket);
            let mut server = Server::spawn(&mut command, None)?;
            match server.wait_for("a greeting", || Ok(greets(socket).then_some(()))) {
                Err(_) if tries < 20 => {
                    tries += 1;
                    std::thread::sleep(Duration::from_millis(100));
                }
                done => return done.map(|()| server),
            }
        }
    }

    /// `qemu-nbd` on a qcow2 image, with its faster way of doing input and output through the host's
    /// cache.
    pub fn qemu_nbd(image: &Path, socket: &Path) -> Result<Server> {
        let mut command = Command::new("qemu-nbd");
        command.args(["--format=qcow2", "--shared=16", "--aio=io_uring"]);
        command.arg("--cache=writeback");
        Server::nbd(command, image, socket)
    }

    /// `gaur serve` on a qcow2 image.
    pub fn gaur_nbd(binary: &Path, image: &Path, socket: &Path) -> Result<Server> {
        let mut command = Command::new(binary);
        command.args(["serve", "--format=qcow2", "--shared=16"]);
        command.arg("--cache=writeback");
        Server::nbd(command, image, socket)
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Waits until `look` finds something; an error when the server ends before.
    pub fn wait_for<T>(
        &mut self,
        what: &str,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        until(what, PATIENCE, || match (look()?, self.0.try_wait()?) {
            (None, Some(status)) => bail!("the server ended with {status}"),
            (found, _) => Ok(found),
        })
    }

    /// Asks the server to end, and waits until it has closed its images.
    pub fn end(mut self) -> Result<ExitStatus> {
        let pid = self.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status()?;
        until("the server to end", PATIENCE, || Ok(self.0.try_wait()?))
    }

    /// The same, and it must have ended well.
    pub fn stop(self) -> Result<()> {
        let status = self.end()?;
        if !status.success() {
            bail!("the server ended with {status}");
        }
        Ok(())
    }

    /// Waits for an end that something else brings about.
    pub fn wait(&mut self) {
        let _ = self.0.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An image that matters is closed by `stop`.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether a server is there that has its image: `qemu-nbd` listens before it opens the image.
pub fn greets(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else {
        return false;
    };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(60)));
    stream.read_exact(&mut [0; 18]).is_ok()
}
