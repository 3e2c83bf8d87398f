//! The gaur command.

fn main() {}
