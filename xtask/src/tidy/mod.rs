//! The rules of the house that no compiler checks: arrows between crates, sizes of files and
//! functions, names of modules, where `unsafe` may be, which words may not be anywhere.
//!
//! It runs as a task (`cargo xtask tidy`) and as a test. Every finding is one line: where, what,
//! and what is allowed.

mod arrows;
mod finding;
mod rust;
mod text;
mod walk;

pub use walk::run;
