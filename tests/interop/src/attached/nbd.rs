//! The kernel's NBD client on a server of ours.
//!
//! `nbd-client` attaches it, or, where a device has to outlive its server, a script: the kernel can wait
//! for another connection, but `nbd-client` knows no way to ask it to.

use crate::attached::device::{Attachment, wait_until};
use crate::gaur::serve_with;
use crate::nbd::Server;
use crate::scratch::Scratch;
use crate::tool::run;

const SCRIPT: &str = include_str!("nbd_netlink.py");

#[derive(Debug)]
pub(super) struct NbdDevice {
    server: Option<Server>,
    index: u32,
    image: String,
    socket: String,
    more: Vec<String>,
}

impl NbdDevice {
    #[track_caller]
    pub(super) fn start(image: &str, scratch: &Scratch, more: &[&str], lasting: bool) -> NbdDevice {
        let is_free = |index: &u32| {
            let folder = format!("/sys/block/nbd{index}");
            assert!(
                std::path::Path::new(&folder).exists(),
                "no free nbd device: is this the guest of `cargo xtask vm test`?"
            );
            !std::path::Path::new(&format!("{folder}/pid")).exists()
        };
        let index = (0..).find(is_free).expect("the search has an end");
        let mut device = NbdDevice {
            server: None,
            index,
            image: image.to_owned(),
            socket: scratch.path(&format!("nbd{index}.socket")),
            more: more.iter().map(|&word| word.to_owned()).collect(),
        };
        if lasting {
            let log = format!("--handover=/run/gaur-nbd{index}.log");
            device.more.push(log);
        }
        device.serve();
        if lasting {
            device.by_script("connect");
        } else {
            let path = format!("/dev/{}", device.name());
            let from = ["-unix", &device.socket, &path];
            run("nbd-client", &[&from[..], &["-connections", "2"]].concat()).ok();
        }
        device
    }

    #[track_caller]
    fn serve(&mut self) {
        let more: Vec<&str> = self.more.iter().map(String::as_str).collect();
        self.server = Some(serve_with(&self.image, &self.socket, &more));
    }

    #[track_caller]
    fn by_script(&self, verb: &str) {
        let index = self.index.to_string();
        run("python3", &["-c", SCRIPT, verb, &self.socket, &index, "2"]).ok();
    }
}

impl Attachment for NbdDevice {
    fn name(&self) -> String {
        format!("nbd{}", self.index)
    }

    fn server(&self) -> u32 {
        self.server.as_ref().map_or(0, Server::id)
    }

    fn reap(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.wait();
        }
    }

    #[track_caller]
    fn recover(&mut self) {
        self.serve();
        self.by_script("reconnect");
    }

    #[track_caller]
    fn detach(&mut self) {
        run("nbd-client", &["-d", &format!("/dev/{}", self.name())]).ok();
        let pid = format!("/sys/block/{}/pid", self.name());
        wait_until("the device is gone", || {
            !std::path::Path::new(&pid).exists()
        });
        if let Some(server) = self.server.take() {
            server.stop();
        }
    }
}
