//! Repair: whatever a cut leaves reads as before, and another repair makes it sound.

use std::collections::BTreeSet;

use gaur_engine::{Job, repair_breaking};
use gaur_format::bitmap::{Bitmap, parse_directory};
use gaur_format::check::RepairMode;
use gaur_format::l1::OFFSET_MASK;
use gaur_format::{extension, refcount};
use gaur_sim::{DiskProfile, FileImage, Random};

use crate::config::{Bitmaps, Config};
use crate::judge;
use crate::shape::Shape;
use crate::verbs::{Cuts, NAME, Work, broken_rule, contents, header, open, prepared, profile};

fn u64_at(file: &FileImage, offset: u64) -> u64 {
    u64::from_be_bytes(file.bytes(offset, 8).try_into().unwrap())
}

/// Changes refcounts at random, or loses a block or the whole table of them.
fn damage_refcounts(file: &mut FileImage, random: &mut Random) -> Result<(), String> {
    let header = header(file)?;
    let (geometry, table) = (header.geometry(), header.refcount_table_offset.0);
    let size = geometry.cluster_size() as usize;
    match random.below(4) {
        0 => file.write(table, &[0; 8]),
        1 => file.write(table, &vec![0; size]),
        _ => {
            let block = u64_at(file, table);
            let mut bytes = file.bytes(block, size);
            for _ in 0..20 {
                let clusters = geometry.clusters_for(file.len_bytes());
                let index = random.below(clusters.min(geometry.refcount_block_entries()));
                let value = random.below(4).min(geometry.refcount_max());
                refcount::set(&mut bytes, geometry.refcount_order(), index, value).unwrap();
            }
            file.write(block, &bytes);
        }
    }
    Ok(())
}

/// The L1 entries of the active disk: their places, and the L2 tables that they have.
fn l1_entries(file: &FileImage) -> Result<Vec<(u64, u64)>, String> {
    let header = header(file)?;
    let places = (0..u64::from(header.l1_size)).map(|index| header.l1_table_offset.0 + index * 8);
    let entry = |at: u64| (at, u64_at(file, at) & OFFSET_MASK);
    Ok(places.map(entry).collect())
}

/// Gives an L1 entry the table of another, flagged as its only owner or not; where refcounts are wide enough to say so.
fn share_table(file: &mut FileImage, random: &mut Random) -> Result<(), String> {
    let entries = l1_entries(file)?;
    let (_, table) = entries[random.index(entries.len())];
    let (at, _) = entries[random.index(entries.len())];
    if header(file)?.geometry().refcount_max() > 0xff && table != 0 {
        let flag = random.below(2) << 63;
        file.write(at, &(table | flag).to_be_bytes());
    }
    Ok(())
}

/// Whether two L1 entries have one table.
fn shares_tables(file: &FileImage) -> Result<bool, String> {
    let entries = l1_entries(file)?.into_iter();
    let tables: Vec<u64> = entries.map(|entry| entry.1).filter(|at| *at != 0).collect();
    let apart: BTreeSet<&u64> = tables.iter().collect();
    Ok(apart.len() < tables.len())
}

/// Damages the entry of a snapshot, or says that there are more; what is left to be read afterwards.
fn damage_snapshots(file: &mut FileImage, random: &mut Random) -> Result<Vec<Vec<u8>>, String> {
    let mut left = contents(file)?;
    let table = header(file)?.snapshots_offset.0;
    let count = (left.len() as u64 - 1) / 2;
    let lengths = |at: u64| u64_at(file, at + 8) & 0xffff_ffff;
    let mut at = table;
    let number = random.below(count);
    for _ in 0..number {
        let names = (lengths(at) >> 16) + (lengths(at) & 0xffff);
        let extra = u64_at(file, at + 32) & 0xffff_ffff;
        at += (40 + extra + names).next_multiple_of(8);
    }
    let gone = 1 + 2 * number as usize;
    match random.below(4) {
        0 => file.write(at, &(u64_at(file, at) + 8).to_be_bytes()),
        1 => file.write(at, &(1_u64 << 45).to_be_bytes()),
        2 => file.write(at + 8, &[0x7f; 4]),
        _ => {
            file.write(at + 36, &[0xff; 4]);
            left.truncate(gone);
            return Ok(left);
        }
    }
    left.drain(gone..gone + 2);
    Ok(left)
}

/// The bitmaps of an image, with their tables.
fn bitmaps(file: &FileImage) -> Result<Vec<(Bitmap, Vec<u8>)>, String> {
    let header = header(file)?;
    let Some(pointer) = header.bitmaps() else {
        return Ok(Vec::new());
    };
    let len = pointer.directory_len_bytes as usize;
    let bytes = file.bytes(pointer.directory_offset.0, len);
    let all = parse_directory(&bytes, pointer.count, &header.geometry());
    let table = |one: &Bitmap| file.bytes(one.table_offset.0, 8 * one.table_entries as usize);
    let all = all.map_err(|error| error.to_string())?.into_iter();
    Ok(all.map(|one| (one.clone(), table(&one))).collect())
}

/// Damages a bitmap or the directory of all; what is left of them afterwards.
fn damage_bitmaps(
    file: &mut FileImage,
    random: &mut Random,
) -> Result<Vec<(Bitmap, Vec<u8>)>, String> {
    let mut all = bitmaps(file)?;
    let header = header(file)?;
    let pointer = header.bitmaps().ok_or("no bitmaps")?;
    let index = random.index(all.len());
    let before = all.iter().take(index).map(|(one, _)| one.entry_bytes());
    let at = pointer.directory_offset.0 + before.sum::<u64>();
    let table = all[index].0.table_offset.0;
    let far = (file.len_bytes() + (64 << 20)).next_multiple_of(1 << 21);
    match random.below(7) {
        0 => file.write(at, &far.to_be_bytes()),
        1 => file.write(at, &(table + 8).to_be_bytes()),
        2 => file.write(at + 8, &[0x7f; 4]),
        3 => file.write(at + 16, &[9, 60]),
        4 => file.write(table, &[0xff; 8]),
        5 => file.write(table, &far.to_be_bytes()),
        _ => {
            let extension = header
                .extension_at(extension::BITMAPS)
                .ok_or("no bitmaps")?;
            let more = pointer.count + 1;
            file.write(extension + 8, &more.to_be_bytes());
            return Ok(Vec::new());
        }
    }
    all.remove(index);
    Ok(all)
}

/// A machine on which a repair of the image has begun.
fn repairing(seed: u64, file: FileImage, profile: DiskProfile, breaks: bool) -> Work {
    Work::begin(seed, [(NAME, file)], profile, async move |host| {
        let file = open(&host, NAME).await?;
        let (mode, job) = (RepairMode::All, Job::default());
        let repaired = repair_breaking(&file, mode, &job, broken_rule(breaks)).await;
        match repaired.map_err(|error| format!("{error:#}"))?.after {
            after if after.is_clean() => Ok(()),
            after => Err(format!("after the repair: {after:?}")),
        }
    })
}

/// Repairs with power cuts, and again after each: then the image is sound, and `wrong`
/// finds nothing; `wrong_before` looks at what a cut has left.
fn repaired_after_cuts(
    seed: u64,
    file: FileImage,
    (shape, profile, apart): (Shape, DiskProfile, u64),
    breaks: bool,
    wrong_before: impl Fn(&FileImage) -> Result<Option<&'static str>, String>,
    wrong: impl Fn(&FileImage) -> Result<Option<&'static str>, String>,
) -> Cuts {
    repairing(seed, file, profile, breaks).judged(seed, apart, |left| {
        if let Some(wrong) = wrong_before(&left[NAME])? {
            return Err(wrong.to_owned());
        }
        let whole = repairing(seed, left[NAME].clone(), profile, false).finish()?;
        if let Some(wrong) = wrong(&whole[NAME])? {
            return Err(format!("repaired: {wrong}"));
        }
        match judge::check(&whole[NAME], shape)? {
            counts if counts.leaks == 0 => Ok(()),
            counts => Err(format!("repaired: {counts:?}")),
        }
    })
}

/// What is damaged cannot be read before it was repaired.
fn unread(_: &FileImage) -> Result<Option<&'static str>, String> {
    Ok(None)
}

/// Repairs refcounts and shared L2 tables; what could be read can be read at every moment.
pub fn repair(seed: u64, breaks: bool) -> Cuts {
    let config = Config::draw(seed);
    let random = &mut Random::new(seed);
    let mut file = prepared(seed, &config, random);
    if random.below(2) == 0 {
        share_table(&mut file, random)?;
    }
    let before = contents(&file)?;
    damage_refcounts(&mut file, random)?;
    let other = |file: &FileImage| Ok((contents(file)? != before).then_some("other disks"));
    let how = (config.image.shape, profile(seed), 12);
    repaired_after_cuts(seed, file, how, breaks, other, |whole| {
        Ok(other(whole)?.or(shares_tables(whole)?.then_some("shared tables")))
    })
}

/// Repairs a damaged table of snapshots. Where there is none, there are no cuts.
pub fn repair_snapshots(seed: u64, breaks: bool) -> Cuts {
    let config = Config::draw(seed);
    let random = &mut Random::new(seed);
    let mut file = prepared(seed, &config, random);
    if header(&file)?.nb_snapshots == 0 {
        return Ok(0);
    }
    let expected = damage_snapshots(&mut file, random)?;
    let how = (config.image.shape, DiskProfile::default(), 4);
    repaired_after_cuts(seed, file, how, breaks, unread, |whole| {
        Ok((contents(whole)? != expected).then_some("other disks"))
    })
}

/// Repairs a damaged directory of bitmaps, or a damaged table of one. Where there is none, there are no cuts.
pub fn repair_bitmaps(seed: u64, breaks: bool) -> Cuts {
    let mut config = Config::draw(seed);
    if config.image.shape.version == 2 {
        return Ok(0);
    }
    config.image.bitmaps = Some(Bitmaps::Valid);
    let random = &mut Random::new(seed);
    let mut file = prepared(seed, &config, random);
    let disks = contents(&file)?;
    let expected = damage_bitmaps(&mut file, random)?;
    let how = (config.image.shape, DiskProfile::default(), 4);
    let other = |left: &FileImage| Ok((contents(left)? != disks).then_some("other disks"));
    repaired_after_cuts(seed, file, how, breaks, other, |whole| {
        Ok(match () {
            () if contents(whole)? != disks => Some("other disks"),
            () if bitmaps(whole)? != expected => Some("other bitmaps"),
            () => None,
        })
    })
}
