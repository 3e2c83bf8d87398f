//! The image file, for verbs that read metadata and not guest data. They work on images that cannot be
//! opened as a disk (encrypted, or with a missing backing file).

use std::path::Path;

use gaur_block::{Access, Errno, Extent, File, Target, Within};
use gaur_engine::{ErrorKind, Format, OpenOptions};
use gaur_format::{Header, limit};
use gaur_reactor::{BlockingFile, OpenFile, block_on};

use crate::failure::Failure;
use crate::open::{self, Place};
use crate::references;

/// Bytes from which the length of the header can be told.
const HEADER_START_BYTES: u64 = 512;

/// A file that may be an image.
pub struct ImageFile {
    name: String,
    file: BlockingFile,
    len: u64,
}

impl ImageFile {
    /// Opens the file as `options` say.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<ImageFile, Failure> {
        ImageFile::open_within(path, Within::ByUser, options)
    }

    /// The same with an image in another place than a file as a whole.
    pub fn open_in_place(
        path: &Path,
        place: Option<Place>,
        options: &OpenOptions,
    ) -> Result<ImageFile, Failure> {
        let Some(place) = place else {
            return ImageFile::open(path, options);
        };
        let name = path.to_string_lossy().into_owned();
        let file = place.open(path, Within::ByUser, access_of(options));
        let file = file.map_err(|error| open::file_failed(&name, &error))?;
        ImageFile::of(name, file)
    }

    /// The same with a file that an image names.
    pub fn open_within(
        path: &Path,
        within: Within<'_>,
        options: &OpenOptions,
    ) -> Result<ImageFile, Failure> {
        let name = path.to_string_lossy().into_owned();
        let file = OpenFile::open_within(path, within, access_of(options)).map_err(|error| {
            let failure = open::file_failed(&name, &error);
            match error.errno {
                Errno::EXDEV => failure
                    .kind(ErrorKind::ReferenceRefused)
                    .hint(references::hint(&options.references)),
                _ => failure,
            }
        })?;
        ImageFile::of(name, file)
    }

    fn of(name: String, file: OpenFile) -> Result<ImageFile, Failure> {
        let file = BlockingFile::new(file);
        let len = block_on(file.len())
            .map_err(|errno| Failure::system(&name, "cannot tell its length", errno))?;
        Ok(ImageFile { name, file, len })
    }

    /// Its path as given, to be shown.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// The file, to do input and output on.
    pub fn file(&self) -> &BlockingFile {
        &self.file
    }

    /// The file itself.
    pub fn open_file(&self) -> &OpenFile {
        self.file.open_file()
    }

    /// The run of data or hole at an offset below its length.
    pub fn extent_at(&self, offset: u64) -> Result<Extent, Errno> {
        block_on(self.file.extent_at(offset))
    }

    /// The format that its content shows.
    pub fn probe(&self) -> Result<Format, Failure> {
        let found = block_on(gaur_engine::probe(&self.file)).and_then(Format::supported);
        found.map_err(|error| Failure::image(&self.name, &error))
    }

    /// The first cluster, which has the header; less when the file ends in it.
    pub fn header_cluster(&self) -> Result<Vec<u8>, Failure> {
        let start = self.read(0, HEADER_START_BYTES.min(self.len))?;
        let cluster_size = Header::cluster_size_of(&start).map_err(|error| self.broken(&error))?;
        self.read(0, cluster_size.min(self.len))
    }

    /// Its header, if all its incompatible features are known.
    pub fn header(&self) -> Result<Header, Failure> {
        let header = Header::parse(&self.header_cluster()?).map_err(|error| self.broken(&error))?;
        header
            .check_features()
            .map_err(|error| self.broken(&error))?;
        Ok(header)
    }

    /// The failure that a structure of the image is not what it should be.
    pub fn broken(&self, error: &gaur_format::Error) -> Failure {
        Failure::about(&self.name, error.to_string())
    }

    /// Reads `len` bytes at `offset`, at most as many as the longest structure of an image has. What
    /// lies beyond the end of the file is zeros.
    pub fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, Failure> {
        self.try_read(offset, len).map_err(|errno| {
            let what = format!("cannot read offset {offset}");
            Failure::system(&self.name, &what, errno).because(self.open_file().trouble())
        })
    }

    /// The same with the bare error.
    pub fn try_read(&self, offset: u64, len: u64) -> Result<Vec<u8>, Errno> {
        read_bytes(&self.file, offset, len.min(limit::SNAPSHOT_TABLE_BYTES_MAX))
    }
}

fn access_of(options: &OpenOptions) -> Access {
    Access {
        write: !options.read_only,
        direct: options.direct,
        lock: options.lock,
        force_share: options.force_share,
    }
}

/// Reads `len` bytes at `offset` of a file, cached or not.
pub fn read_bytes(file: &BlockingFile, offset: u64, len: u64) -> Result<Vec<u8>, Errno> {
    let len = usize::try_from(len).map_err(|_| Errno::EOVERFLOW)?;
    // With O_DIRECT whole blocks are read, into memory made for that.
    let block = u64::from(file.limits().request_alignment);
    let start = offset - offset % block;
    let skip = (offset - start) as usize;
    let mut buffer = file.buffer((skip + len).next_multiple_of(block as usize));
    block_on(file.read_at(start, Target::memory(&mut buffer)))?;
    let bytes = buffer.get(skip..skip + len);
    bytes.map(<[u8]>::to_vec).ok_or(Errno::EIO)
}
