//! Amend under power cuts: whatever a cut leaves is a whole image with the same content, and every key that a slot says it
//! has opens the disk.
#![cfg(feature = "broken-order")]

use std::path::Path;

use gaur_block::{Access, Host};
use gaur_engine::{
    Amendment, BrokenRule, ErrorKind, Job, KeySlots, NewKey, Passphrase, amend_breaking, create,
};
use gaur_format::plan::{CreateOptions, LuksArea};
use gaur_format::{AllocationPolicy, Header, Version};
use gaur_luks::{Cipher, Hash, Header as LuksHeader, Iv, KeyBits, Mode, New};
use gaur_sim::{
    DiskProfile, FileImage, Random, Scheduler, SimFile, SimHost, Stop, Survivors, Trace,
};
use gaur_simulator::config::Config;
use gaur_simulator::content::ValueEncoding;
use gaur_simulator::judge;
use gaur_simulator::prepare::prepare;
use gaur_simulator::view::View;

const NAME: &str = "top.qcow2";

fn header(file: &FileImage) -> Header {
    Header::parse(&file.bytes(0, file.len_bytes().min(2 << 20) as usize)).unwrap()
}

/// What is read of an image: the disk and its snapshots.
fn contents(file: &FileImage) -> Vec<Vec<u8>> {
    View::open(file, &[]).unwrap().contents().unwrap()
}

fn profile(seed: u64) -> DiskProfile {
    DiskProfile {
        request_alignment: [1, 512][seed as usize % 2],
        memory_alignment: 512,
        ..DiskProfile::default()
    }
}

async fn file_of(host: &SimHost) -> SimFile {
    let access = Access {
        write: true,
        direct: false,
        lock: true,
        force_share: false,
    };
    host.open(Path::new(NAME), access).await.unwrap()
}

/// A machine on which `work` has begun.
fn working<W: Future<Output = ()> + 'static>(
    seed: u64,
    file: FileImage,
    work: impl FnOnce(SimHost) -> W,
) -> (Scheduler, SimHost) {
    let scheduler = Scheduler::new(seed, Trace::default());
    let handle = scheduler.handle();
    let host = SimHost::from_images(&handle, [(NAME, file, profile(seed))]);
    handle.spawn("work", work(host.clone()));
    (scheduler, host)
}

/// Cuts the power at many moments of the work; how often, and the first cut whose image `wrong` does not like.
fn cut(
    seed: u64,
    (mut scheduler, host): (Scheduler, SimHost),
    wrong: impl Fn(&FileImage) -> Option<String>,
) -> (u64, Option<String>) {
    let random = &mut Random::new(seed);
    let mut cuts = 0;
    loop {
        let stop = scheduler.run(1 + random.below(12)).unwrap();
        let left = host.crash_images(Survivors::draw(random), random)[NAME].clone();
        cuts += 1;
        if let Some(what) = wrong(&left) {
            return (cuts, Some(format!("seed {seed}, cut {cuts}: {what}")));
        }
        if stop == Stop::Done {
            return (cuts, wrong(&host.images()[NAME]));
        }
    }
}

fn amendment(seed: u64) -> Amendment {
    let random = &mut Random::new(seed ^ 0xa3e4d);
    Amendment {
        version: Some(Version::V3),
        refcount_order: (random.below(4) > 0).then(|| random.below(7) as u32),
        lazy_refcounts: (random.below(2) == 0).then(|| random.below(2) == 0),
        allocation: (random.below(3) == 0).then_some(AllocationPolicy::Compact),
        ..Amendment::default()
    }
}

/// Amends a prepared image with cuts.
fn amend_with_cuts(seed: u64, broken: Option<BrokenRule>) -> (u64, Option<String>) {
    let config = Config::draw(seed);
    let random = &mut Random::new(seed);
    let script = ValueEncoding::new(seed, config.unit_bytes);
    let file = prepare(&config.image, script, &mut 0, random).file;
    let (before, shape) = (contents(&file), config.image.shape);
    let leaks = judge::check(&file, shape).unwrap().leaks;
    let wanted = amendment(seed);
    let expected = wanted.clone();
    let machine = working(seed, file, async move |host| {
        let file = file_of(&host).await;
        let done = amend_breaking(&file, &wanted, &Job::default(), broken).await;
        if let Err(error) = done {
            let kind = error.kind();
            let allowed = [ErrorKind::InvalidInput, ErrorKind::Unsupported];
            assert!(allowed.contains(&kind), "seed {seed}: {error:#}");
        }
    });
    let host = machine.1.clone();
    let (cuts, wrong) = cut(seed, machine, |left| {
        if contents(left) != before {
            return Some("another disk".to_owned());
        }
        judge::check(left, shape).err()
    });
    if wrong.is_none() {
        let whole = &host.images()[NAME];
        assert_eq!(
            judge::check(whole, shape).unwrap().leaks,
            leaks,
            "seed {seed}"
        );
        let after = header(whole);
        let narrow = expected
            .refcount_order
            .is_some_and(|order| order < after.refcount_order);
        if !narrow && after.version == Version::V3 {
            let order = expected.refcount_order.unwrap_or(after.refcount_order);
            assert_eq!(after.refcount_order, order, "seed {seed}");
        }
    }
    (cuts, wrong)
}

#[test]
fn a_power_cut_during_an_amendment_leaves_a_whole_image() {
    let mut cuts = 0;
    for seed in 0..300 {
        let (count, wrong) = amend_with_cuts(seed, None);
        assert_eq!(wrong, None);
        cuts += count;
    }
    assert!(cuts > 2000, "{cuts} cuts");
}

#[test]
fn a_switch_to_refcounts_that_are_not_durable_is_noticed() {
    let noticed = (0..300).find_map(|seed| amend_with_cuts(seed, Some(BrokenRule::O5)).1);
    assert!(noticed.is_some());
}

fn passphrase(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes().to_vec())
}

/// An encrypted image that the first key opens.
fn encrypted(seed: u64) -> FileImage {
    let random = &mut Random::new(seed);
    let cipher = Cipher {
        bits: KeyBits::Aes128,
        mode: Mode::Xts,
        iv: Iv::Plain64,
    };
    let new = New {
        cipher,
        hash: Hash::Sha256,
        iterations: 1,
        digest_iterations: 1,
        uuid: String::new(),
    };
    let mut noise = |out: &mut [u8]| {
        out.iter_mut()
            .for_each(|byte| *byte = random.number() as u8)
    };
    let made = LuksHeader::create(&new, &passphrase("old"), &mut noise).unwrap();
    let mut bytes = made.header.encode();
    bytes.resize(made.header.slots[0].offset_bytes as usize, 0);
    bytes.extend(made.stripes);
    let options = CreateOptions {
        size_bytes: 1 << 20,
        cluster_bits: 12,
        luks: Some(LuksArea {
            bytes,
            len_bytes: LuksHeader::new_bytes(cipher),
        }),
        ..CreateOptions::default()
    };
    let (mut scheduler, host) = working(seed, FileImage::new(0), async move |host| {
        create(&file_of(&host).await, &options, &Job::default())
            .await
            .unwrap();
    });
    assert_eq!(scheduler.run(10_000_000).unwrap(), Stop::Done);
    host.images()[NAME].clone()
}

/// Adds a key to a slot and erases the first one.
async fn change_key(host: SimHost, seed: u64, broken: Option<BrokenRule>) {
    let random = &mut Random::new(seed);
    let file = file_of(&host).await;
    let mut slots = KeySlots::open(&file).await.unwrap();
    slots.break_rule(broken);
    let slot = 1 + random.below(7) as usize;
    let mut noise = |out: &mut [u8]| {
        out.iter_mut()
            .for_each(|byte| *byte = random.number() as u8)
    };
    let new = passphrase("new");
    let new = NewKey {
        passphrase: &new,
        iterations: 1,
        slot: Some(slot),
    };
    slots
        .add(&passphrase("old"), new, &mut noise)
        .await
        .unwrap();
    slots.erase(&[0], false, &mut noise).await.unwrap();
}

/// What is wrong with the keys of an image: no slot is active, or one that is does not open.
fn keys_wrong(file: &FileImage) -> Option<String> {
    let pointer = header(file).encryption()?;
    let luks = LuksHeader::parse(&file.bytes(pointer.offset.0, 592)).unwrap();
    let mut opened = 0;
    for (index, slot) in luks.slots.iter().enumerate() {
        if slot.iterations.is_none() {
            continue;
        }
        let place = luks.stripes_of(slot);
        let bytes = file.bytes(
            pointer.offset.0 + place.start,
            (place.end - place.start) as usize,
        );
        let opens = |text| {
            luks.open_slot(slot, &mut bytes.clone(), &passphrase(text))
                .is_some()
        };
        if !(opens("old") || opens("new")) {
            return Some(format!("slot {index} is active and opens with neither key"));
        }
        opened += 1;
    }
    (opened == 0).then(|| "no key is left".to_owned())
}

fn change_key_with_cuts(seed: u64, broken: Option<BrokenRule>) -> (u64, Option<String>) {
    let machine = working(seed, encrypted(seed), move |host| {
        change_key(host, seed, broken)
    });
    let host = machine.1.clone();
    let (cuts, wrong) = cut(seed, machine, keys_wrong);
    if wrong.is_none() {
        let whole = &host.images()[NAME];
        let at = header(whole).encryption().unwrap().offset.0;
        let luks = LuksHeader::parse(&whole.bytes(at, 592)).unwrap();
        assert_eq!(luks.active_slots().count(), 1, "seed {seed}");
        assert_eq!(luks.slots[0].iterations, None, "seed {seed}");
        let erased = luks.stripes_of(&luks.slots[0]);
        let before = encrypted(seed).bytes(at + erased.start, 4096);
        assert_ne!(whole.bytes(at + erased.start, 4096), before, "seed {seed}");
    }
    (cuts, wrong)
}

#[test]
fn a_power_cut_during_a_change_of_keys_leaves_one_that_opens() {
    let mut cuts = 0;
    for seed in 0..60 {
        let (count, wrong) = change_key_with_cuts(seed, None);
        assert_eq!(wrong, None);
        cuts += count;
    }
    assert!(cuts > 150, "{cuts} cuts");
}

#[test]
fn a_key_slot_marked_active_before_its_key_is_durable_is_noticed() {
    let noticed = (0..60).find_map(|seed| change_key_with_cuts(seed, Some(BrokenRule::O5)).1);
    assert!(noticed.is_some());
}
