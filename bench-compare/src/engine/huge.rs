//! Table `huge`: random reads of a disk of 8 TiB, extended L2 entries, every cluster allocated, in a
//! sparse file, with 16 MiB for L2 tables against no limit.
//!
//! Writing 8 TiB to measure tables of 64 and 128 MiB would take too long: the image is planned with all its
//! clusters in place, and then every subcluster is marked as data. What such a cluster reads as is a
//! hole of the file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};
use gaur_format::plan::{self, CreateOptions, Preallocation};
use gaur_format::{Header, HostOffset, L2Entry, l1};

use crate::engine::images::{Scratch, short_size};
use crate::engine::load::{L2Cache, Load};
use crate::engine::stride::Disk;
use crate::engine::suite::{Progress, Suite};
use crate::engine::turns::{Comparison, Contestant};
use crate::process::{qemu_img, succeed};
use crate::record::{Cell, Direction, Unit, Verdict};

const HUGE: Disk = Disk {
    size_bytes: 8 << 40,
};
const BUDGET_BYTES: u64 = 16 << 20;
const ENTRY_BYTES: u64 = 4096;
const REQUESTS: u64 = 400_000;

/// With the budget, this much of the speed without one.
const OF_UNLIMITED: f64 = 0.9;

/// Opening the image takes no longer, in microseconds.
const OPEN_MAX_US: f64 = 10_000.0;

/// Measures all cells. A cluster has 32 subclusters: 64 KiB of them make one of 2 MiB, and one of
/// 1 MiB has 32 KiB.
pub fn random_reads(suite: &Suite, progress: &mut Progress) -> Result<()> {
    let scratch = Scratch::new(&suite.memory)?;
    let image = scratch.path("huge.qcow2");
    for cluster_bits in [20, 21] {
        create(&image, HUGE.size_bytes, cluster_bits)?;
        let mut check = qemu_img(&["check", "-q", "-f", "qcow2"]);
        succeed(check.arg(&image)).context("qemu does not like the image")?;
        measure(suite, progress, &image, cluster_bits)?;
    }
    Ok(())
}

fn measure(suite: &Suite, progress: &mut Progress, image: &Path, cluster_bits: u32) -> Result<()> {
    let cluster_bytes = 1 << cluster_bits;
    let unlimited = HUGE.size_bytes / cluster_bytes * 16;
    let load = |size_bytes| Load {
        l2_cache: Some(L2Cache {
            size_bytes,
            entry_bytes: ENTRY_BYTES,
        }),
        ..Load::scattered(image, "qcow2", HUGE, suite.requests(REQUESTS))
    };
    let (limited, all) = (load(BUDGET_BYTES), load(unlimited));
    let cluster = short_size(cluster_bytes);
    let labels = [
        ("cluster", cluster.as_str()),
        ("subcluster", &short_size(cluster_bytes / 32)),
        ("tables", &format!("{} MiB", unlimited >> 20)),
    ];
    let mut cell = Cell::new(Unit::Iops, &labels);
    let others = vec![
        Contestant::new("gaur, random", || suite.gaur_random(&limited)),
        Contestant::new("gaur, random, unlimited", || suite.gaur_random(&all)),
    ];
    let duel = Comparison::on_a_kept_image(&limited);
    duel.run(&mut cell, suite, others)?;
    cell.expect_ratio("gaur, random", "gaur, random, unlimited", OF_UNLIMITED);
    let detail = |who, name| {
        cell.series(who)
            .and_then(|series| series.details.get(name).copied())
    };
    let open = detail("gaur, random", "open-us").unwrap_or(f64::NAN);
    let table = progress.table();
    for who in ["gaur, random", "gaur, random, unlimited"] {
        if let Some(bytes) = detail(who, "resident-bytes") {
            let mib = bytes / 1_048_576.0;
            table.notes.push(format!(
                "Clusters of {cluster}, {who}: {mib:.1} MiB resident."
            ));
        }
    }
    let what = format!("clusters of {cluster}: opening");
    let verdict = Verdict::new(
        what,
        Unit::Microseconds,
        open,
        Direction::AtMost,
        OPEN_MAX_US,
    );
    table.verdicts.push(verdict);
    progress.push(cell);
    Ok(())
}

/// Makes an image with every subcluster allocated, as a sparse file.
fn create(image: &Path, size_bytes: u64, cluster_bits: u32) -> Result<()> {
    let options = CreateOptions {
        cluster_bits,
        extended_l2: true,
        size_bytes,
        preallocation: Preallocation::Metadata,
        ..CreateOptions::default()
    };
    let plan = plan::create(&options)?;
    let file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(image)?;
    file.set_len(plan.len_bytes)?;
    for (offset, bytes) in &plan.writes {
        file.write_all_at(bytes, offset.0)?;
    }
    mark_all_as_data(&file)
}

/// Marks every subcluster of every cluster that has its place as data.
fn mark_all_as_data(file: &File) -> Result<()> {
    let mut bytes = vec![0; 4096];
    file.read_exact_at(&mut bytes, 0)?;
    let header = Header::parse(&bytes)?;
    let geometry = header.geometry();
    let mut l1_table = vec![0; header.l1_size as usize * 8];
    file.read_exact_at(&mut l1_table, header.l1_table_offset.0)?;
    let mut table = vec![0; geometry.cluster_size() as usize];
    for reference in l1_table.chunks_exact(8) {
        let reference = u64_of(reference)?;
        let Some(reference) = l1::decode(reference, &geometry)? else {
            continue;
        };
        let HostOffset(offset) = reference.offset;
        file.read_exact_at(&mut table, offset)?;
        for entry in table.chunks_exact_mut(16) {
            let (raw, bitmap) = (u64_of(&entry[..8])?, u64_of(&entry[8..])?);
            let L2Entry::Cluster {
                host: Some(host),
                copied,
                ..
            } = L2Entry::decode(raw, bitmap, &geometry)?
            else {
                continue;
            };
            let full = L2Entry::Cluster {
                host: Some(host),
                copied,
                alloc: u32::MAX,
                zero: 0,
            };
            let (raw, bitmap) = full.encode(&geometry);
            entry[..8].copy_from_slice(&raw.to_be_bytes());
            entry[8..].copy_from_slice(&bitmap.to_be_bytes());
        }
        file.write_all_at(&table, offset)?;
    }
    Ok(())
}

fn u64_of(bytes: &[u8]) -> Result<u64> {
    Ok(u64::from_be_bytes(bytes.try_into()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cluster_of_the_image_is_data() {
        let folder = Scratch::new(&std::env::temp_dir()).unwrap();
        let image = folder.path("huge.qcow2");
        create(&image, 40 << 30, 20).unwrap();
        let file = File::open(&image).unwrap();
        let mut bytes = vec![0; 4096];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let header = Header::parse(&bytes).unwrap();
        let mut reference = [0; 8];
        file.read_exact_at(&mut reference, header.l1_table_offset.0)
            .unwrap();
        let geometry = header.geometry();
        let table = l1::decode(u64::from_be_bytes(reference), &geometry)
            .unwrap()
            .unwrap();
        let mut entry = [0; 16];
        // The last of the 40,960 clusters.
        file.read_exact_at(&mut entry, table.offset.0 + 40_959 * 16)
            .unwrap();
        let (raw, bitmap) = (u64_of(&entry[..8]).unwrap(), u64_of(&entry[8..]).unwrap());
        let entry = L2Entry::decode(raw, bitmap, &geometry).unwrap();
        assert!(matches!(
            entry,
            L2Entry::Cluster {
                alloc: u32::MAX,
                zero: 0,
                copied: true,
                ..
            }
        ));
    }
}
