//! Waiting for event counters.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::time::Duration;

use gaur_block::Errno;
use gaur_reactor::{Config, Descriptor, Driver, Either, Reactor, race, sleep};

/// An event counter, and another descriptor of the same.
fn counter(flags: libc::c_int) -> (File, File) {
    // SAFETY: the descriptor is new and ours alone.
    let file = unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC | flags);
        assert!(fd >= 0, "an event counter can be made");
        File::from_raw_fd(fd)
    };
    let other = file.try_clone().expect("it can be duplicated");
    (file, other)
}

fn add(counter: &mut File, count: u64) {
    counter
        .write_all(&count.to_ne_bytes())
        .expect("it has room");
}

fn each_driver(test: impl Fn(&Reactor)) {
    for driver in [Driver::Auto, Driver::Fallback] {
        let config = Config {
            driver,
            ..Config::default()
        };
        let reactor = Reactor::new(&config).expect("a reactor");
        test(&reactor);
    }
}

#[test]
fn counts_are_taken_once_whether_the_counter_blocks_or_not() {
    each_driver(|reactor| {
        for flags in [0, libc::EFD_NONBLOCK] {
            let (file, mut other) = counter(flags);
            let descriptor = Descriptor::new(file.into());
            add(&mut other, 2);
            add(&mut other, 3);
            assert_eq!(reactor.block_on(descriptor.count()), Ok(5));
            let late = reactor.block_on(async {
                let later = async {
                    sleep(Duration::from_millis(20)).await;
                    add(&mut other.try_clone().expect("a duplicate"), 7);
                    std::future::pending::<()>().await;
                };
                race(descriptor.count(), later).await
            });
            assert!(matches!(late, Either::Left(Ok(7))), "flags {flags}");
        }
    });
}

#[test]
fn cancelled_wait_takes_nothing() {
    each_driver(|reactor| {
        let (file, mut other) = counter(0);
        let descriptor = Descriptor::new(file.into());
        let first = reactor.block_on(race(descriptor.count(), sleep(Duration::from_millis(10))));
        assert!(matches!(first, Either::Right(())));
        add(&mut other, 1);
        let mut bytes = [0; 8];
        other.read_exact(&mut bytes).expect("it is there");
        assert_eq!(u64::from_ne_bytes(bytes), 1);
    });
}

#[test]
fn nothing_more_will_come_from_a_pipe_that_is_closed() {
    each_driver(|reactor| {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(writer);
        let descriptor = Descriptor::never_blocking(reader.into());
        assert_eq!(
            reactor.block_on(descriptor.count()),
            Err(Errno::from_raw(libc::EPIPE))
        );
    });
}
