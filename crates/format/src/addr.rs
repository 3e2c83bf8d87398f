//! Addresses as types of their own, so that a guest offset is never used as a host offset.

use core::fmt;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl fmt::LowerHex for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::LowerHex::fmt(&self.0, out)
            }
        }
    };
}

address! {
    /// A byte of the virtual disk.
    GuestOffset
}
address! {
    /// A byte of the image file.
    HostOffset
}
address! {
    /// A cluster of the image file: its host offset divided by the cluster size.
    ClusterIndex
}
