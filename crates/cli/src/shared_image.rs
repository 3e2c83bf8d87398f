//! An open image that several threads use: opened once, which takes its locks, with a queue of
//! each thread's own on the same open files.

use std::sync::Arc;

use gaur_block::File;
use gaur_engine::{Image, OpenOptions, Queue};
use gaur_reactor::{BlockingFile, OpenFile};

use crate::failure::Failure;
use crate::guest::Guest;
use crate::open;

/// An open image and its files.
pub struct SharedImage {
    name: String,
    image: Arc<Image>,
    files: Vec<OpenFile>,
}

impl SharedImage {
    /// Opens the image and its chain.
    pub fn open(name: &str, options: &OpenOptions) -> Result<SharedImage, Failure> {
        let opened = open::open(name, options)?;
        let files = opened.files.iter();
        Ok(SharedImage {
            name: name.to_owned(),
            files: files.map(|file| file.open_file().clone()).collect(),
            image: opened.image,
        })
    }

    /// The name it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What all queues share.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// A queue for the calling thread, on files that `file` makes for it.
    pub fn queue<F: File>(&self, file: impl Fn(OpenFile) -> F) -> Queue<F> {
        let files = self.files.iter().cloned().map(file).collect();
        self.image.queue(files)
    }

    /// The last thing done to an image, after all queues are gone.
    pub fn close(&self) -> Result<(), Failure> {
        Guest::new(self.queue(BlockingFile::new))
            .close()
            .map_err(|error| Failure::image(&self.name, &error))
    }
}
