//! Names of files that are in stores.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// What names of files in stores begin with, before `://`.
pub const REMOTE_PROTOCOLS: [&str; 7] = ["s3", "gs", "az", "azure", "http", "https", "oci"];

/// Whether a name is of a file in a store, and no path.
pub fn is_remote(name: &Path) -> bool {
    let name = name.as_os_str().as_bytes();
    let rest = |protocol: &&str| name.strip_prefix(protocol.as_bytes());
    let mut rests = REMOTE_PROTOCOLS.iter().filter_map(rest);
    rests.any(|rest| rest.starts_with(b"://"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_a_store_has_its_protocol_and_two_slashes() {
        for name in ["s3://bucket/key", "https://host/x", "oci://host/name:tag"] {
            assert!(is_remote(Path::new(name)), "{name}");
        }
        for name in ["s3:key", "s3", "./s3://x", "https:/x", "S3://x", "nbd://h"] {
            assert!(!is_remote(Path::new(name)), "{name}");
        }
    }
}
