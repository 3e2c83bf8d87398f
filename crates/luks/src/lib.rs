//! LUKS 1, as qcow2 images carry it: header, key slots, and the encryption of sectors.
//!
//! * Pure: no input, output, clock or thread. Random bytes are asked of the caller.
//! * Every byte of a header is hostile. Its fields are checked when it is parsed, nothing is allocated by
//!   what it says, and the work of trying a passphrase is bounded ([`WORK_MAX`]).
//! * Keys and passphrases are zeroed when they are dropped, and never shown by `Debug`.
//! * Lengths and offsets are bytes; sectors are always of [`SECTOR_BYTES`].
//!
//! Source: "LUKS On-Disk Format Specification" 1.2.3. AES and the hashes are those of RustCrypto, which look
//! at run time which instructions the processor has (AES-NI, VAES, SHA). XTS and CBC are here: they are a few
//! lines each, and written over whole sectors they keep those instructions busy.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::unwrap_used, clippy::panic, clippy::arithmetic_side_effects)
)]

mod algorithm;
mod area;
mod error;
mod header;
mod key_slot;
mod secret;
mod sector;
mod stripes;

pub use algorithm::{Cipher, Hash, Iv, KeyBits, Mode};
pub use area::{Encryption, iterations};
pub use error::{Error, ErrorKind};
pub use header::{
    HEADER_BYTES, Header, ITERATIONS_MIN, KEY_SLOTS, KeySlot, New, STRIPES, WORK_MAX,
};
pub use key_slot::Created;
pub use secret::{Passphrase, Random, VolumeKey};
pub use sector::{SECTOR_BYTES, SectorCipher};
