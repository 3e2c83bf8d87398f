//! How an image likes its space: a header extension of Gaur's own.
//!
//! | byte | length | field |
//! |---|---|---|
//! | 0 | 1 | version of the extension, 1 |
//! | 1 | 1 | policy: 1 compact, 2 contiguous |
//! | 2 | 6 | zeros; ignored when read |
//!
//! It is advice, so nothing about it is an error: another version, another length and an unknown
//! policy all mean that the image says nothing. QEMU does not know the extension and preserves it.

use alloc::vec::Vec;

use crate::bytes;
use crate::extension::{self, Extension};

/// Length of the data in bytes.
const LEN_BYTES: usize = 8;
/// The version of the extension that this crate writes and understands.
const VERSION: u8 = 1;

/// What is done with the host's space of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AllocationPolicy {
    /// As little of it as possible: nothing is allocated ahead, and what is discarded goes back to
    /// the host, subcluster by subcluster.
    #[default]
    Compact,
    /// A cluster's space is allocated as a whole and stays together: discards give back whole
    /// clusters only.
    Contiguous,
}

impl AllocationPolicy {
    /// The name used for it on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            AllocationPolicy::Compact => "compact",
            AllocationPolicy::Contiguous => "contiguous",
        }
    }

    /// The policy with this name.
    pub fn from_name(name: &str) -> Option<AllocationPolicy> {
        match name {
            "compact" => Some(AllocationPolicy::Compact),
            "contiguous" => Some(AllocationPolicy::Contiguous),
            _ => None,
        }
    }

    const fn code(self) -> u8 {
        match self {
            AllocationPolicy::Compact => 1,
            AllocationPolicy::Contiguous => 2,
        }
    }

    /// What the data of an [`extension::ALLOCATION`] says, if it says something known.
    pub fn parse(data: &[u8]) -> Option<AllocationPolicy> {
        let known = data.len() == LEN_BYTES && data.first() == Some(&VERSION);
        match data.get(1).filter(|_| known)? {
            1 => Some(AllocationPolicy::Compact),
            2 => Some(AllocationPolicy::Contiguous),
            _ => None,
        }
    }

    /// The extension.
    pub fn encode(self) -> Extension {
        let mut data: Vec<u8> = alloc::vec![0; LEN_BYTES];
        bytes::put(&mut data, 0, &[VERSION, self.code()]);
        Extension {
            kind: extension::ALLOCATION,
            data,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [AllocationPolicy; 2] = [AllocationPolicy::Compact, AllocationPolicy::Contiguous];

    #[test]
    fn policies_survive_their_extension_and_their_name() {
        for policy in BOTH {
            let extension = policy.encode();
            assert_eq!(extension.kind, extension::ALLOCATION);
            assert_eq!(AllocationPolicy::parse(&extension.data), Some(policy));
            assert_eq!(AllocationPolicy::from_name(policy.name()), Some(policy));
        }
        assert_eq!(
            AllocationPolicy::Contiguous.encode().data,
            [1, 2, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(AllocationPolicy::from_name("Compact"), None);
    }

    #[test]
    fn what_is_not_known_says_nothing_and_reserved_bytes_do_not_matter() {
        for data in [
            &[][..],
            &[1, 1],
            &[1, 1, 0, 0, 0, 0, 0],
            &[1, 1, 0, 0, 0, 0, 0, 0, 0],
            &[2, 1, 0, 0, 0, 0, 0, 0],
            &[1, 0, 0, 0, 0, 0, 0, 0],
            &[1, 3, 0, 0, 0, 0, 0, 0],
        ] {
            assert_eq!(AllocationPolicy::parse(data), None, "{data:?}");
        }
        let later = [1, 2, 0, 0, 0xff, 0, 0, 1];
        assert_eq!(
            AllocationPolicy::parse(&later),
            Some(AllocationPolicy::Contiguous)
        );
    }
}
