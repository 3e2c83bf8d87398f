//! What a running export of one device has in common with every other, whatever its clients speak.

use gaur_reactor::Stop;

use crate::error::ServeError;

/// A running export. Its threads are its own; this value may be used from any.
pub trait Front: Send + Sync {
    /// Where clients find it: a block device, the path of a socket or of a file.
    fn place(&self) -> String;

    /// The size of the device has changed: tells the clients that can be told.
    ///
    /// # Errors
    /// When they cannot be told while they are connected, or would not take it.
    fn resized(&self) -> Result<(), ServeError>;

    /// Takes no further requests. Those under way are answered, the devices are flushed, and the
    /// export ends by itself. A second call makes it end at once, with whatever is under way.
    fn stop(&self);

    /// Raised once it has ended, whether it was stopped or its clients were through with it.
    fn ended(&self) -> Stop;

    /// Waits for the end of its threads.
    ///
    /// # Errors
    /// What went wrong while it served or ended.
    fn finish(self: Box<Self>) -> Result<(), ServeError>;
}
