//! Benchmarks side by side with peers.

fn main() {}
