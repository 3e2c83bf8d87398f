//! A vhost-user-blk back end, for the virtual machine monitors that have a disk in another process:
//!
//! ```text
//! vhost_user_blk disk.qcow2 disk.socket &
//! qemu-system-x86_64 -m 1G -object memory-backend-memfd,id=m,size=1G,share=on -machine memory-backend=m \
//!     -chardev socket,id=c,path=disk.socket -device vhost-user-blk-pci,chardev=c,num-queues=4
//! ```
//!
//! It serves one client after the other until its standard input ends.

use std::env;
use std::error::Error;
use std::io::{Read, stdin};
use std::thread::available_parallelism;

use gaur::{Disk, OpenOptions, References};
use gaur_export::{Front, vhost_user};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args_os().skip(1);
    let (Some(image), Some(socket)) = (arguments.next(), arguments.next()) else {
        return Err("usage: vhost_user_blk IMAGE SOCKET".into());
    };
    let disk = Disk::open(image, &OpenOptions::new(References::Beside))?;

    let mut options = vhost_user::Options::new(socket);
    options.queues = 4;
    options.threads = available_parallelism()?.get().min(4);
    let served = disk.clone();
    // Called on each of its threads, which have a reactor.
    let server = vhost_user::start(options, move |_| Ok(served.queue()))?;
    println!("{}", server.place());

    stdin().read_to_end(&mut Vec::new())?;
    // Requests under way are answered.
    server.stop();
    Box::new(server).finish()?;
    disk.close()?;
    Ok(())
}
