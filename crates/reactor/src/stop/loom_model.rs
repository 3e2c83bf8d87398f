//! Model of the flag: a waiting task is woken, or finds it raised. One that is not shows as a
//! deadlock.

use gaur_model::{block_on, check, thread};

use super::*;

#[test]
fn everybody_hears_of_it() {
    check(|| {
        let stop = Stop::new();
        let threads = [0, 1].map(|_| {
            let stop = stop.clone();
            thread::spawn(move || block_on(stop.stopped()))
        });
        stop.stop();
        for thread in threads {
            thread.join().unwrap();
        }
        assert!(stop.is_stopped());
        let waiting = stop.shared.waiting.lock();
        assert!(waiting.iter().all(Option::is_none));
    });
}
