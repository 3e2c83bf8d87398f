//! The shapes an image can have: version, cluster size, kind of L2 entries, refcount width.

/// A legal shape of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Version 2 (`compat=0.10`); otherwise 3.
    pub v2: bool,
    /// Extended L2 entries.
    pub extended: bool,
    /// Cluster size in bytes.
    pub cluster_bytes: u64,
    /// Width of a refcount in bits.
    pub refcount_bits: u32,
    /// Compressed clusters are zstd instead of deflate.
    pub zstd: bool,
}

const BASE: Layout = Layout {
    v2: false,
    extended: false,
    cluster_bytes: 65536,
    refcount_bits: 16,
    zstd: false,
};

impl Layout {
    /// Version 2 with clusters of this size.
    pub const fn v2(cluster_bytes: u64) -> Layout {
        Layout {
            v2: true,
            cluster_bytes,
            ..BASE
        }
    }

    /// Version 3 with clusters of this size.
    pub const fn v3(cluster_bytes: u64) -> Layout {
        Layout {
            cluster_bytes,
            ..BASE
        }
    }

    /// Extended L2 entries with clusters of this size, 16 KiB or more.
    pub const fn extended(cluster_bytes: u64) -> Layout {
        Layout {
            extended: true,
            cluster_bytes,
            ..BASE
        }
    }

    /// The same with refcounts of this width.
    pub const fn refcount_bits(self, refcount_bits: u32) -> Layout {
        Layout {
            refcount_bits,
            ..self
        }
    }

    /// The same with zstd.
    pub const fn zstd(self) -> Layout {
        Layout { zstd: true, ..self }
    }

    /// What follows `-o` when such an image is created.
    pub fn options(&self) -> String {
        if self.v2 {
            return format!("compat=0.10,cluster_size={}", self.cluster_bytes);
        }
        let Layout {
            extended,
            cluster_bytes,
            refcount_bits,
            zstd,
            ..
        } = *self;
        format!(
            "compat=1.1,cluster_size={cluster_bytes},refcount_bits={refcount_bits},\
             extended_l2={},compression_type={}",
            if extended { "on" } else { "off" },
            if zstd { "zstd" } else { "zlib" },
        )
    }

    /// The unit of mapping: a subcluster or a cluster, in bytes.
    pub fn unit_bytes(&self) -> u64 {
        if self.extended {
            self.cluster_bytes / 32
        } else {
            self.cluster_bytes
        }
    }

    /// A size for test images: several clusters and several L2 tables where that is cheap, and a
    /// last cluster that is not whole.
    pub fn size_bytes(&self) -> u64 {
        let clusters = 6 * self.cluster_bytes;
        clusters.max(3 << 20) + (self.cluster_bytes / 2).next_multiple_of(512)
    }
}

/// Makes a test of every layout: `every_layout!(check)` calls `check(Layout)` in eleven tests named
/// after their layouts; a second argument is applied to the layout first.
#[macro_export]
macro_rules! every_layout {
    ($check:path) => {
        $crate::every_layout!($check, |layout| layout);
    };
    ($check:path, $change:expr) => {
        $crate::layout_tests! { $check, $change;
            v2_512: v2(512); v2_4k: v2(4096); v2_64k: v2(65536); v2_2m: v2(2 << 20);
        }
        $crate::every_v3_layout!($check, $change);
    };
}

/// Like [`every_layout!`] without version 2.
#[macro_export]
macro_rules! every_v3_layout {
    ($check:path, $change:expr) => {
        $crate::layout_tests! { $check, $change;
            v3_512: v3(512); v3_4k: v3(4096); v3_64k: v3(65536); v3_2m: v3(2 << 20);
            extended_16k: extended(16384); extended_64k: extended(65536);
            extended_2m: extended(2 << 20);
        }
    };
}

/// Makes a test of every refcount width: `every_width!(check, from)` calls `check(Layout)` for the
/// widths from `from` to 64 bits, for small and for ordinary clusters.
#[macro_export]
macro_rules! every_width {
    ($check:path) => {
        $crate::layout_tests! { $check, |layout: $crate::layout::Layout| layout.refcount_bits(1);
            bits_1_4k: v3(4096); bits_1_64k: v3(65536);
        }
        $crate::every_width_with_snapshots!($check);
    };
}

/// Like [`every_width!`] without 1 bit, which cannot count a snapshot.
#[macro_export]
macro_rules! every_width_with_snapshots {
    ($check:path) => {
        $crate::every_width_with_snapshots! { $check;
            2 bits_2_4k bits_2_64k; 4 bits_4_4k bits_4_64k; 8 bits_8_4k bits_8_64k;
            32 bits_32_4k bits_32_64k; 64 bits_64_4k bits_64_64k;
        }
    };
    ($check:path; $($bits:literal $small:ident $ordinary:ident;)*) => {$(
        $crate::layout_tests! { $check, |layout: $crate::layout::Layout| layout.refcount_bits($bits);
            $small: v3(4096); $ordinary: v3(65536);
        }
    )*};
}

/// One test a line: name, and the constructor of a [`Layout`].
#[macro_export]
macro_rules! layout_tests {
    ($check:path, $change:expr; $($name:ident: $kind:ident($bytes:expr);)*) => {$(
        #[test]
        fn $name() {
            let layout = $crate::layout::Layout::$kind($bytes);
            let change: fn($crate::layout::Layout) -> $crate::layout::Layout = $change;
            $check(change(layout));
        }
    )*};
}
