//! How long an end may take.

use std::time::Duration;

/// Limits of an end, whether of a server or of one export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For clients to take what they have asked for; then NBD clients are cut off. Requests of the other front
    /// ends are waited for until `close` is over, too.
    pub drain: Duration,
    /// For the images to be flushed and closed after that.
    pub close: Duration,
}
