//! Comparing guest views, byte for byte.

use std::fs::File;
use std::io::Read;

use crate::tool::qemu_img;

/// Asserts that two raw files have the same length and bytes; says where they first differ.
#[track_caller]
pub fn assert_same_bytes(left: &str, right: &str) {
    let len = |path: &str| {
        std::fs::metadata(path)
            .expect("a file to compare exists")
            .len()
    };
    assert_eq!(len(left), len(right), "lengths of {left} and {right}");
    if let Some(offset) = first_difference(left, right) {
        panic!("{left} and {right} differ at byte {offset} ({offset:#x})");
    }
}

/// The offset of the first byte in which two files of one length differ.
fn first_difference(left: &str, right: &str) -> Option<u64> {
    let mut files = [left, right].map(|path| File::open(path).expect("a file to compare opens"));
    let mut buffers = [vec![0; 1 << 20], vec![0; 1 << 20]];
    let mut offset = 0;
    loop {
        let mut len = 0;
        for (file, buffer) in files.iter_mut().zip(&mut buffers) {
            len = fill(file, buffer);
        }
        let [one, other] = &buffers;
        if one[..len] != other[..len] {
            let same = one.iter().zip(other).take_while(|(a, b)| a == b).count();
            return Some(offset + same as u64);
        }
        if len == 0 {
            return None;
        }
        offset += len as u64;
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut File, buffer: &mut [u8]) -> usize {
    let mut len = 0;
    while len < buffer.len() {
        match file
            .read(&mut buffer[len..])
            .expect("a file to compare is readable")
        {
            0 => break,
            more => len += more,
        }
    }
    len
}

/// Writes the guest view of an image, as QEMU sees it, to a raw file.
#[track_caller]
pub fn qemu_view(image: &str, raw: &str) {
    qemu_img(&["convert", "-O", "raw", image, raw]).ok();
}

/// Asserts that QEMU sees the same guest bytes in both; each is a format and a file name or URI.
#[track_caller]
pub fn assert_same_view(left: (&str, &str), right: (&str, &str)) {
    qemu_img(&["compare", "-f", left.0, "-F", right.0, left.1, right.1]).ok();
}
