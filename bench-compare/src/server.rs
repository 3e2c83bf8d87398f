//! The servers that are compared, as child processes.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// A server process that ends with this value.
pub struct Server {
    child: Child,
    /// Its Unix socket.
    pub socket: PathBuf,
}

impl Server {
    /// `qemu-nbd` on a qcow2 image, with its faster way of doing input and output through the host's
    /// cache.
    pub fn qemu(image: &Path, socket: &Path) -> Result<Server> {
        let mut command = Command::new("qemu-nbd");
        command.args(["--format=qcow2", "--shared=16", "--aio=io_uring"]);
        command.arg("--cache=writeback");
        Server::start(command, image, socket)
    }

    /// `gaur serve` on a qcow2 image.
    pub fn gaur(binary: &Path, image: &Path, socket: &Path) -> Result<Server> {
        let mut command = Command::new(binary);
        command.args(["serve", "--format=qcow2", "--shared=16"]);
        command.arg("--cache=writeback");
        Server::start(command, image, socket)
    }

    /// Starts a server that stays when clients leave, several times if it must: the kernel takes a
    /// moment to give up the image lock of a process that was killed with a ring.
    pub fn start(mut command: Command, image: &Path, socket: &Path) -> Result<Server> {
        command
            .arg("--persistent")
            .arg("--socket")
            .arg(socket)
            .arg(image);
        let mut tries = 0;
        loop {
            match Server::start_once(&mut command, socket) {
                Err(_) if tries < 20 => {
                    tries += 1;
                    std::thread::sleep(Duration::from_millis(100));
                }
                done => return done,
            }
        }
    }

    /// Asks the server to end, and waits until it has closed its image.
    pub fn stop(mut self) -> Result<()> {
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status()?;
        let status = self.child.wait()?;
        if !status.success() {
            bail!("the server ended with {status}");
        }
        Ok(())
    }

    fn start_once(command: &mut Command, socket: &Path) -> Result<Server> {
        let _ = std::fs::remove_file(socket);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {:?}", command.get_program()))?;
        let mut server = Server {
            child,
            socket: socket.to_owned(),
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        while !greets(socket) {
            if let Some(status) = server.child.try_wait()? {
                bail!("{:?} ended with {status}", command.get_program());
            }
            if Instant::now() > deadline {
                bail!("{:?} does not listen", command.get_program());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

/// Whether a server is there that has its image: `qemu-nbd` listens before it opens the image.
fn greets(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else {
        return false;
    };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
    stream.read_exact(&mut [0; 18]).is_ok()
}

impl Drop for Server {
    fn drop(&mut self) {
        // An image that matters is closed by `stop`.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}
