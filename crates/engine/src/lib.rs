//! The qcow2 engine: shared image, one queue a thread, ordered metadata.
