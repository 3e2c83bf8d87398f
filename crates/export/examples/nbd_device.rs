//! Serves a null or memory device, to test and measure the NBD front end alone.
//!
//! `nbd_device null|memory SIZE_BYTES SOCKET [THREADS] [blocking]`

use gaur_export::device::{Memory, Null};
use gaur_export::nbd::{self, Export, Listen, Listener, Options, Stop};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, size_bytes, socket, rest @ ..] = &arguments[..] else {
        return Err("usage: nbd_device null|memory SIZE_BYTES SOCKET [THREADS] [blocking]".into());
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
            nbd::serve_blocking(listener, options, &stop, move |_| Ok(Null::new(size_bytes)))?
        }
        ("memory", _) => {
            let memory = Memory::new(size_bytes);
            let make = move |_| Ok(memory.clone());
            if blocking {
                nbd::serve_blocking(listener, options, &stop, make)?
            } else {
                nbd::serve_uring(listener, options, &stop, make)?
            }
        }
        (other, _) => return Err(format!("unknown device {other:?}").into()),
    };
    println!("{outcome:?}");
    Ok(())
}
