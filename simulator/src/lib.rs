//! The crash simulator: seeded workloads, power cuts, oracles.
