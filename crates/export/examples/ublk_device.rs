//! Serves a null device, memory or a plain file as a ublk device, to test and measure that front end
//! alone, and does what can be done to such devices.
//!
//! `ublk_device serve null|memory|PATH SIZE_BYTES [key=value...]`, `recover ID PATH SIZE_BYTES
//! [key=value...]`, `list`, `features`, `delete ID [if-unused]`, `quiesce ID`. Keys: id, queues,
//! depth, threads, buffer, direct, zero-copy, unprivileged, read-only, recovery, affinity.

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gaur_block::{Access, Device, DeviceLimits, Errno, File, Payload, Request, Status};
use gaur_export::Front;
use gaur_export::device::{Memory, Null};
use gaur_export::ublk::{self, Options, Server, ZeroCopy};
use gaur_reactor::{Config, OpenFile, Reactor, ReactorFile, Signal, Signals};

/// The bytes of a file as they are.
struct Plain {
    file: ReactorFile,
    size_bytes: u64,
}

impl Device for Plain {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn limits(&self) -> DeviceLimits {
        let limits = self.file.limits();
        DeviceLimits {
            preferred_block: 4096,
            discard_block: 4096,
            max_transfer: limits.max_transfer,
            read_only: limits.read_only,
        }
    }

    async fn submit(&self, request: Request, payload: Payload<'_>) -> Result<(), Errno> {
        match (request, payload) {
            (Request::Read { offset_bytes }, Payload::Read(target)) => {
                self.file.read_at(offset_bytes, target).await
            }
            (Request::Write { offset_bytes, fua }, Payload::Write(source)) => {
                self.file.write_at(offset_bytes, source).await?;
                if fua { self.file.flush().await } else { Ok(()) }
            }
            (
                Request::WriteZeroes {
                    offset_bytes,
                    len_bytes,
                    may_unmap,
                    ..
                },
                _,
            ) => {
                self.file
                    .write_zeroes_at(offset_bytes, len_bytes, may_unmap)
                    .await
            }
            (
                Request::Discard {
                    offset_bytes,
                    len_bytes,
                },
                _,
            ) => self.file.discard_at(offset_bytes, len_bytes).await,
            (Request::Flush, _) => self.file.flush().await,
            _ => Err(Errno::EINVAL),
        }
    }

    async fn status(&self, _: u64, len_bytes: u64) -> Result<Status, Errno> {
        Ok(Status {
            len_bytes,
            allocated: true,
            zero: false,
        })
    }
}

fn options(words: &[String]) -> Result<Options, Box<dyn Error>> {
    let mut options = Options::new();
    options.log = Some(Arc::new(|line| eprintln!("{line}")));
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, "on"));
        let on = value == "on";
        match key {
            "id" => options.id = Some(value.parse()?),
            "queues" => options.queues = value.parse()?,
            "depth" => options.depth = Some(value.parse()?),
            "threads" => options.threads = Some(value.parse()?),
            "buffer" => options.buffer_bytes = value.parse()?,
            "direct" => options.direct = on,
            "zero-copy" => options.zero_copy = if on { ZeroCopy::On } else { ZeroCopy::Off },
            "unprivileged" => options.unprivileged = on,
            "read-only" => options.read_only = on,
            "recovery" => options.recovery = on,
            "affinity" => options.affinity = on,
            _ => return Err(format!("no such key: {key}").into()),
        }
    }
    Ok(options)
}

/// The kernel holds the files of a server that died, and their locks, until it has put its rings
/// away, which may be after the process is gone.
fn open_when_free(path: &str, access: Access) -> Result<OpenFile, Box<dyn Error>> {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        match OpenFile::open(path, access) {
            Ok(file) => return Ok(file),
            Err(error) if Instant::now() > end => return Err(format!("{path}: {error}").into()),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn serve(
    recover: Option<u32>,
    kind: &str,
    size_bytes: u64,
    options: Options,
) -> Result<Server, Box<dyn Error>> {
    let start = |options: Options, make: Make| match recover {
        Some(id) => ublk::recover(id, options, make),
        None => ublk::start(options, make),
    };
    Ok(match kind {
        "null" => ublk::start(options, move |_| Ok(Null::new(size_bytes)))?,
        "memory" => {
            let memory = Memory::new(size_bytes);
            ublk::start(options, move |_| Ok(memory.clone()))?
        }
        path => {
            let access = Access {
                write: !options.read_only,
                direct: options.direct,
                lock: true,
                force_share: false,
            };
            let file = open_when_free(path, access)?;
            let make = move |_| {
                Ok(Plain {
                    file: ReactorFile::new(file.clone()),
                    size_bytes,
                })
            };
            start(options, Box::new(make))?
        }
    })
}

type Make = Box<dyn Fn(usize) -> Result<Plain, String> + Send + Sync>;

fn run(server: Server) -> Result<(), Box<dyn Error>> {
    println!("{} {}", server.place(), server.info().features);
    std::io::stdout().flush()?;
    let signals = Signals::install(&[Signal::Interrupt, Signal::Terminate])?;
    let reactor = Reactor::new(&Config::default())?;
    reactor.block_on(async {
        let ended = server.ended();
        gaur_reactor::race(ended.stopped(), signals.next()).await;
    });
    server.stop();
    Box::new(server).finish()?;
    println!("ended");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |at: usize| words.get(at).map_or("", String::as_str);
    match word(0) {
        "serve" => run(serve(
            None,
            word(1),
            word(2).parse()?,
            options(words.get(3..).unwrap_or_default())?,
        )?)?,
        "recover" => run(serve(
            Some(word(1).parse()?),
            word(2),
            word(3).parse()?,
            options(words.get(4..).unwrap_or_default())?,
        )?)?,
        "list" => {
            for info in ublk::list()? {
                println!("{info:?}");
            }
        }
        "features" => println!("{}", ublk::features()?),
        "delete" => println!(
            "{:?}",
            ublk::delete(word(1).parse()?, word(2) == "if-unused")?
        ),
        "quiesce" => ublk::quiesce(word(1).parse()?)?,
        _ => return Err("see the head of this example".into()),
    }
    Ok(())
}
