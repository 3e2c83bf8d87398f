//! What `-o help` prints: the options of a format.

use std::io::Write;

use gaur_engine::Format;

use crate::failure::Failure;
use crate::notice::is_qemu;

/// Whose option it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// The format's.
    Format,
    /// The format's, and QEMU does not have it: not told under the name of its program.
    Gaur,
    /// The file's. Told where a file is named.
    File,
}

/// An option and its values, and what it is.
pub type Row = (Of, &'static str, &'static str);

const QCOW2: &[Row] = &[
    (
        Of::Gaur,
        "allocation=<str>",
        "How it likes its space (allowed values: compact, contiguous)",
    ),
    (
        Of::Format,
        "backing_file=<str>",
        "File name of a base image",
    ),
    (
        Of::Format,
        "backing_fmt=<str>",
        "Image format of the base image",
    ),
    (
        Of::Format,
        "cluster_size=<size>",
        "qcow2 cluster size, a power of two from 512 to 2M (default: 64k)",
    ),
    (
        Of::Format,
        "compat=<str>",
        "Compatibility level (v2 [0.10] or v3 [1.1])",
    ),
    (
        Of::Format,
        "compression_type=<str>",
        "How clusters are compressed (allowed values: zlib, zstd)",
    ),
    (
        Of::Format,
        "data_file=<str>",
        "File name of an external data file",
    ),
    (
        Of::Format,
        "data_file_raw=<bool (on/off)>",
        "The external data file is a raw image of the disk by itself",
    ),
    (
        Of::Format,
        "encrypt.cipher-alg=<str>",
        "Cipher (allowed values: aes-128, aes-192, aes-256)",
    ),
    (
        Of::Format,
        "encrypt.cipher-mode=<str>",
        "Mode of the cipher (allowed values: xts, cbc)",
    ),
    (
        Of::Format,
        "encrypt.format=<str>",
        "How guest data is encrypted (allowed values: luks)",
    ),
    (
        Of::Format,
        "encrypt.hash-alg=<str>",
        "Hash of passphrases (allowed values: sha1, sha256, sha512)",
    ),
    (
        Of::Format,
        "encrypt.iter-time=<num>",
        "Milliseconds that trying a passphrase takes (default: 2000)",
    ),
    (
        Of::Format,
        "encrypt.ivgen-alg=<str>",
        "Initialisation vectors (allowed values: plain64, plain, essiv)",
    ),
    (
        Of::Format,
        "encrypt.ivgen-hash-alg=<str>",
        "Hash of essiv (allowed values: sha256)",
    ),
    (
        Of::Format,
        "encrypt.key-secret=<str>",
        "Secret that is to open the image",
    ),
    (
        Of::Format,
        "encryption=<bool (on/off)>",
        "Encryption as old images have it, which is only read: off",
    ),
    (
        Of::Format,
        "extended_l2=<bool (on/off)>",
        "Extended L2 tables: clusters of 32 subclusters",
    ),
    (
        Of::File,
        "extent_size_hint=<size>",
        "What the file system allocates at a time (XFS)",
    ),
    (
        Of::Format,
        "lazy_refcounts=<bool (on/off)>",
        "Postpone refcount updates",
    ),
    (
        Of::File,
        "nocow=<bool (on/off)>",
        "Turn off copy-on-write in the file system (btrfs)",
    ),
    (
        Of::Format,
        "preallocation=<str>",
        "Preallocation mode (allowed values: off, metadata, falloc, full)",
    ),
    (
        Of::Format,
        "refcount_bits=<num>",
        "Width of a reference count entry in bits (1 to 64, default: 16)",
    ),
    (Of::Format, "size=<size>", "Virtual disk size"),
];

const RAW: &[Row] = &[
    (
        Of::File,
        "extent_size_hint=<size>",
        "What the file system allocates at a time (XFS)",
    ),
    (
        Of::File,
        "nocow=<bool (on/off)>",
        "Turn off copy-on-write in the file system (btrfs)",
    ),
    (
        Of::File,
        "preallocation=<str>",
        "Preallocation mode (allowed values: off, falloc, full)",
    ),
    (Of::Format, "size=<size>", "Virtual disk size"),
];

const LUKS: &[Row] = &[
    (
        Of::Format,
        "cipher-alg=<str>",
        "Cipher (allowed values: aes-128, aes-192, aes-256)",
    ),
    (
        Of::Format,
        "cipher-mode=<str>",
        "Mode of the cipher (allowed values: xts, cbc)",
    ),
    (
        Of::Format,
        "detached-header=<bool (on/off)>",
        "The header in a file of its own: off",
    ),
    (
        Of::File,
        "extent_size_hint=<size>",
        "What the file system allocates at a time (XFS)",
    ),
    (
        Of::Format,
        "hash-alg=<str>",
        "Hash of passphrases (allowed values: sha1, sha256, sha512)",
    ),
    (
        Of::Format,
        "iter-time=<num>",
        "Milliseconds that trying a passphrase takes (default: 2000)",
    ),
    (
        Of::Format,
        "ivgen-alg=<str>",
        "Initialisation vectors (allowed values: plain64, plain, essiv)",
    ),
    (
        Of::Format,
        "ivgen-hash-alg=<str>",
        "Hash of essiv (allowed values: sha256)",
    ),
    (
        Of::Format,
        "key-secret=<str>",
        "Secret that is to open the image",
    ),
    (
        Of::File,
        "nocow=<bool (on/off)>",
        "Turn off copy-on-write in the file system (btrfs)",
    ),
    (
        Of::File,
        "preallocation=<str>",
        "Preallocation mode (allowed values: off, falloc, full)",
    ),
    (Of::Format, "size=<size>", "Virtual disk size"),
];

/// What can be amended of a LUKS container.
pub const LUKS_KEYS: &[Row] = &[
    (
        Of::Format,
        "iter-time=<num>",
        "Milliseconds that trying the new key takes (default: 2000)",
    ),
    (
        Of::Format,
        "keyslot=<num>",
        "Key slot to fill or to erase, 0 to 7",
    ),
    (Of::Format, "new-secret=<str>", "Secret to add"),
    (Of::Format, "old-secret=<str>", "Secret to erase"),
    (
        Of::Format,
        "state=<str>",
        "What to do with a key (allowed values: active, inactive)",
    ),
];

/// Prints what `-o` understands for a new image of a format.
pub fn print_new(format: Format, named: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let rows = match format {
        Format::Qcow2 => QCOW2,
        Format::Raw => RAW,
        Format::Luks => LUKS,
        Format::Foreign(other) => {
            let message = format!("{} images can only be read", other.shown());
            return Err(Failure::new(message).hint("qcow2, raw and luks can be written"));
        }
    };
    match named {
        true => print("Supported options:", rows, named, out),
        false => {
            let heading = format!("Supported {format} options:");
            print(&heading, rows, named, out)?;
            let more = "The protocol level may support further options.";
            let how = "Specify the target filename to include those options.";
            Ok(writeln!(out, "\n{more}\n{how}")?)
        }
    }
}

/// Prints the rows under a heading.
pub fn print(heading: &str, rows: &[Row], named: bool, out: &mut dyn Write) -> Result<(), Failure> {
    writeln!(out, "{heading}")?;
    for (of, option, what) in rows {
        let shown = match of {
            Of::Format => true,
            Of::Gaur => !is_qemu(),
            Of::File => named,
        };
        if shown {
            writeln!(out, "  {option:<22} - {what}")?;
        }
    }
    Ok(())
}
