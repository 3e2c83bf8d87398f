//! Tests against QEMU's tools, libnbd, fio and a kernel.
//!
//! The library is what the tests share: running programs under a time limit, finding the `gaur`
//! program, serving an image, building images with QEMU's tools in every shape, and comparing guest
//! views. The tests themselves are in `tests/`, one file a subject. A tool that is missing fails
//! them: `scripts/setup` installs all of them.

#![forbid(unsafe_code)]

pub mod attached;
pub mod build_paths;
pub mod builder;
pub mod compare;
pub mod document;
pub mod field;
pub mod filesystem;
pub mod gaur;
pub mod guest;
pub mod hostile;
pub mod in_path;
pub mod layout;
pub mod ledger;
pub mod machine;
pub mod nbd;
pub mod op;
pub mod packages;
pub mod random;
pub mod scratch;
pub mod store;
pub mod tool;
pub mod vhost_user;
