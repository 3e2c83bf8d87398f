//! Tasks, timers, threads and the ways between them, with a ring and with the fallback.

use std::cell::{Cell, RefCell};
use std::future::{Future, pending, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use gaur_block::Errno;
use gaur_reactor::local::Notify;
use gaur_reactor::{
    Config, Driver, Either, Reactor, Stop, Threads, ThreadsConfig, block_on, has_reactor, race,
    sleep, spawn, timeout, uring, yield_now,
};

const DRIVERS: [Driver; 2] = [Driver::Ring, Driver::Fallback];

fn config(driver: Driver) -> Config {
    Config {
        driver,
        ..Config::default()
    }
}

fn on_each_driver<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for driver in DRIVERS {
        Reactor::new(&config(driver))
            .expect("a reactor can be made")
            .block_on(test());
    }
}

#[test]
fn io_uring_is_found() {
    assert_eq!(uring::available(), Ok(()));
    assert!(Reactor::new(&config(Driver::Auto)).unwrap().has_ring());
    assert!(!Reactor::new(&config(Driver::Fallback)).unwrap().has_ring());
}

#[test]
fn tasks_run_in_turns_and_give_results() {
    on_each_driver(|| async {
        let order = Rc::new(RefCell::new(Vec::new()));
        let tasks: Vec<_> = (0..3)
            .map(|task| {
                let order = order.clone();
                spawn(async move {
                    for step in 0..2 {
                        order.borrow_mut().push((step, task));
                        yield_now().await;
                    }
                    task * 10
                })
            })
            .collect();
        let mut results = Vec::new();
        for task in tasks {
            results.push(task.await);
        }
        assert_eq!(results, [0, 10, 20]);
        assert_eq!(
            *order.borrow(),
            [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
        );
    });
}

#[test]
fn slots_of_ended_tasks_are_reused_and_late_wakers_wake_no_task() {
    on_each_driver(|| async {
        let kept: Rc<RefCell<Option<Waker>>> = Rc::default();
        let keep = kept.clone();
        let polls = Rc::new(Cell::new(0));
        spawn(poll_fn(move |context| {
            *keep.borrow_mut() = Some(context.waker().clone());
            Poll::Ready(())
        }))
        .await;
        let counted = polls.clone();
        let _waits = spawn(poll_fn(move |_| {
            counted.set(counted.get() + 1);
            Poll::<()>::Pending
        }));
        yield_now().await;
        yield_now().await;
        assert_eq!(polls.get(), 1);
        kept.borrow().as_ref().unwrap().wake_by_ref();
        yield_now().await;
        yield_now().await;
        assert_eq!(polls.get(), 1);
    });
}

#[test]
fn a_panic_ends_its_task_alone() {
    on_each_driver(|| async {
        let bad = spawn(async { panic!("this panic is part of a test") });
        let good = spawn(async { 7 });
        assert_eq!(good.await, 7);
        let waits = spawn(async move {
            let () = bad.await;
        });
        drop(waits);
        yield_now().await;
        assert_eq!(spawn(async { 8 }).await, 8);
    });
}

#[test]
fn timers_fire_in_order_and_in_time() {
    on_each_driver(|| async {
        let start = Instant::now();
        let order = Rc::new(RefCell::new(Vec::new()));
        let tasks: Vec<_> = [30, 10, 20]
            .into_iter()
            .map(|ms| {
                let order = order.clone();
                spawn(async move {
                    sleep(Duration::from_millis(ms)).await;
                    order.borrow_mut().push(ms);
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
        assert_eq!(*order.borrow(), [10, 20, 30]);
        assert!(start.elapsed() >= Duration::from_millis(30));
        assert!(start.elapsed() < Duration::from_secs(5));
        assert_eq!(
            timeout(Duration::from_millis(5), pending::<()>()).await,
            None
        );
        assert_eq!(timeout(Duration::from_secs(60), async { 1 }).await, Some(1));
        let first = race(sleep(Duration::from_secs(60)), async { 2 }).await;
        assert_eq!(first, Either::Right(2));
    });
}

#[test]
fn wakers_work_from_any_thread() {
    on_each_driver(|| async {
        for round in 0..200_u64 {
            let (send, receive) = mpsc::channel::<Waker>();
            let done = Arc::new(AtomicU32::new(0));
            let set = done.clone();
            let other = thread::spawn(move || {
                let waker = receive.recv().unwrap();
                // Sometimes the reactor sleeps by now, sometimes not.
                thread::sleep(Duration::from_micros(round % 7 * 20));
                set.store(1, Ordering::SeqCst);
                waker.wake();
            });
            let mut sent = false;
            poll_fn(|context| {
                if !std::mem::replace(&mut sent, true) {
                    send.send(context.waker().clone()).unwrap();
                }
                match done.load(Ordering::SeqCst) {
                    0 => Poll::Pending,
                    _ => Poll::Ready(()),
                }
            })
            .await;
            other.join().unwrap();
        }
    });
}

#[test]
fn work_is_sent_to_threads_and_drained_at_the_end() {
    for driver in DRIVERS {
        for processors in [vec![], vec![vec![0]; 3]] {
            let config = ThreadsConfig {
                count: 3,
                processors,
                name: "test".to_owned(),
                reactor: config(driver),
            };
            let threads = Threads::start(&config).unwrap();
            assert!(!has_reactor());
            let mut names: Vec<String> = threads
                .handles()
                .iter()
                .map(|handle| {
                    let name = async || thread::current().name().unwrap().to_owned();
                    block_on(handle.spawn(name).unwrap())
                })
                .collect();
            names.sort();
            assert_eq!(names, ["test-0", "test-1", "test-2"]);

            // Tasks of !Send state that spawn further tasks; all end before `join` returns.
            let count = Arc::new(AtomicU32::new(0));
            for handle in threads.handles() {
                let count = count.clone();
                let work = async move || {
                    let inner = Rc::new(count);
                    for _ in 0..10 {
                        let count = inner.clone();
                        let _detached = spawn(async move {
                            sleep(Duration::from_millis(5)).await;
                            count.fetch_add(1, Ordering::SeqCst);
                        });
                    }
                };
                drop(handle.spawn(work).unwrap());
            }
            let handle = threads.handles()[0].clone();
            threads.join();
            assert_eq!(count.load(Ordering::SeqCst), 30);
            assert_eq!(handle.spawn(async || ()).err(), Some(Errno::ESHUTDOWN));
        }
    }
}

#[test]
fn panic_on_another_thread_reaches_the_waiting_task() {
    let config = ThreadsConfig {
        count: 1,
        processors: Vec::new(),
        name: "test".to_owned(),
        reactor: config(Driver::Auto),
    };
    let threads = Threads::start(&config).unwrap();
    let bad = threads.handles()[0]
        .spawn(async || panic!("this panic is part of a test"))
        .unwrap();
    let waited = thread::spawn(move || block_on(bad)).join();
    let message = waited.unwrap_err();
    assert_eq!(
        message.downcast_ref(),
        Some(&"this panic is part of a test")
    );
    assert_eq!(block_on(threads.handles()[0].spawn(async || 5).unwrap()), 5);
    threads.join();
}

#[test]
fn tasks_are_dropped_with_their_reactor() {
    for driver in DRIVERS {
        let reactor = Reactor::new(&config(driver)).unwrap();
        let held = Rc::new(());
        let hold = held.clone();
        let task = spawn(async move {
            let _hold = hold;
            pending::<()>().await;
        });
        reactor.block_on(yield_now());
        assert_eq!(Rc::strong_count(&held), 2);
        assert_eq!(reactor.tasks_alive(), 1);
        drop(reactor);
        assert_eq!(Rc::strong_count(&held), 1);
        drop(task);
        assert!(!has_reactor());
    }
}

#[test]
fn a_stop_reaches_every_waiter() {
    let stop = Stop::new();
    let threads: Vec<_> = DRIVERS
        .into_iter()
        .map(|driver| {
            let stop = stop.clone();
            thread::spawn(move || {
                Reactor::new(&config(driver)).unwrap().block_on(async {
                    let waits = [spawn(wait(stop.clone())), spawn(wait(stop.clone()))];
                    for task in waits {
                        task.await;
                    }
                });
            })
        })
        .collect();
    let blocked = thread::spawn({
        let stop = stop.clone();
        move || block_on(stop.stopped())
    });
    thread::sleep(Duration::from_millis(20));
    assert!(!stop.is_stopped());
    stop.stop();
    stop.stop();
    for thread in threads {
        thread.join().unwrap();
    }
    blocked.join().unwrap();
    block_on(stop.stopped());
}

async fn wait(stop: Stop) {
    stop.stopped().await;
}

#[test]
fn a_notification_is_not_lost() {
    on_each_driver(|| async {
        let notify = Rc::new(Notify::new());
        notify.notify_one();
        notify.notified().await;
        let count = Rc::new(Cell::new(0));
        for _ in 0..3 {
            let (notify, count) = (notify.clone(), count.clone());
            let _detached = spawn(async move {
                notify.notified().await;
                count.set(count.get() + 1);
            });
        }
        yield_now().await;
        notify.notify_one();
        yield_now().await;
        yield_now().await;
        assert_eq!(count.get(), 1);
        notify.notify_all();
        yield_now().await;
        yield_now().await;
        assert_eq!(count.get(), 3);
    });
}

#[test]
#[should_panic(expected = "a thread with a reactor waits by Reactor::block_on")]
fn block_on_does_not_sleep_where_a_reactor_should() {
    let _reactor = Reactor::new(&config(Driver::Auto)).unwrap();
    block_on(pending::<()>());
}

#[test]
fn messages_from_many_threads_all_arrive() {
    for driver in DRIVERS {
        let reactor = Reactor::new(&config(driver)).unwrap();
        let handle = reactor.handle();
        let count = Arc::new(AtomicU32::new(0));
        thread::scope(|scope| {
            for sender in 0..4_u32 {
                let (handle, count) = (handle.clone(), count.clone());
                scope.spawn(move || {
                    for index in 0..2000 {
                        let count = count.clone();
                        let work = async move || {
                            count.fetch_add(1, Ordering::SeqCst);
                            index
                        };
                        let task = handle.spawn(work).unwrap();
                        // Some wait for each answer, some send on.
                        if sender % 2 == 0 {
                            assert_eq!(block_on(task), index);
                        }
                    }
                });
            }
            reactor.block_on(async {
                while count.load(Ordering::SeqCst) < 8000 {
                    sleep(Duration::from_millis(1)).await;
                }
                reactor.drained().await;
            });
        });
        assert_eq!(handle.spawn(async || ()).err(), Some(Errno::ESHUTDOWN));
    }
}
