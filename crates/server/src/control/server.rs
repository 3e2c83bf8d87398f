//! The control socket's side in a server: a thread with a reactor of its own, on which every command
//! runs as a task with a queue of its own. Serving threads are not held up by it; what the engine makes
//! them wait for is the moment in which a change becomes visible.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use gaur_block::Errno;
use gaur_reactor::{Address, Config, Driver, Either, Listener, Reactor, Stop, race, sleep, spawn};
use rustix::fs::Mode;

use super::session;
use crate::exporter::Exporter;
use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::notice::say;

/// Clients at once; further ones wait in the socket's queue.
const CLIENTS_MAX: usize = 16;
const EADDRINUSE: Errno = Errno::from_raw(98);
/// Time to wait when there is no room, or a client cannot be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// What all sessions share.
pub struct Context {
    /// What the server exports.
    pub exporter: Arc<Exporter>,
    /// No further command is taken.
    pub closing: Stop,
    /// What is under way is given up.
    pub cancel: Stop,
}

/// The running thread.
pub struct ControlServer {
    thread: JoinHandle<()>,
    closing: Stop,
}

/// Makes the socket, for this user only. A socket file without a listener is replaced, any other
/// file is not. To be called while the process has one thread: the mode of new files is the process's.
pub fn bind(path: &Path) -> Result<Listener, Failure> {
    let private = Mode::RWXG | Mode::RWXO | Mode::XUSR;
    let before = rustix::process::umask(private);
    let listener = Listener::bind(&Address::Unix(path.to_owned()));
    rustix::process::umask(before);
    listener.map_err(|errno| {
        let name = path.display().to_string();
        if let Some(reason) = Address::too_long(path) {
            return Failure::about(name, reason).hint("choose another path with --control");
        }
        let is_socket = path
            .metadata()
            .is_ok_and(|found| found.file_type().is_socket());
        let message = match is_socket {
            _ if errno != EADDRINUSE => {
                return Failure::system(&name, "cannot make the control socket", errno);
            }
            true => "somebody listens there",
            false => "a file that is no socket is in the way",
        };
        Failure::about(name, message).hint("choose another path with --control")
    })
}

impl ControlServer {
    /// Starts to take commands. `cancel` ends everything, and may be raised from anywhere.
    pub fn start(
        listener: Listener,
        exporter: Arc<Exporter>,
        cancel: Stop,
    ) -> Result<ControlServer, Failure> {
        let closing = Stop::new();
        let stop = closing.clone();
        let run = move || {
            let config = Config {
                driver: match exporter.host {
                    HostKind::Blocking => Driver::Fallback,
                    _ => Driver::Auto,
                },
                ..Config::default()
            };
            let reactor = match Reactor::new(&config) {
                Ok(reactor) => reactor,
                Err(errno) => return say(format!("no commands are taken: {errno}")),
            };
            let context = Rc::new(Context {
                exporter,
                closing: stop,
                cancel,
            });
            reactor.block_on(async {
                take(listener, &context).await;
                reactor.drained().await;
            });
        };
        let thread = std::thread::Builder::new().name("control".to_owned());
        let thread = thread
            .spawn(run)
            .map_err(|error| Failure::io("the control thread", &error))?;
        Ok(ControlServer { thread, closing })
    }

    /// Takes no further command, and waits for those under way.
    pub fn finish(self) {
        self.closing.stop();
        if self.thread.join().is_err() {
            say("the control thread failed");
        }
    }
}

/// Lets clients in until the end.
async fn take(listener: Listener, context: &Rc<Context>) {
    // Every client has one more reference.
    let present = Rc::new(());
    loop {
        let knock = async {
            while Rc::strong_count(&present) > CLIENTS_MAX {
                sleep(PAUSE).await;
            }
            listener.accept().await
        };
        let over = race(context.closing.stopped(), context.cancel.stopped());
        match race(over, knock).await {
            Either::Left(_) => return,
            Either::Right(Err(errno)) => {
                say(format!("cannot accept a control client: {errno}"));
                sleep(PAUSE).await;
            }
            Either::Right(Ok(stream)) => {
                let (context, present) = (Rc::clone(context), Rc::clone(&present));
                drop(spawn(async move {
                    session::serve(context, stream).await;
                    drop(present);
                }));
            }
        }
    }
}
