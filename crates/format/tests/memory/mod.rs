//! Images in memory, sparse, for the tests of this crate.

mod image;

pub use image::Image;
