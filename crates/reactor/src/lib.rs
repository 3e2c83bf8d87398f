//! Hosts for the engine: io_uring and blocking system calls.
