//! Making LUKS headers and keys: what an option list asks for, random bytes, and how many iterations a passphrase
//! costs on this machine.

use std::time::Duration;

use gaur_engine::{ErrorKind, Passphrase};
use gaur_format::plan::LuksArea;
use gaur_luks::{Cipher, Encryption, Hash, Iv, KeyBits, Mode};
use gaur_reactor::{RandomBytes, processor_time};

use crate::failure::Failure;
use crate::options::{OptionList, wrong_value};

/// Processor time that finding a passphrase takes, if nothing is said.
const ITER_TIME: Duration = Duration::from_secs(2);

const CIPHERS: [(&str, KeyBits); 3] = [
    ("aes-128", KeyBits::Aes128),
    ("aes-192", KeyBits::Aes192),
    ("aes-256", KeyBits::Aes256),
];
const MODES: [(&str, Mode); 2] = [("xts", Mode::Xts), ("cbc", Mode::Cbc)];
const IVS: [(&str, Iv); 3] = [
    ("plain", Iv::Plain),
    ("plain64", Iv::Plain64),
    ("essiv", Iv::EssivSha256),
];
const HASHES: [(&str, Hash); 3] = [
    ("sha1", Hash::Sha1),
    ("sha256", Hash::Sha256),
    ("sha512", Hash::Sha512),
];

/// Encryption of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LuksChoice {
    cipher: Cipher,
    hash: Hash,
    iter_time: Duration,
    /// Name of the secret that is to open the image.
    pub secret: Option<String>,
}

/// What the options begin with where they are those of an image that is encrypted besides.
pub const PREFIX: &str = "encrypt.";

impl LuksChoice {
    /// Takes the `encrypt.` options out of a list.
    pub fn take(options: &mut OptionList) -> Result<Option<LuksChoice>, Failure> {
        match options.take("encrypt.format").as_deref() {
            Some("luks") => {}
            Some("aes") => {
                let message = "option 'encrypt.format=aes' is not supported: it hides little";
                return Err(Failure::new(message).hint("encrypt.format=luks is"));
            }
            Some(other) => return Err(wrong_value("encrypt.format", other, "luks")),
            None => match options.rest().find(|key| key.starts_with("encrypt.")) {
                None => return Ok(None),
                Some(key) => {
                    let message = format!("option '{key}' without 'encrypt.format'");
                    return Err(Failure::new(message).hint("encrypt.format=luks"));
                }
            },
        }
        LuksChoice::take_fields(options, PREFIX).map(Some)
    }

    /// Takes the options of a container out of a list.
    pub fn take_container(options: &mut OptionList) -> Result<LuksChoice, Failure> {
        if options.take_bool("detached-header")? == Some(true) {
            let message = "option 'detached-header' is not supported: the header is in the image";
            return Err(Failure::new(message));
        }
        LuksChoice::take_fields(options, "")
    }

    fn take_fields(options: &mut OptionList, prefix: &str) -> Result<LuksChoice, Failure> {
        let key = |name: &str| format!("{prefix}{name}");
        let secret = options.take(&key("key-secret"));
        let bits = options.take_choice(&key("cipher-alg"), &CIPHERS, None)?;
        let mode = options.take_choice(&key("cipher-mode"), &MODES, None)?;
        let iv = options.take_choice(&key("ivgen-alg"), &IVS, None)?;
        let iv_hash = options.take(&key("ivgen-hash-alg"));
        let hash = options.take_choice(&key("hash-alg"), &HASHES, None)?;
        let value = |choice: Option<(&str, _)>| choice.map(|(_, value)| value);
        let cipher = Cipher {
            bits: value(bits).unwrap_or_default(),
            mode: mode.map(|(_, mode)| mode).unwrap_or_default(),
            iv: iv.map(|(_, iv)| iv).unwrap_or_default(),
        };
        if let Some(name) = iv_hash {
            if name != "sha256" {
                return Err(wrong_value(&key("ivgen-hash-alg"), &name, "sha256"));
            }
            if cipher.iv != Iv::EssivSha256 {
                let (hash, alg) = (key("ivgen-hash-alg"), key("ivgen-alg"));
                let message = format!("option '{hash}' is for {alg}=essiv");
                return Err(Failure::new(message));
            }
        }
        if (cipher.bits, cipher.mode) == (KeyBits::Aes192, Mode::Cbc) {
            let message = "aes-192 in mode cbc is not supported: QEMU cannot open such images";
            let hint = format!("aes-256, or {}=xts", key("cipher-mode"));
            return Err(Failure::new(message).hint(hint));
        }
        Ok(LuksChoice {
            cipher,
            hash: hash.map(|(_, hash)| hash).unwrap_or_default(),
            iter_time: take_iter_time(options, prefix)?,
            secret,
        })
    }

    /// The header's size alone.
    pub fn measured(&self) -> LuksArea {
        LuksArea {
            bytes: Vec::new(),
            len_bytes: self.encryption().area_bytes(),
        }
    }

    /// What it is, as options.
    pub fn options(&self) -> [(&'static str, &'static str); 5] {
        let Cipher { bits, mode, iv } = self.cipher;
        [
            ("encrypt.format", "luks"),
            ("encrypt.cipher-alg", name_of(&CIPHERS, bits)),
            ("encrypt.cipher-mode", mode.name()),
            ("encrypt.ivgen-alg", name_of(&IVS, iv)),
            ("encrypt.hash-alg", self.hash.name()),
        ]
    }

    /// Makes a header with a new key, which `passphrase` opens.
    pub fn make(&self, passphrase: &Passphrase) -> Result<LuksArea, Failure> {
        let mut random = RandomBytes::default();
        let how = self.encryption();
        let made = how.make(
            passphrase,
            &mut |bytes| random.fill(bytes),
            &mut processor_time,
        );
        let bytes = made.map_err(|error| Failure::new(error.to_string()))?;
        check_random(&random)?;
        Ok(LuksArea {
            bytes,
            len_bytes: how.area_bytes(),
        })
    }

    fn encryption(&self) -> Encryption {
        Encryption {
            cipher: self.cipher,
            hash: self.hash,
            unlock_time: self.iter_time,
        }
    }
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], wanted: T) -> &'static str {
    let found = names.iter().find(|(_, value)| *value == wanted);
    found.map_or("", |(name, _)| name)
}

/// Takes `iter-time`, the milliseconds that finding a passphrase is to take.
pub fn take_iter_time(options: &mut OptionList, prefix: &str) -> Result<Duration, Failure> {
    let key = format!("{prefix}iter-time");
    let Some(text) = options.take(&key) else {
        return Ok(ITER_TIME);
    };
    match text.parse::<u64>() {
        Ok(millis @ 1..=60_000) => Ok(Duration::from_millis(millis)),
        _ => Err(wrong_value(&key, &text, "milliseconds, 1 to 60000")),
    }
}

/// Iterations that take so much processor time here.
pub fn iterations(cipher: Cipher, hash: Hash, time: Duration) -> u32 {
    gaur_luks::iterations(cipher, hash, time, &mut processor_time)
}

/// Random bytes of the kernel, or why there are none.
pub fn check_random(random: &RandomBytes) -> Result<(), Failure> {
    random.check().map_err(|errno| {
        let failure = Failure::new(format!("no random bytes: {errno}"));
        failure.kind(ErrorKind::Io)
    })
}

#[cfg(test)]
mod tests {
    use gaur_luks::{Header, ITERATIONS_MIN};

    use super::*;

    fn taken(list: &str) -> Result<Option<LuksChoice>, Failure> {
        LuksChoice::take(&mut OptionList::parse(&[list.to_owned()])?)
    }

    #[test]
    fn defaults_are_those_of_qemu_and_others_are_refused_by_name() {
        assert_eq!(taken("compat=v3").expect("no encryption"), None);
        let choice = taken("encrypt.format=luks").expect("luks").expect("luks");
        let values = choice.options().map(|(_, value)| value);
        assert_eq!(values, ["luks", "aes-256", "xts", "plain64", "sha256"]);
        assert_eq!(choice.measured().len_bytes, 2_068_480);
        for (list, word) in [
            ("encrypt.format=aes", "encrypt.format=aes"),
            ("encrypt.format=luks2", "possible values: luks"),
            ("encrypt.key-secret=a", "without 'encrypt.format'"),
            (
                "encrypt.format=luks,encrypt.cipher-alg=serpent-256",
                "aes-256",
            ),
            ("encrypt.format=luks,encrypt.cipher-mode=ctr", "xts, cbc"),
            ("encrypt.format=luks,encrypt.ivgen-alg=null", "plain64"),
            ("encrypt.format=luks,encrypt.ivgen-hash-alg=sha256", "essiv"),
            (
                "encrypt.format=luks,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=md5",
                "sha256",
            ),
            ("encrypt.format=luks,encrypt.hash-alg=ripemd160", "sha512"),
            ("encrypt.format=luks,encrypt.iter-time=0", "1 to 60000"),
            (
                "encrypt.format=luks,encrypt.cipher-alg=aes-192,encrypt.cipher-mode=cbc",
                "aes-192",
            ),
        ] {
            let failure = taken(list).expect_err(list).to_string();
            assert!(failure.contains(word), "{failure}");
        }
    }

    #[test]
    fn a_header_opens_with_its_passphrase_and_costs_what_was_asked_for() {
        let choice = taken("encrypt.format=luks,encrypt.iter-time=20").expect("luks");
        let choice = choice.expect("luks");
        let passphrase = Passphrase::new(b"open".to_vec());
        let area = choice.make(&passphrase).expect("a header");
        let other = choice.make(&passphrase).expect("a header");
        assert_ne!(area, other);
        let header = Header::parse(&area.bytes).expect("a header");
        let slot = &header.slots[0];
        assert!(slot.iterations.is_some_and(|count| count >= ITERATIONS_MIN));
        assert_eq!(header.uuid.len(), 36);
        let mut stripes = area.bytes[slot.offset_bytes as usize..].to_vec();
        assert!(header.open_slot(slot, &mut stripes, &passphrase).is_some());
    }
}
