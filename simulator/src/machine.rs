//! The simulated machine at the start of a seed: its files and their content.

use gaur_sim::{DiskProfile, FileImage, Random};

use crate::config::Config;
use crate::content::{Value, ValueEncoding};
use crate::judge;
use crate::prepare::{PreparedOptions, prepare};
use crate::qemu;

/// Name of the image under test on its machine.
pub const TOP: &str = "top.qcow2";

/// The files of a machine and what they hold.
pub struct Machine {
    /// Name, content and disk of each file.
    pub files: Vec<(String, FileImage, DiskProfile)>,
    /// The active disk, unit by unit.
    pub active: Vec<Value>,
    /// The disk below the top image.
    pub below: Vec<u8>,
    /// The same, unit by unit.
    pub below_values: Vec<Value>,
    /// The disk at each snapshot.
    pub snapshots: Vec<Vec<u8>>,
    /// The header of the image has the unknown extension.
    pub has_extension: bool,
}

impl Machine {
    /// The machine that a seed starts with.
    pub fn build(
        config: &Config,
        script: ValueEncoding,
        next_value: &mut Value,
        random: &mut Random,
    ) -> Machine {
        let mut files = Vec::new();
        let mut below: Vec<Value> = Vec::new();
        let mut backing: Option<(String, &'static str)> = None;
        for (number, layer) in config.backing.iter().enumerate().rev() {
            let Some(shape) = layer.shape else {
                let (image, values) = raw_file(layer.bytes, script, next_value, random);
                let name = format!("base{number}.raw");
                files.push((name.clone(), image, DiskProfile::default()));
                (below, backing) = (values, Some((name, "raw")));
                continue;
            };
            let wanted = PreparedOptions {
                shape,
                guest_bytes: layer.bytes,
                backing,
                snapshots: 0,
                filled_per_mille: 500,
                compressed_per_mille: config.compressed_per_mille,
                spare_l1_entries: 0,
                mapped_beyond: false,
                bitmaps: None,
                spare_refcount_clusters: 0,
                lazy_refcounts: false,
                crowded: false,
                leaks: false,
                allocation: None,
            };
            let prepared = prepare(&wanted, script, next_value, random);
            below = judge::resolve(&prepared.active, &below);
            let name = format!("base{number}.qcow2");
            files.push((name.clone(), prepared.file, DiskProfile::default()));
            backing = Some((name, "qcow2"));
        }
        let wanted = PreparedOptions {
            shape: config.shape,
            guest_bytes: config.guest_bytes,
            backing,
            snapshots: config.snapshots,
            filled_per_mille: config.filled_per_mille,
            compressed_per_mille: config.compressed_per_mille,
            spare_l1_entries: config.spare_l1_entries,
            mapped_beyond: config.mapped_beyond,
            bitmaps: config.bitmaps,
            spare_refcount_clusters: config.spare_refcount_clusters,
            lazy_refcounts: config.lazy_refcounts,
            crowded: config.crowded,
            leaks: config.leaks,
            allocation: config.stored_allocation,
        };
        let prepared = prepare(&wanted, script, next_value, random);
        files.push((
            TOP.to_owned(),
            on_its_disk(config, prepared.file),
            config.profile,
        ));
        let disk = |content| script.encode_disk(&judge::resolve(content, &below));
        Machine {
            files,
            active: judge::resolve(&prepared.active, &below),
            below: script.encode_disk(&below),
            snapshots: prepared.snapshots.iter().map(disk).collect(),
            below_values: below.clone(),
            has_extension: true,
        }
    }

    /// The machine of a seed whose image QEMU's tools have made: a compressed image, then snapshots
    /// with writes between them.
    pub fn by_qemu(
        config: &Config,
        script: ValueEncoding,
        next_value: &mut Value,
        random: &mut Random,
    ) -> Result<Machine, String> {
        let (raw, mut active) = raw_file(config.guest_bytes, script, next_value, random);
        let mut image = qemu::Image::make(config.shape, &raw, config.compressed_per_mille > 0)?;
        let mut snapshots = Vec::new();
        for number in 0..config.snapshots {
            image.snapshot(number)?;
            snapshots.push(script.encode_disk(&active));
            for _ in 0..4 {
                let len = active.len() as u64;
                let first = random.below(len);
                let end = len.min(first + random.between(1, 64));
                *next_value += 1;
                let mut bytes = vec![0; ((end - first) * script.unit_bytes()) as usize];
                script.encode_run(*next_value, first as u32, &mut bytes);
                image.write(first * script.unit_bytes(), &bytes)?;
                active[first as usize..end as usize].fill(*next_value);
            }
        }
        let file = on_its_disk(config, image.file()?);
        Ok(Machine {
            files: vec![(TOP.to_owned(), file, config.profile)],
            active,
            below: Vec::new(),
            below_values: Vec::new(),
            snapshots,
            has_extension: false,
        })
    }
}

/// A raw file with runs of values and zeros.
fn raw_file(
    bytes: u64,
    script: ValueEncoding,
    next_value: &mut Value,
    random: &mut Random,
) -> (FileImage, Vec<Value>) {
    let units = (bytes / script.unit_bytes()) as u32;
    let mut image = FileImage::new(bytes);
    let mut values = vec![0; units as usize];
    let mut first = 0;
    while first < units {
        let end = units.min(first + random.between(1, 64) as u32);
        if random.chance(700) {
            *next_value += 1;
            let mut content = vec![0; (u64::from(end - first) * script.unit_bytes()) as usize];
            script.encode_run(*next_value, first, &mut content);
            image.write(u64::from(first) * script.unit_bytes(), &content);
            values[first as usize..end as usize].fill(*next_value);
        }
        first = end;
    }
    (image, values)
}

/// Puts an image on a device when the profile says so.
fn on_its_disk(config: &Config, file: FileImage) -> FileImage {
    let Some(seed) = config.profile.device else {
        return file;
    };
    let least = file.len_bytes() + 64 * config.shape.cluster_bytes();
    let len = least.max(config.guest_bytes * 6).next_multiple_of(1 << 20);
    let mut device = FileImage::device(len, seed);
    let mut at = 0;
    while at < file.len_bytes() {
        let step = (file.len_bytes() - at).min(1 << 20);
        device.write(at, &file.bytes(at, step as usize));
        at += step;
    }
    device
}
