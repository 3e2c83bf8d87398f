//! A reactor in the event loop of an application: its descriptor is readable exactly when there is something to do.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use gaur_block::{Access, File, Target};
use gaur_reactor::{Config, Driver, OpenFile, Reactor, ReactorFile, Stop, sleep, spawn, yield_now};

const DRIVERS: [Driver; 2] = [Driver::Ring, Driver::Fallback];

fn reactor(driver: Driver) -> Reactor {
    let config = Config {
        driver,
        ..Config::default()
    };
    Reactor::new(&config).expect("a reactor can be made")
}

/// Whether the reactor's descriptor becomes readable within so many milliseconds.
fn readable(reactor: &Reactor, timeout_ms: i32) -> bool {
    let mut asked = libc::pollfd {
        fd: reactor.as_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one element, for which there is room.
    unsafe { libc::poll(&raw mut asked, 1, timeout_ms) == 1 }
}

/// A loop like an application's, until `done`.
fn drive(reactor: &Reactor, done: impl Fn() -> bool) {
    let mut due = reactor.turn();
    while !done() {
        let timeout = due.map_or(10_000, |due| due.as_millis() as i32 + 1);
        let readable = readable(reactor, timeout);
        assert!(readable || due.is_some(), "nothing happens any more");
        due = reactor.turn();
    }
}

#[test]
fn idle_reactor_is_not_readable() {
    for driver in DRIVERS {
        let reactor = reactor(driver);
        assert_eq!(reactor.turn(), None);
        assert!(!readable(&reactor, 20));
        assert_eq!(reactor.turn(), None);
    }
}

#[test]
fn completion_of_a_ring_makes_its_descriptor_readable() {
    let reactor = reactor(Driver::Ring);
    let access = Access {
        write: false,
        direct: true,
        lock: false,
        force_share: false,
    };
    // Something that is on a disk: files in memory never wait.
    let path = std::env::current_exe().expect("a path to itself");
    let file = OpenFile::open(path, access).or_else(|_| {
        let cached = Access {
            direct: false,
            ..access
        };
        OpenFile::open("/proc/self/exe", cached)
    });
    let file = Rc::new(ReactorFile::new(file.expect("it opens")));
    let left = Rc::new(Cell::new(200));
    for number in 0..left.get() {
        let (file, left) = (file.clone(), left.clone());
        spawn(async move {
            let mut memory = file.buffer(4096);
            let read = file.read_at(number % 16 * 4096, Target::memory(&mut memory));
            read.await.expect("a read");
            left.set(left.get() - 1);
        });
    }
    drive(&reactor, || left.get() == 0);
    assert!(!readable(&reactor, 20));
}

#[test]
fn messages_of_other_threads_make_the_descriptor_readable() {
    for driver in DRIVERS {
        let reactor = reactor(driver);
        let handle = reactor.handle();
        let arrived = Arc::new(AtomicBool::new(false));
        for _ in 0..50 {
            reactor.turn();
            let (handle, sent) = (handle.clone(), arrived.clone());
            let sender = thread::spawn(move || {
                let run = move || async move { sent.store(true, Ordering::SeqCst) };
                drop(handle.spawn(run).expect("the reactor is there"));
            });
            drive(&reactor, || arrived.swap(false, Ordering::SeqCst));
            sender.join().expect("no panic");
        }
    }
}

#[test]
fn task_that_waits_for_another_thread_goes_on() {
    for driver in DRIVERS {
        let reactor = reactor(driver);
        let stop = Stop::new();
        let (waiting, over) = (stop.clone(), Rc::new(Cell::new(false)));
        let seen = over.clone();
        spawn(async move {
            waiting.stopped().await;
            seen.set(true);
        });
        reactor.turn();
        assert!(!over.get() && !readable(&reactor, 10));
        let raised = thread::spawn(move || stop.stop());
        drive(&reactor, || over.get());
        raised.join().expect("no panic");
    }
}

#[test]
fn turn_tells_when_the_next_timer_is_due() {
    for driver in DRIVERS {
        let reactor = reactor(driver);
        let over = Rc::new(Cell::new(false));
        let seen = over.clone();
        spawn(async move {
            sleep(Duration::from_millis(30)).await;
            seen.set(true);
        });
        let due = reactor.turn().expect("a timer");
        assert!(due <= Duration::from_millis(30));
        drive(&reactor, || over.get());
        assert_eq!(reactor.turn(), None);
    }
}

#[test]
fn busy_task_leaves_the_loop_its_turn_and_the_descriptor_readable() {
    for driver in DRIVERS {
        let reactor = reactor(driver);
        let steps = Rc::new(RefCell::new(VecDeque::new()));
        let taken = steps.clone();
        spawn(async move {
            for step in 0..10_000 {
                taken.borrow_mut().push_back(step);
                yield_now().await;
            }
        });
        assert_eq!(reactor.turn(), Some(Duration::ZERO));
        let first = steps.borrow().len();
        assert!(first > 0 && first < 10_000, "{first}");
        assert!(readable(&reactor, 0));
        drive(&reactor, || steps.borrow().len() == 10_000);
    }
}

#[test]
fn reactor_is_driven_by_a_loop_and_by_block_on_in_turns() {
    for driver in DRIVERS {
        let reactor = reactor(driver);
        reactor.turn();
        reactor.block_on(async {
            sleep(Duration::from_millis(1)).await;
            yield_now().await;
        });
        assert_eq!(reactor.turn(), None);
        assert!(!readable(&reactor, 10));
        assert_eq!(reactor.block_on(async { 5 }), 5);
    }
}
