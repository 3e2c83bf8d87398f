//! VDUSE and the kernel's virtio driver.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::attached::device::Attachment;
use crate::gaur::binary;
use crate::tool::run;

/// Longest time until a server is there, or gone.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct VduseDevice {
    server: Option<Child>,
    /// On the vDPA bus.
    device: String,
    /// Of the disk.
    name: String,
    image: String,
    more: Vec<String>,
}

impl VduseDevice {
    #[track_caller]
    pub(super) fn start(image: &str, more: &[&str]) -> VduseDevice {
        let is_free = |index: &u32| {
            let path = format!("/dev/vduse/test{index}");
            !std::path::Path::new(&path).exists()
        };
        let index = (0..).find(is_free).expect("the search has an end");
        let mut device = VduseDevice {
            server: None,
            device: format!("test{index}"),
            name: String::new(),
            image: image.to_owned(),
            more: more.iter().map(|&word| word.to_owned()).collect(),
        };
        device.serve();
        device
    }

    /// Starts a server. The image may still be in the hands of one that was killed.
    #[track_caller]
    fn serve(&mut self) {
        let start = Instant::now();
        loop {
            let mut command = Command::new(binary());
            command.args(["serve", "--vduse", &self.device]);
            command.args(&self.more).arg(&self.image);
            command.stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("gaur starts");
            let output = child.stdout.as_mut().expect("a pipe was asked for");
            let mut line = String::new();
            // It says what the disk is called when it is there.
            let said = BufReader::new(output).read_line(&mut line);
            if said.is_ok_and(|count| count > 0) {
                let name = line.trim().strip_prefix("/dev/");
                self.name = name.expect("a disk").to_owned();
                self.server = Some(child);
                return;
            }
            let status = child.wait().expect("it can be waited for");
            let patient = start.elapsed() < PATIENCE;
            assert!(patient, "the server does not start: {status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Attachment for VduseDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn server(&self) -> u32 {
        self.server.as_ref().map_or(0, Child::id)
    }

    fn reap(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.wait().expect("it can be waited for");
        }
    }

    #[track_caller]
    fn recover(&mut self) {
        self.serve();
    }

    #[track_caller]
    fn detach(&mut self) {
        let server = self.server.as_mut().expect("it is served");
        run("kill", &["-TERM", &server.id().to_string()]).ok();
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(status) = server.try_wait().expect("it can be waited for") {
                self.server = None;
                assert!(status.success(), "the server ended with {status}");
                let left = format!("/dev/vduse/{}", self.device);
                assert!(!std::path::Path::new(&left).exists(), "{left} is gone");
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the server does not end");
    }
}

impl Drop for VduseDevice {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}
