//! Keys of an encrypted image: whatever a cut leaves, each slot that is active opens the disk.

use gaur_engine::{Job, KeySlots, NewKey, Passphrase, create};
use gaur_format::plan::{CreateOptions, LuksArea};
use gaur_luks::{Cipher, Hash, Header as LuksHeader, Iv, KeyBits, Mode, New};
use gaur_sim::{FileImage, Random, SimHost};

use crate::verbs::{Cuts, NAME, Work, broken_rule, header, open, profile};

fn passphrase(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes().to_vec())
}

/// An encrypted image that the first key opens.
fn encrypted(seed: u64) -> Result<FileImage, String> {
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
    let made = LuksHeader::create(&new, &passphrase("old"), &mut noise(random));
    let made = made.map_err(|error| error.to_string())?;
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
    let empty = [(NAME, FileImage::new(0))];
    let work = Work::begin(seed, empty, profile(seed), async move |host| {
        let file = open(&host, NAME).await?;
        let made = create(&file, &options, &Job::default()).await;
        made.map_err(|error| format!("{error:#}"))
    });
    Ok(work.finish()?[NAME].clone())
}

fn noise(random: &mut Random) -> impl FnMut(&mut [u8]) {
    |out| {
        out.iter_mut()
            .for_each(|byte| *byte = random.number() as u8)
    }
}

/// Adds a key to a slot and erases the first one.
async fn change(host: SimHost, seed: u64, breaks: bool) -> Result<(), String> {
    let random = &mut Random::new(seed);
    let file = open(&host, NAME).await?;
    let failed = |error| format!("{error:#}");
    let mut slots = KeySlots::open(&file).await.map_err(failed)?;
    slots.break_rule(broken_rule(breaks));
    let slot = 1 + random.below(7) as usize;
    let new = passphrase("new");
    let new = NewKey {
        passphrase: &new,
        iterations: 1,
        slot: Some(slot),
    };
    let added = slots.add(&passphrase("old"), new, &mut noise(random)).await;
    added.map_err(failed)?;
    let erased = slots.erase(&[0], false, &mut noise(random)).await;
    erased.map(drop).map_err(failed)
}

fn luks_header(file: &FileImage) -> Result<(u64, LuksHeader), String> {
    let at = header(file)?.encryption().ok_or("no luks header")?.offset.0;
    let luks = LuksHeader::parse(&file.bytes(at, 592));
    Ok((at, luks.map_err(|error| error.to_string())?))
}

/// An active slot opens with one of the keys, and there is one.
fn judge_keys(file: &FileImage) -> Result<(), String> {
    let (at, luks) = luks_header(file)?;
    let mut opened = 0;
    for (index, slot) in luks.slots.iter().enumerate() {
        if slot.iterations.is_none() {
            continue;
        }
        let place = luks.stripes_of(slot);
        let bytes = file.bytes(at + place.start, (place.end - place.start) as usize);
        let opens = |text| {
            let key = luks.open_slot(slot, &mut bytes.clone(), &passphrase(text));
            key.is_some()
        };
        if !(opens("old") || opens("new")) {
            return Err(format!("slot {index} is active and opens with neither key"));
        }
        opened += 1;
    }
    match opened {
        0 => Err("no key is left".to_owned()),
        _ => Ok(()),
    }
}

/// Changes the keys of an encrypted image.
pub fn change_keys(seed: u64, breaks: bool) -> Cuts {
    let old = encrypted(seed)?;
    let mut work = Work::begin(seed, [(NAME, old.clone())], profile(seed), |host| {
        change(host, seed, breaks)
    });
    let cuts = work.judged(seed, 12, |left| judge_keys(&left[NAME]))?;
    let whole = &work.host.images()[NAME];
    let (at, luks) = luks_header(whole)?;
    if luks.active_slots().count() != 1 || luks.slots[0].iterations.is_some() {
        return Err("another slot than the new one is active".to_owned());
    }
    let erased = at + luks.stripes_of(&luks.slots[0]).start;
    match whole.bytes(erased, 4096) == old.bytes(erased, 4096) {
        true => Err("the old key is still there".to_owned()),
        false => Ok(cuts),
    }
}
