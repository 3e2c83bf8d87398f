//! Table `cache`: random reads of a full image while the cache of L2 tables holds a fifth, three
//! fifths and all of them, in slices of 4, 16 and 64 KiB, on an image that was written first to last and
//! on one that was written in random order.
//!
//! The original of this table has 40 GB; here it is a tenth of that, and so are the cache sizes. Slices
//! are not scaled: a fifth of the tables is no more than one slice and a half of 64 KiB, and QEMU
//! keeps two slices at least, so in that row it has a quarter.

use anyhow::Result;

use crate::engine::images::{Scratch, Shape, short_size};
use crate::engine::load::{L2Cache, Load};
use crate::engine::stride::Slices;
use crate::engine::suite::{DISK, Progress, Suite};
use crate::engine::turns::{Comparison, Contestant};
use crate::record::{Cell, Direction, Unit, Verdict};

const CLUSTER_BYTES: u64 = 64 << 10;

/// All L2 tables of the disk.
const TABLE_BYTES: u64 = DISK.size_bytes / CLUSTER_BYTES * 8;

/// Slices that QEMU keeps at least.
const SLICES_MIN: u64 = 2;

const REQUESTS: u64 = 200_000;

/// At a fifth, on an image filled first to last, this much of our own speed with the full cache.
const OF_FULL_CACHE: f64 = 0.9;

/// Gaur over QEMU at a fifth: filled first to last, and in random order.
const OVER_QEMU: [f64; 2] = [3.0, 1.5];

/// Measures all cells.
pub fn random_reads(suite: &Suite, progress: &mut Progress) -> Result<()> {
    let scratch = Scratch::new(&suite.memory)?;
    let image = scratch.path("image.qcow2");
    let shape = Shape::standard(CLUSTER_BYTES, DISK.size_bytes);
    for (filled, over_qemu) in ["first to last", "in random order"]
        .into_iter()
        .zip(OVER_QEMU)
    {
        if filled == "first to last" {
            shape.create_full(&image)?;
            shape.verify_full(&image)?;
        } else {
            shape.create_full_in_random_order(&image, 1)?;
        }
        for entry_bytes in [4 << 10, 16 << 10, 64 << 10] {
            for fifths in [1, 3, 5] {
                let cache = L2Cache {
                    size_bytes: TABLE_BYTES * fifths / 5,
                    entry_bytes,
                };
                let mut cell = measure(suite, &image, filled, fifths, cache)?;
                if fifths == 1 {
                    cell.expect_ratio("gaur", "qemu", over_qemu);
                }
                progress.push(cell);
            }
        }
    }
    let verdicts = against_full_cache(&progress.table().cells);
    progress.table().verdicts.extend(verdicts);
    Ok(())
}

fn measure(
    suite: &Suite,
    image: &std::path::Path,
    filled: &str,
    fifths: u64,
    cache: L2Cache,
) -> Result<Cell> {
    let slices = Slices {
        all: TABLE_BYTES / cache.entry_bytes,
        held: (cache.size_bytes / cache.entry_bytes).max(SLICES_MIN),
    };
    let load = Load {
        image,
        format: "qcow2",
        write: false,
        requests: suite.requests(REQUESTS),
        stride_bytes: DISK.fair_stride(slices),
        l2_cache: Some(cache),
    };
    let mut cell = Cell::new(
        Unit::Iops,
        &[
            ("filled", filled),
            ("slice", &short_size(cache.entry_bytes)),
            ("cache", &format!("{fifths}/5")),
        ],
    );
    let random = Contestant::new("gaur, random", || suite.gaur_random(&load));
    let duel = Comparison::on_a_kept_image(&load);
    duel.run(&mut cell, suite, vec![random])?;
    Ok(cell)
}

/// Verdicts on a fifth of the cache beside our own full one, on the image filled first to last.
fn against_full_cache(cells: &[Cell]) -> Vec<Verdict> {
    let of = |slice: &str, cache: &str| {
        let found = cells.iter().find(|cell| {
            cell.label("filled") == "first to last"
                && cell.label("slice") == slice
                && cell.label("cache") == cache
        });
        found.map_or(f64::NAN, |cell| cell.median("gaur"))
    };
    let verdict = |slice| {
        let what =
            format!("gaur, filled first to last, slices of {slice}: cache of 1/5 / full cache");
        let measured = of(slice, "1/5") / of(slice, "5/5");
        Verdict::new(
            what,
            Unit::Ratio,
            measured,
            Direction::AtLeast,
            OF_FULL_CACHE,
        )
    };
    ["4K", "16K", "64K"].into_iter().map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Series;

    fn cell(cache: &str, iops: f64) -> Cell {
        let labels = [
            ("filled", "first to last"),
            ("slice", "4K"),
            ("cache", cache),
        ];
        let mut cell = Cell::new(Unit::Iops, &labels);
        cell.series.push(Series {
            who: "gaur".to_owned(),
            samples: vec![iops],
            ..Series::default()
        });
        cell
    }

    #[test]
    fn a_fifth_is_judged_by_the_full_cache_of_the_same_slices() {
        let verdicts = against_full_cache(&[cell("1/5", 90.0), cell("5/5", 100.0)]);
        assert_eq!(verdicts.len(), 3);
        assert!(verdicts[0].met());
        assert!(!verdicts[1].met(), "nothing was measured with 16K");
        assert_eq!(TABLE_BYTES, 512 << 10);
    }
}
