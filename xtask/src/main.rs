//! The project's own tasks: tidy, ci, sim, vm, bench.

fn main() {}
