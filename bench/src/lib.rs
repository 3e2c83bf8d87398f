//! Benchmarks of the engine alone.

pub mod memory;
