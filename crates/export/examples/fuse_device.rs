//! Covers a file with a null device or memory, to test and measure the FUSE front end alone.
//!
//! `fuse_device null|memory SIZE_BYTES FILE [THREADS]`; a signal ends it, also `umount FILE`.

use gaur_export::Server;
use gaur_export::device::{Memory, Null};
use gaur_export::fuse::{self, Options};
use gaur_export::{Front, ServeError};
use gaur_reactor::{Config, Driver, Either, Reactor, Signal, Signals, race};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, size, path, rest @ ..] = &arguments[..] else {
        eprintln!("usage: fuse_device null|memory SIZE_BYTES FILE [THREADS]");
        std::process::exit(2);
    };
    let size_bytes = size.parse().expect("a size in bytes");
    let signals = Signals::install(&[Signal::Interrupt, Signal::Terminate]).expect("signals");
    let mut options = Options::new(path);
    options.log = Some(std::sync::Arc::new(|line: &str| eprintln!("{line}")));
    if let Some(threads) = rest.first() {
        options.threads = threads.parse().expect("a number of threads");
    }
    let server = match kind.as_str() {
        "null" => fuse::start(options, move |_| Ok(Null::new(size_bytes))),
        "memory" => {
            let memory = Memory::new(size_bytes);
            fuse::start(options, move |_| Ok(memory.clone()))
        }
        _ => panic!("null or memory"),
    };
    if let Err(error) = server.and_then(|server| serve(server, &signals)) {
        eprintln!("fuse_device: {error}");
        std::process::exit(1);
    }
}

fn serve(server: Server, signals: &Signals) -> Result<(), ServeError> {
    let ended = server.ended();
    let driver = Driver::Fallback;
    let reactor = Reactor::new(&Config {
        driver,
        ..Config::default()
    });
    let reactor = reactor.expect("a reactor");
    while let Either::Left(_) = reactor.block_on(race(signals.next(), ended.stopped())) {
        server.stop();
    }
    Box::new(server).finish()
}
