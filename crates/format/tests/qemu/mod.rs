//! QEMU's tools and scratch files for the tests of this crate.

#![allow(
    dead_code,
    unused_imports,
    reason = "every test file uses a part of it"
)]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the crate itself does no input or output; its tests need files and QEMU"
)]

mod driver;
mod json;
mod scratch;
mod tool;

pub use driver::{check_ours, check_ours_file};
pub use json::Json;
pub use scratch::Scratch;
pub use tool::{
    check, check_luks, check_text, img, io, measure, peek, peek_u64, poke, repair, write_plan,
};
