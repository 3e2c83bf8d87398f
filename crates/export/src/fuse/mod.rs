//! Exports as a raw file at a path.
