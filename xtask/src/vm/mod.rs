//! `cargo xtask vm`: a Linux kernel for tests that need what the machine's own kernel may lack: ublk,
//! nbd and VDUSE.
//!
//! It is User-Mode Linux: a kernel that is an ordinary program. It boots in half a second, needs no
//! hardware virtualisation, and sees the machine's own file tree, so that what is installed or built
//! here runs there. It is built once, from the source package of Debian's newest kernel.

mod checks;
mod console;
mod guest;
mod kernel;
mod run_folder;
mod session;
mod source;
mod suite;
mod task;

pub use kernel::prepare_once;
pub use suite::test_all;
pub use task::{Task, run};
