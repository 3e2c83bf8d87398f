//! A disk in an event loop that the program has already: the reactor is one more descriptor of its
//! `epoll`. Here the other is a socket, on which a guest would ring for its requests.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use gaur::{CreateOptions, Disk, OpenOptions, Reactor, ReactorConfig, References, Result, spawn};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

const RING: EventData = EventData::new_u64(0);
const GUEST: EventData = EventData::new_u64(1);
const REQUESTS: u8 = 32;

fn main() -> Result<()> {
    Disk::create("disk.qcow2", &CreateOptions::new(64 << 20))?;
    let disk = Disk::open("disk.qcow2", &OpenOptions::new(References::Beside))?;
    let reactor = Reactor::new(&ReactorConfig::default())?;
    let queue = Rc::new(disk.queue());
    let (mut guest, host) = UnixStream::pair()?;
    let host = Rc::new(host);

    let events = epoll::create(CreateFlags::CLOEXEC).map_err(io::Error::from)?;
    for (descriptor, data) in [(reactor.as_fd(), RING), (host.as_fd(), GUEST)] {
        epoll::add(&events, descriptor, data, EventFlags::IN).map_err(io::Error::from)?;
    }
    guest.write_all(&(0..REQUESTS).collect::<Vec<u8>>())?;
    let mut answered = 0;
    while answered < REQUESTS {
        let mut ready = Vec::with_capacity(2);
        epoll::wait(&events, rustix::buffer::spare_capacity(&mut ready), None)
            .map_err(io::Error::from)?;
        for event in ready {
            if { event.data } == GUEST {
                let mut numbers = [0; 8];
                let count = (&*host).read(&mut numbers)?;
                for number in numbers.into_iter().take(count) {
                    let (queue, host) = (Rc::clone(&queue), Rc::clone(&host));
                    spawn(async move {
                        let at = u64::from(number) << 16;
                        let done = queue.write_at(at, &[number; 512]).await;
                        // The answer; a real guest is told of an error.
                        let status = u8::from(done.is_err());
                        (&*host).write_all(&[status]).expect("the guest listens");
                    });
                }
            }
        }
        // New tasks begin, and those whose input or output is done go on.
        reactor.turn();
        answered += answers(&mut guest)?;
    }
    reactor.block_on(queue.flush())?;
    println!("{answered} requests");
    drop(queue);
    drop(reactor);
    disk.close()
}

/// The guest's side: how many answers have come since the last call, all of them good.
fn answers(guest: &mut UnixStream) -> Result<u8> {
    guest.set_nonblocking(true)?;
    let mut statuses = [0; REQUESTS as usize];
    match guest.read(&mut statuses) {
        Ok(count) => {
            assert!(statuses[..count].iter().all(|status| *status == 0));
            Ok(count as u8)
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error.into()),
    }
}
