//! Benchmarks of the engine alone.

pub mod engine;
pub mod memory;
pub mod vmstate;

pub use gaur_sim::Random;
