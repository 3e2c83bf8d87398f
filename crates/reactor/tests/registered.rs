//! Buffers that the engine passes on by their number, and operations that are given up.

#[path = "scratch/contract.rs"]
mod contract;
#[path = "scratch/files.rs"]
mod scratch;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use contract::pattern;
use gaur_block::{Access, Errno, File, Host, Registered, Source, Target};
use gaur_reactor::{Buffer, Config, Driver, Reactor, ReactorFile, ReactorHost};
use scratch::Scratch;

const WRITE: Access = Access {
    write: true,
    direct: false,
    lock: true,
    force_share: false,
};
const DIRECT: Access = Access {
    direct: true,
    ..WRITE
};

fn with_file<F: Future<Output = ()>>(
    driver: Driver,
    scratch: &Scratch,
    access: Access,
    test: impl FnOnce(ReactorFile) -> F,
) {
    let name = scratch.file_with("image", &vec![1; 1 << 20]);
    let reactor = Reactor::new(&Config {
        driver,
        ..Config::default()
    })
    .unwrap();
    reactor.block_on(async {
        let file = ReactorHost
            .open(name.as_ref(), access)
            .await
            .expect("the file opens");
        test(file).await;
    });
}

fn registered(buffer: &Buffer) -> Registered {
    buffer
        .registered()
        .expect("the pool is registered with the ring")
}

#[test]
fn a_registered_buffer_is_read_and_written_by_its_number() {
    let places = [
        (Scratch::on_disk(), WRITE),
        (Scratch::on_disk(), DIRECT),
        (Scratch::in_memory(), WRITE),
    ];
    for (scratch, access) in places {
        with_file(Driver::Ring, &scratch, access, async |file| {
            let mut from = file.buffer(65536);
            from.copy_from_slice(&pattern(1, 65536));
            file.write_at(8192, Source::Registered(registered(&from)))
                .await
                .unwrap();
            assert!(contract::read(&file, 8192, 65536).await == from[..]);

            // Part of a buffer, and across the end of the file, where zeros follow.
            let mut to = file.buffer(65536);
            to.fill(9);
            let whole = registered(&to);
            let part = Registered {
                offset: whole.offset + 4096,
                len: 8192,
                ..whole
            };
            file.read_at(8192, Target::Registered(part)).await.unwrap();
            assert!(to[..4096].iter().chain(&to[12288..]).all(|byte| *byte == 9));
            assert!(to[4096..12288] == from[..8192]);
            file.read_at((1 << 20) - 4096, Target::Registered(part))
                .await
                .unwrap();
            assert!(to[4096..8192].iter().all(|byte| *byte == 1));
            assert!(to[8192..12288].iter().all(|byte| *byte == 0));
            assert!(to[12288..].iter().all(|byte| *byte == 9));

            let beyond = Registered {
                offset: u64::MAX - 10,
                ..whole
            };
            assert_eq!(
                file.read_at(0, Target::Registered(beyond)).await,
                Err(Errno::EINVAL)
            );
            let nobody = Registered {
                index: 999,
                offset: 0,
                len: 4096,
            };
            let error = file
                .read_at(0, Target::Registered(nobody))
                .await
                .unwrap_err();
            assert_eq!(error.raw(), libc::EFAULT);
        });
    }
}

#[test]
fn without_a_ring_registered_buffers_are_refused() {
    with_file(Driver::Fallback, &Scratch::on_disk(), WRITE, async |file| {
        assert!(file.buffer(4096).registered().is_none());
        let some = Registered {
            index: 0,
            offset: 0,
            len: 4096,
        };
        let refused = Err(Errno::EOPNOTSUPP);
        assert_eq!(file.read_at(0, Target::Registered(some)).await, refused);
        assert_eq!(file.write_at(0, Source::Registered(some)).await, refused);
    });
}

#[test]
fn a_buffer_of_another_thread_is_plain_memory() {
    let buffer = std::thread::spawn(|| {
        let reactor = Reactor::new(&Config::default()).unwrap();
        reactor.block_on(async { gaur_reactor::buffer(4096) })
    });
    let mut buffer = buffer.join().unwrap();
    with_file(Driver::Ring, &Scratch::on_disk(), WRITE, async |file| {
        assert!(buffer.registered().is_none());
        buffer.fill(3);
        file.write_at(0, Source::memory(&buffer)).await.unwrap();
        assert_eq!(contract::read(&file, 0, 4096).await, [3; 4096]);
    });
}

#[test]
fn a_dropped_read_lets_go_of_its_memory() {
    let scratch = Scratch::on_disk();
    with_file(Driver::Ring, &scratch, DIRECT, async |file| {
        for round in 0..200_usize {
            let mut memory = file.buffer(1 << 18);
            {
                let mut read = pin!(file.read_at(0, Target::memory(&mut memory)));
                // Started, and for every other round handed to the kernel, but not waited for.
                poll_fn(|context| {
                    assert!(read.as_mut().poll(context).is_pending());
                    Poll::Ready(())
                })
                .await;
                if round % 2 == 0 {
                    gaur_reactor::yield_now().await;
                }
            }
            // Had the kernel still been at work, some of these bytes would change again.
            memory.fill(0x77);
            gaur_reactor::sleep(std::time::Duration::from_micros(300)).await;
            assert!(memory.iter().all(|byte| *byte == 0x77));
        }
    });
}
