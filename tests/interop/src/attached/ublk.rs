//! ublk: the image's server makes the device itself, in the background.

use crate::attached::device::{Attachment, wait_until};
use crate::gaur::gaur;

#[derive(Debug)]
pub(super) struct UblkDevice {
    number: String,
    server: u32,
}

impl UblkDevice {
    /// A ublk device always outlives its server.
    #[track_caller]
    pub(super) fn start(image: &str, more: &[&str]) -> UblkDevice {
        let add = ["ublk", "add", "--output", "json", image];
        let run = gaur(&[&add[..], more].concat()).ok();
        let place = run.json()["place"].clone();
        let place = place.as_str().expect("it says which device it is");
        let number = place.strip_prefix("/dev/ublkb").expect("of ublk");
        UblkDevice {
            number: number.to_owned(),
            server: server_of(&run.json()),
        }
    }
}

fn server_of(answer: &serde_json::Value) -> u32 {
    let pid = answer["pid"].as_u64().and_then(|pid| pid.try_into().ok());
    pid.expect("it says which process serves it")
}

impl Attachment for UblkDevice {
    fn name(&self) -> String {
        format!("ublkb{}", self.number)
    }

    fn server(&self) -> u32 {
        self.server
    }

    fn reap(&mut self) {
        let process = format!("/proc/{}", self.server);
        wait_until("the server is gone", || {
            !std::path::Path::new(&process).exists()
        });
    }

    #[track_caller]
    fn recover(&mut self) {
        let run = gaur(&["ublk", "recover", "--output", "json", &self.number]).ok();
        self.server = server_of(&run.json());
    }

    #[track_caller]
    fn detach(&mut self) {
        gaur(&["ublk", "del", &self.number]).ok();
        let device = format!("/dev/{}", self.name());
        wait_until("the device is gone", || {
            !std::path::Path::new(&device).exists()
        });
        self.reap();
    }
}
