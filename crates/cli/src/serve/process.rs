//! A serving process: its sockets and images are opened, it says that it is ready, and it obeys signals.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gaur_export::Log;
use gaur_export::nbd::{self, Listen};
use gaur_reactor::{Signal, Signals, block_on};
use gaur_server::server::{Config, Ended, Server, Stopper};

use crate::background::{self, KeepStderr};
use crate::exporter::{Limits, NewExport};
use crate::failure::Failure;
use crate::host_kind::HostKind;
use crate::notice::say;
use crate::pin::{Pin, Prospect};

/// What a process is to serve, and how.
pub struct Plan {
    /// What it exports. Those of NBD come first.
    pub exports: Vec<NewExport>,
    /// Where and how NBD is served, if it is.
    pub nbd: Option<(Listen, nbd::Options)>,
    /// How files are reached.
    pub host: HostKind,
    /// What becomes of the memory and the threads of the process.
    pub pin: Pin,
    /// What will be exported.
    pub prospect: Prospect,
    /// Of the end.
    pub limits: Limits,
    /// Takes lines about clients.
    pub log: Option<Log>,
    /// Path of the socket for commands.
    pub control: Option<PathBuf>,
    /// It stays for commands when it has no export and does not serve NBD.
    pub stays: bool,
    /// It takes over a device whose server is gone.
    pub recover: bool,
    /// File to write its process id to.
    pub pid_file: Option<PathBuf>,
    /// The file stays at the end.
    pub keeps_pid_file: bool,
    /// It is the process in the background.
    pub forked: Option<KeepStderr>,
    /// It prints only errors.
    pub quiet: bool,
}

impl Plan {
    /// Serves until the end. `announce` says where the exports are.
    pub fn run(
        self,
        out: &mut dyn Write,
        announce: impl FnOnce(&Server, &mut dyn Write) -> Result<(), Failure>,
    ) -> Result<u8, Failure> {
        let (pid_file, keeps, forked) = (self.pid_file.clone(), self.keeps_pid_file, self.forked);
        let server = self.start()?;
        if let Some(path) = &pid_file {
            std::fs::write(path, format!("{}\n", std::process::id()))
                .map_err(|error| Failure::io(path, &error))?;
        }
        let outcome = announce(&server, out).and_then(|()| serve(server, forked, out));
        if let Some(path) = pid_file.filter(|_| !keeps) {
            remove_pid_file(&path);
        }
        outcome
    }

    /// Opens the sockets, then the images, each with its export.
    fn start(self) -> Result<Server, Failure> {
        let server = Server::new(Config {
            host: self.host,
            pin: self.pin,
            prospect: self.prospect,
            limits: self.limits,
            log: self.log,
            nbd: self.nbd,
            control: self.control,
            stays: self.stays,
        })?;
        let of_nbd = |new: &NewExport| new.front.is_nbd();
        let (of_nbd, others): (Vec<_>, Vec<_>) = self.exports.into_iter().partition(of_nbd);
        let only = (of_nbd.len() == 1).then(|| of_nbd[0].name.clone());
        for new in of_nbd {
            server.exporter().add(new)?;
        }
        if let Some(only) = only {
            server.exporter().set_default(&only);
        }
        // Taken over before a client can come, so that no signal finds the images unflushed.
        let signals = Signals::install(&signals())
            .map_err(|errno| Failure::new(format!("cannot take over signals: {errno}")))?;
        obey(signals, server.stopper(), self.quiet);
        for new in others {
            let added = match self.recover {
                true => server.take_over(&new),
                false => server.exporter().add(new),
            };
            if let Err(failure) = added {
                // Those that run already are not left to the end of the process.
                let _ = server.exporter().finish();
                return Err(failure);
            }
        }
        Ok(server)
    }
}

/// Serves to the end.
fn serve(server: Server, forked: Option<KeepStderr>, out: &mut dyn Write) -> Result<u8, Failure> {
    if let Some(keep) = forked {
        background::ready(out, keep)?;
    }
    match server.run()? {
        Ended::InOrder => Ok(0),
        Ended::GivenUp(why) => {
            say(why);
            Ok(EXIT_FORCED)
        }
    }
}

/// What is no file (/dev/null) is not ours to remove.
fn remove_pid_file(path: &Path) {
    if path.symlink_metadata().is_ok_and(|found| found.is_file()) {
        // Nothing depends on it any more.
        let _ = std::fs::remove_file(path);
    }
}

/// Exit code of a server that was stopped before its images were flushed and closed.
const EXIT_FORCED: u8 = 1;
/// How long a server that is stopped at once may take all the same.
const FORCED_LIMIT: Duration = Duration::from_secs(3);

/// The first signal drains, the second ends the server at once.
fn obey(signals: Signals, server: Stopper, quiet: bool) {
    std::thread::spawn(move || {
        let signal = block_on(signals.next());
        if !quiet && signal == Signal::Interrupt {
            say("finishing what is under way (again to stop at once)");
        }
        server.stop();
        block_on(signals.next());
        signals.exit_on_next(EXIT_FORCED);
        server.stop();
        // It may hang before it serves: in opening an image.
        std::thread::sleep(FORCED_LIMIT);
        std::process::exit(i32::from(EXIT_FORCED));
    });
}

/// Signals that end the server in order. A terminal that goes away sends the last, unless the server
/// was started so that it stays (`nohup`).
fn signals() -> Vec<Signal> {
    const HANGUP_BIT: u64 = 1;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let mut signals = vec![Signal::Interrupt, Signal::Terminate];
    if ignored.unwrap_or(0) & HANGUP_BIT == 0 {
        signals.push(Signal::Hangup);
    }
    signals
}
