//! Serves a null device, memory or a plain file, to test and measure the NBD front end alone.
//!
//! `nbd_device null|memory|PATH SIZE_BYTES SOCKET [THREADS] [blocking]`

use gaur_block::{Access, Device, DeviceLimits, Errno, File, Payload, Request, Status};
use gaur_export::device::{Memory, Null};
use gaur_export::nbd::{self, Export, Exports, Listen, Listener, Options, Stop};
use gaur_reactor::{BlockingFile, OpenFile, ReactorFile};

/// The bytes of a file as they are.
struct Plain<F> {
    file: F,
    size_bytes: u64,
}

impl<F: File> Device for Plain<F> {
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

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Status, Errno> {
        let extent = self.file.extent_at(offset_bytes).await?;
        let len_bytes = extent.len.min(len_bytes);
        Ok(Status {
            len_bytes,
            allocated: extent.data,
            zero: !extent.data,
        })
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, size_bytes, socket, rest @ ..] = &arguments[..] else {
        return Err(
            "usage: nbd_device null|memory|PATH SIZE_BYTES SOCKET [THREADS] [blocking]".into(),
        );
    };
    let size_bytes: u64 = size_bytes.parse()?;
    let listener = Listener::bind(&Listen::Unix(socket.into()))?;
    println!("{}", listener.uri(""));
    let mut options = Options::new(vec![Export::new("")]);
    options.shared = 0;
    options.persistent = true;
    options.threads = rest.first().map_or(Ok(1), |count| count.parse())?;
    let blocking = rest.get(1).is_some_and(|word| word == "blocking");
    let stop = Stop::new();
    let outcome = match (kind.as_str(), blocking) {
        ("null", false) => {
            nbd::serve_uring(listener, options, &stop, move |_| Ok(Null::new(size_bytes)))?
        }
        ("null", true) => {
            let exports = Exports::fixed(&options, move |_| Ok(Null::new(size_bytes)))?;
            exports.serve_blocking(listener, options, &stop)?
        }
        ("memory", _) => {
            let memory = Memory::new(size_bytes);
            let make = move |_| Ok(memory.clone());
            if blocking {
                Exports::fixed(&options, make)?.serve_blocking(listener, options, &stop)?
            } else {
                nbd::serve_uring(listener, options, &stop, make)?
            }
        }
        (path, blocking) => {
            let access = Access {
                write: true,
                direct: false,
                lock: true,
                force_share: false,
            };
            let file = OpenFile::open(path, access).map_err(|error| format!("{path}: {error}"))?;
            if blocking {
                let make = move |_| {
                    Ok(Plain {
                        file: BlockingFile::new(file.clone()),
                        size_bytes,
                    })
                };
                Exports::fixed(&options, make)?.serve_blocking(listener, options, &stop)?
            } else {
                let make = move |_| {
                    Ok(Plain {
                        file: ReactorFile::new(file.clone()),
                        size_bytes,
                    })
                };
                nbd::serve_uring(listener, options, &stop, make)?
            }
        }
    };
    println!("{outcome:?}");
    Ok(())
}
