//! Validation of a [`Header`]: its fields against each other and against the limits.

use super::parse::Field;
use super::{CompressionType, CryptMethod, Header, field};
use crate::addr::HostOffset;
use crate::error::Error;
use crate::extension::{self, BitmapsExtension, LuksPointer};
use crate::feature::Incompatible;
use crate::geometry::Geometry;
use crate::limit;

impl Header {
    /// Checks the fields against each other and the limits.
    pub(super) fn validate(&self) -> Result<(), Error> {
        let geometry = Geometry::new(
            self.version,
            self.cluster_bits,
            self.incompatible.has(Incompatible::EXTENDED_L2),
            self.refcount_order,
        )?;
        self.validate_l1(&geometry)?;
        self.validate_refcount_table(&geometry)?;
        let snapshots = Field::new(field::NB_SNAPSHOTS, self.nb_snapshots);
        if self.nb_snapshots > limit::SNAPSHOTS_MAX {
            return Err(snapshots
                .too_large("too many snapshots")
                .allowed("up to 65536"));
        }
        let offset = Field::new(field::SNAPSHOTS_OFFSET, self.snapshots_offset.0);
        check_place(
            &offset,
            0,
            self.nb_snapshots > 0,
            &geometry,
            "bad snapshot table offset",
        )?;
        let zstd = self.compression_type != CompressionType::Deflate;
        if zstd != self.incompatible.has(Incompatible::COMPRESSION_TYPE) {
            let found = Field::new(field::COMPRESSION_TYPE, self.compression_type as u8);
            return Err(found.wrong("compression type contradicts incompatible feature bit 3"));
        }
        self.validate_extensions(&geometry)
    }

    fn validate_l1(&self, geometry: &Geometry) -> Result<(), Error> {
        let size = Field::new(field::SIZE, self.size_bytes);
        let needed = geometry.l1_entries_for(self.size_bytes);
        if needed > limit::L1_ENTRIES_MAX {
            return Err(size.too_large("virtual size is too large for this cluster size"));
        }
        let entries = Field::new(field::L1_SIZE, self.l1_size);
        if u64::from(self.l1_size) > limit::L1_ENTRIES_MAX {
            let allowed = alloc::format!("up to {}", limit::L1_ENTRIES_MAX);
            return Err(entries.too_large("l1 table is too long").allowed(allowed));
        }
        if u64::from(self.l1_size) < needed {
            return Err(entries
                .wrong("l1 table is too short for the virtual size")
                .allowed(alloc::format!("{needed} entries or more")));
        }
        let offset = Field::new(field::L1_TABLE_OFFSET, self.l1_table_offset.0);
        let len = u64::from(self.l1_size).saturating_mul(8);
        check_place(&offset, len, len > 0, geometry, "bad l1 table offset")
    }

    fn validate_refcount_table(&self, geometry: &Geometry) -> Result<(), Error> {
        let at = field::REFCOUNT_TABLE_CLUSTERS;
        let clusters = Field::new(at, self.refcount_table_clusters);
        let len = u64::from(clusters.value).saturating_mul(geometry.cluster_size());
        if len == 0 {
            return Err(clusters.wrong("image has no refcount table"));
        }
        if len > limit::REFCOUNT_TABLE_BYTES_MAX {
            let most = limit::REFCOUNT_TABLE_BYTES_MAX.wrapping_shr(self.cluster_bits);
            let allowed = alloc::format!("up to {most}");
            return Err(clusters
                .too_large("refcount table is too long")
                .allowed(allowed));
        }
        let at = field::REFCOUNT_TABLE_OFFSET;
        let offset = Field::new(at, self.refcount_table_offset.0);
        check_place(&offset, len, true, geometry, "bad refcount table offset")
    }

    fn validate_extensions(&self, geometry: &Geometry) -> Result<(), Error> {
        let luks = self.crypt_method == CryptMethod::Luks;
        match self.extension(extension::LUKS) {
            Some(_) if !luks => {
                let method = Field::new(field::CRYPT_METHOD, self.crypt_method as u32);
                return Err(method.wrong("luks pointer without luks encryption"));
            }
            Some(data) => LuksPointer::parse(data, geometry).map(drop)?,
            None if luks => {
                let method = Field::new(field::CRYPT_METHOD, self.crypt_method as u32);
                return Err(method.wrong("luks encryption without a luks pointer"));
            }
            None => {}
        }
        if let Some(data) = self.live_bitmaps() {
            BitmapsExtension::parse(data, geometry)?;
        }
        Ok(())
    }
}

/// Checks that a table of `len` bytes at `offset` is cluster aligned and below the end of host
/// offsets, and, when it is `needed`, not in cluster 0.
fn check_place(
    offset: &Field<u64>,
    len: u64,
    needed: bool,
    geometry: &Geometry,
    what: &'static str,
) -> Result<(), Error> {
    if !geometry.is_aligned(HostOffset(offset.value)) {
        return Err(offset.wrong(what).allowed("a multiple of the cluster size"));
    }
    if offset
        .value
        .checked_add(len)
        .is_none_or(|end| end > limit::HOST_END)
    {
        return Err(offset.wrong(what).allowed("an end below 2^56"));
    }
    if needed && offset.value == 0 {
        return Err(offset
            .wrong(what)
            .allowed("not cluster 0, which is the header"));
    }
    Ok(())
}
