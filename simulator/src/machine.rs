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
                filled_per_mille: 500,
                compressed_per_mille: config.image.compressed_per_mille,
                ..PreparedOptions::default()
            };
            let prepared = prepare(&wanted, script, next_value, random);
            below = judge::resolve(&prepared.active, &below);
            let name = format!("base{number}.qcow2");
            files.push((name.clone(), prepared.file, DiskProfile::default()));
            backing = Some((name, "qcow2"));
        }
        let wanted = PreparedOptions {
            backing,
            ..config.image.clone()
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
        let (raw, mut active) = raw_file(config.image.guest_bytes, script, next_value, random);
        let mut image = qemu::Image::make(
            config.image.shape,
            &raw,
            config.image.compressed_per_mille > 0,
        )?;
        let mut snapshots = Vec::new();
        for number in 0..config.image.snapshots {
            image.snapshot(number)?;
            snapshots.push(script.encode_disk(&active));
            for _ in 0..4 {
                let len = active.len() as u64;
                let first = random.below(len);
                let end = len.min(first + random.between(1, 64));
                *next_value += 1;
                let (start, len) = (
                    first * script.unit_bytes(),
                    (end - first) * script.unit_bytes(),
                );
                image.write(start, &script.bytes_of(*next_value, start, len))?;
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
            let start = u64::from(first) * script.unit_bytes();
            let len = u64::from(end - first) * script.unit_bytes();
            image.write(start, &script.bytes_of(*next_value, start, len));
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
    let least = file.len_bytes() + 64 * config.image.shape.cluster_bytes();
    let len = least
        .max(config.image.guest_bytes * 6)
        .next_multiple_of(1 << 20);
    let mut device = FileImage::device(len, seed);
    let mut at = 0;
    while at < file.len_bytes() {
        let step = (file.len_bytes() - at).min(1 << 20);
        device.write(at, &file.bytes(at, step as usize));
        at += step;
    }
    device
}
