//! Exports of NBD servers as files.
//!
//! A connection is driven by a task (`connection`); requests of any thread meet it in `slots`. The first
//! connection of an export has a thread and a reactor of its own, so that it can be used by threads with a reactor and
//! by those that block. Where the server allows several, a reactor has one of its own besides (`own`).

mod connection;
mod file;
mod handshake;
mod own;
mod slots;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use gaur_block::{Access, Errno, FileId, FileLimits, OpenError, Within};
use gaur_nbd::wire::export_flag;
pub use gaur_nbd::{Patience, Remote, Server, Tls};
use parking_lot::Mutex;

use crate::address::Address;
use crate::open::refused;
use crate::reactor::{Config, Reactor};
use crate::syscall;
use connection::Connection;
pub(crate) use file::Via;
use handshake::Session;
pub(crate) use own::OwnLink;
use slots::{Phase, Slots};

/// A connection that is not there yet.
const NOT_YET: Phase = Phase::Down(Errno::ENOTCONN);

/// What went wrong with a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Trouble {
    errno: Errno,
    text: String,
    /// Another attempt would end the same way.
    is_final: bool,
}

impl Trouble {
    fn closed(text: &str) -> Trouble {
        Trouble {
            errno: Errno::ECONNRESET,
            text: text.to_owned(),
            is_final: false,
        }
    }

    fn system(what: &str, errno: Errno) -> Trouble {
        Trouble {
            errno,
            text: format!("{what}: {errno}"),
            is_final: false,
        }
    }

    fn timed_out(text: String) -> Trouble {
        Trouble {
            errno: Errno::ETIMEDOUT,
            text,
            is_final: false,
        }
    }

    fn violation(text: String) -> Trouble {
        Trouble::final_word(Errno::EPROTO, text)
    }

    fn final_word(errno: Errno, text: String) -> Trouble {
        Trouble {
            errno,
            text,
            is_final: true,
        }
    }
}

/// Reads a name that may be of an export; `None` when it is a path.
pub(crate) fn remote_of(name: &Path) -> Option<Result<Remote, OpenError>> {
    let parsed = Remote::parse(name.as_os_str().as_bytes())?;
    Some(parsed.map_err(|bad| refused(Errno::EINVAL, bad.to_string())))
}

/// The identity of the export that a name is of; `None` when it is a path. Two names of one server are two
/// exports: where they lead, only the server knows.
pub fn file_id(name: &Path) -> Option<FileId> {
    remote_of(name)?.ok().map(|remote| id_of(&remote))
}

fn id_of(remote: &Remote) -> FileId {
    let mut hasher = DefaultHasher::new();
    (&remote.server, &remote.export).hash(&mut hasher);
    FileId {
        device: u64::MAX,
        inode: hasher.finish(),
    }
}

/// Whether an image may refer to an export.
pub(crate) fn is_within(remote: &Remote, within: Within<'_>) -> bool {
    let Within::Places(places) = within else {
        return true;
    };
    places.iter().any(|place| {
        let place = Remote::parse(place.as_os_str().as_bytes());
        place.is_some_and(|place| place.is_ok_and(|place| remote.is_allowed_by(&place)))
    })
}

/// The connections of this process. An export that is opened again finds its connection here, for a moment also
/// when it was closed: servers may serve one client at a time, or one and no more.
static LINKS: Mutex<Vec<Arc<Link>>> = Mutex::new(Vec::new());

/// Whether the process is to end soon.
static IN_A_HURRY: AtomicBool = AtomicBool::new(false);

/// Has every wait for a server end soon, also for one that is to come back: a signal has asked for the end.
pub fn hurry() {
    IN_A_HURRY.store(true, Ordering::Relaxed);
}

fn is_in_a_hurry() -> bool {
    IN_A_HURRY.load(Ordering::Relaxed)
}

/// A connection, and what is known of the export behind it.
struct Link {
    remote: Remote,
    session: Session,
    /// Where its server was found.
    address: Address,
    slots: Arc<Slots>,
}

/// An export of an NBD server, open. Any number of threads may use it.
pub(crate) struct NbdExport {
    link: Arc<Link>,
    limits: FileLimits,
}

impl Link {
    /// The connection that there is, or a new one.
    fn to(remote: Remote) -> Result<Arc<Link>, Trouble> {
        if let Some(link) = LINKS.lock().iter().find(|link| link.is_usable(&remote)) {
            link.slots.hold().users += 1;
            return Ok(link.clone());
        }
        let slots = Slots::new();
        let (session, address) = start(Connection::new(remote.clone(), slots.clone()))?;
        let link = Arc::new(Link {
            remote,
            session,
            address,
            slots,
        });
        LINKS.lock().push(link.clone());
        Ok(link)
    }

    fn is_usable(&self, remote: &Remote) -> bool {
        self.remote == *remote && self.slots.hold().phase == Phase::Open
    }
}

/// Whether nobody uses a connection any more, now that nobody has for a while. It is not found from here on.
fn give_up(slots: &Arc<Slots>) -> bool {
    let mut links = LINKS.lock();
    if slots.hold().users > 0 {
        return false;
    }
    links.retain(|link| !Arc::ptr_eq(&link.slots, slots));
    true
}

/// Runs a connection on a thread of its own; returns what was agreed on with the server, and where that is.
fn start(connection: Connection) -> Result<(Session, Address), Trouble> {
    let (tell, told) = mpsc::sync_channel(1);
    let run = move || {
        let config = Config {
            entries: 64,
            pool_bytes: 0,
            ..Config::default()
        };
        match Reactor::new(&config) {
            Ok(reactor) => reactor.block_on(connection.drive(&tell)),
            Err(errno) => drop(tell.send(Err(Trouble::system("no reactor", errno)))),
        }
    };
    let thread = thread::Builder::new()
        .name("gaur-nbd".to_owned())
        .spawn(run);
    thread.map_err(|error| Trouble::system("cannot start a thread", syscall::errno_of(&error)))?;
    told.recv().unwrap_or_else(|_| {
        let text = "the thread of the connection ended";
        Err(Trouble::final_word(Errno::EIO, text.to_owned()))
    })
}

impl NbdExport {
    pub(crate) fn open(remote: Remote, access: Access) -> Result<NbdExport, OpenError> {
        let link = Link::to(remote).map_err(|trouble| refused(trouble.errno, trouble.text))?;
        let export = NbdExport {
            limits: limits(&link.session, access),
            link,
        };
        match access.write && export.has(export_flag::READ_ONLY) {
            true => Err(refused(Errno::EROFS, "the server lets it be read only")),
            false => Ok(export),
        }
    }

    pub(crate) fn limits(&self) -> FileLimits {
        self.limits
    }

    pub(crate) fn id(&self) -> FileId {
        id_of(&self.link.remote)
    }

    pub(crate) fn len(&self) -> u64 {
        self.link.session.export.size_bytes
    }

    /// Whether its name chose a metadata context, which the server has then.
    pub(crate) fn has_context(&self) -> bool {
        self.link.remote.context.is_some()
    }

    /// What went wrong with the connection last.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.link.slots.hold().trouble.clone()
    }

    /// What a thread asks of it, by its own connection if it has one.
    pub(crate) fn via<'a>(&'a self, own: Option<&'a OwnLink>) -> Via<'a> {
        Via { export: self, own }
    }

    fn has(&self, flag: u16) -> bool {
        self.link.session.export.has(flag)
    }
}

impl std::fmt::Debug for NbdExport {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "NbdExport({})", self.link.remote)
    }
}

impl Drop for NbdExport {
    fn drop(&mut self) {
        self.link.slots.leave();
    }
}

fn limits(session: &Session, access: Access) -> FileLimits {
    let export = &session.export;
    let request_alignment = session.alignment();
    FileLimits {
        request_alignment,
        memory_alignment: 1,
        max_transfer: export.maximum_payload - export.maximum_payload % request_alignment,
        resizable: false,
        discard_zeroes: false,
        read_only: !access.write,
    }
}
