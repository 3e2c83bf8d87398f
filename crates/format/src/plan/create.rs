//! Creation plan: the bytes of a new image.

use alloc::vec::Vec;

use crate::addr::{ClusterIndex, HostOffset};
use crate::allocation::AllocationPolicy;
use crate::error::{Error, ErrorKind};
use crate::extension::{self, Extension, LuksPointer};
use crate::feature::{self, Autoclear, Compatible, Incompatible};
use crate::geometry::{Geometry, Version};
use crate::header::{CompressionType, CryptMethod, Header};
use crate::l1::{self, L1Ref};
use crate::l2::L2Entry;
use crate::limit;
use crate::plan::layout::Layout;
use crate::plan::options::{CreateOptions, STRUCTURE, wrong};
use crate::refcount;

/// Clusters from 4 KiB on have room for the table of feature names beside a backing file name.
const NAMES_CLUSTER_BITS: u32 = 12;

/// Longest single write, so that a table of many megabytes is not one buffer.
const WRITE_BYTES: usize = 1 << 20;

/// What a new image consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What to write where, each with a length that is a multiple of 512, none overlapping another.
    /// The last one is the header and must not reach the disk before all others are durable.
    pub writes: Vec<(HostOffset, Vec<u8>)>,
    /// Length of the file in bytes, a multiple of the cluster size. Everything in it that no write
    /// covers reads as zeros.
    pub len_bytes: u64,
}

/// Plans an image. The options are checked against each other and against the limits.
pub fn create(options: &CreateOptions) -> Result<Plan, Error> {
    let geometry = options.check()?;
    let size_bytes = options.rounded_size_bytes()?;
    let preallocated = options.is_mapped();
    let layout = Layout::new(&geometry, size_bytes, options.luks_bytes(), preallocated);
    check_reach(&geometry, &layout, preallocated)?;
    let header = header(options, &geometry, &layout, size_bytes)?;
    let mut writer = Writer {
        geometry,
        writes: Vec::new(),
    };
    writer.refcount_table(&layout);
    writer.refcount_blocks(&layout);
    if preallocated {
        writer.l1_table(&layout);
        writer.l2_tables(&layout, size_bytes, options);
    }
    if let Some(luks) = &options.luks {
        writer.push(writer.start(layout.luks_start()), luks.bytes.clone());
    }
    writer.push(HostOffset(0), header);
    let len_bytes = geometry.cluster_start(ClusterIndex(layout.end())).0;
    Ok(Plan {
        writes: writer.writes,
        len_bytes,
    })
}

/// Checks that the tables can count and reach all clusters, and fit in memory.
fn check_reach(geometry: &Geometry, layout: &Layout, preallocated: bool) -> Result<(), Error> {
    let too_large = |what| Error::new(ErrorKind::InvalidInput, STRUCTURE, what);
    let bytes = |clusters| geometry.cluster_start(ClusterIndex(clusters)).0;
    if bytes(layout.refcount_table) > limit::REFCOUNT_TABLE_BYTES_MAX
        || bytes(layout.end()) > limit::HOST_END
    {
        return Err(too_large(
            "image is too large for its refcounts, try larger clusters",
        ));
    }
    // Without preallocation the L1 table is all zeros and not part of the plan.
    let planned = layout
        .tables()
        .saturating_sub(if preallocated { 0 } else { layout.l1 });
    if bytes(planned) > limit::PLAN_BYTES_MAX.max(geometry.cluster_size().saturating_mul(8)) {
        return Err(
            too_large("tables are too large to preallocate, try larger clusters")
                .found(format_args!("{} bytes", bytes(planned)))
                .allowed(alloc::format!("up to {} bytes", limit::PLAN_BYTES_MAX)),
        );
    }
    Ok(())
}

fn header(
    options: &CreateOptions,
    geometry: &Geometry,
    layout: &Layout,
    size_bytes: u64,
) -> Result<Vec<u8>, Error> {
    let start = |cluster| geometry.cluster_start(ClusterIndex(cluster));
    let narrow = |value: u64| u32::try_from(value).map_err(|_| wrong("size is too large"));
    let mut incompatible = Incompatible::default();
    if options.extended_l2 {
        incompatible = incompatible.with(Incompatible::EXTENDED_L2);
    }
    if options.compression_type != CompressionType::Deflate {
        incompatible = incompatible.with(Incompatible::COMPRESSION_TYPE);
    }
    if options.data_file.is_some() {
        incompatible = incompatible.with(Incompatible::DATA_FILE);
    }
    let autoclear = match options.data_file_raw {
        true => Autoclear::RAW_DATA_FILE,
        false => Autoclear(0),
    };
    let lazy = if options.lazy_refcounts {
        Compatible::LAZY_REFCOUNTS
    } else {
        Compatible(0)
    };
    let header = Header {
        version: options.version,
        cluster_bits: options.cluster_bits,
        size_bytes,
        crypt_method: match options.luks {
            Some(_) => CryptMethod::Luks,
            None => CryptMethod::None,
        },
        l1_size: narrow(geometry.l1_entries_for(size_bytes))?,
        l1_table_offset: if layout.l1 > 0 {
            start(layout.l1_start())
        } else {
            HostOffset(0)
        },
        refcount_table_offset: start(Layout::REFCOUNT_TABLE_START),
        refcount_table_clusters: narrow(layout.refcount_table)?,
        nb_snapshots: 0,
        snapshots_offset: HostOffset(0),
        incompatible,
        compatible: lazy,
        autoclear,
        refcount_order: options.refcount_order,
        compression_type: options.compression_type,
        tail: if options.version == Version::V3 {
            alloc::vec![0; 7]
        } else {
            Vec::new()
        },
        extensions: extensions(options, start(layout.luks_start())),
        backing_file_name: options.backing_file.clone(),
    };
    header.encode().map_err(Error::into_invalid_input)
}

fn extensions(options: &CreateOptions, luks_offset: HostOffset) -> Vec<Extension> {
    let mut list = Vec::new();
    if let Some(format) = &options.backing_format {
        let data = format.clone().into_bytes();
        list.push(Extension {
            kind: extension::BACKING_FORMAT,
            data,
        });
    }
    if options.version == Version::V3 && options.cluster_bits >= NAMES_CLUSTER_BITS {
        list.push(Extension {
            kind: extension::FEATURE_NAMES,
            data: feature::name_table(),
        });
    }
    if let Some(luks) = &options.luks {
        let pointer = LuksPointer {
            offset: luks_offset,
            len_bytes: luks.len_bytes,
        };
        list.push(pointer.encode());
    }
    if let Some(name) = &options.data_file {
        list.push(Extension {
            kind: extension::DATA_FILE,
            data: name.clone(),
        });
    }
    list.extend(options.allocation.map(AllocationPolicy::encode));
    list
}

struct Writer {
    geometry: Geometry,
    writes: Vec<(HostOffset, Vec<u8>)>,
}

impl Writer {
    fn push(&mut self, offset: HostOffset, mut bytes: Vec<u8>) {
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        if !bytes.is_empty() {
            self.writes.push((offset, bytes));
        }
    }

    fn start(&self, cluster: u64) -> HostOffset {
        self.geometry.cluster_start(ClusterIndex(cluster))
    }

    /// Writes 8-byte entries from the start of `cluster` on, in pieces.
    fn table(&mut self, cluster: u64, entries: impl Iterator<Item = u64>) {
        let mut offset = self.start(cluster);
        let mut piece = Vec::new();
        for entry in entries {
            piece.extend_from_slice(&entry.to_be_bytes());
            if piece.len() >= WRITE_BYTES {
                let len = piece.len() as u64;
                self.push(offset, core::mem::take(&mut piece));
                offset = HostOffset(offset.0.saturating_add(len));
            }
        }
        self.push(offset, piece);
    }

    /// Entries that point to `count` clusters one after the other, from `first` on.
    fn cluster_offsets(&self, first: u64, count: u64) -> impl Iterator<Item = HostOffset> + use<> {
        let geometry = self.geometry;
        (0..count).map(move |n| geometry.cluster_start(ClusterIndex(first.saturating_add(n))))
    }

    fn refcount_table(&mut self, layout: &Layout) {
        let blocks = self.cluster_offsets(layout.refcount_blocks_start(), layout.refcount_blocks);
        let entries = blocks.map(|block| refcount::encode_table_entry(Some(block)));
        self.table(Layout::REFCOUNT_TABLE_START, entries);
    }

    /// Every cluster of the image has a refcount of 1.
    fn refcount_blocks(&mut self, layout: &Layout) {
        let order = self.geometry.refcount_order();
        let per_block = self.geometry.refcount_block_entries();
        let mut left = layout.end();
        for number in 0..layout.refcount_blocks {
            let count = left.min(per_block);
            left = left.saturating_sub(count);
            let bits = count.saturating_mul(u64::from(self.geometry.refcount_bits()));
            let mut block = alloc::vec![0; bits.div_ceil(8) as usize];
            for index in 0..count {
                // 1 fits in every width and the block was made for `count` refcounts.
                let _ = refcount::set(&mut block, order, index, 1);
            }
            let cluster = layout.refcount_blocks_start().saturating_add(number);
            self.push(self.start(cluster), block);
        }
    }

    fn l1_table(&mut self, layout: &Layout) {
        let tables = self.cluster_offsets(layout.l2_start(), layout.l2);
        let entries = tables.map(|offset| {
            l1::encode(Some(L1Ref {
                offset,
                copied: true,
            }))
        });
        self.table(layout.l1_start(), entries);
    }

    /// Maps every cluster to its place. Standard entries say "data", which reads as zeros in a new
    /// file; extended ones keep their subclusters unallocated, so that a backing file shows through. A `raw` data
    /// file shows through itself. Zeros of an encrypted file are noise to the guest, so that clusters are zeros
    /// with space there.
    fn l2_tables(&mut self, layout: &Layout, size_bytes: u64, options: &CreateOptions) {
        let geometry = self.geometry;
        let standard = u32::from(!geometry.extended_l2());
        let (alloc, zero) = match (&options.luks, options.data_file_raw) {
            (Some(_), _) => (0, standard),
            (None, true) => (geometry.subcluster_mask(), 0),
            (None, false) => (standard, 0),
        };
        let first = match geometry.data_file() {
            true => 0,
            false => layout.data_start(),
        };
        let data = self.cluster_offsets(first, geometry.clusters_for(size_bytes));
        let entries = data.flat_map(move |offset| {
            let entry = L2Entry::Cluster {
                host: Some(offset),
                copied: true,
                alloc,
                zero,
            };
            let (raw, bitmap) = entry.encode(&geometry);
            let halves = if geometry.extended_l2() { 2 } else { 1 };
            [raw, bitmap].into_iter().take(halves)
        });
        self.table(layout.l2_start(), entries);
    }
}
