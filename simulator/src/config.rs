//! The configuration of a seed: image, disk, history, load and faults.
//!
//! Every seed switches whole features on and off (swarm testing): a load without discards fills
//! tables that one with discards never fills.

use gaur_engine::{AllocationPolicy, DetectZeroes, PassDiscard};
use gaur_sim::{DiskProfile, Random};

use crate::encryption::Encryption;
use crate::prepare::PreparedOptions;
use crate::shape::Shape;

/// A layer below the top image.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    /// Its shape; `None` for a raw file.
    pub shape: Option<Shape>,
    /// Its size in bytes: shorter, longer or as long as what lies above.
    pub bytes: u64,
}

/// How often each request is drawn, relative to the others.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// Reads.
    pub read: u32,
    /// Writes.
    pub write: u32,
    /// Write zeroes.
    pub zero: u32,
    /// Discards.
    pub discard: u32,
    /// Flushes.
    pub flush: u32,
    /// Questions for the status of a range.
    pub status: u32,
    /// Changes of the size.
    pub resize: u32,
    /// Requests beyond the end.
    pub beyond: u32,
}

/// Which mishaps befall the host's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPlan {
    /// None.
    None,
    /// Requests fail at random, this often in a thousand, from the start or from open on.
    Random(u32),
    /// Writes fail at random, this often in a thousand, and nothing else does.
    Writes(u32),
    /// One request fails.
    Once,
    /// The file system fills up.
    Full,
}

/// The task that changes internal snapshots while the load runs.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotLoad {
    /// How many do so at once.
    pub tasks: u32,
    /// Operations of each between two crashes.
    pub operations: u32,
    /// How often they create, delete, apply, rename, list, ask for what cannot be, save the state of a
    /// virtual machine, and read it.
    pub weights: [u32; 8],
    /// Operations in a thousand that are cancelled.
    pub cancel_per_mille: u32,
    /// Longest pause between two operations.
    pub pause_ns: u64,
    /// Snapshots at which no more are made.
    pub most: u32,
}

/// Loads that chance alone would make too rarely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetedLoad {
    None,
    /// Discards of parts of clusters, and writes into them again.
    Holes,
    /// The same, and short writes that fail half-way.
    TornWrites,
    /// The disk grows until its L1 table needs more clusters in a row than a refcount block counts.
    LongDisk,
}

/// What the bitmaps of an image are worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bitmaps {
    /// They say what has changed.
    Valid,
    /// Their autoclear bit is off, and nothing that they refer to is theirs any more.
    Stale,
}

/// Everything a seed decides before the run.
#[derive(Clone, Debug)]
pub struct Config {
    /// The seed.
    pub seed: u64,
    /// Smallest alignment of guest requests in bytes.
    pub unit_bytes: u64,
    /// The top image as it is at first, but for its backing file.
    pub image: PreparedOptions,
    /// What lies below it, top first.
    pub backing: Vec<Layer>,
    /// Longest name of a snapshot in bytes.
    pub longest_name: u64,
    /// Largest size that the disk is given in bytes, now and then.
    pub longest_disk_bytes: Option<u64>,
    /// Resizes in a thousand that are cancelled.
    pub cancelled_resizes_per_mille: u32,
    /// The disk of the top image.
    pub profile: DiskProfile,
    /// Opened with O_DIRECT.
    pub direct: bool,
    /// Size of the L2 cache.
    pub l2_cache_bytes: u64,
    /// Size of an L2 slice; `None` for the usual.
    pub l2_entry_bytes: Option<u64>,
    /// Size of the refcount cache.
    pub refcount_cache_bytes: u64,
    /// Freed space is given back.
    pub discard: bool,
    /// What becomes of freed space otherwise, and of writes of zeros.
    pub space: SpaceOptions,
    /// The policy it is opened with, whatever the header says.
    pub allocation: Option<AllocationPolicy>,
    /// Queues on the image.
    pub queues: u32,
    /// Tasks on each queue.
    pub depth: u32,
    /// Requests of each task between two crashes.
    pub requests: u32,
    /// Longest request in units.
    pub longest_units: u32,
    /// Requests in a thousand that lie in a small part of the disk.
    pub hot_per_mille: u32,
    /// What the load consists of.
    pub weights: Weights,
    /// Writes with FUA in a thousand.
    pub fua_per_mille: u32,
    /// How many reads and writes have their memory in several pieces.
    pub scattered_per_mille: u32,
    /// Writes in a thousand that store whole clusters compressed.
    pub packed_per_mille: u32,
    /// Runs from open to crash or close.
    pub epochs: u32,
    /// What goes wrong.
    pub mishaps: FaultPlan,
    /// Snapshots are made and applied meanwhile.
    pub snapshot_load: Option<SnapshotLoad>,
    /// Checks of the open image between two crashes.
    pub online_checks: u32,
    /// What reads find below the top image stays in it.
    pub copy_on_read: bool,
    /// Times between two crashes that all of it is copied there.
    pub streams: u32,
    /// A process that is killed leaves a log of its commits to the next.
    pub keeps_log: bool,
    /// Persistent bitmaps are kept, else removed.
    pub keeps_bitmaps: bool,
}

/// Most units, smaller than a sector, that a disk is divided into.
const UNITS_MAX: u64 = 1 << 15;

impl Config {
    /// What `seed` stands for.
    pub fn draw(seed: u64) -> Config {
        let mut random = Random::new(seed);
        let random = &mut random;
        // Drawn apart, so that the other seeds are what they were before there were policies.
        let space = &mut Random::new(seed ^ 0x3c6e_f372_fe94_f82b);
        let tables = &mut Random::new(seed ^ 0x2b7e_1516_28ae_d2a6);
        let (special, shape) = draw_special(draw_shape(random), space, tables);
        let unit_bytes = random.pick(&[512, 512, 512, 512, 64, 16]);
        let guest_bytes = draw_size(shape, unit_bytes, random);
        // Large disks in small units take minutes and find nothing that others do not.
        let unit_bytes = if guest_bytes / unit_bytes > UNITS_MAX {
            512
        } else {
            unit_bytes
        };
        let snapshots = match shape.refcount_max() {
            1 => 0,
            max => random.pick(&[0, 0, 0, 1, 1, 2]).min(max - 1) as u32,
        };
        let direct = random.chance(400);
        let backing = draw_backing(guest_bytes, unit_bytes, random);
        let profile = draw_profile(direct, random);
        let mishaps = draw_mishaps(random);
        let largest = (4 * shape.cluster_bytes()).min(guest_bytes) / unit_bytes;
        let image = draw_image(shape, (guest_bytes, snapshots), random, space, tables);
        let config = Config {
            seed,
            unit_bytes,
            image,
            backing,
            longest_name: tables.pick(&[40, 40, 40, 3000, 65535]),
            longest_disk_bytes: None,
            cancelled_resizes_per_mille: tables.pick(&[0, 0, 100, 500]),
            profile,
            direct,
            l2_cache_bytes: random.pick(&[0, 1024, 4096, 16 << 10, 32 << 20]),
            l2_entry_bytes: draw_slice(seed, shape),
            refcount_cache_bytes: random.pick(&[0, 1024, 4096, 1 << 20]),
            discard: random.chance(700),
            space: draw_space(seed, shape),
            allocation: space.pick(&[
                None,
                None,
                Some(AllocationPolicy::Compact),
                Some(AllocationPolicy::Contiguous),
            ]),
            queues: random.pick(&[1, 1, 2, 3, 4]),
            depth: random.pick(&[1, 1, 2, 4, 8]),
            requests: random.pick(&[3, 6, 12, 25]),
            longest_units: random.between(1, largest.max(1)) as u32,
            hot_per_mille: random.pick(&[0, 500, 900]),
            weights: draw_weights(snapshots, shape, random),
            fua_per_mille: random.pick(&[0, 50, 300, 1000]),
            scattered_per_mille: Random::new(seed ^ 0x2e8d_47b1_90c6_f35a).pick(&[0, 0, 300, 1000]),
            packed_per_mille: draw_packed(seed),
            epochs: random.between(1, 5) as u32,
            mishaps,
            snapshot_load: draw_snapshot_load(seed, shape, guest_bytes),
            online_checks: draw_online_checks(seed),
            copy_on_read: false,
            streams: 0,
            keeps_log: shape.version == 3 && Random::new(seed ^ 0x51a7_09c3_e2d4_8b16).chance(500),
            keeps_bitmaps: Random::new(seed ^ 0x7c3a_9e15_20bd_f468).chance(800),
        };
        let config = config
            .with_time_for_snapshots(random)
            .with_copies()
            .with_special(special, space, tables);
        match Random::new(seed ^ 0x7d1e_90b2_4f3c_a865).chance(200) {
            true => config.with_encryption(),
            false => config,
        }
    }

    /// The same with what lies below copied into the top, by reads, as a whole, or both. Drawn apart, and such that the
    /// seeds in `seeds.txt` that are older have none.
    fn with_copies(self) -> Config {
        if !matches!(self.seed % 23, 1 | 4 | 6 | 8 | 10 | 11 | 12 | 15) {
            return self;
        }
        let mut random = Random::new(self.seed ^ 0x0dc0_b1e5_7a3f_9d26);
        let (copy_on_read, streams) = random.pick(&[
            (true, 0),
            (true, 0),
            (true, 1),
            (true, 3),
            (false, 1),
            (false, 4),
        ]);
        let backing = match self.backing.is_empty() {
            true => draw_backing(self.image.guest_bytes, self.unit_bytes, &mut random),
            false => self.backing,
        };
        Config {
            copy_on_read,
            streams,
            backing,
            weights: Weights {
                read: self.weights.read.max(random.pick(&[10, 40])),
                ..self.weights
            },
            ..self
        }
    }

    /// The same with an encrypted image. Compressed clusters are not encrypted, so it has none.
    pub(crate) fn with_encryption(self) -> Config {
        let random = &mut Random::new(self.seed ^ 0x4c55_4b53_babe_0001);
        Config {
            image: PreparedOptions {
                compressed_per_mille: 0,
                encryption: Some(random.pick(&[Encryption::Cbc, Encryption::Xts])),
                ..self.image
            },
            ..self
        }
    }

    fn with_special(
        self,
        special: TargetedLoad,
        space: &mut Random,
        tables: &mut Random,
    ) -> Config {
        match special {
            TargetedLoad::None => self,
            TargetedLoad::Holes => self.with_holes(space),
            TargetedLoad::TornWrites => self.with_holes(space).with_torn_writes(space),
            TargetedLoad::LongDisk => self.with_long_disk(tables),
        }
    }

    /// The same with a disk that grows a thousandfold. It is read as a whole at every crash point, so there
    /// is little else to read.
    fn with_long_disk(self, random: &mut Random) -> Config {
        let per_table = self.image.shape.entries() * self.image.shape.cluster_bytes();
        let rows = self.image.shape.block_entries() * self.image.shape.cluster_bytes() / 8;
        Config {
            unit_bytes: 512,
            image: PreparedOptions {
                guest_bytes: self.image.guest_bytes.min(64 << 10),
                snapshots: 0,
                spare_l1_entries: 0,
                mapped_beyond: false,
                ..self.image
            },
            backing: Vec::new(),
            snapshot_load: None,
            longest_disk_bytes: Some(rows * per_table * random.pick(&[5, 6]) / 4),
            queues: random.pick(&[1, 2]),
            depth: 1,
            requests: random.pick(&[3, 6, 12]),
            epochs: random.between(1, 2) as u32,
            weights: Weights {
                resize: 20,
                ..self.weights
            },
            ..self
        }
    }

    /// The same with enough requests for snapshots to be made beside them.
    fn with_time_for_snapshots(self, random: &mut Random) -> Config {
        match self.snapshot_load {
            Some(_) => Config {
                requests: self.requests.max(random.pick(&[6, 12, 40])),
                ..self
            },
            None => self,
        }
    }

    /// The same with short writes into few fresh clusters, many of which fail half-way: what they
    /// leave must not come up with the next write beside them. Flushes are rare: metadata that cannot
    /// be written ends an epoch early.
    fn with_torn_writes(self, random: &mut Random) -> Config {
        Config {
            image: PreparedOptions {
                guest_bytes: self
                    .image
                    .guest_bytes
                    .min(8 * self.image.shape.cluster_bytes()),
                snapshots: 0,
                filled_per_mille: 0,
                ..self.image
            },
            backing: Vec::new(),
            hot_per_mille: 1000,
            longest_units: self.longest_units.min(random.pick(&[2, 6])),
            fua_per_mille: 0,
            l2_cache_bytes: 32 << 20,
            refcount_cache_bytes: 1 << 20,
            requests: 25,
            weights: Weights {
                read: 30,
                write: 60,
                zero: 2,
                discard: 2,
                flush: 0,
                ..self.weights
            },
            mishaps: FaultPlan::Writes(60),
            ..self
        }
    }

    /// The same with a load that makes holes inside clusters and writes into them again.
    fn with_holes(self, random: &mut Random) -> Config {
        let compact = Some(AllocationPolicy::Compact);
        Config {
            image: PreparedOptions {
                allocation: random.pick(&[None, Some(1)]),
                ..self.image
            },
            allocation: random.pick(&[None, None, compact]),
            profile: DiskProfile {
                device: None,
                discard_zeroes: true,
                ..self.profile
            },
            discard: true,
            hot_per_mille: random.pick(&[500, 900, 1000]),
            requests: self.requests.max(12),
            weights: Weights {
                zero: random.pick(&[5, 20]),
                discard: random.pick(&[10, 30]),
                flush: random.pick(&[5, 20]),
                ..self.weights
            },
            ..self
        }
    }
}

fn draw_image(
    shape: Shape,
    (guest_bytes, snapshots): (u64, u32),
    random: &mut Random,
    space: &mut Random,
    tables: &mut Random,
) -> PreparedOptions {
    PreparedOptions {
        shape,
        guest_bytes,
        backing: None,
        snapshots,
        filled_per_mille: random.pick(&[0, 0, 100, 500, 900]),
        compressed_per_mille: random.pick(&[0, 0, 200, 600]),
        spare_l1_entries: draw_spare_l1(shape, random, tables),
        mapped_beyond: tables.chance(300),
        bitmaps: draw_bitmaps(shape, tables),
        spare_refcount_clusters: draw_spare_refcounts(shape, tables),
        lazy_refcounts: random.chance(200),
        crowded: random.chance(300),
        leaks: random.chance(100),
        allocation: space.pick(&[None, None, Some(1), Some(2), Some(77)]),
        encryption: None,
    }
}

fn draw_mishaps(random: &mut Random) -> FaultPlan {
    match random.below(100) {
        0..70 => FaultPlan::None,
        70..82 => FaultPlan::Once,
        82..95 => FaultPlan::Random(random.pick(&[2, 10, 50])),
        _ => FaultPlan::Full,
    }
}

fn draw_bitmaps(shape: Shape, random: &mut Random) -> Option<Bitmaps> {
    match shape.version {
        2 => None,
        _ => random.pick(&[None, None, None, Some(Bitmaps::Valid), Some(Bitmaps::Stale)]),
    }
}

fn draw_special(shape: Shape, random: &mut Random, tables: &mut Random) -> (TargetedLoad, Shape) {
    if tables.chance(8) {
        let shape = Shape {
            version: 3,
            cluster_bits: 9,
            extended: false,
            refcount_order: 6,
        };
        return (TargetedLoad::LongDisk, shape);
    }
    match random.below(100) {
        0..18 => {
            let cluster_bits = random.pick(&[14, 14, 15, 16]);
            (TargetedLoad::Holes, shape.with_subclusters(cluster_bits))
        }
        18..25 => (TargetedLoad::TornWrites, shape.with_subclusters(16)),
        _ => (TargetedLoad::None, shape),
    }
}

fn draw_shape(random: &mut Random) -> Shape {
    let extended = random.chance(350);
    let cluster_bits = if extended {
        random.pick(&[14, 14, 14, 15, 16])
    } else {
        match random.below(1000) {
            0..350 => 9,
            350..550 => 10,
            550..750 => 12,
            750..990 => 16,
            _ => 21,
        }
    };
    let version = if extended || random.chance(750) { 3 } else { 2 };
    let refcount_order = match version {
        2 => 4,
        _ => random.pick(&[0, 1, 2, 3, 4, 4, 4, 4, 5, 6, 6]),
    };
    Shape {
        version,
        cluster_bits,
        extended,
        refcount_order,
    }
}

/// Entries of the L1 table that the disk does not need. Where clusters are small they may be many, so that
/// the table is longer than what one refcount block counts.
fn draw_spare_l1(shape: Shape, random: &mut Random, tables: &mut Random) -> u64 {
    let few = random.pick(&[0, 0, 0, 1, 80]);
    let row = shape.block_entries() * shape.cluster_bytes() / 8;
    match shape.cluster_bits < 12 && tables.chance(200) {
        true => tables.pick(&[row / 2, row, 2 * row]).min(1 << 16),
        false => few,
    }
}

/// The same for clusters of the refcount table.
fn draw_spare_refcounts(shape: Shape, tables: &mut Random) -> u64 {
    let row = shape.block_entries();
    match shape.cluster_bits < 12 && tables.chance(200) {
        true => tables.pick(&[row / 2, row, 2 * row]).min(1 << 9),
        false => tables.pick(&[0, 0, 0, 1]),
    }
}

/// Drawn from numbers of its own: it came later, and the old seeds keep their meaning.
fn draw_slice(seed: u64, shape: Shape) -> Option<u64> {
    let mut random = Random::new(!seed);
    let cluster = shape.cluster_bytes();
    random.pick(&[None, Some(512), Some(2048.min(cluster)), Some(cluster)])
}

fn draw_size(shape: Shape, unit_bytes: u64, random: &mut Random) -> u64 {
    let cluster = shape.cluster_bytes();
    let most = match cluster {
        0..=1024 => 640,
        1025..=4096 => 200,
        4097..=65536 => 24,
        _ => 3,
    };
    let clusters = random.between(2, most);
    // Not every disk ends where a cluster does; every one ends where a sector does.
    let cut = if random.chance(500) {
        random.below(cluster / 512) * 512
    } else {
        0
    };
    (clusters * cluster - cut).next_multiple_of(unit_bytes)
}

fn draw_backing(above: u64, unit_bytes: u64, random: &mut Random) -> Vec<Layer> {
    let depth = random.pick(&[0, 0, 0, 1, 1, 2, 3]);
    let mut layers = Vec::new();
    for number in 0..depth {
        let bytes = match random.below(3) {
            0 => above,
            1 => random.between(1, above / 512) * 512,
            _ => above + random.below(above / 512) * 512,
        };
        let raw = number + 1 == depth && random.chance(500);
        let shape = (!raw).then(|| draw_shape(random));
        // A raw file may end anywhere.
        let odd = raw && bytes > 512 && unit_bytes < 512 && random.chance(500);
        let bytes = bytes - if odd { unit_bytes } else { 0 };
        layers.push(Layer { shape, bytes });
    }
    layers
}

fn draw_profile(direct: bool, random: &mut Random) -> DiskProfile {
    let alignment = if direct {
        random.pick(&[512, 512, 4096])
    } else {
        1
    };
    let device = random.chance(150);
    DiskProfile {
        request_alignment: alignment,
        memory_alignment: if direct {
            random.pick(&[4, alignment])
        } else {
            1
        },
        max_transfer: random.pick(&[1 << 30, 1 << 20, 64 << 10, 8 << 10]),
        device: device.then(|| random.number()),
        discard_zeroes: !device,
        write_zeroes: random.chance(700),
    }
}

/// Most bytes that the disks of all snapshots have together.
const SNAPSHOT_BYTES: u64 = 12 << 20;

/// Drawn apart as well, and such that the seeds in `seeds.txt` that are older have none.
fn draw_snapshot_load(seed: u64, shape: Shape, guest_bytes: u64) -> Option<SnapshotLoad> {
    let mut random = Random::new(seed ^ SNAPSHOT_STREAM);
    // Where refcounts cannot tell two from one there is little to do.
    let often = if shape.refcount_max() > 1 { 400 } else { 50 };
    if !random.chance(often) {
        return None;
    }
    let mut some = |weights: &[u32]| random.pick(weights);
    let weights = [
        some(&[10, 20]),
        some(&[0, 5, 15]),
        some(&[0, 5, 15]),
        some(&[0, 2]),
        some(&[0, 2]),
        some(&[0, 2]),
        some(&[0, 0, 20]),
        some(&[0, 4]),
    ];
    let most = (SNAPSHOT_BYTES / guest_bytes.max(shape.cluster_bytes())).clamp(1, 8);
    Some(SnapshotLoad {
        tasks: random.pick(&[1, 1, 1, 2, 3]),
        operations: random.pick(&[2, 5, 12]),
        weights,
        cancel_per_mille: random.pick(&[0, 0, 100, 500]),
        pause_ns: random.pick(&[1, 20_000, 200_000]),
        most: random.between(1, most) as u32,
    })
}

const SNAPSHOT_STREAM: u64 = 0x51ab_0a98;

/// Options about space that most images are opened without.
#[derive(Clone, Copy, Debug, Default)]
pub struct SpaceOptions {
    /// What frees space gives it back, or does not.
    pub pass_discard: PassDiscard,
    /// Clusters keep their place when they are discarded.
    pub no_unref: bool,
    /// Writes of zeros are looked for.
    pub detect_zeroes: DetectZeroes,
    /// Zeros are marked where they are zeros already.
    pub mark_zeros: bool,
}

/// Drawn apart, and such that the seeds in `seeds.txt` that are older have none.
fn draw_space(seed: u64, shape: Shape) -> SpaceOptions {
    let mark_zeros = matches!(seed % 17, 0 | 4 | 10 | 11 | 12 | 15);
    if !matches!(seed % 16, 2 | 3 | 8 | 11 | 12 | 15) {
        return SpaceOptions {
            mark_zeros,
            ..SpaceOptions::default()
        };
    }
    let mut random = Random::new(seed ^ 0x3fd1_6a2b_88e0_c957);
    let mut some = || random.pick(&[None, None, Some(false), Some(true)]);
    SpaceOptions {
        pass_discard: PassDiscard {
            request: some(),
            snapshot: some(),
            other: some(),
        },
        no_unref: shape.version == 3 && random.chance(400),
        detect_zeroes: random.pick(&[
            DetectZeroes::Off,
            DetectZeroes::On,
            DetectZeroes::Unmap,
            DetectZeroes::Unmap,
        ]),
        mark_zeros,
    }
}

/// Drawn apart, and such that the seeds in `seeds.txt` that are older have none.
fn draw_online_checks(seed: u64) -> u32 {
    match seed % 19 {
        0 | 4 | 6 | 9..=12 | 17 => Random::new(seed ^ 0x18e7_55c2_04fb_d93a).pick(&[1, 3, 8]),
        _ => 0,
    }
}

/// Drawn apart, and such that the seeds in `seeds.txt` that are older have none.
fn draw_packed(seed: u64) -> u32 {
    match seed % 10 {
        0 | 6 | 9 => Random::new(seed ^ 0x7d3f_02c9_b1e6_4a58).pick(&[200, 500, 1000]),
        _ => 0,
    }
}

fn draw_weights(snapshots: u32, shape: Shape, random: &mut Random) -> Weights {
    let mut some = |weights: &[u32]| random.pick(weights);
    let resizable = shape.version == 3 || snapshots == 0;
    Weights {
        read: some(&[0, 5, 20]),
        write: some(&[10, 30, 60]),
        zero: some(&[0, 0, 10, 30]),
        discard: some(&[0, 0, 10, 30]),
        flush: some(&[1, 5, 20]),
        status: some(&[0, 3]),
        resize: if resizable { some(&[0, 0, 3]) } else { 0 },
        beyond: some(&[0, 1]),
    }
}
