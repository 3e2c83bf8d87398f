//! Signals, in processes of their own: this test starts itself again.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use gaur_reactor::{Config, Driver, Reactor, Signal, Signals};

/// The same signal counts once in this time.
const ECHO: Duration = Duration::from_millis(600);
const ROLE: &str = "GAUR_SIGNAL_TEST_DRIVER";

/// Not a test by itself: what the child does. It waits for a signal, then for another.
#[test]
fn child() {
    let driver = match std::env::var(ROLE).as_deref() {
        Ok("ring") => Driver::Ring,
        Ok("fallback") => Driver::Fallback,
        _ => return,
    };
    let signals =
        Signals::install(&[Signal::Interrupt, Signal::Terminate, Signal::Hangup]).unwrap();
    let reactor = Reactor::new(&Config {
        driver,
        ..Config::default()
    })
    .unwrap();
    eprintln!("ready");
    reactor.block_on(async {
        loop {
            let signal = signals.next().await;
            if signal == Signal::Terminate {
                break;
            }
            eprintln!("{signal:?}");
        }
        signals.exit_on_next(42);
        eprintln!("Terminate");
        // A thread that never looks again ends nevertheless.
        thread::sleep(Duration::from_secs(600));
    });
}

fn start(role: &str) -> (Child, impl FnMut() -> String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(ROLE, role)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    (child, move || {
        lines.next().expect("the child says something").unwrap()
    })
}

fn send(child: &Child, signal: libc::c_int) {
    let id = libc::pid_t::try_from(child.id()).unwrap();
    // SAFETY: no memory is passed; the child has not been waited for.
    assert_eq!(unsafe { libc::kill(id, signal) }, 0);
}

#[test]
fn signals_are_waited_for_and_the_last_one_is_immediate() {
    for role in ["ring", "fallback"] {
        let (mut child, mut line) = start(role);
        assert_eq!(line(), "ready");
        send(&child, libc::SIGHUP);
        assert_eq!(line(), "Hangup");
        send(&child, libc::SIGINT);
        assert_eq!(line(), "Interrupt");
        send(&child, libc::SIGTERM);
        assert_eq!(line(), "Terminate");
        // `timeout` sends every signal twice, and the second ended the process at once.
        send(&child, libc::SIGTERM);
        thread::sleep(ECHO / 4);
        assert!(child.try_wait().unwrap().is_none(), "an echo is no signal");
        thread::sleep(ECHO);
        send(&child, libc::SIGTERM);
        assert_eq!(child.wait().unwrap().code(), Some(42));
    }
}
