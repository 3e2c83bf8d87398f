//! Options about the keys of an encrypted image.

use std::time::Duration;

use gaur_engine::{Format, KeySlots, Keys, NewKey, Passphrase};
use gaur_reactor::{BlockingFile, RandomBytes, block_on};

use crate::failure::Failure;
use crate::image_file::ImageFile;
use crate::new_luks;
use crate::options::{OptionList, wrong_value};

/// A key that is to be added or erased.
pub(super) enum KeyChange {
    /// Another key opens the image.
    Add {
        opener: Passphrase,
        new: Passphrase,
        slot: Option<usize>,
        iter_time: Duration,
    },
    /// A key opens the image no more.
    Erase {
        old: Option<Passphrase>,
        slot: Option<usize>,
        force: bool,
    },
}

impl KeyChange {
    /// Takes the `encrypt.` options out of the list. `keys` has the secrets, and what opens the image.
    pub(super) fn take(
        options: &mut OptionList,
        prefix: &str,
        keys: &Keys,
        force: bool,
    ) -> Result<Option<KeyChange>, Failure> {
        let name = |key: &str| format!("{prefix}{key}");
        let states = [("active", true), ("inactive", false)];
        let state = options.take_choice(&name("state"), &states, None)?;
        let Some((_, active)) = state else {
            return match options.rest().find(|key| key.starts_with(prefix)) {
                None => Ok(None),
                Some(key) => {
                    let state = name("state");
                    let message = format!("option '{key}' without '{state}'");
                    Err(Failure::new(message)
                        .hint(format!("{state}=active adds a key, inactive erases")))
                }
            };
        };
        let mut secret = |key: &str| match options.take(key) {
            None => Ok(None),
            Some(id) => match keys.named(&id) {
                Some(secret) => Ok(Some(secret.clone())),
                None => {
                    let failure =
                        Failure::new(format!("option '{key}': there is no secret '{id}'"));
                    Err(failure.hint(format!("--object secret,id={id},file=PATH makes it")))
                }
            },
        };
        let (old, new) = (secret(&name("old-secret"))?, secret(&name("new-secret"))?);
        let slot = take_slot(options, &name("keyslot"))?;
        let refused = |message: String| Err(Failure::new(message));
        if active {
            if old.is_some() {
                return refused(format!(
                    "option '{prefix}old-secret' is for {prefix}state=inactive"
                ));
            }
            let Some(new) = new else {
                return refused(format!("{prefix}state=active needs '{prefix}new-secret'"));
            };
            let Some(opener) = keys.of_layer(0).cloned() else {
                let failure = Failure::new("to add a key, one that opens the image is needed");
                return Err(failure.hint(format!(
                    "--key-file PATH gives it, or {prefix}key-secret=ID among the image's options"
                )));
            };
            let iter_time = new_luks::take_iter_time(options, prefix)?;
            return Ok(Some(KeyChange::Add {
                opener,
                new,
                slot,
                iter_time,
            }));
        }
        if new.is_some() || options.has(&name("iter-time")) {
            return refused(format!(
                "'{prefix}new-secret' and '{prefix}iter-time' are for {prefix}state=active"
            ));
        }
        if old.is_none() && slot.is_none() {
            return refused(format!(
                "{prefix}state=inactive needs '{prefix}keyslot' or '{prefix}old-secret'"
            ));
        }
        Ok(Some(KeyChange::Erase { old, slot, force }))
    }

    /// Changes the keys of the image in the file.
    pub(super) fn carry_out(&self, file: &ImageFile, format: Format) -> Result<(), Failure> {
        let failed = |error| Failure::image(file.name(), &error);
        let slots = match format {
            Format::Luks => block_on(KeySlots::open_container(file.file())),
            _ => block_on(KeySlots::open(file.file())),
        };
        let mut slots = slots.map_err(failed)?;
        let mut chance = RandomBytes::default();
        match self {
            KeyChange::Add {
                opener,
                new,
                slot,
                iter_time,
            } => {
                // Before anything is written: the key must not be made of zeros.
                chance.fill(&mut [0]);
                new_luks::check_random(&chance)?;
                let iterations = new_luks::iterations(slots.cipher(), slots.hash(), *iter_time);
                let new = NewKey {
                    passphrase: new,
                    iterations,
                    slot: *slot,
                };
                let random = &mut |bytes: &mut [u8]| chance.fill(bytes);
                let added = slots.add(opener, new, random);
                block_on(added).map_err(failed)?;
            }
            KeyChange::Erase { old, slot, force } => {
                let erased = which(&slots, old.as_ref(), *slot)
                    .map_err(|failure| failure.with_subject(file.name()))?;
                let random = &mut |bytes: &mut [u8]| chance.fill(bytes);
                let erasing = slots.erase(&erased, *force, random);
                block_on(erasing).map_err(|error| {
                    let hint = "--force erases it all the same";
                    match error.kind() {
                        gaur_engine::ErrorKind::InvalidInput => failed(error).hint(hint),
                        _ => failed(error),
                    }
                })?;
            }
        }
        new_luks::check_random(&chance)
    }
}

/// The slots to erase.
fn which(
    slots: &KeySlots<'_, BlockingFile>,
    old: Option<&Passphrase>,
    slot: Option<usize>,
) -> Result<Vec<usize>, Failure> {
    let Some(old) = old else {
        return Ok(slot.into_iter().collect());
    };
    let opened = block_on(slots.opened_by(old));
    let mut found = opened.map_err(|error| Failure::new(format!("{error:#}")))?;
    if let Some(slot) = slot {
        found.retain(|index| *index == slot);
    }
    match found.is_empty() {
        false => Ok(found),
        true => Err(Failure::new(match slot {
            Some(slot) => format!("key slot {slot} does not open with the old secret"),
            None => "no key slot opens with the old secret".to_owned(),
        })),
    }
}

fn take_slot(options: &mut OptionList, key: &str) -> Result<Option<usize>, Failure> {
    let Some(text) = options.take(key) else {
        return Ok(None);
    };
    match text.parse() {
        Ok(slot @ 0..=7) => Ok(Some(slot)),
        _ => Err(wrong_value(key, &text, "0 to 7")),
    }
}
