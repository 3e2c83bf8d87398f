//! Output of a guest's command: read from a pipe to its end, or until the reader stops waiting.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What happens to the command's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// It goes to this program's own.
    Streamed,
    /// It is returned.
    Kept,
}

/// A thread that reads a pipe.
#[derive(Debug)]
pub struct Console {
    kept: Arc<Mutex<Vec<u8>>>,
    thread: JoinHandle<()>,
}

impl Console {
    /// Starts to read.
    pub fn read(
        mut from: impl Read + Send + 'static,
        output: Output,
        mut to: impl Write + Send + 'static,
    ) -> Console {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let keeper = Arc::clone(&kept);
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(len @ 1..) = from.read(&mut buffer) {
                let read = &buffer[..len];
                match (output, keeper.lock()) {
                    (Output::Kept, Ok(mut kept)) => kept.extend_from_slice(read),
                    (Output::Kept, Err(_)) => return,
                    // Standard output is closed: the command goes on all the same.
                    (Output::Streamed, _) => drop(to.write_all(read).and_then(|()| to.flush())),
                }
            }
        });
        Console { kept, thread }
    }

    /// What has been kept when the pipe ends, or then. A process that outlived the guest's kernel would
    /// hold the pipe for as long as it lives.
    pub fn end(self, until: Instant) -> String {
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let kept = self.kept.lock();
        kept.map_or_else(
            |_| String::new(),
            |kept| String::from_utf8_lossy(&kept).into_owned(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    /// The pipe of a console was read to its end, and a process in the guest that was not waited for
    /// kept it open.
    #[test]
    fn a_pipe_that_stays_open_does_not_keep_its_reader() {
        let (mut writer, reader) = UnixStream::pair().unwrap();
        let console = Console::read(reader, Output::Kept, std::io::sink());
        writer.write_all(b"last words").unwrap();
        let until = Instant::now() + Duration::from_secs(1);
        assert_eq!(console.end(until), "last words");
        drop(writer);
    }
}
