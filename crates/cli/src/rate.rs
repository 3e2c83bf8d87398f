//! Limits on how fast data is moved (`--rate`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use gaur_engine::Job;

use crate::notice::is_qemu;
use crate::size::parse_size;

/// Longest time until a limit looks whether it is still needed.
const TICK: Duration = Duration::from_millis(20);

/// Reads a rate in bytes a second, with a suffix if any. QEMU's program takes 0 for no limit.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 if is_qemu() => Ok(u64::MAX),
        0 => Err("a rate is at least one byte a second".to_owned()),
        rate => Ok(rate),
    }
}

fn bytes_after(rate: u64, time: Duration) -> u64 {
    let bytes = u128::from(rate) * time.as_micros() / 1_000_000;
    bytes.min(u128::from(u64::MAX)) as u64
}

/// Lets a job of the engine go on at a rate, until it is dropped.
pub struct Pace {
    ended: Arc<AtomicBool>,
}

impl Pace {
    /// Begins now.
    pub fn start(job: &Arc<Job>, rate: u64) -> Pace {
        job.allow(1);
        let ended = Arc::new(AtomicBool::new(false));
        let (job, over, start) = (Arc::clone(job), Arc::clone(&ended), Instant::now());
        thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                thread::sleep(TICK);
                job.allow(bytes_after(rate, start.elapsed()));
            }
            job.allow(u64::MAX);
        });
        Pace { ended }
    }
}

impl Drop for Pace {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// The rate at which several threads move data together.
#[derive(Debug)]
pub struct Rate {
    bytes_per_second: u64,
    /// When the next piece may begin.
    next: Mutex<Instant>,
}

impl Rate {
    /// Begins now.
    pub fn new(bytes_per_second: u64) -> Rate {
        Rate {
            bytes_per_second,
            next: Mutex::new(Instant::now()),
        }
    }

    /// Waits until a piece of so many bytes may begin, or until `ended`.
    pub fn wait(&self, len_bytes: u64, ended: impl Fn() -> bool) {
        let micros = u128::from(len_bytes) * 1_000_000 / u128::from(self.bytes_per_second);
        let time = Duration::from_micros(micros.min(u128::from(u64::MAX)) as u64);
        let begin = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = (*next).max(Instant::now());
            *next = begin.checked_add(time).unwrap_or(begin);
            begin
        };
        while !ended() {
            match begin.checked_duration_since(Instant::now()) {
                None | Some(Duration::ZERO) => return,
                Some(left) => thread::sleep(left.min(TICK)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_rate_follow_each_other_in_its_time() {
        let rate = Rate::new(1 << 20);
        let start = Instant::now();
        for _ in 0..3 {
            rate.wait(100 << 10, || false);
        }
        // The third begins when two have had their time.
        assert!(start.elapsed() >= Duration::from_millis(190));
        let slow = Rate::new(1);
        slow.wait(1 << 40, || false);
        slow.wait(1, || true);
        assert_eq!(
            bytes_after(u64::MAX, Duration::from_secs(1 << 40)),
            u64::MAX
        );
        assert_eq!(bytes_after(1000, Duration::from_millis(1500)), 1500);
        assert!(parse_rate("0").is_err() && parse_rate("x").is_err());
        assert_eq!(parse_rate("10M"), Ok(10 << 20));
    }
}
