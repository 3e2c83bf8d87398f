//! Which reactor runs on this thread.

/// Whether this thread runs a reactor now.
pub fn has_reactor() -> bool {
    false
}
