//! Rings by hand, and what a driver can do with them.

mod driver;
mod hostile;
mod log;
mod pieces;
mod random;
mod requests;
