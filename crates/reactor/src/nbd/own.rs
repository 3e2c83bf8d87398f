//! A connection of one thread, on the reactor of that thread: where a server allows several.
//!
//! It is made when the thread opens the export, used from when it is there, and not made again when it is lost: the
//! connection that all threads share has what it had.

use std::sync::Arc;

use super::connection::Connection;
use super::slots::Slots;
use super::{Link, NbdExport};
use crate::reactor::spawn;

/// A thread's own connection, or the attempt to have one.
pub(crate) struct OwnLink {
    slots: Arc<Slots>,
}

impl OwnLink {
    /// Starts one on the calling thread's reactor, if the server allows it.
    pub(crate) fn start(export: &NbdExport) -> Option<OwnLink> {
        let Link {
            remote,
            session,
            address,
            ..
        } = &*export.link;
        if !session.allows_several() {
            return None;
        }
        let slots = Slots::new();
        slots.hold().phase = super::NOT_YET;
        let connection = Connection::new(remote.clone(), slots.clone()).at(address.clone());
        let session = *session;
        drop(spawn(async move { connection.drive_once(&session).await }));
        Some(OwnLink { slots })
    }

    /// Its requests, while it is there.
    pub(super) fn slots(&self) -> Option<&Slots> {
        (self.slots.hold().phase == super::slots::Phase::Open).then_some(&*self.slots)
    }
}

impl Drop for OwnLink {
    fn drop(&mut self) {
        self.slots.leave();
    }
}
