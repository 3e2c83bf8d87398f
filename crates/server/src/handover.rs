//! The file of a handover log ([`HandoverLog`]): what a server leaves to the next one when it is killed.
//! It lies in memory that outlives the process (in /run, which a reboot empties).

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gaur_engine::{
    CommitLog, ErrorKind, HandoverLog, Left, LogError, LogOwner, Unclosed, log_checksum,
};
use gaur_reactor::{BlockingFile, SharedWords, block_on};

use crate::failure::Failure;
use crate::notice::say;
use crate::shared_image::SharedImage;

/// Records of a part.
const CAPACITY: usize = 87_000;

/// The log of a server.
pub struct Handover {
    path: PathBuf,
    log: Arc<HandoverLog<SharedWords>>,
}

impl Handover {
    /// Opens the log at `path` for the image in `image`. What belongs to the time before this machine was
    /// started is forgotten.
    ///
    /// # Errors
    /// The file is none of ours, was damaged, or holds what another image's server has left: nothing of it
    /// is changed then.
    pub fn open(path: &Path, image: impl AsRef<Path>) -> Result<Handover, Failure> {
        let image = image.as_ref();
        let count = HandoverLog::<SharedWords>::words_for(CAPACITY);
        let words = SharedWords::open(path, count).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => {
                Failure::about(path, "another server uses it").kind(ErrorKind::Locked)
            }
            std::io::ErrorKind::InvalidData => unusable(path, LogError::Foreign),
            _ => Failure::io(path, &error),
        })?;
        let found = std::fs::metadata(image).map_err(|error| Failure::io(image, &error))?;
        let owner = LogOwner {
            boot: boot(),
            file: [found.dev(), found.ino()],
        };
        let log = HandoverLog::open(words, owner, new_number());
        Ok(Handover {
            path: path.to_owned(),
            log: Arc::new(log.map_err(|error| unusable(path, error))?),
        })
    }

    /// The log, for the engine.
    pub fn log(&self) -> Arc<dyn CommitLog> {
        self.log.clone()
    }

    /// Whether a server was killed, and some of its requests may be under way yet.
    pub fn is_left(&self) -> bool {
        self.log.is_left()
    }

    /// Takes over what a server that was killed has left, and notes commits from now on. Nothing else
    /// was done to the image since it was opened.
    pub fn take_over(&self, image: &SharedImage) -> Result<(), Failure> {
        let left = self.left()?;
        let known = [self.log.number(), self.log.number_before()];
        let queue = image.queue::<BlockingFile>();
        let taken = block_on(self.log.take_over(&queue, &left, new_number()));
        let adopted = taken.map_err(|error| {
            let failure = Failure::image(image.name(), &error);
            failure.hint(ways_out(&self.path))
        })?;
        if left.failed {
            say("the last server could not flush: what it had not flushed is lost");
        }
        match adopted {
            Some(changed) => say_adopted(changed, left.overflowed),
            None if left.failed || left.commits.is_empty() => {}
            None => say(format_args!(
                "{}: was written to since its server was killed: what only the log {} knew is lost",
                image.name(),
                self.path.display()
            )),
        }
        if let (Some(unclosed), None) = (image.image().unclosed(), adopted) {
            tell(image.name(), unclosed, known.contains(&unclosed.log_number));
        }
        Ok(())
    }

    /// Forgets what a server that was killed has left: who had been told of it is gone, too.
    pub fn forget(&self) -> Result<(), Failure> {
        if !self.left()?.commits.is_empty() {
            say(
                "the last server was killed, and whoever used its disk is gone: what was not flushed is lost",
            );
        }
        self.log.start_anew(new_number(), self.log.number());
        Ok(())
    }

    /// The image was closed: there is nothing to hand over.
    pub fn remove(&self) {
        // It may have been removed already.
        let _ = std::fs::remove_file(&self.path);
    }

    fn left(&self) -> Result<Left, Failure> {
        let left = self.log.left();
        left.map_err(|error| unusable(&self.path, error))
    }
}

fn say_adopted(changed: u64, overflowed: bool) {
    if changed > 0 {
        say(format_args!(
            "{changed} clusters taken over from a server that was killed"
        ));
    }
    if overflowed {
        say("the last server had written more than its log holds: some of it is lost");
    }
}

/// Why the file at `path` is not used, and what to do about it.
fn unusable(path: &Path, error: LogError) -> Failure {
    let (text, hint) = match error {
        LogError::Foreign => (
            "is no handover log of this version of gaur",
            "name another file, or remove it".to_owned(),
        ),
        LogError::Damaged => ("the log is damaged", ways_out(path)),
        LogError::OtherImage => (
            "holds what a killed server of another image has left",
            "serve that image with it, or remove it to give that up".to_owned(),
        ),
    };
    let failure = Failure::about(path, text);
    failure.kind(ErrorKind::Corrupt).hint(hint)
}

fn ways_out(path: &Path) -> String {
    format!(
        "'rm {}' gives up what was acknowledged to clients and not flushed",
        path.display()
    )
}

/// A number for a log: a third stands for the start of the machine, the rest is chance.
fn new_number() -> u64 {
    let mut chance = [0; 4];
    // It only fails before the system has gathered any chance, long before this.
    let _ = rustix::rand::getrandom(&mut chance[..], rustix::rand::GetRandomFlags::empty());
    boot_mark() << 32 | u64::from(u32::from_ne_bytes(chance).max(1))
}

fn boot_mark() -> u64 {
    u64::from(log_checksum(boot())) & 0xffff
}

/// Says what a user who opens an image for writing has to know of a process that did not close it. `knows`:
/// what was in its log is dealt with.
pub fn tell(name: &str, unclosed: Unclosed, knows: bool) {
    // After a restart of the machine there is no log.
    if !knows && unclosed.log_number != 0 && unclosed.log_number >> 32 == boot_mark() {
        say(format_args!(
            "{name}: a server that was killed left a log of changes (--handover); \
             without it what was acknowledged and not flushed is lost"
        ));
    }
    say(format_args!(
        "{name}: the process that wrote to it last was killed or lost its power; clusters may be leaked: \
         'gaur check {name}' counts them, 'gaur check -r leaks {name}' gives them back"
    ));
}

/// Which start of the machine this is; zeros where the kernel does not say.
fn boot() -> [u64; 2] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).unwrap_or(0);
    [(number >> 64) as u64, number as u64]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_one_user_at_a_time_and_a_number_of_this_start_of_the_machine() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let log = Handover::open(&path, folder.path()).expect("it opens");
        let number = log.log.number();
        assert!(number >> 48 == 0 && number >> 32 == boot_mark());
        assert!(
            Handover::open(&path, folder.path()).is_err_and(|failure| failure.is_locked()),
            "it is in use"
        );
        drop(log);
        let log = Handover::open(&path, folder.path()).expect("it opens");
        assert!(log.is_left());
        assert_eq!(log.log.number(), number);
    }
}
