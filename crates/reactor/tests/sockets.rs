//! Sockets on a ring, on the fallback, and on threads without a reactor, against each other.

#[path = "scratch/contract.rs"]
mod contract;
#[path = "scratch/files.rs"]
mod scratch;

use std::io::IoSlice;
use std::net::Shutdown;
use std::path::Path;
use std::thread;
use std::time::Duration;

use contract::pattern;
use gaur_block::Errno;
use gaur_reactor::{
    Address, Config, Driver, Listener, Reactor, Stream, block_on, sleep, spawn, timeout,
};
use scratch::Scratch;

/// Where a call may wait.
#[derive(Clone, Copy, Debug)]
enum Place {
    Ring,
    Fallback,
    Thread,
}

const PLACES: [Place; 3] = [Place::Ring, Place::Fallback, Place::Thread];

fn run<F: Future>(place: Place, future: F) -> F::Output {
    let driver = match place {
        Place::Ring => Driver::Ring,
        Place::Fallback => Driver::Fallback,
        Place::Thread => return block_on(future),
    };
    Reactor::new(&Config {
        driver,
        ..Config::default()
    })
    .unwrap()
    .block_on(future)
}

/// Sends back whatever comes, whole megabytes of it, until the peer ends the stream.
async fn echo(stream: Stream) {
    let mut memory = vec![0; 1 << 20];
    loop {
        match stream.recv(&mut memory).await.unwrap() {
            0 => return,
            count => stream.send(&memory[..count]).await.unwrap(),
        }
    }
}

#[test]
fn bytes_arrive_whole_and_in_order_between_all_kinds_of_places() {
    for server in PLACES {
        for client in PLACES {
            let scratch = Scratch::on_disk();
            let unix = Address::Unix(scratch.file("socket").into());
            for address in [unix, Address::Tcp("127.0.0.1:0".parse().unwrap())] {
                let listener = Listener::bind(&address).unwrap();
                let address = listener.local_address().unwrap();
                let server = thread::spawn(move || {
                    run(server, async {
                        echo(listener.accept().await.unwrap()).await;
                    });
                });
                run(client, exchange(&address));
                server.join().unwrap();
            }
        }
    }
}

async fn exchange(address: &Address) {
    let stream = Stream::connect(address).await.unwrap();
    stream.send(b"one").await.unwrap();
    let mut memory = [0; 3];
    assert_eq!(stream.recv_exact(&mut memory).await, Ok(3));
    assert_eq!(&memory, b"one");

    // More than fits any socket buffer, in parts of all sizes; sending and receiving at once, from
    // two threads where there is no reactor to do both.
    let bytes = pattern(1, 3 << 20);
    let parts: Vec<IoSlice<'_>> = bytes
        .chunks(997)
        .enumerate()
        .flat_map(|(index, chunk)| {
            [IoSlice::new(chunk), IoSlice::new(&[])]
                .into_iter()
                .take(1 + index % 2)
        })
        .collect();
    let mut back = vec![0; bytes.len()];
    if gaur_reactor::has_reactor() {
        let receive = async { stream.recv_exact(&mut back).await };
        let (sent, received) = both(stream.send_vectored(&parts), receive).await;
        assert_eq!((sent, received), (Ok(()), Ok(bytes.len())));
    } else {
        thread::scope(|scope| {
            let sender = scope.spawn(|| block_on(stream.send_vectored(&parts)));
            assert_eq!(block_on(stream.recv_exact(&mut back)), Ok(bytes.len()));
            assert_eq!(sender.join().unwrap(), Ok(()));
        });
    }
    assert!(back == bytes);

    // The end of the stream in the middle of what is wanted.
    stream.send(b"end").await.unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut memory = [0; 10];
    assert_eq!(stream.recv_exact(&mut memory).await, Ok(3));
    assert_eq!(&memory[..3], b"end");
    assert_eq!(stream.recv(&mut memory).await, Ok(0));
}

async fn both<A: Future, B: Future>(a: A, b: B) -> (A::Output, B::Output) {
    let (mut a, mut b) = (Box::pin(a), Box::pin(b));
    let (mut first, mut second) = (None, None);
    std::future::poll_fn(move |context| {
        if first.is_none()
            && let std::task::Poll::Ready(output) = a.as_mut().poll(context)
        {
            first = Some(output);
        }
        if second.is_none()
            && let std::task::Poll::Ready(output) = b.as_mut().poll(context)
        {
            second = Some(output);
        }
        match (first.take(), second.take()) {
            (Some(first), Some(second)) => std::task::Poll::Ready((first, second)),
            (one, other) => {
                (first, second) = (one, other);
                std::task::Poll::Pending
            }
        }
    })
    .await
}

#[test]
fn a_dead_peer_is_an_error_and_no_signal() {
    for place in PLACES {
        let (ours, theirs) = Stream::pair().unwrap();
        drop(theirs);
        run(place, async {
            let error = ours.send(b"x").await.unwrap_err();
            assert_eq!(error.raw(), libc::EPIPE);
            let parts = [IoSlice::new(b"x"), IoSlice::new(b"y")];
            let error = ours.send_vectored(&parts).await.unwrap_err();
            assert_eq!(error.raw(), libc::EPIPE);
            assert_eq!(ours.recv(&mut [0; 4]).await, Ok(0));
        });
    }
}

#[test]
fn shutdown_from_another_thread_ends_a_wait() {
    for place in PLACES {
        let (ours, _theirs) = Stream::pair().unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| run(place, ours.recv(&mut [0; 4])));
            thread::sleep(Duration::from_millis(30));
            ours.shutdown(Shutdown::Both).unwrap();
            assert_eq!(waiting.join().unwrap(), Ok(0));
        });
    }
}

#[test]
fn a_dropped_receive_leaves_the_stream_usable() {
    for place in [Place::Ring, Place::Fallback] {
        let (ours, theirs) = Stream::pair().unwrap();
        run(place, async {
            for round in 0..50 {
                let mut memory = [0; 4];
                let none = timeout(Duration::from_millis(1), ours.recv(&mut memory)).await;
                assert_eq!(none, None);
                theirs.send(&[round; 4]).await.unwrap();
                assert_eq!(ours.recv_exact(&mut memory).await, Ok(4));
                assert_eq!(memory, [round; 4]);
            }
        });
    }
}

#[test]
fn a_dropped_accept_loses_no_connection() {
    for place in [Place::Ring, Place::Fallback] {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let address = listener.local_address().unwrap();
        run(place, async {
            for _ in 0..20 {
                assert!(
                    timeout(Duration::from_millis(1), listener.accept())
                        .await
                        .is_none()
                );
            }
            let client = spawn(async move {
                let stream = Stream::connect(&address).await.unwrap();
                stream.send(b"hello").await.unwrap();
                sleep(Duration::from_millis(5)).await;
            });
            let stream = listener.accept().await.unwrap();
            assert!(stream.peer().starts_with("127.0.0.1:"));
            let mut memory = [0; 5];
            assert_eq!(stream.recv_exact(&mut memory).await, Ok(5));
            client.await;
        });
    }
}

#[test]
fn a_socket_file_is_replaced_only_when_dead_and_removed_at_the_end() {
    let scratch = Scratch::on_disk();
    let path = scratch.file("socket");
    let address = Address::Unix(path.clone().into());
    let in_use = Errno::from_raw(libc::EADDRINUSE);
    let listener = Listener::bind(&address).unwrap();
    assert_eq!(listener.local_address(), Ok(address.clone()));
    assert_eq!(Listener::bind(&address).unwrap_err(), in_use);
    drop(listener);
    assert!(!Path::new(&path).exists());

    // Left behind by a process that was killed.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(Path::new(&path).exists());
    let listener = Listener::bind(&address).unwrap();
    // Not ours any more: it stays.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, b"something else").unwrap();
    drop(listener);
    assert_eq!(std::fs::read(&path).unwrap(), b"something else");
    assert_eq!(Listener::bind(&address).unwrap_err(), in_use);

    let long = Address::Unix("x".repeat(200).into());
    assert_eq!(Listener::bind(&long).unwrap_err().raw(), libc::ENAMETOOLONG);
}

#[test]
fn thousands_of_receives_wait_at_once_on_one_ring() {
    run(Place::Ring, async {
        let pairs: Vec<_> = (0..300).map(|_| Stream::pair().unwrap()).collect();
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let tasks: Vec<_> = ours
            .into_iter()
            .map(|stream| {
                spawn(async move {
                    let mut memory = [0; 8];
                    for _ in 0..10 {
                        assert_eq!(stream.recv_exact(&mut memory).await, Ok(8));
                        stream.send(&memory).await.unwrap();
                    }
                })
            })
            .collect();
        for round in 0..10_u64 {
            for stream in &theirs {
                stream.send(&round.to_be_bytes()).await.unwrap();
            }
            for stream in &theirs {
                let mut memory = [0; 8];
                assert_eq!(stream.recv_exact(&mut memory).await, Ok(8));
                assert_eq!(u64::from_be_bytes(memory), round);
            }
        }
        for task in tasks {
            task.await;
        }
    });
}

/// Threads of this process that the kernel made for operations of rings.
fn kernel_workers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks are listed");
    let names = tasks.flatten().map(|task| task.path().join("comm"));
    let names = names.filter_map(|name| std::fs::read_to_string(name).ok());
    names.filter(|name| name.starts_with("iou-wrk")).count()
}

/// A hundred clients that sent most of a payload and no more held a thread of the server each, for as
/// long as they liked: a receive that had waited 128 times blocked in a thread of the kernel's.
#[test]
fn peers_that_stall_hold_no_threads() {
    const PEERS: usize = 12;
    const PARTS: usize = 300;
    run(Place::Ring, async {
        let pairs: Vec<_> = (0..PEERS).map(|_| Stream::pair().unwrap()).collect();
        let (far, near): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let received: Vec<_> = near
            .into_iter()
            .enumerate()
            .map(|(peer, stream)| {
                // A long payload in parts, and a short one byte by byte.
                let part = if peer % 2 == 0 { 1000 } else { 1 };
                spawn(async move {
                    let mut memory = vec![0; PARTS * part + 1];
                    stream.recv_exact(&mut memory).await
                })
            })
            .collect();
        for _ in 0..PARTS {
            for (peer, stream) in far.iter().enumerate() {
                let part = if peer % 2 == 0 { 1000 } else { 1 };
                stream.send(&vec![7; part]).await.unwrap();
            }
            sleep(Duration::from_millis(1)).await;
        }
        let workers = kernel_workers();
        assert!(workers <= 4, "{workers} threads for {PEERS} peers");
        for stream in &far {
            stream.send(&[8]).await.unwrap();
        }
        for (peer, received) in received.into_iter().enumerate() {
            let part = if peer % 2 == 0 { 1000 } else { 1 };
            assert_eq!(received.await, Ok(PARTS * part + 1));
        }
    });
}
