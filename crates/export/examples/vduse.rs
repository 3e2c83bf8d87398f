//! A disk in memory for this machine: `vduse NAME MEBIBYTES [THREADS]`, until the end of its input.

use std::env;
use std::process::ExitCode;
use std::sync::Arc;

use gaur_export::device::Memory;
use gaur_export::{Front, vduse};

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let name = arguments.next().unwrap_or_else(|| "disk".to_owned());
    let mut number = |default| {
        let given = arguments.next().and_then(|text| text.parse().ok());
        given.unwrap_or(default)
    };
    let device = Memory::new(number(64) << 20);
    let mut options = vduse::Options::new(name);
    options.threads = number(1) as usize;
    options.queues = options.threads as u16;
    options.log = Some(Arc::new(|line: &str| eprintln!("{line}")));
    let served = vduse::start(options, move |_| Ok(device.clone())).and_then(|server| {
        println!("{}", server.place());
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        server.stop();
        Box::new(server).finish()
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
