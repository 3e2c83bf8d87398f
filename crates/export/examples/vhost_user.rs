//! A disk in memory for a virtual machine: `vhost_user SOCKET MEBIBYTES [THREADS]`, until it is
//! interrupted.

use std::env;
use std::process::ExitCode;
use std::sync::Arc;

use gaur_export::device::Memory;
use gaur_export::{Front, vhost_user};

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let socket = arguments.next().unwrap_or_else(|| "disk.sock".to_owned());
    let mut number = |default| {
        let given = arguments.next().and_then(|text| text.parse().ok());
        given.unwrap_or(default)
    };
    let device = Memory::new(number(64) << 20);
    let mut options = vhost_user::Options::new(socket);
    options.threads = number(1) as usize;
    options.log = Some(Arc::new(|line: &str| eprintln!("{line}")));
    let server = match vhost_user::start(options, move |_| Ok(device.clone())) {
        Ok(server) => server,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{}", server.place());
    match Box::new(server).finish() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
