//! A server of ours for virtual machines, and QEMU's machine on it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::gaur::binary;
use crate::guest::Kernel;

/// Longest time until a server is there, or gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// `gaur serve --vhost-user`; killed on drop unless it was stopped.
#[derive(Debug)]
pub struct Server {
    child: Child,
}

impl Server {
    /// Serves an image at a socket. The image may still be in the hands of a server that was killed.
    #[track_caller]
    pub fn start(image: &str, socket: &str, more: &[&str]) -> Server {
        let start = Instant::now();
        loop {
            let mut command = Command::new(binary());
            command.args(["serve", "--vhost-user", socket]);
            command.args(more).arg(image).stdout(Stdio::piped());
            command.stderr(File::create(told(socket)).expect("a file beside the socket"));
            let mut child = command.spawn().expect("gaur starts");
            let output = child.stdout.as_mut().expect("a pipe was asked for");
            let mut line = String::new();
            // It says where the socket is when clients can come.
            let said = BufReader::new(output).read_line(&mut line);
            if said.is_ok_and(|count| count > 0) {
                return Server { child };
            }
            let status = child.wait().expect("it can be waited for");
            let patient = start.elapsed() < PATIENCE;
            let told = Server::told(socket);
            assert!(patient, "the server does not start: {status}: {told}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What the last server at a socket has printed.
    #[track_caller]
    pub fn told(socket: &str) -> String {
        std::fs::read_to_string(told(socket)).expect("a server has been there")
    }

    /// Kills it, as a crash would.
    pub fn kill(mut self) {
        self.child.kill().expect("a child can be killed");
        self.child.wait().expect("it can be waited for");
    }

    /// Tells it to stop, and asserts that it ends well.
    #[track_caller]
    pub fn stop(mut self) {
        let id = self.child.id().to_string();
        crate::tool::run("kill", &["-TERM", &id]).ok();
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                assert!(status.success(), "the server ended with {status}");
                return;
            }
            assert!(start.elapsed() < PATIENCE, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn told(socket: &str) -> String {
    format!("{socket}.told")
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A machine of QEMU's with a vhost-user disk; killed on drop.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    output: Option<std::thread::JoinHandle<()>>,
    said: Arc<Mutex<Vec<u8>>>,
}

impl Machine {
    /// Boots a kernel; it connects again when the server goes. More arguments are for the device.
    #[track_caller]
    pub fn boot(kernel: &Kernel, socket: &str, device: &str) -> Machine {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-accel", "tcg", "-machine", "pc,memory-backend=memory"]);
        command.args([
            "-object",
            "memory-backend-memfd,id=memory,size=512M,share=on",
        ]);
        command.args([
            "-m",
            "512",
            "-smp",
            "2",
            "-nographic",
            "-no-reboot",
            "-nic",
            "none",
        ]);
        let socket = format!("socket,id=disk,path={socket},reconnect-ms=100");
        let device = format!("vhost-user-blk-pci,chardev=disk,num-queues=2{device}");
        command.args(["-chardev", &socket, "-device", &device]);
        command.args(["-kernel", &kernel.image, "-initrd", &kernel.initrd]);
        command.args(["-append", "console=ttyS0 quiet panic=-1"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .expect("qemu-system-x86_64 is there: scripts/setup installs what the tests need");
        let mut stdout = child.stdout.take().expect("a pipe was asked for");
        let said = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&said);
        let output = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(len @ 1..) = stdout.read(&mut buffer) {
                let mut heard = heard.lock().expect("no holder panics");
                heard.extend_from_slice(&buffer[..len]);
            }
        });
        Machine {
            child,
            output: Some(output),
            said,
        }
    }

    /// What its guest has said so far.
    pub fn said(&self) -> String {
        let said = self.said.lock().expect("no holder panics");
        String::from_utf8_lossy(&said).into_owned()
    }

    /// Waits until its guest has said these words.
    #[track_caller]
    pub fn wait_for(&mut self, words: &str, limit: Duration) {
        let start = Instant::now();
        while !self.said().contains(words) {
            let patient = self.is_on() && start.elapsed() < limit;
            assert!(patient, "no {words:?} from the guest: {}", self.said());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether it is still on.
    pub fn is_on(&mut self) -> bool {
        self.child
            .try_wait()
            .expect("it can be waited for")
            .is_none()
    }

    /// Turns it off as a power cut would.
    pub fn kill(mut self) {
        self.child.kill().expect("a child can be killed");
        self.child.wait().expect("it can be waited for");
    }

    /// What its guest said, once it is off.
    #[track_caller]
    pub fn output(mut self, limit: Duration) -> String {
        let start = Instant::now();
        while self.is_on() {
            if start.elapsed() > limit {
                let _ = self.child.kill();
                panic!("the guest does not end: {}", self.said());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let output = self.output.take().expect("it is there until now");
        output.join().expect("the reader does not panic");
        self.said()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
