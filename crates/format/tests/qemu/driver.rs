//! Runs the checker of this crate over a file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use gaur_format::check::{Check, Report, Step};

/// Reads what is there; the rest is zeros.
pub(super) fn read(file: &File, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    let mut done = 0;
    while done < bytes.len() {
        match file
            .read_at(&mut bytes[done..], offset + done as u64)
            .unwrap()
        {
            0 => break,
            count => done += count,
        }
    }
    bytes
}

/// Checks an open file.
pub fn check_ours_file(file: &File) -> Report {
    let len = file.metadata().unwrap().len();
    let header = read(file, 0, len.min(2 << 20));
    let mut check = Check::new(&header, len).unwrap();
    loop {
        match check.next() {
            Step::Need { offset, len } => check.feed(&read(file, offset, len)),
            Step::Done(report) => return report,
        }
    }
}

/// Checks the image at `path`.
pub fn check_ours(path: &str) -> Report {
    check_ours_file(&File::open(path).unwrap())
}
